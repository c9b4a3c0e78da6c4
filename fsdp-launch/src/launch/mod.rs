//! A launch from its start to its outcome.

mod attempt;
pub(crate) mod dry_run;
mod waiting;

use std::{
    collections::VecDeque,
    hash::BuildHasher,
    path::PathBuf,
    process,
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender},
    },
    time::SystemTime,
};

use rustix::process::{getpid, set_child_subreaper};

use crate::{
    Cause, Error, Failure, LaunchSpec, Outcome, RankReport, Result,
    job::{
        JobFile,
        cleanup::{Guard, ID_DIGITS, TempDir, sweep},
    },
    launch::{
        attempt::Attempt,
        waiting::{Next, Reason, next},
    },
    output::logs::{create_attempt_dir, create_run_dir},
    pmi::PmiEvent,
    rank::environment::{Job, hostname},
    rendezvous::{
        Assignment, AttemptResult, EventSink, FromAgent, KeepAlive, NodeInfo, Rendezvous, RendezvousEvent, RunConfig,
        RunResult, ToAgent, free_port, machine,
    },
    report::{outcome::describe_hang, rank::name_of},
    watch::{
        Event, SignalWatch,
        supervise::{AttemptEnd, Notice},
    },
};

/// Starts the ranks of `spec`, prints what they print, and returns when nothing of them is left. When a rank fails
/// they all end, and start again as often as the spec allows. That a rank fails is an [`Outcome`], not an error.
///
/// With [`rendezvous`](LaunchSpec::rendezvous) it waits for the other hosts' launchers first, and ends, restarts and
/// fails together with them.
///
/// It is made to be the one thing a process does: call it from the main thread (the ranks are killed when the thread
/// that called it ends), once at a time. It takes over the [`signals`](LaunchSpec::signals), SIGCHLD and SIGXFSZ, and
/// makes the process the parent of its orphaned descendants.
///
/// # Errors
/// When the ranks can't be started; none is left running then.
pub fn launch(spec: &LaunchSpec) -> Result<Outcome> {
    let mut launch = Launch::begin(spec)?;
    loop {
        let outcome = match launch.next() {
            Next::Start(assignment) => launch.attempt(&assignment)?,
            Next::End(run_result) => Some(launch.end(run_result)),
            Next::Failed(failure) => Some(launch.outcome(Cause::Failed(failure))),
            Next::Gone(how) => launch.rejoin(how)?,
            Next::Interrupted(signal) => Some(launch.leave(signal)),
        };
        if let Some(outcome) = outcome {
            return Ok(outcome);
        }
    }
}

/// A launch under way. What is dropped first stands first.
struct Launch<'a> {
    spec: &'a LaunchSpec,
    /// Of the coordinator that made it up; should it go and this launcher hold the next rendezvous, the run is still
    /// the same.
    run_id: String,
    rendezvous: Rendezvous,
    temp_dir: TempDir,
    /// From before there is the directory until after it is removed: the launcher may be killed at any moment.
    guard: Guard,
    /// An id that no other launch has.
    id: String,
    sender: Sender<Event>,
    events: Receiver<Event>,
    _signals: SignalWatch,
    /// What was heard and has not been looked at.
    pending: VecDeque<RendezvousEvent>,
    /// The number of the next attempt, as far as it is known here.
    attempts: u32,
    /// How many restarts were used, and how many of them the user was told of.
    restarts: u32,
    restarts_reported: u32,
    /// What stopped the attempt before.
    why: Option<Reason>,
    run_dir: Option<PathBuf>,
    /// Every rank of this host, of the last attempt; none before the first.
    ranks: Vec<RankReport>,
}

