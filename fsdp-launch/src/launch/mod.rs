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

/// Starts the ranks of `spec`, forwards their output, and returns when all their processes are gone. When a rank fails,
/// all ranks end, and restart as often as the spec allows. A failed rank is an [`Outcome`], not an error.
///
/// With [`rendezvous`](LaunchSpec::rendezvous), it waits for the launchers of other hosts, and ends and restarts with
/// them.
///
/// Use it for one launch at a time, as the only task of the process, and call it from the main thread: the ranks are
/// killed when the calling thread ends. It handles the [`signals`](LaunchSpec::signals), SIGCHLD and SIGXFSZ, and makes
/// the process the subreaper of its descendants.
///
/// # Errors
/// When the ranks can't be started. None is left running.
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

/// A launch in progress. Fields are dropped in this order.
struct Launch<'a> {
    spec: &'a LaunchSpec,
    /// Run id from the coordinator. It outlives the coordinator, in case this launcher serves the next one.
    run_id: String,
    rendezvous: Rendezvous,
    temp_dir: TempDir,
    /// Created before the directory and dropped after it: the launcher may be killed at any moment.
    guard: Guard,
    /// Unique id of this launch.
    id: String,
    sender: Sender<Event>,
    events: Receiver<Event>,
    _signals: SignalWatch,
    /// Rendezvous events that were received but not handled.
    pending: VecDeque<RendezvousEvent>,
    /// Number of the next attempt, as far as this host knows.
    attempts: u32,
    /// Restarts used, and restarts that were reported to the user.
    restarts: u32,
    restarts_reported: u32,
    /// Why the previous attempt stopped.
    why: Option<Reason>,
    run_dir: Option<PathBuf>,
    /// Reports of this host's ranks in the last attempt; empty before the first.
    ranks: Vec<RankReport>,
}

