//! Which files `--data` means.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use walkdir::{DirEntry, WalkDir};

/// The files of the workspace that are its text.
const SOURCES: [&str; 3] = ["rs", "md", "toml"];

/// The files that hold the data, in the order in which they are read.
pub(super) struct DataFiles {
    /// Where they were looked for: the file or directory.
    pub(super) root: PathBuf,
    pub(super) files: Files,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Files {
    /// Token ids, unsigned 16-bit little-endian.
    Tokens(Vec<PathBuf>),
    /// The one text file that was asked for.
    Text(PathBuf),
    /// What was found in a directory: those that turn out not to be text are left out.
    MaybeText(Vec<PathBuf>),
}

impl DataFiles {
    /// The files of `--data PATH`.
    pub(super) fn of_path(path: &Path) -> Result<Self> {
        let kind = fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
        let files = if kind.is_dir() {
            of_directory(path)?
        } else if !kind.is_file() {
            bail!("{} is neither a file nor a directory: every rank must be able to read it for itself", path.display())
        } else if has_extension(path, &["bin"]) {
            Files::Tokens(vec![path.to_owned()])
        } else {
            Files::Text(path.to_owned())
        };
        Ok(DataFiles { root: path.to_owned(), files })
    }

    /// The sources of the Cargo workspace that `directory` is in.
    pub(super) fn of_workspace(directory: &Path) -> Result<Self> {
        let root = directory
            .ancestors()
            .find(|ancestor| is_workspace(ancestor))
            .with_context(|| {
                format!(
                    "there is no data: without --data the sources of the Cargo workspace you are in are read, and {} \
                    is in none. Pass --data PATH: a .bin \
                     file of u16 little-endian tokens, a text file or a directory of them",
                    directory.display()
                )
            })?
            .to_owned();
        let files = walk(&root)?.into_iter().filter(|file| has_extension(file, &SOURCES)).collect();
        Ok(DataFiles { root, files: Files::MaybeText(files) })
    }
}

fn of_directory(path: &Path) -> Result<Files> {
    let (tokens, text): (Vec<_>, Vec<_>) = walk(path)?.into_iter().partition(|file| has_extension(file, &["bin"]));
    ensure!(!tokens.is_empty() || !text.is_empty(), "{} holds no files but hidden ones", path.display());
    if tokens.is_empty() {
        return Ok(Files::MaybeText(text));
    }
    if let Some(other) = text.first() {
        bail!(
            "{} holds both .bin files of tokens ({}) and other files ({}): pass the file you mean, or a \
                directory that holds only one kind",
            path.display(),
            tokens[0].display(),
            other.display()
        );
    }
    Ok(Files::Tokens(tokens))
}

/// All files below `root` in the same order on every machine, but hidden ones and those in `target` directories.
/// Symbolic links are not followed.
fn walk(root: &Path) -> Result<Vec<PathBuf>> {
    let wanted = |entry: &DirEntry| {
        let name = entry.file_name().as_encoded_bytes();
        entry.depth() == 0 || !(name.starts_with(b".") || name == b"target" && entry.file_type().is_dir())
    };
    let mut files = Vec::new();
    for entry in WalkDir::new(root).sort_by_file_name().into_iter().filter_entry(wanted) {
        let entry = entry.with_context(|| format!("cannot list {}", root.display()))?;
        if entry.file_type().is_file() {
            files.push(entry.into_path());
        }
    }
    Ok(files)
}

fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    path.extension()
        .and_then(OsStr::to_str)
        .is_some_and(|found| extensions.iter().any(|e| found.eq_ignore_ascii_case(e)))
}

fn is_workspace(directory: &Path) -> bool {
    fs::read_to_string(directory.join("Cargo.toml")).is_ok_and(|manifest| {
        manifest
            .lines()
            .any(|line| line.trim_start().starts_with("[workspace]") || line.trim_start().starts_with("[workspace."))
    })
}

/// The text of a file, or `None` if it is none: it has a zero byte, or is not UTF-8.
pub(super) fn read_text(path: &Path) -> Result<Option<String>> {
    let read = || -> io::Result<Option<String>> {
        // A look at the start saves reading large binary files as a whole.
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
    fn directories_are_read_recursively_in_order_without_hidden_files_target_and_links() {
        let root = tree(&[
            ("b.txt", b""),
            ("a/z.txt", b""),
            ("a/y/x.md", b""),
            (".git/config", b""),
            (".hidden", b""),
            ("target/debug/out.txt", b""),
            ("c/target", b"a file may have the name"),
        ]);
        std::os::unix::fs::symlink(root.path().join("a"), root.path().join("link")).unwrap();
        std::os::unix::fs::symlink(root.path().join("b.txt"), root.path().join("link.txt")).unwrap();
        let found = DataFiles::of_path(root.path()).unwrap();
        let expected = ["a/y/x.md", "a/z.txt", "b.txt", "c/target"].map(|name| root.path().join(name)).to_vec();
        assert_eq!(found.files, Files::MaybeText(expected));
    }

    #[test]
    fn a_hidden_directory_can_be_asked_for() {
        let root = tree(&[(".data/a.txt", b"")]);
        let path = root.path().join(".data");
        assert_eq!(DataFiles::of_path(&path).unwrap().files, Files::MaybeText(vec![path.join("a.txt")]));
    }

    #[test]
    fn a_directory_of_token_files_is_read_as_tokens_and_a_mixed_one_is_refused() {
        let root = tree(&[("2.bin", b""), ("1.bin", b"")]);
        let expected = ["1.bin", "2.bin"].map(|name| root.path().join(name)).to_vec();
        assert_eq!(DataFiles::of_path(root.path()).unwrap().files, Files::Tokens(expected));
        fs::write(root.path().join("input.txt"), "x").unwrap();
        let message = message(DataFiles::of_path(root.path()));
        assert!(
            message.contains("1.bin") && message.contains("input.txt") && message.contains("pass the file you mean"),
            "{message}"
        );
    }

    #[test]
    fn what_is_missing_empty_or_no_file_is_named() {
        let root = tree(&[]);
        assert!(message(DataFiles::of_path(root.path())).contains("holds no files"));
        let missing = message(DataFiles::of_path(&root.path().join("nowhere")));
        assert!(missing.contains("nowhere") && missing.contains("No such file"), "{missing}");
        assert!(message(DataFiles::of_path(Path::new("/dev/null"))).contains("neither a file nor a directory"));
    }

    #[test]
    fn the_workspace_is_found_from_below_and_only_its_sources_are_read() {
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
    fn without_a_workspace_the_way_out_is_data() {
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