impl<'a> Launch<'a> {
    fn begin(spec: &'a LaunchSpec) -> Result<Self> {
        let run_id = run_id(spec)?;
        let (sender, events) = mpsc::channel();
        let signals = SignalWatch::start(&spec.signals, sender.clone())?;
        // So that what a rank leaves behind is ours to reap: the first process of a container often does not.
        set_child_subreaper(Some(getpid())).map_err(Error::system("become the parent of orphaned processes"))?;
        let id = unique_id();
        let parent = std::env::temp_dir();
        sweep(&parent);
        let guard = Guard::start(&TempDir::path_of(&parent, &id), &id);
        let temp_dir = TempDir::create(&parent, &id)
            .map_err(Error::system("make a directory for temporary files, which TMPDIR names"))?;
        let rendezvous = join_rendezvous(spec, &run_id, 0, 0, &sender)?;
        Ok(Launch {
            spec,
            run_id,
            rendezvous,
            temp_dir,
            guard,
            id,
            sender,
            events,
            _signals: signals,
            pending: VecDeque::new(),
            attempts: 0,
            restarts: 0,
            restarts_reported: 0,
            why: None,
            run_dir: None,
            ranks: Vec::new(),
        })
    }

    /// Waits for what comes after an attempt, or first.
    fn next(&mut self) -> Next {
        let since = SystemTime::now();
        let show = |what: &str| {
            let job = JobFile::new(self.spec, &self.run_id, self.attempts, self.restarts, since);
            JobFile { waiting: Some(what.to_owned()), ..job }.publish(self.temp_dir.path());
        };
        next(self.spec, &mut self.pending, &mut self.why, &self.events, show)
    }

    /// The coordinator is gone, as is told by `how`: waits for another, unless that is the end.
    fn rejoin(&mut self, how: String) -> Result<Option<Outcome>> {
        // It may have said before why it goes.
        let before = self.why.take();
        let how = before.as_ref().map_or(how.clone(), |first| format!("{}\n  then {how}", first.text));
        // As the coordinator counts: the loss of a host that may be missing is free, but a failure was to be counted,
        // and is not when the coordinator goes.
        let (min, max) = self.spec.nnodes();
        let costs = min == max || before.is_some_and(|first| first.costs);
        self.why = Some(Reason { text: how.clone(), costs: false });
        if costs {
            let allowed = self.spec.max_restarts;
            if self.restarts >= allowed {
                let why = format!("{how}\n  that costs a restart, and all of --max-restarts {allowed} are used");
                return Ok(Some(self.outcome(Cause::Failed(Failure::Rendezvous { why }))));
            }
            self.restarts += 1;
        }
        tracing::warn!("{how}: waiting for it to come back");
        self.rendezvous.leave();
        self.rendezvous = join_rendezvous(self.spec, &self.run_id, self.attempts, self.restarts, &self.sender)?;
        Ok(None)
    }

    /// Starts the ranks of this host in their `place`, waits for their end, and tells how that was; an outcome if this
    /// launcher has nothing more to do.
    fn attempt(&mut self, assignment: &Assignment) -> Result<Option<Outcome>> {
        if assignment.attempt > 0 && self.attempts > 0 {
            warn_restart(self.spec, assignment, self.why.take().map(|why| why.text), self.restarts_reported);
        }
        self.restarts_reported = assignment.restarts;
        self.run_id.clone_from(&assignment.run_id);
        (self.attempts, self.restarts) = (assignment.attempt + 1, assignment.restarts);
        let attempt = match self.run_ranks(assignment) {
            Ok(attempt) => attempt,
            Err(error) => {
                self.rendezvous.send(FromAgent::NotStarted { attempt: assignment.attempt, why: error.to_string() });
                if self.ranks.is_empty() {
                    return Err(error);
                }
                // The end that is heard next tells what came before.
                self.ranks.clear();
                return Ok(None);
            }
        };
        self.ranks = attempt.ranks;
        if let Some(why) = &mut self.why {
            describe_hang(&self.ranks, None).iter().for_each(|line| why.text += &format!("\n  {line}"));
        }
        for heard in attempt.news {
            match heard {
                RendezvousEvent::Message(ToAgent::Stop { why: text, costs, .. }) => {
                    self.why.get_or_insert(Reason { text, costs });
                }
                heard => self.pending.push_back(heard),
            }
        }
        let may_restart = attempt.is_gone && attempt.interrupted.is_none();
        let result = match attempt.cause {
            AttemptEnd::Interrupted(signal) => return Ok(Some(self.leave(signal))),
            AttemptEnd::Succeeded => AttemptResult::Succeeded,
            AttemptEnd::Stopped => AttemptResult::Stopped { may_restart },
            AttemptEnd::RankFailed(first) => match self.ranks.get(first).cloned() {
                Some(report) => {
                    self.why.get_or_insert_with(|| rank_failed(&report));
                    AttemptResult::Failed { report: Box::new(report.for_others()), may_restart }
                }
                None => AttemptResult::Stopped { may_restart: false },
            },
        };
        let leaves = attempt.interrupted.filter(|_| self.spec.rendezvous.is_some());
        // Who leaves with nothing left behind is lost to the others, and no reason for them to end.
        if leaves.is_none() || !attempt.is_gone || matches!(result, AttemptResult::Succeeded) {
            // Of an attempt that failed, the old port may still be in use.
            let master_port = master_port(self.spec)?;
            self.rendezvous.send(FromAgent::AttemptEnded { attempt: assignment.attempt, result, master_port });
        }
        Ok(leaves.map(|signal| self.leave(signal)))
    }

