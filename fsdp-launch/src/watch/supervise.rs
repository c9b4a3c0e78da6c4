//! Supervises the ranks: finds the first failure, and ends the other ranks.

use std::{
    cmp::Reverse,
    sync::mpsc::Receiver,
    time::{Duration, Instant, SystemTime},
};

use fsdp_core::RankEnv;
use rustix::process::Pid;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::{
    pmi::{self, PmiEvent, PmiFailure, PmiFailureKind},
    rank::{environment::Job, orphans, worker::Worker},
    rendezvous::{RendezvousEvent, ToAgent},
    report::rank::{ExitStatus, StopRequest, recorded_at},
    watch::{Event, watchdog::Watchdog},
};

/// Polling interval during a shutdown, for processes whose parent is not this process.
const TICK: Duration = Duration::from_millis(20);

/// Time for the other ranks to fail by themselves after a rank failed with an exit code. They often find the same
/// error, such as bad input, a little later, and should report it. After a signal, there is no such time.
const FAILURE_GRACE: Duration = Duration::from_millis(300);

/// Time for the kernel to end a process after SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// How an attempt ended on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttemptEnd {
    /// Every rank exited with code 0.
    Succeeded,
    /// This local rank failed first.
    RankFailed(usize),
    /// The launcher received this signal.
    Interrupted(i32),
    /// The coordinator requested it, or is gone.
    Stopped,
}

/// Result of the supervision.
pub(crate) struct Supervised {
    pub(crate) cause: AttemptEnd,
    /// Signal that the launcher received, even if it was not the cause.
    pub(crate) interrupted: Option<i32>,
    /// Number of streams that were printed to their end.
    pub(crate) streams: usize,
    /// Rendezvous events that were not handled.
    pub(crate) rendezvous_events: Vec<RendezvousEvent>,
}

/// A notice for other hosts, sent at once.
pub(crate) enum Notice<'a> {
    /// This rank failed first. The others are about to be ended.
    Failed(&'a Worker),
    /// The launcher received this signal. The ranks are about to be ended.
    Leaving(i32),
    /// This rank has exited with code 0.
    Done(usize),
    /// An event of the PMI connections.
    Pmi(PmiEvent),
}

