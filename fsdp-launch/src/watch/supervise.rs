//! Watching the ranks: which one fails first, and how the others are ended.

use std::{
    cmp::Reverse,
    sync::mpsc::Receiver,
    time::{Duration, Instant, SystemTime},
};

use fsdp_core::RankEnv;
use rustix::process::Pid;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::{
    pmi::{self, Kind, Said, Trouble},
    rank::{environment::Job, orphans, worker::Worker},
    rendezvous::{News, ToAgent},
    report::{
        end::{End, Request},
        error_file::recorded_at,
    },
    watch::{event::Event, watchdog::Watchdog},
};

/// How often to look for processes whose end the kernel tells someone else than us, while waiting for all to end.
const TICK: Duration = Duration::from_millis(20);

/// How long the others have to end by themselves once a rank has failed by an exit code: what one rank finds wrong (bad
/// input, most often) the others find too, a little later, and each should be heard. A rank that died by a signal has
/// nothing more to say and no peers that would.
const HEARING: Duration = Duration::from_millis(300);

/// How long the kernel may take to end what was sent SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Why the ranks ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// By themselves, with exit code 0.
    Succeeded,
    /// This rank of the host failed, before the host's others.
    RankFailed(usize),
    /// The launcher received this signal.
    Interrupted(i32),
    /// The coordinator wanted it, or is gone.
    Stopped,
}

/// What was seen until all had ended.
pub(crate) struct Ended {
    pub(crate) cause: Cause,
    /// The signal that asked the launcher to end, even if that was not the cause.
    pub(crate) interrupted: Option<i32>,
    /// How many of the ranks' streams were printed to their end.
    pub(crate) streams: usize,
    /// What was heard of other hosts.
    pub(crate) news: Vec<News>,
}

/// What others should hear at once.
pub(crate) enum Sign<'a> {
    /// This rank failed first, and the others are about to be ended.
    Failed(&'a Worker),
    /// The launcher received this signal, and the ranks are about to be ended.
    Leaving(i32),
    /// This rank of the world has ended with exit code 0.
    Done(usize),
    /// Over PMI.
    Pmi(Said),
}

