//! One rank's process and the process group it leads.

use std::{
    io,
    process::{ChildStderr, ChildStdout, Command, Stdio},
    time::{Duration, Instant, SystemTime},
};

use fsdp_core::heartbeat::{StatusPage, VARIABLE};
use rustix::{
    io::Errno,
    process::{Pid, Signal, WaitOptions, WaitStatus, kill_process_group, test_kill_process_group, waitpgid, waitpid},
};

use crate::{
    Error, Result,
    pmi::{self, Trouble},
    rank::{cores, environment::Job, exec::only_what_runs, orphans, session::own_session_dying_with_us},
    report::{
        end::{End, Request},
        process::{ProcessInfo, ProcessState},
        whereabouts::Whereabouts,
    },
};

/// A rank. Dropping it kills whatever is left of it.
pub(crate) struct Worker {
    /// Its rank on this host, and in the world.
    pub(crate) local_rank: usize,
    pub(crate) rank: usize,
    /// Of the rank, and so of its process group.
    pub(crate) pid: Pid,
    /// How the rank ended, once it has.
    pub(crate) end: Option<End>,
    /// When that was, and how long after its start.
    pub(crate) ended_at: Option<(SystemTime, Duration)>,
    /// What had been sent to the rank when it ended.
    pub(crate) ended_after: Option<Request>,
    /// On which it tells how it is; none where the system refused the memory.
    pub(crate) board: Option<StatusPage>,
    /// How long its heart had not beaten, if it was ended for that.
    pub(crate) silent_for: Option<Duration>,
    /// Where it was when something went wrong.
    pub(crate) whereabouts: Option<Whereabouts>,
    /// What it did over PMI that ended the attempt.
    pub(crate) trouble: Option<Trouble>,
    started: Instant,
    sent: Option<Request>,
    group_gone: bool,
    /// What the rank left running was sent SIGTERM.
    rest_was_asked: bool,
}

/// Where a rank's streams are read, as far as they come through pipes.
pub(crate) type Pipes = (Option<ChildStdout>, Option<ChildStderr>);

impl Worker {
    /// Starts a rank with these for its stdout and stderr.
    pub(crate) fn start(
        job: &Job<'_>,
        local_rank: usize,
        pmi: &mut pmi::Server,
        stdout: Stdio,
        stderr: Stdio,
    ) -> Result<(Self, Pipes)> {
        let spec = job.spec;
        let mut command = Command::new(&spec.program);
        command.args(&spec.args).stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        job.apply(local_rank, &mut command)?;
        command.env(orphans::MARK, job.launch_id);
        let board = StatusPage::new().inspect_err(|error| tracing::warn!("no heartbeats: {error}")).ok();
        match &board {
            Some(board) => command.env(VARIABLE, board.path()),
            // Of a launcher around us.
            None => command.env_remove(VARIABLE),
        };
        if let Some(cores) = cores::of_rank(spec, local_rank)? {
            cores::pin(&mut command, &cores);
        }
        own_session_dying_with_us(&mut command);
        // The rank's own from when it is started.
        let pmi_end = pmi.apply(local_rank, &mut command);
        let rank = job.rank(local_rank);
        let failed = |source: io::Error| {
            let hint = match source.kind() {
                io::ErrorKind::NotFound => ": the file, or the interpreter its #! line names, is not there",
                io::ErrorKind::WouldBlock => ": too many processes; see `ulimit -u`, or start fewer ranks",
                _ if source.raw_os_error() == Some(Errno::NOEXEC.raw_os_error()) => {
                    ": it is no program of this kind of machine, and no script: \
                     damaged, cut short, empty, or built for another machine"
                }
                _ if source.raw_os_error() == Some(Errno::MFILE.raw_os_error()) => {
                    ": too many open files; raise `ulimit -n`, or start fewer ranks"
                }
                _ => "",
            };
            Error::Start { rank, program: spec.program.clone(), source, hint }
        };
        let mut child = only_what_runs(&mut command).and_then(|()| command.spawn()).map_err(failed)?;
        drop(pmi_end);
        let pid = Pid::from_child(&child);
        tracing::debug!(rank, pid = pid.as_raw_pid(), "started");
        let worker = Worker {
            local_rank,
            rank,
            pid,
            end: None,
            ended_at: None,
            ended_after: None,
            board,
            silent_for: None,
            whereabouts: None,
            trouble: None,
            started: Instant::now(),
            sent: None,
            group_gone: false,
            rest_was_asked: false,
        };
        Ok((worker, (child.stdout.take(), child.stderr.take())))
    }

