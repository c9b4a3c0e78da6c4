//! Finding out before the first step that a file can be written, by writing to it. Nothing of it stays.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// What is written: a block of most file systems, because less may go to room that a file has already.
const BLOCK: [u8; 4096] = [b'\n'; 4096];

/// Tries whether a file can be appended to. One that was not there goes again.
///
/// # Errors
/// It can't, or a symbolic link leads to where it can't be made.
pub fn try_file(path: &Path) -> io::Result<()> {
    append(path).map_err(|error| explained(path, error))
}

/// Tries whether files can be made in a directory, which is made where it is missing, and goes again.
///
/// # Errors
/// They can't.
pub fn try_directory(directory: &Path) -> io::Result<()> {
    let _made = MadeDirs::new(directory)?;
    append(&directory.join(format!(".write-test-{}", std::process::id())))
}

fn append(path: &Path) -> io::Result<()> {
    let is_new = !path.exists();
    // Read as well: a pipe that nobody reads yet would be waited for.
    let mut file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
    let status = file.metadata()?;
    let kind = status.file_type();
    if kind.is_file() {
        let written = file.write_all(&BLOCK).and_then(|()| file.sync_all());
        let restored = if is_new { remove(path) } else { file.set_len(status.len()) };
        written.and(restored)
    } else if kind.is_fifo() {
        Ok(())
    } else {
        // A device: one empty line does no harm.
        file.write_all(&BLOCK[..1])
    }
}

/// Removes a file, not the link that leads to it.
fn remove(path: &Path) -> io::Result<()> {
    fs::remove_file(path.canonicalize()?)
}

/// "File exists" and "No such file" say nothing where a link leads nowhere or a file is in the way.
fn explained(path: &Path, error: io::Error) -> io::Error {
    let dangling = path.ancestors().find(|path| path.is_symlink() && !path.exists());
    let file = path.ancestors().skip(1).find(|path| path.exists() && !path.is_dir());
    let why = match (dangling, file) {
        (Some(link), _) => {
            let target = fs::read_link(link).unwrap_or_default();
            format!("{} is a symbolic link to {}, which can't be made: {error}", link.display(), target.display())
        }
        (None, Some(file)) => format!("{} is not a directory", file.display()),
        (None, None) => return error,
    };
    io::Error::new(error.kind(), why)
}

/// Directories that were made, the inner one first. Dropped, those that are empty go again.
#[derive(Debug)]
pub struct MadeDirs(Vec<PathBuf>);

impl MadeDirs {
    /// Makes a directory and those above it.
    ///
    /// # Errors
    /// It can't be made.
    pub fn new(directory: &Path) -> io::Result<Self> {
        let missing = directory.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let made = MadeDirs(missing.map(Path::to_path_buf).collect());
        if !directory.as_os_str().is_empty() {
            let of_entry = |error| explained(&directory.join("entry"), error);
            fs::create_dir_all(directory).map_err(of_entry)?;
        }
        Ok(made)
    }
}

impl Drop for MadeDirs {
    fn drop(&mut self) {
        for directory in &self.0 {
            // Only what is empty can be removed like this.
            let _ = fs::remove_dir(directory);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn nothing_stays_and_what_was_there_is_as_it_was() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        fs::write(path("old"), "a line\n").unwrap();
        symlink("target", path("link")).unwrap();
        for name in ["old", "new", "sub/dir/new", "link"] {
            let file = path(name);
            let _made = MadeDirs::new(file.parent().unwrap()).unwrap();
            try_file(&file).unwrap();
        }
        for name in ["sub/dir", "."] {
            try_directory(&path(name)).unwrap();
        }
        let mut left: Vec<_> = fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["link", "old"]);
        assert_eq!(fs::read_to_string(path("old")).unwrap(), "a line\n");
        try_file(Path::new("/dev/null")).unwrap();
    }

    #[test]
    fn what_can_not_be_written_is_found_by_writing() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        fs::write(path("file"), "").unwrap();
        symlink("gone/target", path("link")).unwrap();
        for (name, part) in [
            ("/dev/full", "No space left"),
            ("/proc/new", "No such file"),
            ("/proc/new/file", "No such file"),
            ("file/below", "irectory"),
            (".", "directory"),
            ("link", "is a symbolic link to gone/target, which can't be made"),
        ] {
            let error = try_file(&path(name)).unwrap_err().to_string();
            assert!(error.contains(part), "{name}: {error}");
        }
        for (name, part) in [
            ("file", "file is not a directory"),
            ("file/below", "file is not a directory"),
            ("link/sub", "is a symbolic link to gone/target"),
        ] {
            let error = try_directory(&path(name)).unwrap_err().to_string();
            assert!(error.contains(part), "{name}: {error}");
        }
    }
}
