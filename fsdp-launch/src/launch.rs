//! A launch from its start to its outcome.

use std::{
    fs::Permissions,
    hash::BuildHasher,
    io::{self, IsTerminal},
    net::{Ipv4Addr, TcpListener},
    os::{fd::OwnedFd, unix::fs::PermissionsExt},
    process,
    sync::mpsc,
    time::SystemTime,
};

use rustix::process::{getpid, set_child_subreaper};

use crate::{
    Error, LaunchSpec, Outcome, RankReport, Result,
    environment::Job,
    error_file::read_message,
    guard::Guard,
    output::{Outputs, To},
    signals::SignalWatch,
    supervise::supervise,
    worker::Worker,
};

/// Starts the ranks of `spec`, prints what they print, and returns when nothing of them is left. That a rank fails is an [`Outcome`], not an error.
///
/// It is made to be the one thing a process does: call it from the main thread (the ranks are killed when the thread that called it ends), once at a
/// time. It takes over SIGINT, SIGTERM, SIGHUP and SIGCHLD, as far as they were not ignored, and makes the process the parent of its orphaned descendants.
///
/// # Errors
/// When the ranks can't be started; none is left running then.
pub fn launch(spec: &LaunchSpec) -> Result<Outcome> {
    let (run_id, master_port) = check(spec)?;
    let (sender, events) = mpsc::channel();
    let _signals = SignalWatch::start(&spec.signals, sender.clone())?;
    // So that what a rank leaves behind is ours to reap: the first process of a container often does not.
    set_child_subreaper(Some(getpid())).map_err(Error::system("become the parent of orphaned processes"))?;
    let error_dir = tempfile::Builder::new()
        .prefix("fsdp-launch-")
        .permissions(Permissions::from_mode(0o700))
        .tempdir()
        .map_err(Error::system("make a temporary directory"))?;
    let job = Job { spec, master_port, run_id: &run_id, error_dir: error_dir.path() };
    tracing::debug!(?spec, master_port, run_id, "launching");

    let mut guard = Guard::start(error_dir.path());
    let mut outputs = Outputs::new(sender)?;
    let mut workers = Vec::new();
    let has_terminal = io::stderr().is_terminal();
    for rank in 0..spec.nproc_per_node {
        let (worker, (stdout, stderr)) = Worker::start(spec, &job, rank, rank == 0 && has_terminal)?;
        guard.watch(worker.pid);
        workers.push(worker);
        let streams = [(stdout.map(OwnedFd::from), To::Stdout), (stderr.map(OwnedFd::from), To::Stderr)];
        for (stream, to) in streams {
            stream.map_or(Ok(()), |stream| outputs.forward(rank, stream, to))?;
        }
    }

    let (cause, streams_ended) = supervise(&mut workers, &job, &events, spec.shutdown_timeout);
    outputs.finish(&events, streams_ended);
    let report = |worker: &Worker| RankReport {
        rank: worker.rank,
        pid: worker.pid.as_raw_pid(),
        end: worker.end,
        request: worker.ended_after,
        message: read_message(&job.error_file(worker.rank)),
    };
    Ok(Outcome { cause, ranks: workers.iter().map(report).collect(), shutdown_timeout: spec.shutdown_timeout })
}

/// Checks what a rank would stumble over, and fills in the run's id and the port.
pub(crate) fn check(spec: &LaunchSpec) -> Result<(String, u16)> {
    if spec.nproc_per_node == 0 {
        return Err(Error::NoRanks);
    }
    let run_id = spec.run_id.clone().unwrap_or_else(unique_id);
    if run_id.is_empty() || run_id.contains(char::is_control) {
        return Err(Error::RunId { id: run_id });
    }
    Ok((run_id, spec.master_port.map_or_else(free_port, Ok)?))
}

/// An id that no other launch has: a hash with random keys of what tells processes apart.
fn unique_id() -> String {
    let moment = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{:016x}", std::hash::RandomState::new().hash_one((process::id(), moment)))
}

fn free_port() -> Result<u16> {
    let find = || TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?.local_addr().map(|address| address.port());
    find().map_err(Error::system("find a free port"))
}
