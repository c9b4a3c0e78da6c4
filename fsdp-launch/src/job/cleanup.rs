//! The launcher's temporary directory, and its removal: by the launcher, by its guard, or by the next launcher.

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

/// A line is a group, an empty one says that those before are gone. What has the variable is looked for more than once:
/// a process that is executing a program has no environment for a moment.
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

/// The waiting shell. Dropping it is the launch's regular end: nothing is left for it to do.
pub(crate) struct Guard {
    shell: Option<Child>,
}

impl Guard {
    /// Starts the shell, which also removes `directory` in the end. To be called before that is made: the launcher may
    /// be killed in between.
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

    /// The shell's process.
    pub(crate) fn pid(&self) -> Option<Pid> {
        self.shell.as_ref().map(Pid::from_child)
    }

    /// Puts a rank's process group in the shell's care.
    pub(crate) fn add(&mut self, group: Pid) {
        self.send(&format!("{}\n", group.as_raw_pid()));
    }

    /// All groups are gone: others may get their ids.
    pub(crate) fn clear(&mut self) {
        self.send("\n");
    }

    /// In one write, so that no part of a line is read if the launcher is killed meanwhile.
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
        if is_launcher_dir(&entry.file_name().to_string_lossy())
            && let Err(error) = remove_if_stale(&entry.path(), geteuid().as_raw())
        {
            tracing::debug!("{} is left: {error}", entry.path().display());
        }
    }
}

/// Beside the launchers' directories there are those of logs, and of tokens.
fn is_launcher_dir(name: &str) -> bool {
    let is_digit = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    name.strip_prefix(PREFIX).is_some_and(|id| id.len() == ID_DIGITS && id.as_bytes().iter().all(is_digit))
}

/// Removes a directory of this user's that no process has locked.
fn remove_if_stale(path: &Path, user: u32) -> io::Result<()> {
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