/// Watches `workers` until nothing of them is left, and passes on what they say over PMI. What others should hear
/// meanwhile goes to `tell`. Orphans that end meanwhile are reaped; `children` are none.
pub(crate) fn supervise(
    workers: &mut [Worker],
    job: &Job<'_>,
    pmi: &mut pmi::Server,
    events: &Receiver<Event>,
    children: &[Pid],
    tell: &mut dyn FnMut(Sign<'_>),
) -> Ended {
    let grace = job.spec.shutdown_timeout;
    let mut watchdog = Watchdog::new(job.spec.heartbeat_timeout, workers.len(), Instant::now());
    let mut shutdown = Shutdown { workers, grace, gentle: SIGTERM, sent: None, begin_at: None };
    let mut cause = None;
    let (mut streams, mut interrupted, mut is_told, mut news) = (0, None, false, Vec::new());
    loop {
        let (done, failed): (Vec<_>, Vec<_>) = shutdown.reap().into_iter().partition(|(_, end)| end.is_success());
        for rank in done.into_iter().map(|(rank, _)| job.rank(rank)) {
            shutdown.tell_ended(rank, job);
            tell(Sign::Done(rank));
        }
        match cause {
            None => {
                if let Some(rank) = first_of(&failed, job) {
                    tracing::info!("rank {} failed: ending all ranks", job.rank(rank));
                    cause = Some(Cause::RankFailed(rank));
                    shutdown.note_whereabouts();
                    shutdown.begin_at = Some(Instant::now() + HEARING);
                } else if let Some((rank, silent)) = watchdog.look(shutdown.workers) {
                    tracing::info!("rank {} hangs: ending all ranks", job.rank(rank));
                    cause = Some(Cause::RankFailed(rank));
                    shutdown.note_whereabouts();
                    shutdown.kill_hung(rank, silent);
                }
            }
            // What ended before it was asked to may be the cause, and be slower to end than its echo.
            Some(Cause::RankFailed(first)) if shutdown.sent.is_none() => {
                cause = Some(Cause::RankFailed(earlier_of(first, &failed, job)));
            }
            Some(_) => {}
        }
        if failed.iter().any(|(_, end)| matches!(end, End::Signaled(_))) || shutdown.heard() {
            shutdown.begin();
        }
        if let (Some(Cause::RankFailed(first)), true, false) = (cause, shutdown.sent.is_some(), is_told) {
            is_told = true;
            shutdown.workers.get(first).into_iter().for_each(|worker| tell(Sign::Failed(worker)));
        }
        if shutdown.workers.iter().all(Worker::is_gone) {
            break;
        }
        if shutdown.workers.iter().all(|worker| worker.end.is_some()) {
            // What the ranks left running ends with them.
            shutdown.begin();
        }
        shutdown.workers.iter_mut().for_each(Worker::kill_if_stopped);
        shutdown.ask_what_is_left();
        match shutdown.wait(events, watchdog.period()) {
            Some(Event::ChildEnded) => orphans::reap(children),
            Some(Event::OutputEnded) => streams += 1,
            Some(Event::Interrupted(signal)) => {
                if interrupted.replace(signal).is_none() {
                    tell(Sign::Leaving(signal));
                }
                // Only Ctrl-C is impatience: `timeout` and service managers send their signal twice as a matter of
                // course.
                if shutdown.sent.is_some() && signal == SIGINT {
                    shutdown.send(Request::Kill);
                }
                if shutdown.sent.is_none() {
                    // As `torchrun` does: Python makes a `KeyboardInterrupt` of SIGINT. No rank inherits it as ignored:
                    // what a process catches is back to the default in those that it starts.
                    shutdown.gentle = signal;
                }
                shutdown.begin();
                cause.get_or_insert(Cause::Interrupted(signal));
            }
            Some(Event::News(News::Said(ToAgent::RankDone { attempt, rank }))) if attempt == job.place.attempt => {
                shutdown.tell_ended(rank, job);
            }
            Some(Event::News(News::Said(ToAgent::PmiPut { attempt, entries }))) if attempt == job.place.attempt => {
                pmi.hear_put(entries);
            }
            Some(Event::News(News::Said(ToAgent::PmiGoOn { attempt }))) if attempt == job.place.attempt => pmi.go_on(),
            Some(Event::Pmi { attempt, said }) if attempt == job.place.attempt => match said {
                Said::Failed(trouble) => {
                    let rank = trouble.local_rank;
                    if cause.is_none() {
                        tracing::info!("rank {}: {}: ending all ranks", job.rank(rank), trouble.text);
                        cause = Some(Cause::RankFailed(rank));
                        shutdown.note_whereabouts();
                        match trouble.kind {
                            Kind::Aborted(_) => shutdown.begin(),
                            // It is about to end by itself, most often, with an exit code of its own.
                            Kind::Broken | Kind::Gone => shutdown.begin_at = Some(Instant::now() + HEARING),
                        }
                    }
                    if cause == Some(Cause::RankFailed(rank)) {
                        shutdown.note_trouble(trouble);
                    }
                }
                said => tell(Sign::Pmi(said)),
            },
            Some(Event::Pmi { .. }) => {}
            Some(Event::News(heard)) => {
                let means_stop = match &heard {
                    News::Said(ToAgent::Stop { attempt, .. }) => *attempt == job.place.attempt,
                    // It goes on without this host, or has ended.
                    News::Said(ToAgent::Refused { .. } | ToAgent::End(_)) | News::Gone(_) => true,
                    News::Said(_) | News::NotYet(_) | News::Unreachable(_) => false,
                };
                if means_stop {
                    shutdown.begin();
                    cause.get_or_insert(Cause::Stopped);
                }
                news.push(heard);
            }
            None => {}
        }
        match shutdown.overdue() {
            Some(Request::Terminate) => {
                shutdown.send(Request::Kill);
                tracing::warn!(
                    "not all processes of the ranks ended within {grace:?} after they were asked to: killed them"
                );
            }
            Some(Request::Kill) => break,
            None => {}
        }
    }
    // What a rank said right before its end may not have been heard.
    if let Some(trouble) = pmi.finish() {
        let said = Cause::RankFailed(trouble.local_rank);
        if *cause.get_or_insert(said) == said {
            shutdown.note_trouble(trouble);
        }
    }
    Ended { cause: cause.unwrap_or(Cause::Succeeded), interrupted, streams, news }
}

struct Shutdown<'a> {
    workers: &'a mut [Worker],
    grace: Duration,
    /// The number of the signal that asks the ranks to end.
    gentle: i32,
    /// What was sent to all groups, and when.
    sent: Option<(Request, Instant)>,
    /// When to ask all to end.
    begin_at: Option<Instant>,
}

