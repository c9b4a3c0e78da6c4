//! Finding out before the first step that a file can be written, by writing to it. Nothing of it stays.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use fsdp_ckpt::RemoveIfEmpty;

/// What is written: a block of most file systems, because less may go to room that a file has already.
const BLOCK: [u8; 4096] = [b'\n'; 4096];
/// How often other runs may remove a directory before something is made in it.
const ATTEMPTS: usize = 32;

/// Tries whether a file can be appended to. One that was not there goes again.
///
/// # Errors
/// It can't, or a symbolic link leads to where it can't be made.
pub fn try_file(path: &Path) -> io::Result<()> {
    append(path).map_err(|error| explained(path, error))
}

/// As [`try_file`], in a directory that is made where it is missing, and goes again.
///
/// # Errors
/// It can't, or the directory can't be made.
pub fn try_file_and_directory(path: &Path) -> io::Result<()> {
    let Some(directory) = path.parent() else { return try_file(path) };
    let _made = RemoveIfEmpty::missing(directory);
    in_directory(directory, || try_file(path))
}

/// Tries whether files can be made in a directory, which is made where it is missing, and goes again.
///
/// # Errors
/// They can't.
pub fn try_directory(directory: &Path) -> io::Result<()> {
    let _made = RemoveIfEmpty::missing(directory);
    in_directory(directory, || append(&directory.join(format!(".write-test-{}", std::process::id()))))
}

/// Makes a directory and those above it, then what belongs in it: again when another run that only tried whether it
/// could write has removed the empty directory in between.
///
/// # Errors
/// One of them can't be made.
pub fn in_directory<T>(directory: &Path, make: impl Fn() -> io::Result<T>) -> io::Result<T> {
    let make_all = || {
        if !directory.as_os_str().is_empty() {
            fs::create_dir_all(directory).map_err(|error| explained(&directory.join("entry"), error))?;
        }
        make()
    };
    let mut made = make_all();
    for _ in 1..ATTEMPTS {
        match &made {
            Err(error) if error.kind() == io::ErrorKind::NotFound => made = make_all(),
            _ => break,
        }
    }
    made
}

fn append(path: &Path) -> io::Result<()> {
    let is_new = !path.exists();
    let is_pipe = path.metadata().is_ok_and(|status| status.file_type().is_fifo());
    // A pipe that nobody reads yet would be waited for, unless it is read here as well.
    let mut file = OpenOptions::new().create(true).read(is_pipe).append(true).open(path)?;
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
            try_file_and_directory(&path(name)).unwrap();
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
    fn runs_that_try_at_the_same_time_do_not_hinder_each_other() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("new/logs");
        std::thread::scope(|scope| {
            for thread in 0..6 {
                let file = directory.join(format!("{thread}.jsonl"));
                scope.spawn(move || {
                    for _ in 0..100 {
                        try_file_and_directory(&file).unwrap();
                    }
                });
            }
        });
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
