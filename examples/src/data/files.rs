//! Files of `--data` that hold text or 16-bit tokens.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use fsdp_corpus::files::{self as corpus, Content};
use fsdp_corpus::format::{Compression, Format};

use crate::input::check_data;

/// The format of text that is read whole.
const PLAIN: Format = Format::Text(Compression::None);

/// Extensions of a workspace's text files.
const SOURCES: [&str; 3] = ["rs", "md", "toml"];

/// Files that hold the data, in the order in which they are read.
pub(super) struct DataFiles {
    /// File or directory where they were found.
    pub(super) root: PathBuf,
    pub(super) files: Files,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Files {
    /// Files of token ids, unsigned 16-bit little-endian.
    Tokens(Vec<PathBuf>),
    /// A single text file.
    Text(PathBuf),
    /// Files of a directory. Those that are not text are left out.
    MaybeText(Vec<PathBuf>),
}

impl DataFiles {
    /// Finds the files of `--data PATH`. Fails if they are not plain text or token ids.
    pub(super) fn of_path(path: &Path) -> Result<Self> {
        let corpus::Files { root, content } = corpus::Files::find(path)?;
        let files = match content {
            Content::Tokens(files) => Files::Tokens(files),
            Content::Documents(found) if found.iter().all(|file| file.format == PLAIN) => {
                let paths = found.into_iter().map(|file| file.path).collect();
                if path.is_file() { Files::Text(path.to_owned()) } else { Files::MaybeText(paths) }
            }
            Content::Documents(_) | Content::Prepared(_) => bail!(
                "expected text or 16-bit token ids, found records, compressed text or a prepared corpus in {}: read it by \
                 `Corpora::find`",
                path.display()
            ),
        };
        Ok(DataFiles { root, files })
    }

    /// Finds the sources of the Cargo workspace around `directory`.
    pub(super) fn of_workspace(directory: &Path) -> Result<Self> {
        let root = directory
            .ancestors()
            .find(|ancestor| is_workspace(ancestor))
            .with_context(|| {
                format!(
                    "no data found: {} is not in a Cargo workspace, whose sources are the default. Pass --data PATH: a \
                     .bin file of u16 little-endian tokens, a text file or a directory of them",
                    directory.display()
                )
            })?
            .to_owned();
        let is_source = |file: &PathBuf| {
            let extension = file.extension().and_then(OsStr::to_str).map(str::to_ascii_lowercase);
            extension.is_some_and(|extension| SOURCES.contains(&&*extension))
        };
        let files = corpus::list(&root)?.into_iter().filter(is_source).collect();
        Ok(DataFiles { root, files: Files::MaybeText(files) })
    }
}

fn is_workspace(directory: &Path) -> bool {
    fs::read_to_string(directory.join("Cargo.toml")).is_ok_and(|manifest| {
        manifest
            .lines()
            .any(|line| line.trim_start().starts_with("[workspace]") || line.trim_start().starts_with("[workspace."))
    })
}

/// Reads a text file. Returns `None` if it contains a zero byte or is not UTF-8.
pub(super) fn read_text(path: &Path) -> Result<Option<String>> {
    check_data(path)?;
    let read = || -> io::Result<Option<String>> {
        // Checking the start first avoids reading large binary files.
        let mut file = File::open(path)?;
        let mut bytes = Vec::new();
        file.by_ref().take(8 << 10).read_to_end(&mut bytes)?;
        if bytes.contains(&0) {
            return Ok(None);
        }
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8(bytes).ok().filter(|text| !text.contains('\0')))
    };
    read().with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn tree(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        directory
    }

    fn message(files: Result<DataFiles>) -> String {
        format!("{:#}", files.err().unwrap())
    }

    #[test]
    fn directories_are_read_recursively_in_order() {
        let root = tree(&[
            ("b.txt", b""),
            ("a/z.txt", b""),
            ("a/y/x.md", b""),
            (".git/config", b""),
            (".hidden", b""),
            ("target/debug/out.txt", b""),
            ("c/target", b"a file may have the name"),
        ]);
        symlink(root.path().join("a"), root.path().join("link")).unwrap();
        symlink(root.path().join("b.txt"), root.path().join("link.txt")).unwrap();
        let found = DataFiles::of_path(root.path()).unwrap();
        let expected = ["a/y/x.md", "a/z.txt", "b.txt", "c/target"].map(|name| root.path().join(name)).to_vec();
        assert_eq!(found.files, Files::MaybeText(expected));
    }

    #[test]
    fn records_are_refused() {
        for name in ["chats.jsonl", "a.ndjson", "a.JSON", "a.txt.gz"] {
            let root = tree(&[(name, b"\x1f\x8b")]);
            let message = message(DataFiles::of_path(&root.path().join(name)));
            assert!(message.contains("found records, compressed text") && message.contains(name), "{message}");
        }
    }

    #[test]
    fn mixed_directories_are_refused() {
        let root = tree(&[("2.bin", b""), ("1.bin", b"")]);
        let expected = ["1.bin", "2.bin"].map(|name| root.path().join(name)).to_vec();
        assert_eq!(DataFiles::of_path(root.path()).unwrap().files, Files::Tokens(expected));
        fs::write(root.path().join("input.txt"), "x").unwrap();
        let message = message(DataFiles::of_path(root.path()));
        assert!(
            message.contains("1.bin") && message.contains("input.txt") && message.contains("Pass one file"),
            "{message}"
        );
    }

    #[test]
    fn workspace_sources_are_found_from_below() {
        let root = tree(&[
            ("Cargo.toml", b"[workspace]\nmembers = [\"a\"]\n"),
            ("Cargo.lock", b""),
            ("README.md", b""),
            ("a/Cargo.toml", b"[package]\nworkspace = \"..\"\n"),
            ("a/src/lib.rs", b""),
            ("a/data.bin", b""),
            ("target/x.rs", b""),
        ]);
        let found = DataFiles::of_workspace(&root.path().join("a/src")).unwrap();
        assert_eq!(found.root, root.path());
        let expected =
            ["Cargo.toml", "README.md", "a/Cargo.toml", "a/src/lib.rs"].map(|name| root.path().join(name)).to_vec();
        assert_eq!(found.files, Files::MaybeText(expected));
    }

    #[test]
    fn missing_workspace_suggests_data() {
        let root = tree(&[("Cargo.toml", b"[package]\n")]);
        assert!(message(DataFiles::of_workspace(root.path())).contains("Pass --data PATH"));
    }

    #[test]
    fn text_is_utf8_without_zero_bytes() {
        let root = tree(&[("text", "Grüße".as_bytes()), ("latin1", b"Gr\xfc\xdfe"), ("zero", b"a\0b"), ("empty", b"")]);
        let late = [vec![b'a'; 9 << 10], vec![0]].concat();
        fs::write(root.path().join("late"), late).unwrap();
        let read = |name: &str| read_text(&root.path().join(name)).unwrap();
        assert_eq!(read("text").as_deref(), Some("Grüße"));
        assert_eq!(read("empty").as_deref(), Some(""));
        assert_eq!((read("latin1"), read("zero"), read("late")), (None, None, None));
    }
}
