//! The launcher's directory for temporary files, locked for as long as the launcher lives, and the end of those whose
//! launchers are gone.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rustix::{fs::OFlags, process::geteuid};

/// How the names of launchers' directories begin; an id follows, of so many hexadecimal digits.
pub(crate) const PREFIX: &str = "fsdp-launch-";
pub(crate) const ID_DIGITS: usize = 16;
/// What stands behind the name until the directory is locked: no sweep looks at it.
pub(crate) const UNLOCKED: &str = ".new";

/// A directory that is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct TempDir {
    path: PathBuf,
    _locked: File,
}

impl TempDir {
    /// Where that of the launcher with this `id` is, below `parent`.
    pub(crate) fn path_of(parent: &Path, id: &str) -> PathBuf {
        parent.join(format!("{PREFIX}{id}"))
    }

    /// Makes it.
    pub(crate) fn create(parent: &Path, id: &str) -> io::Result<Self> {
        let path = Self::path_of(parent, id);
        let unlocked = parent.join(format!("{PREFIX}{id}{UNLOCKED}"));
        let at = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        DirBuilder::new().mode(0o700).create(&unlocked).map_err(at)?;
        let locked = locked_and_named(&unlocked, &path).inspect_err(|_| {
            fs::remove_dir(&unlocked).ok();
        });
        Ok(TempDir { _locked: locked.map_err(at)?, path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

fn locked_and_named(unlocked: &Path, path: &Path) -> io::Result<File> {
    // Whatever the umask.
    fs::set_permissions(unlocked, Permissions::from_mode(0o700))?;
    let dir = File::open(unlocked)?;
    // Where there are no locks, nothing is swept either.
    dir.try_lock().ok();
    fs::rename(unlocked, path)?;
    Ok(dir)
}

impl Drop for TempDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::debug!("{} is left: {error}", self.path.display());
        }
    }
}

/// Removes the directories in `parent` of launchers that were killed together with their guards.
pub(crate) fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if is_launchers(&entry.file_name().to_string_lossy())
            && let Err(error) = remove_if_left(&entry.path(), geteuid().as_raw())
        {
            tracing::debug!("{} is left: {error}", entry.path().display());
        }
    }
}

/// Beside the launchers' directories there are those of logs, and of tokens.
fn is_launchers(name: &str) -> bool {
    let is_digit = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    name.strip_prefix(PREFIX).is_some_and(|id| id.len() == ID_DIGITS && id.as_bytes().iter().all(is_digit))
}

/// Removes a directory of this user's that no process has locked.
fn remove_if_left(path: &Path, user: u32) -> io::Result<()> {
    // Not what a link leads to.
    let flags = OFlags::NOFOLLOW | OFlags::DIRECTORY | OFlags::NONBLOCK;
    let dir = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
    let meta = dir.metadata()?;
    if meta.uid() != user || dir.try_lock().is_err() {
        return Ok(());
    }
    // Another sweep may have been here in between.
    let there = path.symlink_metadata()?;
    if (there.dev(), there.ino()) == (meta.dev(), meta.ino()) { fs::remove_dir_all(path) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_dead_launcher_of_this_user_has_left_goes() {
        let parent = tempfile::tempdir().unwrap();
        let precious = parent.path().join("precious");
        let ids = ["0123456789abcdef", "00000000000000aa", "00000000000000bb", "00000000000000cc", "00000000000000dd"];
        let [left, link, file, logs, short] = ids.map(|id| TempDir::path_of(parent.path(), id));
        for dir in
            [&left, &precious, &logs.with_file_name("fsdp-launch-logs-abcdef"), &short.with_file_name("fsdp-launch-0")]
        {
            fs::create_dir(dir).unwrap();
            fs::write(dir.join("job.json"), "{}").unwrap();
        }
        std::os::unix::fs::symlink(&precious, &link).unwrap();
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(&precious, left.join("link")).unwrap();
        let live = TempDir::create(parent.path(), "ffffffffffffffff").unwrap();
        assert_eq!(live.path().metadata().unwrap().mode() & 0o777, 0o700);
        remove_if_left(&left, geteuid().as_raw() + 1).unwrap();
        assert!(left.is_dir(), "it was another user's");

        sweep(parent.path());
        assert!(!left.exists());
        let mut there: Vec<_> =
            fs::read_dir(parent.path()).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
        there.sort();
        let kept = ["00000000000000aa", "00000000000000bb", "0", "ffffffffffffffff", "logs-abcdef"];
        let mut kept: Vec<_> = kept.iter().map(|name| format!("{PREFIX}{name}")).chain(["precious".into()]).collect();
        kept.sort();
        assert_eq!(there, kept);
        assert!(precious.join("job.json").exists());

        let path = live.path().to_owned();
        drop(live);
        assert!(!path.exists());
        let nowhere = TempDir::create(Path::new("/no/such/directory"), ids[0]).unwrap_err().to_string();
        assert!(nowhere.contains("/no/such/directory/fsdp-launch-"), "{nowhere}");
    }
}
