//! The checksum that a manifest ends with: its last field, of all bytes before that field.
//!
//! It is of the text, not of what JSON makes of it, and its own text has one form only. So no byte can be another
//! without being noticed: not in white space, not in the checksum.

use crate::checksum::Checksum;

/// What comes before the checksum. Every line of a manifest that is as little indented is one of its outermost fields.
const FIELD: &[u8] = b",\n  \"crc32c\": ";

/// What the end of a manifest says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seal {
    /// It is as it was written.
    Whole,
    /// It has this checksum, and its end says something else.
    Broken(u32),
    /// There is no checksum at its end.
    Missing,
}

/// Adds the checksum to a JSON object as `serde_json::to_vec_pretty` writes it.
pub(crate) fn seal(text: &mut Vec<u8>) {
    if text.ends_with(b"\n}") {
        text.truncate(text.len() - 2);
    }
    let end = end(checksum(text));
    text.extend(end);
}

/// Looks at the end of a manifest.
pub(crate) fn check(text: &[u8]) -> Seal {
    let longest = end(u32::MAX).len();
    let from = text.len().saturating_sub(longest);
    let Some(at) = text[from..].windows(FIELD.len()).rposition(|window| window == FIELD) else { return Seal::Missing };
    let (body, rest) = text.split_at(from + at);
    let found = checksum(body);
    if rest == end(found) { Seal::Whole } else { Seal::Broken(found) }
}

fn end(checksum: u32) -> Vec<u8> {
    [FIELD, checksum.to_string().as_bytes(), b"\n}\n"].concat()
}

fn checksum(text: &[u8]) -> u32 {
    let mut checksum = Checksum::new();
    checksum.update(text);
    checksum.value()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_breaks_it() {
        let value = serde_json::json!({ "a": 1, "b": { "crc32c": 7 } });
        let mut text = serde_json::to_vec_pretty(&value).unwrap();
        assert_eq!(check(&text), Seal::Missing);
        seal(&mut text);
        assert_eq!(check(&text), Seal::Whole);
        let read: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert!(read["crc32c"].is_u64() && read["b"] == value["b"]);
        for bit in 0..8 * text.len() {
            let mut bad = text.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(check(&bad), Seal::Whole, "bit {bit}");
        }
        for cut in 0..text.len() {
            assert_ne!(check(&text[..cut]), Seal::Whole, "{cut} bytes");
        }
        assert_ne!(check(&[&text[..], b"\n"].concat()), Seal::Whole);
    }
}
