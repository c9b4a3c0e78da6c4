//! Requests of clients, and answers of the server. Both fit one message of a channel, and are parsed as untrusted
//! input.

use std::time::Duration;

use super::refusal;

/// A request to a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Checks that the server is there.
    Ping,
    Set {
        key: &'a str,
        value: &'a [u8],
    },
    /// Waits up to `wait` for the value.
    Get {
        key: &'a str,
        wait: Duration,
    },
    CompareSet {
        key: &'a str,
        expected: Option<&'a [u8]>,
        value: &'a [u8],
    },
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// A set was done; a get found no value yet; a compare-and-set found no previous value.
    Nothing,
    /// The value of a get, or the previous value of a compare-and-set.
    Value(Vec<u8>),
    /// The reason why the request was refused.
    Refused(String),
}

const PING: u8 = 0;
const SET: u8 = 1;
const GET: u8 = 2;
/// A compare-and-set that expects no value, and one that expects a value.
const SET_NEW: u8 = 3;
const SET_OLD: u8 = 4;

impl<'a> Request<'a> {
    pub(crate) fn key(&self) -> &'a str {
        match self {
            Request::Ping => "",
            Request::Set { key, .. } | Request::Get { key, .. } | Request::CompareSet { key, .. } => key,
        }
    }

    /// Returns why every store refuses this request, if so.
    pub(crate) fn refusal(&self) -> Option<String> {
        match *self {
            Request::Ping => None,
            Request::Get { key, .. } => refusal(key, [None, None]),
            Request::Set { key, value } => refusal(key, [Some(value), None]),
            Request::CompareSet { key, expected, value } => refusal(key, [expected, Some(value)]),
        }
    }

    /// Encodes the request, which must not be one that [`refusal`](Self::refusal) rejects.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let part = |bytes: &mut Vec<u8>, part: &[u8]| {
            bytes.extend((part.len() as u32).to_le_bytes());
            bytes.extend(part);
        };
        match *self {
            Request::Ping => bytes.push(PING),
            Request::Set { key, value } => {
                bytes.push(SET);
                part(&mut bytes, key.as_bytes());
                bytes.extend(value);
            }
            Request::Get { key, wait } => {
                bytes.push(GET);
                part(&mut bytes, key.as_bytes());
                bytes.extend(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).to_le_bytes());
            }
            Request::CompareSet { key, expected, value } => {
                bytes.push(if expected.is_some() { SET_OLD } else { SET_NEW });
                part(&mut bytes, key.as_bytes());
                expected.into_iter().for_each(|expected| part(&mut bytes, expected));
                bytes.extend(value);
            }
        }
        bytes
    }

    /// Decodes the output of [`to_bytes`](Self::to_bytes). Returns `None` for other bytes.
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (&kind, mut rest) = bytes.split_first()?;
        let mut part = || {
            let (len, after) = rest.split_first_chunk()?;
            let (part, after) = after.split_at_checked(u32::from_le_bytes(*len) as usize)?;
            rest = after;
            Some(part)
        };
        let request = match kind {
            PING => rest.is_empty().then_some(Request::Ping)?,
            SET | GET | SET_NEW | SET_OLD => {
                let key = str::from_utf8(part()?).ok()?;
                let expected = if kind == SET_OLD { Some(part()?) } else { None };
                match kind {
                    SET => Request::Set { key, value: rest },
                    GET => {
                        let wait = Duration::from_millis(u64::from_le_bytes(rest.try_into().ok()?));
                        Request::Get { key, wait }
                    }
                    _ => Request::CompareSet { key, expected, value: rest },
                }
            }
            _ => return None,
        };
        request.refusal().is_none().then_some(request)
    }
}

#[cfg(any(test, feature = "tcp"))]
impl Answer {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let (kind, rest) = match self {
            Answer::Nothing => (0, &[][..]),
            Answer::Value(value) => (1, &value[..]),
            Answer::Refused(why) => (2, why.as_bytes()),
        };
        [&[kind], rest].concat()
    }

    /// Decodes the output of [`to_bytes`](Self::to_bytes). Returns `None` for other bytes.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        match bytes.split_first()? {
            (0, []) => Some(Answer::Nothing),
            (1, value) => Some(Answer::Value(value.to_vec())),
            (2, why) => Some(Answer::Refused(String::from_utf8_lossy(why).into_owned())),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        super::{MAX_KEY_LEN, MAX_VALUE_LEN},
        *,
    };

    proptest! {
        #[test]
        fn any_bytes_parse_or_are_rejected(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Some(request) = Request::parse(&bytes) {
                let again = request.to_bytes();
                prop_assert_eq!(Request::parse(&again), Some(request));
            }
            if let Some(answer) = Answer::parse(&bytes) {
                prop_assert_eq!(Answer::parse(&answer.to_bytes()), Some(answer));
            }
        }

        /// Damaged requests do not panic either.
        #[test]
        fn truncated_or_changed_requests_do_not_panic(
            key in ".{0,20}",
            value in proptest::collection::vec(any::<u8>(), 0..50),
            expected in proptest::option::of(proptest::collection::vec(any::<u8>(), 0..50)),
            millis in any::<u64>(),
            cut in 0usize..200,
            change in any::<(usize, u8)>(),
        ) {
            let wait = Duration::from_millis(millis);
            for request in [
                Request::Ping,
                Request::Set { key: &key, value: &value },
                Request::Get { key: &key, wait },
                Request::CompareSet { key: &key, expected: expected.as_deref(), value: &value },
            ] {
                let mut bytes = request.to_bytes();
                prop_assert_eq!(Request::parse(&bytes), Some(request));
                let at = change.0 % bytes.len();
                bytes[at] ^= change.1;
                bytes.truncate(cut.max(1));
                Request::parse(&bytes);
            }
        }
    }

    #[test]
    fn rejects_what_is_too_long_and_fits_the_longest_into_a_message() {
        let (key, value) = ("k".repeat(MAX_KEY_LEN), vec![7; MAX_VALUE_LEN]);
        let longest = Request::CompareSet { key: &key, expected: Some(&value), value: &value };
        let bytes = longest.to_bytes();
        #[cfg(feature = "tcp")]
        assert!(bytes.len() <= crate::channel::MAX_MESSAGE_LEN);
        assert_eq!(Request::parse(&bytes), Some(longest));
        let (key, value) = ("k".repeat(MAX_KEY_LEN + 1), vec![7; MAX_VALUE_LEN + 1]);
        let longer = Request::Set { key: &key, value: b"" };
        assert!(Request::parse(&longer.to_bytes()).is_none() && longer.refusal().unwrap().contains("1025 bytes"));
        let longer = Request::CompareSet { key: "", expected: Some(&value), value: b"" };
        assert!(Request::parse(&longer.to_bytes()).is_none() && longer.refusal().unwrap().contains("24577 bytes"));
        // A length beyond the end of the message.
        assert_eq!(Request::parse(&[SET, 255, 255, 255, 255]), None);
    }
}
