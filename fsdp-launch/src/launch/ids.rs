//! What is made up where the user gives none: ids, and a port.

use std::{hash::BuildHasher, process, time::SystemTime};

use crate::{Error, LaunchSpec, Result, job::temp_dir::ID_DIGITS, rendezvous::free_port};

/// Bytes of a run id: it is part of the names of directories, with the host's name behind it.
const LONGEST_RUN_ID: usize = 128;

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
    spec.master_port.map_or_else(|| free_port().map_err(Error::system("find a free port")), Ok)
}

/// An id that no other launch has: a hash with random keys of what tells processes apart.
pub(crate) fn unique_id() -> String {
    let moment = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{:0ID_DIGITS$x}", std::hash::RandomState::new().hash_one((process::id(), moment)))
}
