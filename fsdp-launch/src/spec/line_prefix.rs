//! What stands before each line of a rank's output.

use std::str::FromStr;

const NAMES: [&str; 4] = ["role_name", "local_rank", "rank", "hostname"];

/// A template of a line's prefix with `${role_name}`, `${local_rank}`, `${rank}` and `${hostname}` in it, as
/// `torchrun`'s `--log-line-prefix-template`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinePrefix(String);

impl Default for LinePrefix {
    fn default() -> Self {
        LinePrefix("[rank ${rank}] ".into())
    }
}

impl LinePrefix {
    /// Lines as they are.
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
    /// The prefix of one rank.
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
    fn names_are_filled_in() {
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
