//! Processes in a session of their own: the terminal's Ctrl-C does not reach them, and one signal to their process
//! group reaches their children too.

use std::{io, os::unix::process::CommandExt, process::Command};

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal, setsid};

/// Makes `command` start as the leader of a new session and process group.
pub(crate) fn own_session(command: &mut Command) {
    // SAFETY: the hook runs between fork and exec, where only async-signal-safe calls are allowed: setsid is one, and
    // nothing is allocated.
    unsafe {
        command.pre_exec(|| setsid().map(drop).map_err(io::Error::from));
    }
}

/// As [`own_session`], and the process is killed when the thread that spawns it ends: the main thread of the launcher,
/// so when the launcher ends.
pub(crate) fn own_session_dying_with_us(command: &mut Command) {
    own_session(command);
    let launcher = getpid();
    // SAFETY: as above: prctl and getppid are async-signal-safe, and an error made of a code allocates nothing.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The launcher may have died before the line above, and then no signal comes.
            if getppid() == Some(launcher) { Ok(()) } else { Err(io::Error::from(rustix::io::Errno::SRCH)) }
        });
    }
}
