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
    pmi::{self, PmiFailure},
    rank::{
        affinity,
        environment::Job,
        exec::{exec_without_shell, own_session_killed_with_launcher},
        orphans,
    },
    report::{
        process::{ProcessInfo, ProcessState},
        rank::{ExitStatus, StopRequest},
        rank_snapshot::RankSnapshot,
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
    pub(crate) exit_status: Option<ExitStatus>,
    /// When that was, and how long after its start.
    pub(crate) ended_at: Option<(SystemTime, Duration)>,
    /// What had been sent to the rank when it ended.
    pub(crate) ended_after: Option<StopRequest>,
    /// On which it tells how it is; none where the system refused the memory.
    pub(crate) status_page: Option<StatusPage>,
    /// How long its heart had not beaten, if it was ended for that.
    pub(crate) silent_for: Option<Duration>,
    /// Where it was when something went wrong.
    pub(crate) snapshot: Option<RankSnapshot>,
    /// What it did over PMI that ended the attempt.
    pub(crate) pmi_failure: Option<PmiFailure>,
    started: Instant,
    sent: Option<StopRequest>,
    group_gone: bool,
    /// What the rank left running was sent SIGTERM.
    rest_terminated: bool,
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
        command.env(orphans::LAUNCH_ID, job.launch_id);
        let status_page = StatusPage::new().inspect_err(|error| tracing::warn!("no heartbeats: {error}")).ok();
        match &status_page {
            Some(page) => command.env(VARIABLE, page.path()),
            // Of a launcher around us.
            None => command.env_remove(VARIABLE),
        };
        if let Some(cores) = affinity::cores_of_rank(spec, local_rank)? {
            affinity::pin(&mut command, &cores);
        }
        own_session_killed_with_launcher(&mut command);
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
        let mut child = exec_without_shell(&mut command).and_then(|()| command.spawn()).map_err(failed)?;
        drop(pmi_end);
        let pid = Pid::from_child(&child);
        tracing::debug!(rank, pid = pid.as_raw_pid(), "started");
        let worker = Worker {
            local_rank,
            rank,
            pid,
            exit_status: None,
            ended_at: None,
            ended_after: None,
            status_page,
            silent_for: None,
            snapshot: None,
            pmi_failure: None,
            started: Instant::now(),
            sent: None,
            group_gone: false,
            rest_terminated: false,
        };
        Ok((worker, (child.stdout.take(), child.stderr.take())))
    }

    /// Reaps what has ended of the group, as far as it is our child; true if the rank was among it.
    pub(crate) fn reap(&mut self) -> bool {
        let mut ended = false;
        while !self.group_gone {
            match waitpgid(self.pid, WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == self.pid => {
                    self.set_exit_status(status);
                    ended = true;
                }
                // An orphan of the rank's that became our child.
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => break,
                Err(_) => {
                    // No child of ours is left in the group; a descendant whose parent is outside of it may be.
                    self.group_gone =
                        self.exit_status.is_some() && test_kill_process_group(self.pid) == Err(Errno::SRCH);
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
    pub(crate) fn record_snapshot(&mut self) {
        if self.snapshot.is_none() {
            let told = self.status_page.as_ref().map(StatusPage::snapshot).unwrap_or_default();
            self.snapshot = Some(RankSnapshot::of(pid_of(self.pid), told));
        }
    }

    /// Sends the signal of `request` to the whole group, unless more was sent before.
    ///
    /// `signal_number` is the number of the signal of [`StopRequest::Terminate`].
    pub(crate) fn send(&mut self, request: StopRequest, signal_number: i32) {
        if self.group_gone || self.sent >= Some(request) {
            return;
        }
        let signal = match request {
            StopRequest::Terminate => Signal::from_named_raw(signal_number).unwrap_or(Signal::TERM),
            StopRequest::Kill => Signal::KILL,
        };
        tracing::debug!(rank = self.rank, ?signal, "sending");
        self.sent = Some(request);
        match kill_process_group(self.pid, signal) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => tracing::warn!("{signal:?} could not be sent to rank {}: {error}", self.rank),
        }
    }

    /// Sends SIGTERM to what is left of the group, once.
    pub(crate) fn terminate_rest(&mut self) {
        if !self.group_gone && !std::mem::replace(&mut self.rest_terminated, true) {
            kill_process_group(self.pid, Signal::TERM).ok();
        }
    }

    /// Kills the rank if it was asked to end and is stopped: it hears nothing until somebody makes it go on.
    pub(crate) fn kill_if_stopped(&mut self) {
        if self.exit_status.is_some() || self.sent != Some(StopRequest::Terminate) {
            return;
        }
        let told = self.status_page.as_ref().map(StatusPage::snapshot).unwrap_or_default();
        let own = ProcessInfo::of(pid_of(self.pid));
        let is_stopped = |process: ProcessInfo| process.state == ProcessState::Stopped;
        // A rank may be a script around the process that tells.
        if own.is_some_and(is_stopped) || RankSnapshot::of(pid_of(self.pid), told).process.is_some_and(is_stopped) {
            self.send(StopRequest::Kill, 0);
        }
    }

    fn set_exit_status(&mut self, status: WaitStatus) {
        let signaled = status.terminating_signal().map(ExitStatus::Signaled);
        let end = signaled.unwrap_or(ExitStatus::Exited(status.exit_status().unwrap_or(0)));
        tracing::debug!(rank = self.rank, %end, "ended");
        self.exit_status = Some(end);
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
        if !self.group_gone && self.sent != Some(StopRequest::Kill) {
            self.send(StopRequest::Kill, 0);
            if self.exit_status.is_none() {
                waitpid(Some(self.pid), WaitOptions::empty()).ok();
            }
        }
    }
}
