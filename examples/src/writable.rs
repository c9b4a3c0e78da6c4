//! Tests that files can be written, by writing to them before the first step. Nothing remains of the tests.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use fsdp_ckpt::RemoveIfEmpty;

/// Test data: one block of most file systems, because less may fit into space that a file already has.
const BLOCK: [u8; 4096] = [b'\n'; 4096];
/// Maximal number of attempts when other runs remove an empty directory in between.
const ATTEMPTS: usize = 32;

/// Tests that a file can be appended to. Removes a file that did not exist before.
pub fn try_file(path: &Path) -> io::Result<()> {
    append(path).map_err(|error| explained(path, error))
}

/// Tests like [`try_file`], and creates the file's directory for the test.
pub fn try_file_and_directory(path: &Path) -> io::Result<()> {
    let Some(directory) = path.parent() else { return try_file(path) };
    let _made = RemoveIfEmpty::missing(directory);
    in_directory(directory, || try_file(path))
}

/// Tests that files can be created in a directory, which is created for the test if it does not exist.
pub fn try_directory(directory: &Path) -> io::Result<()> {
    let _made = RemoveIfEmpty::missing(directory);
    in_directory(directory, || append(&directory.join(format!(".write-test-{}", std::process::id()))))
}

/// Creates a directory with its parents, then calls `make` to create a file in it. Retries if another run's test
/// removes the empty directory in between.
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
    // Opening a pipe without a reader would wait, so the test also opens it for reading.
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
        // A device. One empty line does no harm.
        file.write_all(&BLOCK[..1])
    }
}

/// Removes the file, and not a symbolic link to it.
fn remove(path: &Path) -> io::Result<()> {
    fs::remove_file(path.canonicalize()?)
}

/// Explains "File exists" and "No such file" where a dangling link or a file in the path is the cause.
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
    fn tests_leave_no_trace() {
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
    fn concurrent_tests_succeed() {
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
    fn unwritable_paths_are_found() {
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
