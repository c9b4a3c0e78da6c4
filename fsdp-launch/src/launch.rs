//! A launch from its start to its outcome.

use std::{
    collections::VecDeque, fs::Permissions, hash::BuildHasher, os::unix::fs::PermissionsExt, path::PathBuf, process,
    sync::mpsc, time::SystemTime,
};

use rustix::process::{getpid, set_child_subreaper};

use crate::{
    Cause, Error, Failure, LaunchSpec, Outcome, RankReport, RendezvousSpec, Result,
    attempt::{self, Told},
    environment::{Job, hostname},
    guard::Guard,
    job_file::{JobFile, PREFIX},
    logs::{create_attempt_dir, create_run_dir},
    rendezvous::{self, Ended, FromAgent, Member, Membership, News, Place, ToAgent, Verdict},
    signals::SignalWatch,
    summary::stuck,
    supervise,
    waiting::{Next, next},
};

/// Bytes of a run id: it is part of the names of directories, with the host's name behind it.
const LONGEST_RUN_ID: usize = 128;

/// Starts the ranks of `spec`, prints what they print, and returns when nothing of them is left. When a rank fails
/// they all end, and start again as often as the spec allows. That a rank fails is an [`Outcome`], not an error.
///
/// With [`rendezvous`](LaunchSpec::rendezvous) it waits for the other hosts' launchers first, and ends, restarts and fails together with them.
///
/// It is made to be the one thing a process does: call it from the main thread (the ranks are killed when the thread that called it ends), once at a
/// time. It takes over SIGINT, SIGTERM, SIGHUP and SIGCHLD, as far as they were not ignored, and makes the process the parent of its orphaned descendants.
///
/// # Errors
/// When the ranks can't be started; none is left running then.
pub fn launch(spec: &LaunchSpec) -> Result<Outcome> {
    let mut run_id = run_id(spec)?;
    let (sender, events) = mpsc::channel();
    let _signals = SignalWatch::start(&spec.signals, sender.clone())?;
    // So that what a rank leaves behind is ours to reap: the first process of a container often does not.
    set_child_subreaper(Some(getpid())).map_err(Error::system("become the parent of orphaned processes"))?;
    let launch_id = unique_id();
    let temp_name = format!("{PREFIX}{launch_id}");
    // From before there is the directory until after it is removed: the launcher may be killed at any moment.
    let mut guard = Guard::start(&std::env::temp_dir().join(&temp_name), &launch_id);
    let temp_dir = tempfile::Builder::new()
        .prefix(&temp_name)
        .rand_bytes(0)
        .permissions(Permissions::from_mode(0o700))
        .tempdir()
        .map_err(Error::system("make a temporary directory"))?;
    let meet = |run_id: &str, attempts, restarts| {
        let member = member(spec, attempts, restarts)?;
        Membership::start(spec.rendezvous.as_ref(), spec.rules(run_id), member, &sender)
    };
    let mut so_far = SoFar { spec, restarts: 0, ranks: Vec::new(), run_dir: None };
    let mut membership = meet(&run_id, 0, 0)?;
    let mut attempts = 0;
    let mut told_restarts = 0;
    let mut has_run = false;
    let mut pending = VecDeque::new();
    // What stopped the attempt before.
    let mut why: Option<String> = None;
    loop {
        let since = SystemTime::now();
        let show = |what: &str| {
            let job = JobFile::new(spec, &run_id, attempts, so_far.restarts, since);
            JobFile { waiting: Some(what.to_owned()), ..job }.offer(temp_dir.path());
        };
        let place = match next(spec, &mut pending, &mut why, &events, show) {
            Next::Start(place) => place,
            Next::End(verdict) => return Ok(so_far.end(verdict)),
            Next::Failed(failure) => return Ok(so_far.fail(failure)),
            Next::Interrupted(signal) => {
                membership.say(leave(signal));
                return Ok(so_far.interrupted(signal));
            }
            Next::Gone(how) => {
                // It may have said before why it goes.
                let how = why.map_or(how.clone(), |first| format!("{first}\n  then {how}"));
                why = Some(how.clone());
                // As the coordinator counts: the loss of a host that may be missing is free.
                let (min, max) = spec.nnodes();
                if min == max {
                    if so_far.restarts >= spec.max_restarts {
                        let max = spec.max_restarts;
                        let why = format!("{how}\n  that costs a restart, and all of --max-restarts {max} are used");
                        return Ok(so_far.fail(Failure::Meeting { why }));
                    }
                    so_far.restarts += 1;
                }
                tracing::warn!("{how}: waiting for it to come back");
                drop(membership);
                membership = meet(&run_id, attempts, so_far.restarts)?;
                continue;
            }
        };
        if place.attempt > 0 && attempts > 0 {
            tell_restart(spec, &place, why.take(), told_restarts);
        }
        told_restarts = place.restarts;
        // Of the one that made it up; should it go and this launcher hold the next rendezvous, the run is still the same.
        run_id.clone_from(&place.run_id);
        (attempts, so_far.restarts) = (place.attempt + 1, place.restarts);
        if so_far.run_dir.is_none() {
            // Hosts may share the directory.
            let host = spec.rendezvous.as_ref().map(|_| format!("_{}", hostname()));
            let name = place.run_id.clone() + &host.unwrap_or_default();
            so_far.run_dir = create_run_dir(&spec.logs, spec.nproc_per_node, &name)?;
        }
        let log_dir = so_far.run_dir.as_ref().map(|dir| create_attempt_dir(dir, place.attempt, spec.nproc_per_node));
        let log_dir = log_dir.transpose()?;
        let (log_dir, error_dir) = (log_dir.as_deref(), temp_dir.path());
        let job = Job { spec, place: &place, launch_id: &launch_id, log_dir, error_dir };
        tracing::debug!(?spec, ?place, "launching");
        let tell = |told: Told| match told {
            Told::Failed(report) => {
                why = Some(Failure::Rank(report.clone()).to_string());
                membership.say(FromAgent::Failed { attempt: place.attempt, report: Box::new(report.for_others()) });
            }
            Told::Leaving(signal) => {
                membership.say(FromAgent::Leaving { attempt: place.attempt, why: stopped_by(signal) });
            }
        };
        let attempt = match attempt::run(&job, temp_dir.path(), &mut guard, &sender, &events, tell) {
            Ok(attempt) => attempt,
            Err(error) => {
                membership.say(FromAgent::NotStarted { attempt: place.attempt, why: error.to_string() });
                if !has_run {
                    return Err(error);
                }
                // The end that is heard now tells what came before.
                so_far.ranks.clear();
                continue;
            }
        };
        has_run = true;
        so_far.ranks = attempt.ranks;
        if let Some(why) = &mut why {
            stuck(&so_far.ranks, None).iter().for_each(|line| *why += &format!("\n  {line}"));
        }
        for heard in attempt.news {
            match heard {
                News::Said(ToAgent::Stop { why: told, .. }) => why = why.or(Some(told)),
                heard => pending.push_back(heard),
            }
        }
        let may_restart = attempt.is_gone && attempt.interrupted.is_none();
        let result = match attempt.cause {
            supervise::Cause::Interrupted(signal) => {
                membership.say(leave(signal));
                return Ok(so_far.interrupted(signal));
            }
            supervise::Cause::Succeeded => Ended::Succeeded,
            supervise::Cause::Stopped => Ended::Stopped { may_restart },
            supervise::Cause::RankFailed(first) => match so_far.ranks.get(first).cloned() {
                Some(report) => {
                    why.get_or_insert_with(|| Failure::Rank(report.clone()).to_string());
                    Ended::Failed { report: Box::new(report.for_others()), may_restart }
                }
                None => Ended::Stopped { may_restart: false },
            },
        };
        let leaves = attempt.interrupted.filter(|_| spec.rendezvous.is_some());
        // Who leaves with nothing left behind is lost to the others, and no reason for them to end.
        if leaves.is_none() || !attempt.is_gone || matches!(result, Ended::Succeeded) {
            // Of an attempt that failed, the old port may still be in use.
            membership.say(FromAgent::Ended { attempt: place.attempt, result, master_port: master_port(spec)? });
        }
        if let Some(signal) = leaves {
            membership.say(leave(signal));
            return Ok(so_far.interrupted(signal));
        }
    }
}

