//! What this host brings to a launch.

use std::process;

use crate::{
    LaunchSpec, Result,
    launch::ids::master_port,
    rank::environment::hostname,
    rendezvous::{KeepAlive, Member, machine},
};

/// What this host brings, with so many attempts and restarts behind it.
pub(crate) fn member(spec: &LaunchSpec, attempts: u32, restarts: u32) -> Result<Member> {
    let meeting = spec.rendezvous.as_ref();
    Ok(Member {
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
