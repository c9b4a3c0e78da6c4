//! Whether all ranks of a mesh were given the same.

use std::hash::Hasher;

use fsdp_core::process_group::{Signature, Subject};
use fsdp_core::{DeviceMesh, ReduceOp};

use crate::error::{Error, Result};

/// Fails on all ranks of a mesh where `given` differs on some, compared by a hash of 64 bits: they would issue
/// different collectives. Collective.
pub(crate) fn check_alike(mesh: &DeviceMesh, what: &str, given: &str) -> Result<()> {
    let mut hasher = fnv::FnvHasher::default();
    hasher.write(given.as_bytes());
    let hash = hasher.finish() as i64;
    let subject = Subject::new(format!("whether all ranks have the same {what}"), []);
    // The largest hash, and the complement of the smallest.
    let mut ends = vec![hash, !hash];
    for dim in 0..mesh.layout().shape().len() {
        let group = mesh.group(dim)?.signed(Signature::new(&subject, []));
        ends = group.all_reduce_values(ends, ReduceOp::Max)?;
    }
    if ends == [ends[0], !ends[0]] {
        return Ok(());
    }
    Err(Error::Argument(format!(
        "the ranks of the mesh {} have different {what}, rank {} {given}: pass the same on every rank",
        mesh.layout(),
        mesh.rank()
    )))
}