    /// Reaps what has ended of the group, as far as it is our child; true if the rank was among it.
    pub(crate) fn reap(&mut self) -> bool {
        let mut ended = false;
        while !self.group_gone {
            match waitpgid(self.pid, WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == self.pid => {
                    self.set_end(status);
                    ended = true;
                }
                // An orphan of the rank's that became our child.
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => break,
                Err(_) => {
                    // No child of ours is left in the group; a descendant whose parent is outside of it may be.
                    self.group_gone = self.end.is_some() && test_kill_process_group(self.pid) == Err(Errno::SRCH);
                    break;
                }
            }
        }
        ended
    }

    /// Nothing of the rank's process group is left, as of the last [`reap`](Self::reap).
    pub(crate) fn is_gone(&self) -> bool {
        self.group_gone
    }

    /// Notes where the rank is, unless that was noted before.
    pub(crate) fn note_whereabouts(&mut self) {
        if self.whereabouts.is_none() {
            let told = self.board.as_ref().map(StatusPage::snapshot).unwrap_or_default();
            self.whereabouts = Some(Whereabouts::of(pid_of(self.pid), told));
        }
    }

    /// Sends the signal of `request` to the whole group, unless more was sent before.
    ///
    /// `gentle` is the number of the signal of [`Request::Terminate`].
    pub(crate) fn send(&mut self, request: Request, gentle: i32) {
        if self.group_gone || self.sent >= Some(request) {
            return;
        }
        let signal = match request {
            Request::Terminate => Signal::from_named_raw(gentle).unwrap_or(Signal::TERM),
            Request::Kill => Signal::KILL,
        };
        tracing::debug!(rank = self.rank, ?signal, "sending");
        self.sent = Some(request);
        match kill_process_group(self.pid, signal) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => tracing::warn!("{signal:?} could not be sent to rank {}: {error}", self.rank),
        }
    }

    /// Sends SIGTERM to what is left of the group, once.
    pub(crate) fn ask_what_is_left(&mut self) {
        if !self.group_gone && !std::mem::replace(&mut self.rest_was_asked, true) {
            kill_process_group(self.pid, Signal::TERM).ok();
        }
    }

    /// Kills the rank if it was asked to end and is stopped: it hears nothing until somebody makes it go on.
    pub(crate) fn kill_if_stopped(&mut self) {
        if self.end.is_some() || self.sent != Some(Request::Terminate) {
            return;
        }
        let told = self.board.as_ref().map(StatusPage::snapshot).unwrap_or_default();
        let own = ProcessInfo::of(pid_of(self.pid));
        let is_stopped = |process: ProcessInfo| process.state == ProcessState::Stopped;
        // A rank may be a script around the process that tells.
        if own.is_some_and(is_stopped) || Whereabouts::of(pid_of(self.pid), told).process.is_some_and(is_stopped) {
            self.send(Request::Kill, 0);
        }
    }

    fn set_end(&mut self, status: WaitStatus) {
        let signaled = status.terminating_signal().map(End::Signaled);
        let end = signaled.unwrap_or(End::Exited(status.exit_status().unwrap_or(0)));
        tracing::debug!(rank = self.rank, %end, "ended");
        self.end = Some(end);
        self.ended_at = Some((SystemTime::now(), self.started.elapsed()));
        self.ended_after = self.sent;
    }
}

/// As others write it.
pub(crate) fn pid_of(pid: Pid) -> u32 {
    pid.as_raw_nonzero().get().unsigned_abs()
}

impl Drop for Worker {
    fn drop(&mut self) {
        // After a regular end there is nothing to do, and what SIGKILL did not end is not worth waiting for.
        if !self.group_gone && self.sent != Some(Request::Kill) {
            self.send(Request::Kill, 0);
            if self.end.is_none() {
                waitpid(Some(self.pid), WaitOptions::empty()).ok();
            }
        }
    }
}