/// Watches `workers` until all their processes are gone, and serves their PMI requests. Notices for other hosts go to
/// `notify`. Orphans are reaped; `children` lists children that are not orphans.
pub(crate) fn supervise(
    workers: &mut [Worker],
    job: &Job<'_>,
    pmi: &mut pmi::Server,
    events: &Receiver<Event>,
    children: &[Pid],
    notify: &mut dyn FnMut(Notice<'_>),
) -> Supervised {
    let (grace, own_attempt) = (job.spec.shutdown_timeout, job.assignment.attempt);
    let mut watchdog = Watchdog::new(job.spec.heartbeat_timeout, workers.len(), Instant::now());
    let mut shutdown = Shutdown { workers, grace, signal: SIGTERM, sent: None, begin_at: None };
    let mut cause = None;
    let (mut streams, mut interrupted, mut is_reported, mut rendezvous_events) = (0, None, false, Vec::new());
    loop {
        let (done, failed): (Vec<_>, Vec<_>) = shutdown.reap().into_iter().partition(|(_, end)| end.is_success());
        for rank in done.into_iter().map(|(rank, _)| job.rank(rank)) {
            shutdown.record_exit(rank, job);
            notify(Notice::Done(rank));
        }
        match cause {
            None => {
                if let Some(rank) = first_failure(&failed, job) {
                    tracing::info!("rank {} failed: ending all ranks", job.rank(rank));
                    cause = Some(AttemptEnd::RankFailed(rank));
                    shutdown.record_snapshot();
                    shutdown.begin_at = Some(Instant::now() + FAILURE_GRACE);
                } else if let Some((rank, silent)) = watchdog.look(shutdown.workers) {
                    tracing::info!("rank {} hangs: ending all ranks", job.rank(rank));
                    cause = Some(AttemptEnd::RankFailed(rank));
                    shutdown.record_snapshot();
                    shutdown.kill_hung(rank, silent);
                }
            }
            // A rank that failed before the request to end may be the cause, and end after its consequence.
            Some(AttemptEnd::RankFailed(first)) if shutdown.sent.is_none() => {
                cause = Some(AttemptEnd::RankFailed(earlier_failure(first, &failed, job)));
            }
            Some(_) => {}
        }
        if failed.iter().any(|(_, end)| matches!(end, ExitStatus::Signaled(_))) || shutdown.failure_grace_is_over() {
            shutdown.begin();
        }
        if let (Some(AttemptEnd::RankFailed(first)), true, false) = (cause, shutdown.sent.is_some(), is_reported) {
            is_reported = true;
            shutdown.workers.get(first).into_iter().for_each(|worker| notify(Notice::Failed(worker)));
        }
        if shutdown.workers.iter().all(Worker::is_gone) {
            break;
        }
        if shutdown.workers.iter().all(|worker| worker.exit_status.is_some()) {
            // End the processes that the ranks left running.
            shutdown.begin();
        }
        shutdown.workers.iter_mut().for_each(Worker::kill_if_stopped);
        shutdown.terminate_rest();
        match shutdown.wait(events, watchdog.period()) {
            Some(Event::ChildEnded) => orphans::reap(children),
            Some(Event::OutputEnded) => streams += 1,
            Some(Event::Interrupted(signal)) => {
                if interrupted.replace(signal).is_none() {
                    notify(Notice::Leaving(signal));
                }
                // Only a second SIGINT kills: `timeout` and service managers send their signal twice.
                if shutdown.sent.is_some() && signal == SIGINT {
                    shutdown.send(StopRequest::Kill);
                }
                if shutdown.sent.is_none() {
                    // As in `torchrun`: Python turns SIGINT into `KeyboardInterrupt`. Ranks do not inherit it as
                    // ignored, because the launcher handles it.
                    shutdown.signal = signal;
                }
                shutdown.begin();
                cause.get_or_insert(AttemptEnd::Interrupted(signal));
            }
            Some(Event::Pmi { attempt, event }) if attempt == own_attempt => match event {
                PmiEvent::Failed(pmi_failure) => {
                    let rank = pmi_failure.local_rank;
                    if cause.is_none() {
                        tracing::info!("rank {}: {}: ending all ranks", job.rank(rank), pmi_failure.text);
                        cause = Some(AttemptEnd::RankFailed(rank));
                        shutdown.record_snapshot();
                        match pmi_failure.kind {
                            PmiFailureKind::Aborted(_) => shutdown.begin(),
                            // The rank is about to end with an exit code of its own.
                            PmiFailureKind::Protocol | PmiFailureKind::Disconnected => {
                                shutdown.begin_at = Some(Instant::now() + FAILURE_GRACE)
                            }
                        }
                    }
                    if cause == Some(AttemptEnd::RankFailed(rank)) {
                        shutdown.record_pmi_failure(pmi_failure);
                    }
                }
                event => notify(Notice::Pmi(event)),
            },
            Some(Event::Pmi { .. }) => {}
            Some(Event::Rendezvous(event)) => match event {
                RendezvousEvent::Message(ToAgent::RankDone { attempt, rank }) if attempt == own_attempt => {
                    shutdown.record_exit(rank, job);
                }
                RendezvousEvent::Message(ToAgent::PmiPut { attempt, entries }) if attempt == own_attempt => {
                    pmi.add_remote(entries);
                }
                RendezvousEvent::Message(ToAgent::PmiBarrierDone { attempt }) if attempt == own_attempt => {
                    pmi.release_barrier();
                }
                event => {
                    if means_stop(&event, own_attempt) {
                        shutdown.begin();
                        cause.get_or_insert(AttemptEnd::Stopped);
                    }
                    rendezvous_events.push(event);
                }
            },
            None => {}
        }
        match shutdown.overdue() {
            Some(StopRequest::Terminate) => {
                shutdown.send(StopRequest::Kill);
                tracing::warn!("killed processes that did not end within {grace:?} of the request");
            }
            Some(StopRequest::Kill) => break,
            None => {}
        }
    }
    // A rank's last messages may not have been handled.
    if let Some(pmi_failure) = pmi.finish() {
        let event = AttemptEnd::RankFailed(pmi_failure.local_rank);
        if *cause.get_or_insert(event) == event {
            shutdown.record_pmi_failure(pmi_failure);
        }
    }
    Supervised { cause: cause.unwrap_or(AttemptEnd::Succeeded), interrupted, streams, rendezvous_events }
}

/// Returns whether the ranks of an attempt must end after this event.
fn means_stop(event: &RendezvousEvent, own_attempt: u32) -> bool {
    match event {
        RendezvousEvent::Message(ToAgent::Stop { attempt, .. }) => *attempt == own_attempt,
        // The run continues without this host, or is over.
        RendezvousEvent::Message(ToAgent::Refused { .. } | ToAgent::End(_)) | RendezvousEvent::Lost(_) => true,
        RendezvousEvent::Message(_) | RendezvousEvent::Retrying(_) | RendezvousEvent::Failed(_) => false,
    }
}

struct Shutdown<'a> {
    workers: &'a mut [Worker],
    grace: Duration,
    /// Signal that asks the ranks to end.
    signal: i32,
    /// Last request to all groups, and its time.
    sent: Option<(StopRequest, Instant)>,
    /// When to ask all ranks to end.
    begin_at: Option<Instant>,
}

