//! Which agents start ranks, and which ranks each of them starts.

use crate::rendezvous::{
    coordinator::rules::Rules,
    message::{AgentId, Member, Place},
};

/// Up to `most` of those that are there: by the ranks they were given, then as they came.
pub(crate) fn chosen<'a>(
    there: impl Iterator<Item = (AgentId, &'a Member)>,
    most: usize,
) -> Vec<(AgentId, &'a Member)> {
    let mut chosen: Vec<_> = there.collect();
    chosen.sort_by_key(|(id, member)| (member.node_rank.unwrap_or(u32::MAX), *id));
    chosen.truncate(most);
    chosen
}

/// The place of each of the `chosen` in an attempt.
pub(crate) fn places(chosen: &[&Member], rules: &Rules, attempt: u32, restarts: u32) -> Vec<Place> {
    let Some(first) = chosen.first() else { return Vec::new() };
    let mut machines: Vec<&str> = chosen.iter().map(|member| member.machine.as_str()).collect();
    machines.sort_unstable();
    machines.dedup();
    let mut ranks_of_hosts: Vec<(usize, usize)> = Vec::new();
    for member in chosen {
        match ranks_of_hosts.last_mut() {
            Some((hosts, ranks)) if *ranks == member.ranks => *hosts += 1,
            _ => ranks_of_hosts.push((1, member.ranks)),
        }
    }
    let common = Place {
        attempt,
        restarts,
        run_id: rules.run_id.clone(),
        group_rank: 0,
        group_world_size: chosen.len(),
        first_rank: 0,
        world_size: chosen.iter().map(|member| member.ranks).sum(),
        first_role_rank: 0,
        role_world_size: 0,
        master_addr: first.master_addr.clone().or(first.address.clone()).unwrap_or_else(|| "127.0.0.1".into()),
        master_port: first.master_port,
        machines: machines.len(),
        ranks_of_hosts,
        store_secret: rules.store_secret.clone(),
        pmi_space: format!("kvs_{}_{attempt}", rules.unique_id),
    };
    let ranks_of = |members: &[&Member], role: &str| -> usize {
        members.iter().filter(|member| member.role == role).map(|member| member.ranks).sum()
    };
    let place = |(group_rank, member): (usize, &&Member)| {
        let before = &chosen[..group_rank];
        Place {
            group_rank,
            first_rank: before.iter().map(|member| member.ranks).sum(),
            first_role_rank: ranks_of(before, &member.role),
            role_world_size: ranks_of(chosen, &member.role),
            ..common.clone()
        }
    };
    chosen.iter().enumerate().map(place).collect()
}
