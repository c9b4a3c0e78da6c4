//! One attempt of a launch: all ranks from their start to their end.

use std::{
    io::{self, IsTerminal},
    path::Path,
    process::Stdio,
    sync::mpsc::{Receiver, Sender},
};

use fsdp_core::heartbeat::Age;
use rustix::process::Pid;

use crate::{
    Console, Error, RankReport, Result,
    job::{JobFile, cleanup::Guard},
    output::{
        Outputs,
        logs::{Route, STDERR, STDOUT, hidden_stderr, routes},
    },
    pmi::{self, PmiFailureKind},
    rank::{
        affinity,
        environment::{Job, hostname},
        orphans,
        worker::Worker,
    },
    rendezvous::RendezvousEvent,
    report::rank::{ExitStatus, LogEnd, read_message},
    watch::{
        Event,
        supervise::{AttemptEnd, Notice, supervise},
    },
};

/// How an attempt ended.
pub(crate) struct Attempt {
    pub(crate) cause: AttemptEnd,
    /// Reports of this host's ranks, in rank order.
    pub(crate) ranks: Vec<RankReport>,
    /// Whether no process of the attempt is left.
    pub(crate) is_gone: bool,
    /// Signal that the launcher received, even if it was not the cause.
    pub(crate) interrupted: Option<i32>,
    /// Rendezvous events that were not handled.
    pub(crate) rendezvous_events: Vec<RendezvousEvent>,
}

/// Starts the ranks of `job`, waits until all their processes are gone, and writes `job.json` into `temp_dir`. Notices
/// for other hosts go to `notify`.
pub(crate) fn run(
    job: &Job<'_>,
    temp_dir: &Path,
    guard: &mut Guard,
    sender: &Sender<Event>,
    events: &Receiver<Event>,
    notify: &mut dyn FnMut(Notice<'_>),
) -> Result<Attempt> {
    let spec = job.spec;
    // Check all ranks before the first is started.
    (0..spec.nproc_per_node)
        .try_for_each(|rank| job.variables(rank).and(affinity::cores_of_rank(spec, rank)).map(drop))?;
    let attempt = job.assignment.attempt;
    let pmi_sender = sender.clone();
    let report_pmi = move |event| drop(pmi_sender.send(Event::Pmi { attempt, event }));
    let pmi = pmi::Server::start(job.assignment, spec.nproc_per_node, report_pmi);
    let mut pmi = pmi.map_err(Error::system("make sockets for the ranks"))?;
    let mut outputs = Outputs::new(sender.clone())?;
    let (mut workers, mut rendezvous_events) = (Vec::new(), Vec::new());
    if let Err(error) = start(job, guard, &mut pmi, &mut workers, &mut outputs) {
        // Dropping workers kills them.
        drop(workers);
        orphans::kill(job.launch_id, guard.pid().as_slice());
        guard.clear();
        outputs.finish(events, 0, None, &mut rendezvous_events);
        return Err(error);
    }
    JobFile::of(job, &workers).publish(temp_dir);
    let keep: Vec<Pid> = workers.iter().map(|worker| worker.pid).chain(guard.pid()).collect();
    let ended = supervise(&mut workers, job, &mut pmi, events, &keep, notify);
    orphans::kill(job.launch_id, &keep);
    rendezvous_events.extend(ended.rendezvous_events);
    let mut interrupted = outputs.finish(events, ended.streams, ended.interrupted, &mut rendezvous_events);
    while let Ok(event) = events.try_recv() {
        match event {
            Event::Interrupted(signal) => interrupted = Some(signal),
            Event::Rendezvous(event) => rendezvous_events.push(event),
            Event::ChildEnded | Event::OutputEnded | Event::Pmi { .. } => {}
        }
    }
    let is_gone = workers.iter().all(Worker::is_gone);
    if is_gone {
        guard.clear();
    }
    Ok(Attempt {
        cause: ended.cause,
        ranks: workers.iter().map(|worker| report(job, worker)).collect(),
        is_gone,
        interrupted,
        rendezvous_events,
    })
}

/// Starts all ranks, and forwards their output.
fn start(
    job: &Job<'_>,
    guard: &mut Guard,
    pmi: &mut pmi::Server,
    workers: &mut Vec<Worker>,
    outputs: &mut Outputs,
) -> Result<()> {
    let spec = job.spec;
    let has_terminal = io::stderr().is_terminal();
    for rank in 0..spec.nproc_per_node {
        let [stdout, stderr] = routes(&spec.logs, job.log_dir.is_some(), rank);
        // Rank 0 keeps the terminal for its progress bar.
        let shares_stderr = rank == 0 && has_terminal && stderr == Route::Console;
        let (stdout, stdout_copy) = stdout.open(job.log_dir, rank, STDOUT)?;
        let (stderr, stderr_copy) =
            if shares_stderr { (Stdio::inherit(), None) } else { stderr.open(job.log_dir, rank, STDERR)? };
        let (worker, (stdout, stderr)) = Worker::start(job, rank, pmi, stdout, stderr)?;
        guard.add(worker.pid);
        workers.push(worker);
        let prefix = spec.logs.line_prefix.of(&spec.role, job.rank(rank), rank);
        if let Some(stream) = stdout {
            outputs.forward(rank, &prefix, stream.into(), Console::Stdout, stdout_copy)?;
        }
        if let Some(stream) = stderr {
            outputs.forward(rank, &prefix, stream.into(), Console::Stderr, stderr_copy)?;
        }
    }
    Ok(())
}

/// Returns the report of a rank.
pub(crate) fn report(job: &Job<'_>, worker: &Worker) -> RankReport {
    let failed = worker.ended_after.is_none() && worker.exit_status.is_some_and(|end| !end.is_success());
    // If the rank failed by itself, its own error is more useful than the disconnect.
    let pmi_failure = worker.pmi_failure.as_ref();
    let pmi_message =
        pmi_failure.filter(|it| it.kind != PmiFailureKind::Disconnected || !failed).map(|it| it.text.clone());
    let (end, request) = match pmi_failure.map(|it| it.kind) {
        // The rank asked for this exit code by MPI_Abort; the launcher ended it.
        Some(PmiFailureKind::Aborted(code)) if worker.exit_status.is_some() => (Some(ExitStatus::Exited(code)), None),
        _ => (worker.exit_status, worker.ended_after),
    };
    let hidden = if failed { hidden_stderr(&job.spec.logs, job.log_dir, worker.local_rank) } else { None };
    RankReport {
        rank: worker.rank,
        host: hostname(),
        pid: worker.pid.as_raw_pid(),
        exit_status: end,
        ended_at: worker.ended_at.map(|(at, _)| at),
        after: worker.ended_at.map(|(_, after)| Age(after)),
        request,
        silent_for: worker.silent_for.map(Age),
        snapshot: worker.snapshot.clone().map(Box::new),
        message: read_message(&job.error_file(worker.local_rank)).or(pmi_message),
        stderr: hidden.as_deref().and_then(LogEnd::of),
    }
}