impl<'a> Launch<'a> {
    fn begin(spec: &'a LaunchSpec) -> Result<Self> {
        let run_id = run_id(spec)?;
        let (sender, events) = mpsc::channel();
        let signals = SignalWatch::start(&spec.signals, sender.clone())?;
        // Without this, orphans of the ranks would go to init, which may not reap them in a container.
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

    /// Waits for the next step: before the first attempt, and between attempts.
    fn next(&mut self) -> Next {
        let since = SystemTime::now();
        let show = |what: &str| {
            let mut job = JobFile::new(self.spec, &self.run_id, self.attempts, self.restarts, since);
            job.run.waiting = Some(what.to_owned());
            job.publish(self.temp_dir.path());
        };
        next(self.spec, &mut self.pending, &mut self.why, &self.events, show)
    }

    /// Handles the loss of the coordinator: waits for another one, unless no restart is left.
    fn rejoin(&mut self, how: String) -> Result<Option<Outcome>> {
        // The coordinator may have sent the reason before.
        let before = self.why.take();
        let how = before.as_ref().map_or(how.clone(), |first| format!("{}\n  then {how}", first.text));
        // Count as the coordinator would: losing an optional host is free, but a failure costs a restart that the lost
        // coordinator can't count.
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

    /// Runs the ranks of this host, and reports the result to the coordinator. Returns an outcome if the launch is
    /// over.
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
                // The coordinator's final message includes the earlier failures.
                self.ranks.clear();
                return Ok(None);
            }
        };
        self.ranks = attempt.ranks;
        if let Some(why) = &mut self.why {
            describe_hang(&self.ranks, None).iter().for_each(|line| why.text += &format!("\n  {line}"));
        }
        for event in attempt.rendezvous_events {
            match event {
                RendezvousEvent::Message(ToAgent::Stop { why: text, costs, .. }) => {
                    self.why.get_or_insert(Reason { text, costs });
                }
                event => self.pending.push_back(event),
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
        // A launcher that leaves without leftovers counts as a lost host, which need not end the run.
        if leaves.is_none() || !attempt.is_gone || matches!(result, AttemptResult::Succeeded) {
            // The old port may still be in use after a failure.
            let master_port = master_port(self.spec)?;
            self.rendezvous.send(FromAgent::AttemptEnded { attempt: assignment.attempt, result, master_port });
        }
        Ok(leaves.map(|signal| self.leave(signal)))
    }

    fn run_ranks(&mut self, assignment: &Assignment) -> Result<Attempt> {
        let spec = self.spec;
        if self.run_dir.is_none() {
            // Several hosts may share the directory.
            let host = spec.rendezvous.as_ref().map(|_| format!("_{}", hostname()));
            let name = assignment.run_id.clone() + &host.unwrap_or_default();
            self.run_dir = create_run_dir(&spec.logs, spec.nproc_per_node, &name)?;
        }
        let log_dir = self.run_dir.as_ref().map(|dir| create_attempt_dir(dir, assignment.attempt, spec.nproc_per_node));
        let log_dir = match log_dir.transpose() {
            // For example, the disk may be full.
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
            // Only ranks of the same machine wait for each other to join. With one launcher per machine, no other host
            // needs this.
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

    /// Ends the launch after a signal, and tells the coordinator.
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

/// Joins the rendezvous. `attempts` and `restarts` were counted under earlier coordinators.
fn join_rendezvous(
    spec: &LaunchSpec,
    run_id: &str,
    attempts: u32,
    restarts: u32,
    events: &Sender<Event>,
) -> Result<Rendezvous> {
    let node = node_info(spec, attempts, restarts)?;
    let events = events.clone();
    let listener: EventSink =
        Arc::new(move |rendezvous_events| events.send(Event::Rendezvous(rendezvous_events)).is_ok());
    let config = RunConfig::of(spec, run_id).map_err(Error::system("make a secret for the ranks"))?;
    Rendezvous::start(spec.rendezvous.as_ref(), config, node, listener)
}

/// Warns that all ranks start again, and why.
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

fn rank_failed(report: &RankReport) -> Reason {
    Reason { text: Failure::Rank(report.clone()).to_string(), costs: true }
}

fn stopped_by_signal(signal: i32) -> String {
    format!("is gone: its launcher was stopped by {}", name_of(signal))
}

/// Maximum length of a run id. Directory names consist of the run id and the host name.
const MAX_RUN_ID_LEN: usize = 128;

/// Returns the run id of the spec, or a new one.
fn run_id(spec: &LaunchSpec) -> Result<String> {
    if spec.nproc_per_node == 0 {
        return Err(Error::Options("the number of processes per node is 0: start at least 1".into()));
    }
    let run_id = spec.run_id.clone().unwrap_or_else(unique_id);
    if run_id.is_empty() || run_id.len() > MAX_RUN_ID_LEN || run_id.contains(char::is_control) {
        return Err(Error::Options(format!(
            "invalid run id {run_id:?}: it must not be empty or longer than {MAX_RUN_ID_LEN} bytes, and must not \
             contain control characters"
        )));
    }
    Ok(run_id)
}

/// Returns the port for rank 0, which is free or given by the user.
fn master_port(spec: &LaunchSpec) -> Result<u16> {
    spec.master_port.map_or_else(|| free_port().map_err(Error::system("find a free port")), Ok)
}

/// Returns a unique id: a hash, with random keys, of pid and time.
fn unique_id() -> String {
    let moment = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{:0ID_DIGITS$x}", std::hash::RandomState::new().hash_one((process::id(), moment)))
}

/// Describes this host to the coordinator.
fn node_info(spec: &LaunchSpec, attempts: u32, restarts: u32) -> Result<NodeInfo> {
    let rendezvous = spec.rendezvous.as_ref();
    Ok(NodeInfo {
        host: match rendezvous {
            // Distinguishes several launchers on one host.
            Some(rendezvous) if rendezvous.endpoint.is_loopback() => {
                format!("{} (launcher {})", hostname(), process::id())
            }
            _ => hostname(),
        },
        machine: machine(),
        node_rank: rendezvous.and_then(|rendezvous| rendezvous.node_rank),
        ranks: spec.nproc_per_node,
        role: spec.role.clone(),
        address: rendezvous.and_then(|rendezvous| rendezvous.local_addr.clone()),
        master_addr: spec.master_addr.clone(),
        master_port: master_port(spec)?,
        run_id: spec.run_id.clone(),
        nnodes: spec.nnodes(),
        keep_alive: rendezvous.map(KeepAlive::of),
        max_restarts: spec.max_restarts,
        grace: spec.shutdown_timeout,
        attempts,
        restarts,
    })
}
