//! A launch from its start to its outcome.

use std::{
    fs::Permissions,
    hash::BuildHasher,
    net::{Ipv4Addr, TcpListener},
    os::unix::fs::PermissionsExt,
    process,
    sync::mpsc,
    time::SystemTime,
};

use rustix::process::{getpid, set_child_subreaper};

use crate::{
    Cause, Error, LaunchSpec, Outcome, Result, attempt,
    environment::Job,
    logs::{create_attempt_dir, create_run_dir},
    signals::SignalWatch,
};

/// Starts the ranks of `spec`, prints what they print, and returns when nothing of them is left. When a rank fails
/// they all end, and start again as often as the spec allows. That a rank fails is an [`Outcome`], not an error.
///
/// It is made to be the one thing a process does: call it from the main thread (the ranks are killed when the thread that called it ends), once at a
/// time. It takes over SIGINT, SIGTERM, SIGHUP and SIGCHLD, as far as they were not ignored, and makes the process the parent of its orphaned descendants.
///
/// # Errors
/// When the ranks can't be started; none is left running then.
pub fn launch(spec: &LaunchSpec) -> Result<Outcome> {
    let run_id = run_id(spec)?;
    let (sender, events) = mpsc::channel();
    let _signals = SignalWatch::start(&spec.signals, sender.clone())?;
    // So that what a rank leaves behind is ours to reap: the first process of a container often does not.
    set_child_subreaper(Some(getpid())).map_err(Error::system("become the parent of orphaned processes"))?;
    let temp_dir = tempfile::Builder::new()
        .prefix("fsdp-launch-")
        .permissions(Permissions::from_mode(0o700))
        .tempdir()
        .map_err(Error::system("make a temporary directory"))?;
    let run_dir = create_run_dir(&spec.logs, spec.nproc_per_node, &run_id)?;
    let mut failures = Vec::new();
    let mut restart_count = 0;
    loop {
        // Of an attempt that failed, the old port may still be in use.
        let master_port = master_port(spec)?;
        let log_dir = run_dir.as_ref().map(|dir| create_attempt_dir(dir, restart_count, spec.nproc_per_node));
        let log_dir = log_dir.transpose()?;
        let error_dir = temp_dir.path();
        let job = Job { spec, master_port, run_id: &run_id, restart_count, log_dir: log_dir.as_deref(), error_dir };
        tracing::debug!(?spec, master_port, run_id, restart_count, "launching");
        let attempt = attempt::run(&job, temp_dir.path(), &sender, &events)?;
        let failed = match attempt.cause {
            Cause::RankFailed(rank) => attempt.ranks.get(rank).cloned(),
            _ => None,
        };
        match failed.filter(|_| attempt.may_restart && restart_count < spec.max_restarts) {
            Some(failed) => {
                let (next, most) = (restart_count + 1, spec.max_restarts);
                tracing::warn!("{}\n  starting all ranks again, restart {next} of at most {most}", failed.as_first());
                failures.push(failed);
                restart_count = next;
            }
            None => {
                return Ok(Outcome {
                    cause: attempt.cause,
                    ranks: attempt.ranks,
                    shutdown_timeout: spec.shutdown_timeout,
                    failures,
                    max_restarts: spec.max_restarts,
                    log_dir: run_dir,
                });
            }
        }
    }
}

/// The id of the run, made up unless it is given.
pub(crate) fn run_id(spec: &LaunchSpec) -> Result<String> {
    if spec.nproc_per_node == 0 {
        return Err(Error::NoRanks);
    }
    let run_id = spec.run_id.clone().unwrap_or_else(unique_id);
    if run_id.is_empty() || run_id.contains(char::is_control) {
        return Err(Error::RunId { id: run_id });
    }
    Ok(run_id)
}

/// The port that rank 0 may listen at: nothing holds it.
pub(crate) fn master_port(spec: &LaunchSpec) -> Result<u16> {
    spec.master_port.map_or_else(free_port, Ok)
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
