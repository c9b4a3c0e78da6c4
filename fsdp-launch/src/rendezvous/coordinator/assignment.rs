//! The configuration of a run, which agents take part, and the ranks of each agent.

use std::{io, time::Duration};

use crate::{
    LaunchSpec,
    rendezvous::message::{AgentId, Assignment, KeepAlive, NodeInfo, Secret, new_id},
    spec::values::nnodes_text,
};

/// Configuration that is constant during a run.
#[derive(Clone, Debug)]
pub(crate) struct RunConfig {
    pub(crate) run_id: String,
    /// Minimum and maximum number of agents.
    pub(crate) nnodes: (u32, u32),
    pub(crate) max_restarts: u32,
    pub(crate) keep_alive: Option<KeepAlive>,
    /// Time to wait for the minimum.
    pub(crate) join_timeout: Duration,
    /// Time to wait for more than the minimum.
    pub(crate) last_call_timeout: Duration,
    /// Secret of the run's store.
    pub(crate) store_secret: Secret,
    /// Unique id of the run.
    pub(crate) unique_id: String,
}

impl RunConfig {
    /// Returns the configuration of a launch. On one host, there is no time limit.
    pub(crate) fn of(spec: &LaunchSpec, run_id: &str) -> io::Result<Self> {
        let forever = Duration::MAX;
        let rendezvous = spec.rendezvous.as_ref();
        let times = rendezvous.map_or((forever, forever), |it| (it.join_timeout, it.last_call_timeout));
        Ok(RunConfig {
            run_id: run_id.to_owned(),
            nnodes: spec.nnodes(),
            max_restarts: spec.max_restarts,
            keep_alive: rendezvous.map(KeepAlive::of),
            join_timeout: times.0,
            last_call_timeout: times.1,
            store_secret: Secret::new()?,
            unique_id: new_id()?,
        })
    }

    /// Returns why `node` can't join the nodes that are `there`, if so.
    pub(crate) fn refusal<'a>(&self, node: &NodeInfo, mut there: impl Iterator<Item = &'a NodeInfo>) -> Option<String> {
        if let Some(id) = node.run_id.as_ref().filter(|id| **id != self.run_id) {
            return Some(format!("the run here is {:?}, not {id:?} (--rdzv-id)", self.run_id));
        }
        if node.nnodes != self.nnodes {
            let (expected, found) = (nnodes_text(self.nnodes), nnodes_text(node.nnodes));
            return Some(format!("the run here has --nnodes {expected}, not {found}"));
        }
        if node.max_restarts != self.max_restarts {
            let (expected, found) = (self.max_restarts, node.max_restarts);
            return Some(format!("the run here has --max-restarts {expected}, not {found}"));
        }
        // With different keep-alive settings, one side would give up a live peer.
        if let (Some(expected), Some(found)) = (self.keep_alive, node.keep_alive)
            && expected != found
        {
            return Some(format!("the run here has --rdzv-conf {expected}, not {found}"));
        }
        let taken = there.find(|it| it.node_rank.is_some() && it.node_rank == node.node_rank);
        taken.map(|it| {
            let rank = node.node_rank.unwrap_or_default();
            format!("--node-rank {rank} is taken by {}: every host has its own", it.host)
        })
    }
}

/// Selects up to `most` agents: by node rank, then in the order of joining.
pub(super) fn select_nodes<'a>(
    there: impl Iterator<Item = (AgentId, &'a NodeInfo)>,
    most: usize,
) -> Vec<(AgentId, &'a NodeInfo)> {
    let mut select_nodes: Vec<_> = there.collect();
    select_nodes.sort_by_key(|(id, node)| (node.node_rank.unwrap_or(u32::MAX), *id));
    select_nodes.truncate(most);
    select_nodes
}

/// Returns the assignment of each selected agent.
pub(super) fn assign_ranks(
    select_nodes: &[&NodeInfo],
    config: &RunConfig,
    attempt: u32,
    restarts: u32,
) -> Vec<Assignment> {
    let Some(first) = select_nodes.first() else { return Vec::new() };
    let mut machines: Vec<&str> = select_nodes.iter().map(|node| node.machine.as_str()).collect();
    machines.sort_unstable();
    machines.dedup();
    let mut ranks_of_hosts: Vec<(usize, usize)> = Vec::new();
    for node in select_nodes {
        match ranks_of_hosts.last_mut() {
            Some((hosts, ranks)) if *ranks == node.ranks => *hosts += 1,
            _ => ranks_of_hosts.push((1, node.ranks)),
        }
    }
    let common = Assignment {
        attempt,
        restarts,
        run_id: config.run_id.clone(),
        group_rank: 0,
        group_world_size: select_nodes.len(),
        first_rank: 0,
        world_size: select_nodes.iter().map(|node| node.ranks).sum(),
        first_role_rank: 0,
        role_world_size: 0,
        master_addr: first.master_addr.clone().or(first.address.clone()).unwrap_or_else(|| "127.0.0.1".into()),
        master_port: first.master_port,
        machines: machines.len(),
        ranks_of_hosts,
        store_secret: config.store_secret.clone(),
        pmi_space: format!("kvs_{}_{attempt}", config.unique_id),
    };
    let ranks_of = |nodes: &[&NodeInfo], role: &str| -> usize {
        nodes.iter().filter(|node| node.role == role).map(|node| node.ranks).sum()
    };
    let assignment = |(group_rank, node): (usize, &&NodeInfo)| {
        let before = &select_nodes[..group_rank];
        Assignment {
            group_rank,
            first_rank: before.iter().map(|node| node.ranks).sum(),
            first_role_rank: ranks_of(before, &node.role),
            role_world_size: ranks_of(select_nodes, &node.role),
            ..common.clone()
        }
    };
    select_nodes.iter().enumerate().map(assignment).collect()
}