/// Says that all ranks start again, and why.
fn tell_restart(spec: &LaunchSpec, place: &Place, why: Option<String>, restarts_before: u32) {
    let why = why.unwrap_or_else(|| "the hosts have changed".into());
    let count = if place.restarts > restarts_before {
        format!(", restart {} of at most {}", place.restarts, spec.max_restarts)
    } else {
        String::new()
    };
    let hosts = place.group_world_size;
    let places = if spec.rendezvous.is_some() {
        let counted = |count: usize, name: &str| format!("{count} {name}{}", if count == 1 { "" } else { "s" });
        format!(": {} on {}", counted(place.world_size, "rank"), counted(hosts, "node"))
    } else {
        String::new()
    };
    tracing::warn!("{why}\n  starting all ranks again{count}{places}");
}

fn leave(signal: i32) -> FromAgent {
    FromAgent::Leave { why: stopped_by(signal) }
}

fn stopped_by(signal: i32) -> String {
    format!("is gone: its launcher was stopped by {}", crate::summary::name_of(signal))
}

/// What this host brings.
fn member(spec: &LaunchSpec, attempts: u32, restarts: u32) -> Result<Member> {
    let meeting = spec.rendezvous.as_ref();
    Ok(Member {
        host: match meeting {
            // All on this host.
            Some(meeting) if meeting.endpoint.is_loopback() => format!("{} (launcher {})", hostname(), process::id()),
            _ => hostname(),
        },
        machine: rendezvous::machine(),
        node_rank: meeting.and_then(|meeting| meeting.node_rank),
        ranks: spec.nproc_per_node,
        role: spec.role.clone(),
        address: meeting.and_then(|meeting| meeting.local_addr.clone()),
        master_addr: spec.master_addr.clone(),
        master_port: master_port(spec)?,
        run_id: spec.run_id.clone(),
        nnodes: spec.nnodes(),
        keep_alive: meeting.map(RendezvousSpec::keep_alive),
        max_restarts: spec.max_restarts,
        grace: spec.shutdown_timeout,
        attempts,
        restarts,
    })
}

