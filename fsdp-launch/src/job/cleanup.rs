//! The launcher's temporary directory, and its removal: by the launcher, by its guard, or by the next launcher.
//!
//! The kernel kills the ranks when the launcher is killed (`rank/exec.rs`), but not the processes that they started. So
//! the guard, a shell, waits on a pipe that only the launcher holds open. When the pipe closes, it kills the ranks'
//! process groups, and processes that left their group but still have the launch's environment variable.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use rustix::{
    fs::OFlags,
    process::{Pid, geteuid},
};

use crate::rank::{exec::own_session, orphans};

/// Each line of stdin names a process group; an empty line clears the list. The search by variable runs several times,
/// because a process has no environment for a moment during exec.
const SCRIPT: &str = r#"
while read -r group; do
    if [ -n "$group" ]; then groups="$groups -$group"; else groups=; fi
done
[ -z "$groups" ] || kill -s KILL -- $groups
for again in 1 2 3; do
    for file in $(grep -alzx -F -e "$2" /proc/[0-9]*/environ 2>/dev/null); do
        pid=${file#/proc/}
        kill -s KILL "${pid%/environ}" 2>/dev/null
    done
    sleep 0.05
done
rm -rf -- "$1" "$3"
"#;

/// The guard. Dropping it ends the shell, after a regular end of the launch.
pub(crate) struct Guard {
    shell: Option<Child>,
}

impl Guard {
    /// Starts the shell, which also removes `directory`. Call it before creating the directory: the launcher may be
    /// killed in between.
    pub(crate) fn start(directory: &Path, launch_id: &str) -> Self {
        let mut command = Command::new("/bin/sh");
        let mut unlocked = directory.as_os_str().to_owned();
        unlocked.push(UNLOCKED);
        let mark = format!("{}={launch_id}", orphans::LAUNCH_ID);
        command.args(["-c", SCRIPT, "fsdp-launch-guard"]).arg(directory).arg(mark).arg(unlocked);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        own_session(&mut command);
        Guard { shell: command.spawn().map_err(|error| warn_no_guard(&error)).ok() }
    }

    /// Returns the shell's pid.
    pub(crate) fn pid(&self) -> Option<Pid> {
        self.shell.as_ref().map(Pid::from_child)
    }

    /// Adds a rank's process group.
    pub(crate) fn add(&mut self, group: Pid) {
        self.send(&format!("{}\n", group.as_raw_pid()));
    }

    /// Clears the list: the groups are gone, and their ids may be reused.
    pub(crate) fn clear(&mut self) {
        self.send("\n");
    }

    /// Writes a line in one call, so that a killed launcher leaves no partial line.
    fn send(&mut self, line: &str) {
        if let Some(pipe) = self.shell.as_mut().and_then(|shell| shell.stdin.as_mut()) {
            pipe.write_all(line.as_bytes()).unwrap_or_else(|error| warn_no_guard(&error));
        }
    }
}

fn warn_no_guard(error: &io::Error) {
    tracing::warn!(
        "no guard ({error}): if the launcher is killed by SIGKILL, processes that the ranks started may remain"
    );
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(mut shell) = self.shell.take()
            && let Err(error) = shell.kill().and_then(|()| shell.wait())
        {
            tracing::warn!("the guard could not be ended: {error}");
        }
    }
}

/// Prefix of the names of launchers' directories. An id of [`ID_DIGITS`] hexadecimal digits follows.
pub(crate) const PREFIX: &str = "fsdp-launch-";
pub(crate) const ID_DIGITS: usize = 16;
/// Suffix until the directory is locked. [`sweep`] skips such names.
pub(crate) const UNLOCKED: &str = ".new";

/// A locked temporary directory. Dropping it removes the directory.
#[derive(Debug)]
pub(crate) struct TempDir {
    path: PathBuf,
    _locked: File,
}

impl TempDir {
    /// Returns the path of the directory for launch `id`.
    pub(crate) fn path_of(parent: &Path, id: &str) -> PathBuf {
        parent.join(format!("{PREFIX}{id}"))
    }

    /// Creates the directory.
    pub(crate) fn create(parent: &Path, id: &str) -> io::Result<Self> {
        let path = Self::path_of(parent, id);
        let unlocked = parent.join(format!("{PREFIX}{id}{UNLOCKED}"));
        let at = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        DirBuilder::new().mode(0o700).create(&unlocked).map_err(at)?;
        let locked = lock_and_rename(&unlocked, &path).inspect_err(|_| {
            fs::remove_dir(&unlocked).ok();
        });
        Ok(TempDir { _locked: locked.map_err(at)?, path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

fn lock_and_rename(unlocked: &Path, path: &Path) -> io::Result<File> {
    // Independent of the umask.
    fs::set_permissions(unlocked, Permissions::from_mode(0o700))?;
    let dir = File::open(unlocked)?;
    // A file system without locks also has no sweep.
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
        if is_launcher_dir(&entry.file_name().to_string_lossy())
            && let Err(error) = remove_if_stale(&entry.path(), geteuid().as_raw())
        {
            tracing::debug!("{} is left: {error}", entry.path().display());
        }
    }
}

/// Returns whether a name is a launcher's directory, not one of logs or tokens.
fn is_launcher_dir(name: &str) -> bool {
    let is_digit = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    name.strip_prefix(PREFIX).is_some_and(|id| id.len() == ID_DIGITS && id.as_bytes().iter().all(is_digit))
}

/// Removes a directory of this user, unless a process has locked it.
fn remove_if_stale(path: &Path, user: u32) -> io::Result<()> {
    // Do not follow a symbolic link.
    let flags = OFlags::NOFOLLOW | OFlags::DIRECTORY | OFlags::NONBLOCK;
    let dir = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
    let meta = dir.metadata()?;
    if meta.uid() != user || dir.try_lock().is_err() {
        return Ok(());
    }
    // Another sweep may have replaced the directory meanwhile.
    let there = path.symlink_metadata()?;
    if (there.dev(), there.ino()) == (meta.dev(), meta.ino()) { fs::remove_dir_all(path) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sweep_removes_only_this_users_stale_directories() {
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
        remove_if_stale(&left, geteuid().as_raw() + 1).unwrap();
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
