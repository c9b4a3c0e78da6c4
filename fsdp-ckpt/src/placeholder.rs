//! Files whose contents are missing: a Git LFS pointer, an HTML page, an empty file, or a broken link.

use std::fmt::{Display, Formatter};
use std::path::Path;

/// Bytes that [`Placeholder::of`] needs: more than a Git LFS pointer has.
pub(crate) const START: usize = 512;

/// Contents of a file that is not what its name promises. Displays as the finding and the way out.
///
/// ```
/// use fsdp_ckpt::Placeholder;
///
/// let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n";
/// assert_eq!(Placeholder::of(pointer.as_bytes()), Some(Placeholder::LfsPointer));
/// assert_eq!(Placeholder::of(b"<!DOCTYPE html>\n<html>"), Some(Placeholder::HtmlPage));
/// assert_eq!(Placeholder::of(br#"{"model_type": "llama"}"#), None);
/// assert!(Placeholder::LfsPointer.to_string().contains("git lfs pull"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placeholder {
    /// No bytes.
    Empty,
    /// A pointer of Git LFS.
    LfsPointer,
    /// An HTML page.
    HtmlPage,
}

impl Placeholder {
    /// Classifies a file by its first bytes.
    pub fn of(start: &[u8]) -> Option<Self> {
        if start.is_empty() {
            return Some(Placeholder::Empty);
        }
        if start.starts_with(b"version https://") && start.windows(5).any(|part| part == b"\noid ") {
            return Some(Placeholder::LfsPointer);
        }
        let tags: [&[u8]; 3] = [b"<!doctype html", b"<html", b"<head"];
        let text = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start).trim_ascii_start();
        let is_page = tags.iter().any(|tag| text.get(..tag.len()).is_some_and(|text| text.eq_ignore_ascii_case(tag)));
        is_page.then_some(Placeholder::HtmlPage)
    }
}

impl Display for Placeholder {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Placeholder::Empty => "it is empty: download or copy it again",
            Placeholder::LfsPointer => "it is a Git LFS pointer, not the file: run `git lfs pull` in its repository",
            Placeholder::HtmlPage => {
                "it is an HTML page, not the file: download the file itself, and not the page that shows it"
            }
        })
    }
}

/// Describes a link whose target does not exist.
pub(crate) fn broken_link(path: &Path) -> String {
    let target = std::fs::read_link(path).unwrap_or_default();
    format!("it is a link to {}, which does not exist: download the file, or mend the link", target.display())
}