impl Shutdown<'_> {
    /// Notes which ranks have ended, and returns them.
    fn reap(&mut self) -> Vec<(usize, End)> {
        let mut ended = Vec::new();
        // Once more after each find: a rank that was passed over alive may have failed before one that was found dead
        // behind it.
        loop {
            let mut found = false;
            for worker in self.workers.iter_mut() {
                if !worker.reap() {
                    continue;
                }
                found = true;
                ended.extend(worker.end.map(|end| (worker.local_rank, end)));
            }
            if !found {
                return ended;
            }
        }
    }

    /// Lets this host's ranks know that `rank` has ended with exit code 0: those that wait for it to join them do so in
    /// vain.
    fn tell_ended(&self, rank: usize, job: &Job<'_>) {
        let place = job.place;
        let (world_size, run_id, attempt) = (place.world_size, place.run_id.clone(), place.attempt);
        let ended = RankEnv { rank, world_size, run_id, attempt, ..RankEnv::single() };
        self.workers.iter().filter_map(|worker| worker.board.as_ref()).for_each(|board| board.record_exit(&ended));
    }

    /// The others have had their time to end by themselves.
    fn heard(&self) -> bool {
        self.begin_at.is_some_and(|at| Instant::now() >= at)
    }

    /// Notes where all ranks are: before they are ended, and not again.
    fn note_whereabouts(&mut self) {
        self.workers.iter_mut().for_each(Worker::note_whereabouts);
    }

    /// Notes the first that a rank did wrong over PMI.
    fn note_trouble(&mut self, trouble: Trouble) {
        if let Some(worker) = self.workers.get_mut(trouble.local_rank) {
            worker.trouble.get_or_insert(trouble);
        }
    }

    /// Kills a rank that hangs, which hears nothing gentle, and asks the others to end: it has nothing to say that they
    /// could find too.
    fn kill_hung(&mut self, rank: usize, silent: Duration) {
        if let Some(worker) = self.workers.get_mut(rank) {
            worker.silent_for = Some(silent);
            worker.send(Request::Kill, self.gentle);
        }
        self.begin();
    }

    /// Asks all ranks to end, unless that was done.
    fn begin(&mut self) {
        if self.sent.is_none() {
            self.note_whereabouts();
            self.send(Request::Terminate);
        }
    }

    /// Asks what ranks that have ended left running by SIGTERM: the jobs in the background of a shell ignore the SIGINT
    /// and SIGQUIT that the rank was asked by.
    fn ask_what_is_left(&mut self) {
        if self.gentle != SIGTERM && self.sent.is_some_and(|(sent, _)| sent == Request::Terminate) {
            self.workers.iter_mut().filter(|worker| worker.end.is_some()).for_each(Worker::ask_what_is_left);
        }
    }

    fn send(&mut self, request: Request) {
        if self.sent.is_some_and(|(sent, _)| sent >= request) {
            return;
        }
        self.sent = Some((request, Instant::now()));
        self.workers.iter_mut().for_each(|worker| worker.send(request, self.gentle));
    }

    /// What was sent last, if it has not had its effect in time.
    fn overdue(&self) -> Option<Request> {
        let (request, at) = self.sent?;
        let limit = if request == Request::Kill { KILL_TIMEOUT } else { self.grace };
        (at.elapsed() >= limit).then_some(request)
    }

    /// The next event; none after a while when ranks were asked to end, or soon will be, or heartbeats are to be looked
    /// at.
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

