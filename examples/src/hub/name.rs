//! Names of repositories and files on the hub.

use std::fmt;

use fsdp_corpus::files::is_pattern;
use serde::{Deserialize, Serialize};

/// Longest name of an organisation or repository on the hub.
const MAX_PART: usize = 96;

/// Type of a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// A model.
    Model,
    /// A dataset.
    Dataset,
}

impl Kind {
    /// Returns the form of its names, for messages.
    pub fn form(self) -> &'static str {
        match self {
            Kind::Model => "org/name[@revision]",
            Kind::Dataset => "org/dataset[@revision]:file",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Model => "model",
            Kind::Dataset => "dataset",
        })
    }
}

/// A model, or files in a dataset, at a revision.
///
/// ```
/// use fsdp_train::hub::{Kind, Name};
///
/// let name = Name::parse("org/texts@v1.0:data/train.jsonl", Kind::Dataset).unwrap();
/// assert_eq!((name.repo.as_str(), name.revision.as_str()), ("org/texts", "v1.0"));
/// assert_eq!(name.file.as_deref(), Some("data/train.jsonl"));
/// assert_eq!(Name::parse("org/name", Kind::Model).unwrap().to_string(), "org/name@main");
/// let files = Name::parse("org/texts:data/*.parquet", Kind::Dataset).unwrap();
/// assert_eq!((name.pattern(), files.pattern()), (None, Some("data/*.parquet")));
/// assert_eq!(Name::parse("./org/name", Kind::Model), None);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name {
    /// Type of the repository.
    pub kind: Kind,
    /// Organisation or user, a slash, and the repository's name.
    pub repo: String,
    /// Branch, tag or commit: `main` by default.
    pub revision: String,
    /// File of a dataset, or a pattern of files.
    pub file: Option<String>,
}

impl Name {
    /// Returns `None` if the text can't be a name on the hub.
    pub fn parse(text: &str, kind: Kind) -> Option<Self> {
        let (place, file) = match kind {
            Kind::Model => (text, None),
            Kind::Dataset => {
                let (place, file) = text.split_once(':')?;
                (place, Some(file.to_owned()))
            }
        };
        let (repo, revision) = place.split_once('@').unwrap_or((place, "main"));
        let (org, name) = repo.split_once('/')?;
        let is_valid = is_part(org) && is_part(name) && is_path(revision) && file.as_deref().is_none_or(is_path);
        is_valid.then(|| Name { kind, repo: repo.into(), revision: revision.into(), file })
    }

    /// Returns the pattern, if the name has one instead of a file.
    pub fn pattern(&self) -> Option<&str> {
        self.file.as_deref().filter(|file| is_pattern(file))
    }

    /// Returns whether the revision is a commit, which never changes.
    pub fn is_commit(&self) -> bool {
        is_commit(&self.revision)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.repo, self.revision)
    }
}

/// Returns whether the text is the hash of a commit.
pub(super) fn is_commit(text: &str) -> bool {
    [40, 64].contains(&text.len()) && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns whether the text can be an organisation or the name of a repository.
fn is_part(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let ends = |c: Option<char>| c.is_some_and(|c| !"-.".contains(c));
    let mut chars = text.chars();
    text.len() <= MAX_PART
        && text.chars().all(allowed)
        && ends(chars.next())
        && ends(text.chars().next_back())
        && !["--", ".."].iter().any(|twice| text.contains(twice))
}

/// Returns whether the text is a relative path that stays below its start. Revisions and files become paths in the
/// cache.
pub(super) fn is_path(text: &str) -> bool {
    let is_step = |step: &str| !["", ".", ".."].contains(&step);
    text.split('/').all(is_step) && !text.chars().any(|c| c.is_control() || c == '\\')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_from_paths() {
        let model = |text: &str| Name::parse(text, Kind::Model);
        for good in ["a/b", "org-1/Name_2.5", "org/name@refs/pr/1", "org/name@v1.0"] {
            assert!(model(good).is_some(), "{good}");
        }
        for bad in [
            "gpt2", "a/b/c", "./a/b", "../b", "/a/b", "a/", "/b", "a/b@", "a/b@../c", "a/b@/c", "a/.b", "a/b.", "-a/b",
            "a/b--c", "a/b..c", "a/b c", "a/ü", "a/b@x\n", "",
        ] {
            assert_eq!(model(bad), None, "{bad}");
        }
        assert_eq!(model(&format!("a/{}", "b".repeat(97))), None);
    }

    #[test]
    fn data_names_a_file() {
        let data = |text: &str| Name::parse(text, Kind::Dataset);
        assert_eq!(data("a/b:c.txt").unwrap().to_string(), "a/b@main");
        assert_eq!(data("a/b:c d/e:f.txt").unwrap().file.unwrap(), "c d/e:f.txt");
        for bad in ["a/b", "a/b:", "a/b:/etc/passwd", "a/b:../c", "a/b:c/", "a/b:c/../d", "a:b", "s3://bucket/key"] {
            assert_eq!(data(bad), None, "{bad}");
        }
    }

    #[test]
    fn commits_are_full_hashes() {
        assert!(is_commit(&"0a".repeat(20)) && is_commit(&"0a".repeat(32)));
        assert!(!is_commit("main") && !is_commit(&"0A".repeat(20)) && !is_commit("abc123"));
    }
}