    fn run_ranks(&mut self, assignment: &Assignment) -> Result<Attempt> {
        let spec = self.spec;
        if self.run_dir.is_none() {
            // Hosts may share the directory.
            let host = spec.rendezvous.as_ref().map(|_| format!("_{}", hostname()));
            let name = assignment.run_id.clone() + &host.unwrap_or_default();
            self.run_dir = create_run_dir(&spec.logs, spec.nproc_per_node, &name)?;
        }
        let log_dir = self.run_dir.as_ref().map(|dir| create_attempt_dir(dir, assignment.attempt, spec.nproc_per_node));
        let log_dir = match log_dir.transpose() {
            // The disk may be full by now, which is no reason to end a run.
            Err(error) if !self.ranks.is_empty() => {
                tracing::warn!("this attempt has no log files: {error}");
                None
            }
            made => made?,
        };
        let (log_dir, error_dir) = (log_dir.as_deref(), self.temp_dir.path());
        let job = Job { spec, assignment, launch_id: &self.id, log_dir, error_dir };
        tracing::debug!(?spec, ?assignment, "launching");
        let (rendezvous, why, attempt) = (&self.rendezvous, &mut self.why, assignment.attempt);
        let mut notify = |notice: Notice<'_>| match notice {
            Notice::Failed(worker) => {
                let report = attempt::report(&job, worker);
                *why = Some(rank_failed(&report));
                rendezvous.send(FromAgent::Failed { attempt, report: Box::new(report.for_others()) });
            }
            Notice::Leaving(signal) => rendezvous.send(FromAgent::Leaving { attempt, why: stopped_by_signal(signal) }),
            // Ranks meet only within a machine; where each has one launcher, nobody else's wait for this one.
            Notice::Done(rank) if assignment.machines < assignment.group_world_size => {
                rendezvous.send(FromAgent::RankDone { attempt, rank });
            }
            Notice::Done(_) => {}
            Notice::Pmi(PmiEvent::Put(entries)) => rendezvous.send(FromAgent::PmiPut { attempt, entries }),
            Notice::Pmi(PmiEvent::Barrier) => rendezvous.send(FromAgent::PmiBarrier { attempt }),
            // The supervisor handles it.
            Notice::Pmi(PmiEvent::Failed(_)) => {}
        };
        attempt::run(&job, error_dir, &mut self.guard, &self.sender, &self.events, &mut notify)
    }

    /// The launcher was asked to end by `signal`, and says so.
    fn leave(&mut self, signal: i32) -> Outcome {
        self.rendezvous.send(FromAgent::Leave { why: stopped_by_signal(signal) });
        self.outcome(Cause::Interrupted(signal))
    }

    fn end(&mut self, run_result: RunResult) -> Outcome {
        let cause = run_result.failure.map_or(Cause::Succeeded, Cause::Failed);
        Outcome { failed_attempts: run_result.failed_attempts, restarts: run_result.restarts, ..self.outcome(cause) }
    }

    fn outcome(&mut self, cause: Cause) -> Outcome {
        Outcome {
            cause,
            ranks: std::mem::take(&mut self.ranks),
            shutdown_timeout: self.spec.shutdown_timeout,
            failed_attempts: Vec::new(),
            restarts: self.restarts,
            max_restarts: self.spec.max_restarts,
            log_dir: self.run_dir.clone(),
        }
    }
}

