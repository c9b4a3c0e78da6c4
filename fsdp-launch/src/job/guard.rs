//! What ends the ranks' process groups when the launcher is killed by SIGKILL.
//!
//! The kernel then kills the ranks themselves (`session.rs`), but not what they started, and a rank is often a shell
//! script around the real program. So a shell waits for the end of a pipe that only the launcher holds open, kills the
//! groups it was told of, and then what left its group but still has the variable that says which launch its rank was
//! of.

use std::{
    io::{self, Write},
    path::Path,
    process::{Child, Command, Stdio},
};

use rustix::process::Pid;

use crate::{
    job::temp_dir::UNLOCKED,
    rank::{orphans, session::own_session},
};

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
        let mark = format!("{}={launch_id}", orphans::MARK);
        command.args(["-c", SCRIPT, "fsdp-launch-guard"]).arg(directory).arg(mark).arg(unlocked);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        own_session(&mut command);
        Guard { shell: command.spawn().map_err(|error| without_guard(&error)).ok() }
    }

    /// The shell's process.
    pub(crate) fn pid(&self) -> Option<Pid> {
        self.shell.as_ref().map(Pid::from_child)
    }

    /// Puts a rank's process group in the shell's care.
    pub(crate) fn watch(&mut self, group: Pid) {
        self.tell(&format!("{}\n", group.as_raw_pid()));
    }

    /// All groups are gone: others may get their ids.
    pub(crate) fn forget(&mut self) {
        self.tell("\n");
    }

    /// In one write, so that no part of a line is read if the launcher is killed meanwhile.
    fn tell(&mut self, line: &str) {
        if let Some(pipe) = self.shell.as_mut().and_then(|shell| shell.stdin.as_mut()) {
            pipe.write_all(line.as_bytes()).unwrap_or_else(|error| without_guard(&error));
        }
    }
}

fn without_guard(error: &io::Error) {
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
