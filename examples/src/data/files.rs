//! Files of `--data` that hold text or 16-bit tokens.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use walkdir::{DirEntry, WalkDir};

use crate::input::check_data;

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
    /// Finds the files of `--data PATH`.
    pub(super) fn of_path(path: &Path) -> Result<Self> {
        let kind = fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
        let files = if kind.is_dir() {
            of_directory(path)?
        } else if !kind.is_file() {
            bail!("{} is neither a file nor a directory; every rank must be able to read it", path.display())
        } else if has_extension(path, &["bin"]) {
            Files::Tokens(vec![path.to_owned()])
        } else {
            Files::Text(path.to_owned())
        };
        Ok(DataFiles { root: path.to_owned(), files })
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
        let files =
            walk_without_links(&root, false)?.into_iter().filter(|file| has_extension(file, &SOURCES)).collect();
        Ok(DataFiles { root, files: Files::MaybeText(files) })
    }
}

fn of_directory(path: &Path) -> Result<Files> {
    let (tokens, text): (Vec<_>, Vec<_>) = walk(path)?.into_iter().partition(|file| has_extension(file, &["bin"]));
    ensure!(!tokens.is_empty() || !text.is_empty(), "{} holds no visible files", path.display());
    if tokens.is_empty() {
        return Ok(Files::MaybeText(text));
    }
    if let Some(other) = text.first() {
        bail!(
            "{} holds both .bin files of tokens ({}) and other files ({}): pass one \
             file, or a directory with only one kind",
            path.display(),
            tokens[0].display(),
            other.display()
        );
    }
    Ok(Files::Tokens(tokens))
}

/// Lists all files below `root` in the same order on every machine, except hidden ones and those in `target`
/// directories.
///
/// A symbolic link to another file or directory is read, and one within `root` is left out, so that nothing is read twice.
fn walk(root: &Path) -> Result<Vec<PathBuf>> {
    let (mut files, mut targets) = (Vec::new(), HashSet::new());
    let own = root.canonicalize().with_context(|| format!("cannot list {}", root.display()))?;
    for file in walk_without_links(root, true)? {
        let Ok(target) = std::fs::read_link(&file) else {
            files.push(file);
            continue;
        };
        let found = file.canonicalize().with_context(|| {
            format!("{} is a link to {}, which can't be read: mend or remove it", file.display(), target.display())
        })?;
        if found.strip_prefix(&own).is_ok_and(|path| path.iter().all(|name| !is_left_out(name))) {
            continue;
        }
        ensure!(
            !own.starts_with(&found),
            "{} is a link to {}, a directory above it: remove the link",
            file.display(),
            found.display()
        );
        if !targets.insert(found.clone()) {
            continue;
        }
        if found.is_dir() { files.extend(walk_without_links(&file, false)?) } else { files.push(file) }
    }
    Ok(files)
}

/// Lists all files below `root` as [`walk`] does. Does not follow symbolic links, and lists them if `links` is true.
fn walk_without_links(root: &Path, links: bool) -> Result<Vec<PathBuf>> {
    let wanted = |entry: &DirEntry| {
        let is_file = entry.file_type().is_file() && !entry.file_name().as_encoded_bytes().starts_with(b".");
        entry.depth() == 0 || is_file || !is_left_out(entry.file_name())
    };
    let mut files = Vec::new();
    for entry in WalkDir::new(root).sort_by_file_name().into_iter().filter_entry(wanted) {
        let entry = entry.with_context(|| format!("cannot list {}", root.display()))?;
        if entry.file_type().is_file() || links && entry.depth() > 0 && entry.path_is_symlink() {
            files.push(entry.into_path());
        }
    }
    Ok(files)
}

/// Returns whether an entry is hidden, or a directory of this name is left out.
fn is_left_out(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b".") || name == "target"
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
    fn links_to_other_files_are_read() {
        let other = tree(&[("blob", b"x"), ("dir/c.txt", b"")]);
        let root = tree(&[(".cache/hidden", b"")]);
        let link = |to: PathBuf, name: &str| symlink(to, root.path().join(name)).unwrap();
        link(other.path().join("blob"), "a.txt");
        link(other.path().join("dir"), "b");
        link(root.path().join(".cache/hidden"), "d.txt");
        let expected = ["a.txt", "b/c.txt", "d.txt"].map(|name| root.path().join(name)).to_vec();
        assert_eq!(DataFiles::of_path(root.path()).unwrap().files, Files::MaybeText(expected));
        link("/nowhere".into(), "e.txt");
        let message = message(DataFiles::of_path(root.path()));
        assert!(message.contains("e.txt is a link to /nowhere, which can't be read"), "{message}");
    }

    #[test]
    fn hidden_root_is_read() {
        let root = tree(&[(".data/a.txt", b"")]);
        let path = root.path().join(".data");
        assert_eq!(DataFiles::of_path(&path).unwrap().files, Files::MaybeText(vec![path.join("a.txt")]));
    }

    #[test]
    fn mixed_directories_are_refused() {
        let root = tree(&[("2.bin", b""), ("1.bin", b"")]);
        let expected = ["1.bin", "2.bin"].map(|name| root.path().join(name)).to_vec();
        assert_eq!(DataFiles::of_path(root.path()).unwrap().files, Files::Tokens(expected));
        fs::write(root.path().join("input.txt"), "x").unwrap();
        let message = message(DataFiles::of_path(root.path()));
        assert!(
            message.contains("1.bin") && message.contains("input.txt") && message.contains("pass one file"),
            "{message}"
        );
    }

    #[test]
    fn missing_and_empty_paths_are_refused() {
        let root = tree(&[]);
        assert!(message(DataFiles::of_path(root.path())).contains("holds no visible files"));
        let missing = message(DataFiles::of_path(&root.path().join("nowhere")));
        assert!(missing.contains("nowhere") && missing.contains("No such file"), "{missing}");
        assert!(message(DataFiles::of_path(Path::new("/dev/null"))).contains("neither a file nor a directory"));
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
