//! Values of the options for the ranks' output: `--redirects`, `--tee`, `--local-ranks-filter` and
//! `--log-line-prefix-template`.

use std::{collections::BTreeMap, str::FromStr};

/// A set of stdout and stderr.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Whether stdout is in the set.
    pub stdout: bool,
    /// Whether stderr is in the set.
    pub stderr: bool,
}

impl Streams {
    /// Both streams.
    pub const BOTH: Streams = Streams { stdout: true, stderr: true };

    /// Parses `torchrun`'s numbers: 0 none, 1 stdout, 2 stderr, 3 both.
    fn from_number(text: &str) -> Option<Self> {
        let number: u8 = text.parse().ok().filter(|&number| number <= 3)?;
        Some(Streams { stdout: number & 1 != 0, stderr: number & 2 != 0 })
    }
}

/// Streams by local rank. Parses as in `torchrun`: `3`, or `0:3,1:2` (no streams for other ranks).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamChoice {
    /// The same streams for every rank.
    EveryRank(Streams),
    /// Streams by local rank.
    ByRank(BTreeMap<usize, Streams>),
}

impl Default for StreamChoice {
    fn default() -> Self {
        StreamChoice::EveryRank(Streams::default())
    }
}

impl StreamChoice {
    /// Returns the streams of `local_rank`.
    pub fn of(&self, local_rank: usize) -> Streams {
        match self {
            StreamChoice::EveryRank(streams) => *streams,
            StreamChoice::ByRank(streams) => streams.get(&local_rank).copied().unwrap_or_default(),
        }
    }

    /// Returns the highest local rank that is named.
    pub(crate) fn highest(&self) -> Option<usize> {
        match self {
            StreamChoice::EveryRank(_) => None,
            StreamChoice::ByRank(streams) => streams.last_key_value().map(|(&rank, _)| rank),
        }
    }
}

impl FromStr for StreamChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(streams) = Streams::from_number(text) {
            return Ok(StreamChoice::EveryRank(streams));
        }
        let pair = |pair: &str| {
            let (rank, streams) = pair.split_once(':')?;
            Some((rank.trim().parse().ok()?, Streams::from_number(streams.trim())?))
        };
        text.split(',').map(pair).collect::<Option<_>>().map(StreamChoice::ByRank).ok_or_else(|| {
            "expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or such a number by local rank: 0:3,1:2".into()
        })
    }
}

/// Local ranks that are shown; empty means all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankFilter(pub Vec<usize>);

impl RankFilter {
    /// Returns whether `local_rank` is shown.
    pub fn shows(&self, local_rank: usize) -> bool {
        self.0.is_empty() || self.0.contains(&local_rank)
    }
}

impl FromStr for RankFilter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(RankFilter::default());
        }
        let ranks = text.split(',').map(|rank| rank.trim().parse()).collect::<Result<_, _>>();
        ranks.map(RankFilter).map_err(|_| "expected local ranks with commas between them: 0,2".into())
    }
}

const NAMES: [&str; 4] = ["role_name", "local_rank", "rank", "hostname"];

/// Template of a line prefix with `${role_name}`, `${local_rank}`, `${rank}` and `${hostname}`, as in `torchrun`'s
/// `--log-line-prefix-template`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinePrefix(String);

impl Default for LinePrefix {
    fn default() -> Self {
        LinePrefix("[rank ${rank}] ".into())
    }
}

impl LinePrefix {
    /// Returns an empty prefix.
    pub fn none() -> Self {
        LinePrefix(String::new())
    }
}

impl FromStr for LinePrefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(LinePrefix::default());
        }
        let is_known = |rest: &str| rest.split_once('}').is_some_and(|(name, _)| NAMES.contains(&name));
        if text.contains(['\n', '\r', '\0']) || !text.split("${").skip(1).all(is_known) {
            return Err(
                "expected one line, with no other ${...} than ${role_name}, ${local_rank}, ${rank} and ${hostname}"
                    .into(),
            );
        }
        Ok(LinePrefix(text.into()))
    }
}

impl LinePrefix {
    /// Returns the prefix of one rank.
    pub(crate) fn of(&self, role: &str, rank: usize, local_rank: usize) -> String {
        let mut parts = self.0.split("${");
        let mut prefix = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let (name, rest) = part.split_once('}').unwrap_or((part, ""));
            match name {
                "role_name" => prefix.push_str(role),
                "hostname" => prefix.push_str(&rustix::system::uname().nodename().to_string_lossy()),
                "local_rank" => prefix.push_str(&local_rank.to_string()),
                _ => prefix.push_str(&rank.to_string()),
            }
            prefix.push_str(rest);
        }
        prefix
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_as_torchrun_does() {
        let choice = |text: &str| text.parse::<StreamChoice>();
        let numbers =
            |text: &str| [0, 1, 2].map(|rank| choice(text).unwrap().of(rank)).map(|it| (it.stdout, it.stderr));
        assert_eq!(numbers("0"), [(false, false); 3]);
        assert_eq!(numbers("3"), [(true, true); 3]);
        assert_eq!(numbers("0:1,2:2"), [(true, false), (false, false), (false, true)]);
        assert_eq!(choice("0:1,7:2").unwrap().highest(), Some(7));
        for text in ["", "4", "-1", "both", "0:", "0:4", "0:1,", ":1", "0:1:2"] {
            assert!(choice(text).is_err(), "{text}");
        }
        let filter = |text: &str| text.parse::<RankFilter>();
        assert_eq!((filter("0,2"), filter("")), (Ok(RankFilter(vec![0, 2])), Ok(RankFilter::default())));
        assert!(["0;1", "a", "0,", "-1"].iter().all(|text| filter(text).is_err()));
        assert!(RankFilter::default().shows(5) && RankFilter(vec![1]).shows(1) && !RankFilter(vec![1]).shows(0));
    }

    #[test]
    fn fills_in_names() {
        assert_eq!(LinePrefix::default().of("r", 3, 1), "[rank 3] ");
        let of = |text: &str| text.parse::<LinePrefix>().unwrap().of("role ${rank}", 3, 1);
        assert_eq!(of("${role_name}:${local_rank}/${rank} $x} "), "role ${rank}:1/3 $x} ");
        assert!(!of("${hostname}").contains("host"), "{}", of("${hostname}"));
        assert_eq!(of(""), "[rank 3] ");
        for text in ["${other}", "${rank", "a\nb", "${}"] {
            assert!(text.parse::<LinePrefix>().is_err(), "{text}");
        }
    }
}