impl Shutdown<'_> {
    /// Reaps the ranks that have ended, and returns them.
    fn reap(&mut self) -> Vec<(usize, ExitStatus)> {
        let mut ended = Vec::new();
        // Scan again after each find: a rank seen alive may have failed before a later one that was seen dead.
        loop {
            let mut found = false;
            for worker in self.workers.iter_mut() {
                if !worker.reap() {
                    continue;
                }
                found = true;
                ended.extend(worker.exit_status.map(|end| (worker.local_rank, end)));
            }
            if !found {
                return ended;
            }
        }
    }

    /// Records the exit of `rank` for this host's ranks, which may wait for it to join.
    fn record_exit(&self, rank: usize, job: &Job<'_>) {
        let assignment = job.assignment;
        let (world_size, run_id, attempt) = (assignment.world_size, assignment.run_id.clone(), assignment.attempt);
        let ended = RankEnv { rank, world_size, run_id, attempt, ..RankEnv::single() };
        self.workers.iter().filter_map(|worker| worker.status_page.as_ref()).for_each(|page| page.record_exit(&ended));
    }

    /// Returns whether the time for other ranks to fail is over.
    fn failure_grace_is_over(&self) -> bool {
        self.begin_at.is_some_and(|at| Instant::now() >= at)
    }

    /// Records the state of all ranks, once.
    fn record_snapshot(&mut self) {
        self.workers.iter_mut().for_each(Worker::record_snapshot);
    }

    /// Records a rank's first failure over PMI.
    fn record_pmi_failure(&mut self, pmi_failure: PmiFailure) {
        if let Some(worker) = self.workers.get_mut(pmi_failure.local_rank) {
            worker.pmi_failure.get_or_insert(pmi_failure);
        }
    }

    /// Kills a hung rank, which would not handle SIGTERM, and asks the others to end at once.
    fn kill_hung(&mut self, rank: usize, silent: Duration) {
        if let Some(worker) = self.workers.get_mut(rank) {
            worker.silent_for = Some(silent);
            worker.send(StopRequest::Kill, self.signal);
        }
        self.begin();
    }

    /// Asks all ranks to end, once.
    fn begin(&mut self) {
        if self.sent.is_none() {
            self.record_snapshot();
            self.send(StopRequest::Terminate);
        }
    }

    /// Sends SIGTERM to processes that ended ranks left running: background jobs of a shell ignore SIGINT and SIGQUIT.
    fn terminate_rest(&mut self) {
        if self.signal != SIGTERM && self.sent.is_some_and(|(sent, _)| sent == StopRequest::Terminate) {
            self.workers.iter_mut().filter(|worker| worker.exit_status.is_some()).for_each(Worker::terminate_rest);
        }
    }

    fn send(&mut self, request: StopRequest) {
        if self.sent.is_some_and(|(sent, _)| sent >= request) {
            return;
        }
        self.sent = Some((request, Instant::now()));
        self.workers.iter_mut().for_each(|worker| worker.send(request, self.signal));
    }

    /// Returns the last request, if it had no effect in time.
    fn overdue(&self) -> Option<StopRequest> {
        let (request, at) = self.sent?;
        let limit = if request == StopRequest::Kill { KILL_TIMEOUT } else { self.grace };
        (at.elapsed() >= limit).then_some(request)
    }

    /// Returns the next event; `None` after a timeout.
    fn wait(&self, events: &Receiver<Event>, watch: Option<Duration>) -> Option<Event> {
        match (self.sent, self.begin_at) {
            (None, None) => match watch {
                Some(period) => events.recv_timeout(period).ok(),
                None => events.recv().ok(),
            },
            (None, Some(at)) => events.recv_timeout(at.saturating_duration_since(Instant::now())).ok(),
            (Some(_), _) => events.recv_timeout(TICK).ok(),
        }
    }
}

