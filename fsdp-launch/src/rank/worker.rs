//! The process of one rank, and the process group that it leads.

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

/// A rank. Dropping it kills its process group.
pub(crate) struct Worker {
    pub(crate) local_rank: usize,
    pub(crate) rank: usize,
    /// Pid of the rank, and id of its process group.
    pub(crate) pid: Pid,
    /// How the rank ended.
    pub(crate) exit_status: Option<ExitStatus>,
    /// Time of the end, and the time since the start.
    pub(crate) ended_at: Option<(SystemTime, Duration)>,
    /// Last request that was sent before the end.
    pub(crate) ended_after: Option<StopRequest>,
    /// Status page of the rank; `None` if the system has no memory for it.
    pub(crate) status_page: Option<StatusPage>,
    /// Time without heartbeat, if the rank was killed for it.
    pub(crate) silent_for: Option<Duration>,
    /// State of the rank when the first failure occurred.
    pub(crate) snapshot: Option<RankSnapshot>,
    /// Failure over PMI that ended the attempt.
    pub(crate) pmi_failure: Option<PmiFailure>,
    started: Instant,
    sent: Option<StopRequest>,
    group_gone: bool,
    /// Whether SIGTERM was sent to the rest of the group.
    rest_terminated: bool,
}

/// The rank's streams that are pipes.
pub(crate) type Pipes = (Option<ChildStdout>, Option<ChildStderr>);

impl Worker {
    /// Starts a rank with this stdout and stderr.
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
            // Do not pass on an outer launcher's page.
            None => command.env_remove(VARIABLE),
        };
        if let Some(cores) = affinity::cores_of_rank(spec, local_rank)? {
            affinity::pin(&mut command, &cores);
        }
        own_session_killed_with_launcher(&mut command);
        // The rank's end of the connection, open until the rank has started.
        let pmi_end = pmi.apply(local_rank, &mut command);
        let rank = job.rank(local_rank);
        let failed = |source: io::Error| {
            let hint = match source.kind() {
                io::ErrorKind::NotFound => ": the file, or the interpreter its #! line names, is not there",
                io::ErrorKind::WouldBlock => ": too many processes; see `ulimit -u`, or start fewer ranks",
                _ if source.raw_os_error() == Some(Errno::NOEXEC.raw_os_error()) => {
                    ": it is neither a program for this machine nor a script: \
                     damaged, truncated, empty, or built for another machine"
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

    /// Reaps ended processes of the group. Returns whether the rank was among them.
    pub(crate) fn reap(&mut self) -> bool {
        let mut ended = false;
        while !self.group_gone {
            match waitpgid(self.pid, WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == self.pid => {
                    self.set_exit_status(status);
                    ended = true;
                }
                // An orphan of the rank.
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => break,
                Err(_) => {
                    // No child of ours is left in the group, but a process with another parent may be.
                    self.group_gone =
                        self.exit_status.is_some() && test_kill_process_group(self.pid) == Err(Errno::SRCH);
                    break;
                }
            }
        }
        ended
    }

    /// Returns whether the process group was gone at the last [`reap`](Self::reap).
    pub(crate) fn is_gone(&self) -> bool {
        self.group_gone
    }

    /// Records the state of the rank, unless it was recorded before.
    pub(crate) fn record_snapshot(&mut self) {
        if self.snapshot.is_none() {
            let status = self.status_page.as_ref().map(StatusPage::snapshot).unwrap_or_default();
            self.snapshot = Some(RankSnapshot::of(pid_of(self.pid), status));
        }
    }

    /// Sends a request to the whole group, unless the same or a stronger one was sent.
    ///
    /// `signal_number` is the signal for [`StopRequest::Terminate`].
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

    /// Sends SIGTERM to the rest of the group, once.
    pub(crate) fn terminate_rest(&mut self) {
        if !self.group_gone && !std::mem::replace(&mut self.rest_terminated, true) {
            kill_process_group(self.pid, Signal::TERM).ok();
        }
    }

    /// Kills the rank if it was asked to end but is stopped: a stopped process does not handle signals.
    pub(crate) fn kill_if_stopped(&mut self) {
        if self.exit_status.is_some() || self.sent != Some(StopRequest::Terminate) {
            return;
        }
        let status = self.status_page.as_ref().map(StatusPage::snapshot).unwrap_or_default();
        let own = ProcessInfo::of(pid_of(self.pid));
        let is_stopped = |process: ProcessInfo| process.state == ProcessState::Stopped;
        // The rank may be a script around the process that writes the status page.
        if own.is_some_and(is_stopped) || RankSnapshot::of(pid_of(self.pid), status).process.is_some_and(is_stopped) {
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

pub(crate) fn pid_of(pid: Pid) -> u32 {
    pid.as_raw_nonzero().get().unsigned_abs()
}

impl Drop for Worker {
    fn drop(&mut self) {
        // A process that survives SIGKILL is not waited for.
        if !self.group_gone && self.sent != Some(StopRequest::Kill) {
            self.send(StopRequest::Kill, 0);
            if self.exit_status.is_none() {
                waitpid(Some(self.pid), WaitOptions::empty()).ok();
            }
        }
    }
}