/// The one that failed first of ranks that were found ended at the same time: a signal strikes from outside while an
/// error may be another rank's echo; then the one that recorded its error first, then the lowest.
fn first_of(failed: &[(usize, End)], job: &Job<'_>) -> Option<usize> {
    let order = |&&(rank, end): &&(usize, End)| {
        let recorded: Option<SystemTime> = recorded_at(&job.error_file(rank));
        (Reverse(matches!(end, End::Signaled(_))), recorded.is_none(), recorded, rank)
    };
    failed.iter().min_by_key(order).map(|&(rank, _)| rank)
}

/// `first`, unless one of those that failed after it had recorded its error before.
fn earlier_of(first: usize, failed: &[(usize, End)], job: &Job<'_>) -> usize {
    let recorded = |rank: usize| recorded_at(&job.error_file(rank));
    let Some(known) = recorded(first) else { return first };
    let earlier = failed.iter().filter_map(|&(rank, _)| Some((recorded(rank)?, rank))).min();
    earlier.filter(|&(at, _)| at < known).map_or(first, |(_, rank)| rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What ends ranks that would go on, and what does not.
    #[test]
    fn the_coordinators_last_words_end_the_ranks() {
        use std::process::Stdio;
        let dir = tempfile::tempdir().unwrap();
        let mut spec = crate::LaunchSpec::new("/bin/sleep", 1);
        spec.args = vec!["1000".into()];
        let place = crate::rendezvous::Place::alone("r", 1, 1);
        let job = Job { spec: &spec, place: &place, launch_id: "id", log_dir: None, error_dir: dir.path() };
        let verdict = crate::rendezvous::Verdict { failure: None, setbacks: Vec::new(), restarts: 0 };
        let stop = |attempt| ToAgent::Stop { attempt, why: "x".into(), costs: false };
        let ends = [
            News::Said(stop(0)),
            News::Said(ToAgent::Refused { why: "x".into() }),
            News::Said(ToAgent::End(Box::new(verdict))),
            News::Gone("x".into()),
        ];
        for last in ends {
            let (sender, events) = std::sync::mpsc::channel();
            let mut pmi = pmi::Server::start(&place, 1, |_| {}).unwrap();
            let (worker, _) = Worker::start(&job, 0, &mut pmi, Stdio::null(), Stdio::null()).unwrap();
            // Of another attempt, or no more than a sign of life.
            for other in [News::Said(ToAgent::Ping), News::Said(stop(1)), last] {
                sender.send(Event::News(other)).unwrap();
            }
            let ended = supervise(&mut [worker], &job, &mut pmi, &events, &[], &mut |_| {});
            assert_eq!((ended.cause, ended.news.len()), (Cause::Stopped, 3));
        }
    }

    #[test]
    fn a_signal_then_the_earlier_record_then_the_lower_rank() {
        let dir = tempfile::tempdir().unwrap();
        let spec = crate::LaunchSpec::new("p", 4);
        let place = crate::rendezvous::Place::alone("r", 4, 1);
        let job = Job { spec: &spec, place: &place, launch_id: "id", log_dir: None, error_dir: dir.path() };
        let record = |rank, second| {
            let file = std::fs::File::create(job.error_file(rank)).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(second)).unwrap();
        };
        let ended = |rank| (rank, End::Exited(1));
        assert_eq!(first_of(&[], &job), None);
        assert_eq!(first_of(&[ended(2), ended(1)], &job), Some(1));
        record(2, 20);
        assert_eq!(first_of(&[ended(1), ended(2)], &job), Some(2));
        record(3, 10);
        assert_eq!(first_of(&[ended(1), ended(2), ended(3)], &job), Some(3));
        assert_eq!(first_of(&[ended(1), ended(3), (0, End::Signaled(9))], &job), Some(0));

        // Found ended later: only an earlier record counts, and none against a rank without one.
        assert_eq!(earlier_of(2, &[], &job), 2);
        assert_eq!(earlier_of(2, &[ended(0), ended(1)], &job), 2);
        assert_eq!(earlier_of(2, &[ended(0), ended(3)], &job), 3);
        assert_eq!(earlier_of(3, &[ended(2)], &job), 3);
        assert_eq!(earlier_of(1, &[ended(3)], &job), 1);
    }
}