/// Returns the first failure among ranks that ended together: a rank killed by a signal, because an exit code may be a
/// consequence; then the earliest recorded error; then the lowest rank.
fn first_failure(failed: &[(usize, ExitStatus)], job: &Job<'_>) -> Option<usize> {
    let order = |&&(rank, end): &&(usize, ExitStatus)| {
        let recorded: Option<SystemTime> = recorded_at(&job.error_file(rank));
        (Reverse(matches!(end, ExitStatus::Signaled(_))), recorded.is_none(), recorded, rank)
    };
    failed.iter().min_by_key(order).map(|&(rank, _)| rank)
}

/// Returns `first`, or a rank that recorded its error earlier.
fn earlier_failure(first: usize, failed: &[(usize, ExitStatus)], job: &Job<'_>) -> usize {
    let recorded = |rank: usize| recorded_at(&job.error_file(rank));
    let Some(known) = recorded(first) else { return first };
    let earlier = failed.iter().filter_map(|&(rank, _)| Some((recorded(rank)?, rank))).min();
    earlier.filter(|&(at, _)| at < known).map_or(first, |(_, rank)| rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Events that end the ranks, and events that do not.
    #[test]
    fn final_messages_of_the_coordinator_end_the_ranks() {
        use std::process::Stdio;
        let dir = tempfile::tempdir().unwrap();
        let mut spec = crate::LaunchSpec::new("/bin/sleep", 1);
        spec.args = vec!["1000".into()];
        let assignment = crate::rendezvous::Assignment::single_node("r", 1, 1);
        let job = Job { spec: &spec, assignment: &assignment, launch_id: "id", log_dir: None, error_dir: dir.path() };
        let run_result = crate::rendezvous::RunResult { failure: None, failed_attempts: Vec::new(), restarts: 0 };
        let stop = |attempt| ToAgent::Stop { attempt, why: "x".into(), costs: false };
        let ends = [
            RendezvousEvent::Message(stop(0)),
            RendezvousEvent::Message(ToAgent::Refused { why: "x".into() }),
            RendezvousEvent::Message(ToAgent::End(Box::new(run_result))),
            RendezvousEvent::Lost("x".into()),
        ];
        for last in ends {
            let (sender, events) = std::sync::mpsc::channel();
            let mut pmi = pmi::Server::start(&assignment, 1, |_| {}).unwrap();
            let (worker, _) = Worker::start(&job, 0, &mut pmi, Stdio::null(), Stdio::null()).unwrap();
            // Another attempt's event, and a keep-alive.
            for other in [RendezvousEvent::Message(ToAgent::Ping), RendezvousEvent::Message(stop(1)), last] {
                sender.send(Event::Rendezvous(other)).unwrap();
            }
            let ended = supervise(&mut [worker], &job, &mut pmi, &events, &[], &mut |_| {});
            assert_eq!((ended.cause, ended.rendezvous_events.len()), (AttemptEnd::Stopped, 3));
        }
    }

    #[test]
    fn the_first_failure_is_a_signal_or_the_earliest_record() {
        let dir = tempfile::tempdir().unwrap();
        let spec = crate::LaunchSpec::new("p", 4);
        let assignment = crate::rendezvous::Assignment::single_node("r", 4, 1);
        let job = Job { spec: &spec, assignment: &assignment, launch_id: "id", log_dir: None, error_dir: dir.path() };
        let record = |rank, second| {
            let file = std::fs::File::create(job.error_file(rank)).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(second)).unwrap();
        };
        let ended = |rank| (rank, ExitStatus::Exited(1));
        assert_eq!(first_failure(&[], &job), None);
        assert_eq!(first_failure(&[ended(2), ended(1)], &job), Some(1));
        record(2, 20);
        assert_eq!(first_failure(&[ended(1), ended(2)], &job), Some(2));
        record(3, 10);
        assert_eq!(first_failure(&[ended(1), ended(2), ended(3)], &job), Some(3));
        assert_eq!(first_failure(&[ended(1), ended(3), (0, ExitStatus::Signaled(9))], &job), Some(0));

        // Later ends count only with an earlier record, and only if `first` has one.
        assert_eq!(earlier_failure(2, &[], &job), 2);
        assert_eq!(earlier_failure(2, &[ended(0), ended(1)], &job), 2);
        assert_eq!(earlier_failure(2, &[ended(0), ended(3)], &job), 3);
        assert_eq!(earlier_failure(3, &[ended(2)], &job), 3);
        assert_eq!(earlier_failure(1, &[ended(3)], &job), 1);
    }
}