/// Begins to take part, with so many attempts and restarts behind it.
fn join_rendezvous(
    spec: &LaunchSpec,
    run_id: &str,
    attempts: u32,
    restarts: u32,
    events: &Sender<Event>,
) -> Result<Rendezvous> {
    let node = node_info(spec, attempts, restarts)?;
    let events = events.clone();
    let listener: EventSink = Arc::new(move |news| events.send(Event::Rendezvous(news)).is_ok());
    let config = RunConfig::of(spec, run_id).map_err(Error::system("make a secret for the ranks"))?;
    Rendezvous::start(spec.rendezvous.as_ref(), config, node, listener)
}

/// Says that all ranks start again, and why.
fn warn_restart(spec: &LaunchSpec, assignment: &Assignment, why: Option<String>, restarts_before: u32) {
    let why = why.unwrap_or_else(|| "the hosts have changed".into());
    let count = if assignment.restarts > restarts_before {
        format!(", restart {} of at most {}", assignment.restarts, spec.max_restarts)
    } else {
        String::new()
    };
    let hosts = assignment.group_world_size;
    let places = if spec.rendezvous.is_some() {
        let counted = |count: usize, name: &str| format!("{count} {name}{}", if count == 1 { "" } else { "s" });
        format!(": {} on {}", counted(assignment.world_size, "rank"), counted(hosts, "node"))
    } else {
        String::new()
    };
    tracing::warn!("{why}\n  starting all ranks again{count}{places}");
}

/// A rank of this host has failed.
fn rank_failed(report: &RankReport) -> Reason {
    Reason { text: Failure::Rank(report.clone()).to_string(), costs: true }
}

fn stopped_by_signal(signal: i32) -> String {
    format!("is gone: its launcher was stopped by {}", name_of(signal))
}

/// Bytes of a run id: it is part of the names of directories, with the host's name behind it.
const MAX_RUN_ID_LEN: usize = 128;

/// The id of the run, made up unless it is given.
fn run_id(spec: &LaunchSpec) -> Result<String> {
    if spec.nproc_per_node == 0 {
        return Err(Error::NoRanks);
    }
    let run_id = spec.run_id.clone().unwrap_or_else(unique_id);
    if run_id.is_empty() || run_id.len() > MAX_RUN_ID_LEN || run_id.contains(char::is_control) {
        return Err(Error::RunId { id: run_id });
    }
    Ok(run_id)
}

/// The port that rank 0 may listen at: nothing holds it.
fn master_port(spec: &LaunchSpec) -> Result<u16> {
    spec.master_port.map_or_else(|| free_port().map_err(Error::system("find a free port")), Ok)
}

/// An id that no other launch has: a hash with random keys of what tells processes apart.
fn unique_id() -> String {
    let moment = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{:0ID_DIGITS$x}", std::hash::RandomState::new().hash_one((process::id(), moment)))
}

/// What this host brings, with so many attempts and restarts behind it.
fn node_info(spec: &LaunchSpec, attempts: u32, restarts: u32) -> Result<NodeInfo> {
    let meeting = spec.rendezvous.as_ref();
    Ok(NodeInfo {
        host: match meeting {
            // All on this host.
            Some(meeting) if meeting.endpoint.is_loopback() => format!("{} (launcher {})", hostname(), process::id()),
            _ => hostname(),
        },
        machine: machine(),
        node_rank: meeting.and_then(|meeting| meeting.node_rank),
        ranks: spec.nproc_per_node,
        role: spec.role.clone(),
        address: meeting.and_then(|meeting| meeting.local_addr.clone()),
        master_addr: spec.master_addr.clone(),
        master_port: master_port(spec)?,
        run_id: spec.run_id.clone(),
        nnodes: spec.nnodes(),
        keep_alive: meeting.map(KeepAlive::of),
        max_restarts: spec.max_restarts,
        grace: spec.shutdown_timeout,
        attempts,
        restarts,
    })
}
