//! One attempt of a launch: all ranks from their start to their end.

use std::{
    io::{self, IsTerminal},
    path::Path,
    process::Stdio,
    sync::mpsc::{Receiver, Sender},
};

use crate::{
    Cause, RankReport, Result,
    environment::Job,
    error_file::read_message,
    guard::Guard,
    logs::{Destination, destinations},
    output::{Outputs, To},
    signals::Event,
    supervise::supervise,
    worker::Worker,
};

/// How an attempt ended.
pub(crate) struct Attempt {
    pub(crate) cause: Cause,
    /// Every rank, in order.
    pub(crate) ranks: Vec<RankReport>,
    /// Nothing of it is left, and nobody asked the launcher to end.
    pub(crate) may_restart: bool,
}

/// Starts the ranks of `job` and waits until nothing of them is left; should the launcher be killed, `temp_dir` is removed.
pub(crate) fn run(job: &Job<'_>, temp_dir: &Path, sender: &Sender<Event>, events: &Receiver<Event>) -> Result<Attempt> {
    let spec = job.spec;
    // What one rank lacks shows before any of them is started.
    (0..spec.nproc_per_node).try_for_each(|rank| job.variables(rank).map(drop))?;
    let mut guard = Guard::start(temp_dir);
    let mut outputs = Outputs::new(sender.clone())?;
    let mut workers = Vec::new();
    let has_terminal = io::stderr().is_terminal();
    for rank in 0..spec.nproc_per_node {
        let [stdout, stderr] = destinations(&spec.logs, job.log_dir, rank)?;
        // A terminal of its own: rank 0's progress bar shows.
        let shares_stderr = rank == 0 && has_terminal && matches!(stderr, Destination::Console);
        let (stdout, stdout_copy) = stdout.open();
        let (stderr, stderr_copy) = if shares_stderr { (Stdio::inherit(), None) } else { stderr.open() };
        let (worker, (stdout, stderr)) = Worker::start(job, rank, stdout, stderr)?;
        guard.watch(worker.pid);
        workers.push(worker);
        let prefix = spec.logs.line_prefix.of(&spec.role, rank);
        if let Some(stream) = stdout {
            outputs.forward(rank, &prefix, stream.into(), To::Stdout, stdout_copy)?;
        }
        if let Some(stream) = stderr {
            outputs.forward(rank, &prefix, stream.into(), To::Stderr, stderr_copy)?;
        }
    }

    let ended = supervise(&mut workers, job, events, spec.shutdown_timeout);
    let mut interrupted = outputs.finish(events, ended.streams) || ended.interrupted;
    while let Ok(event) = events.try_recv() {
        interrupted |= matches!(event, Event::Interrupted(_));
    }
    let report = |worker: &Worker| RankReport {
        rank: worker.rank,
        pid: worker.pid.as_raw_pid(),
        end: worker.end,
        request: worker.ended_after,
        message: read_message(&job.error_file(worker.rank)),
    };
    Ok(Attempt {
        cause: ended.cause,
        ranks: workers.iter().map(report).collect(),
        may_restart: !interrupted && workers.iter().all(Worker::is_gone),
    })
}