/// What is known of the launch when it ends.
struct SoFar<'a> {
    spec: &'a LaunchSpec,
    restarts: u32,
    ranks: Vec<RankReport>,
    run_dir: Option<PathBuf>,
}

impl SoFar<'_> {
    fn end(self, verdict: Verdict) -> Outcome {
        let cause = verdict.failure.map_or(Cause::Succeeded, Cause::Failed);
        let mut outcome = self.outcome(cause);
        outcome.setbacks = verdict.setbacks;
        outcome.restarts = verdict.restarts;
        outcome
    }

    fn fail(self, failure: Failure) -> Outcome {
        self.outcome(Cause::Failed(failure))
    }

    fn interrupted(self, signal: i32) -> Outcome {
        self.outcome(Cause::Interrupted(signal))
    }

    fn outcome(self, cause: Cause) -> Outcome {
        Outcome {
            cause,
            ranks: self.ranks,
            shutdown_timeout: self.spec.shutdown_timeout,
            setbacks: Vec::new(),
            restarts: self.restarts,
            max_restarts: self.spec.max_restarts,
            log_dir: self.run_dir,
        }
    }
}

/// The id of the run, made up unless it is given.
pub(crate) fn run_id(spec: &LaunchSpec) -> Result<String> {
    if spec.nproc_per_node == 0 {
        return Err(Error::NoRanks);
    }
    let run_id = spec.run_id.clone().unwrap_or_else(unique_id);
    if run_id.is_empty() || run_id.len() > LONGEST_RUN_ID || run_id.contains(char::is_control) {
        return Err(Error::RunId { id: run_id });
    }
    Ok(run_id)
}

/// The port that rank 0 may listen at: nothing holds it.
pub(crate) fn master_port(spec: &LaunchSpec) -> Result<u16> {
    spec.master_port.map_or_else(|| rendezvous::free_port().map_err(Error::system("find a free port")), Ok)
}

/// An id that no other launch has: a hash with random keys of what tells processes apart.
fn unique_id() -> String {
    let moment = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{:016x}", std::hash::RandomState::new().hash_one((process::id(), moment)))
}
