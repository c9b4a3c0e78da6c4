//! The best of the plans that a machine has room for.

use serde::Serialize;

use super::link::Mesh;
use super::memory;
use super::setup::{Reshard, Setup};
use super::time;

/// A plan in short.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Choice {
    pub(super) shard: usize,
    pub(super) replicate: usize,
    pub(super) reshard_after_forward: Reshard,
    pub(super) batch: usize,
    /// Bytes of a rank.
    pub(super) memory: f64,
    /// Seconds.
    pub(super) step: f64,
    pub(super) exposed: f64,
    pub(super) tokens_per_s_per_rank: f64,
    pub(super) mfu: f64,
}

/// Batches double from 1 to this.
const LARGEST_BATCH: usize = 1 << 10;
/// Speeds that differ by less are equal: no plan is so exact.
const ALIKE: f64 = 0.005;

/// The `top` best choices that fit, the fastest first; of those as fast as the best, the one that takes least memory.
///
/// All ways to split the ranks into copies, all policies, and batches that double. Of a device whose memory is not
/// known, only the batch that `setup` has.
pub(super) fn best(setup: &Setup, top: usize) -> Vec<Choice> {
    let ranks = setup.mesh.ranks();
    let mut choices = vec![];
    for shard in (1..=ranks).filter(|shard| ranks.is_multiple_of(*shard)) {
        let mesh = Mesh { shard, replicate: ranks / shard, ..setup.mesh };
        // Gathered again within a host, or within half of a copy.
        let parts = [setup.mesh.ranks_per_host, shard / 2].map(Reshard::To);
        let mut policies = vec![Reshard::Default, Reshard::Never];
        policies.extend(parts.iter().filter(|&&part| Setup { mesh, reshard: part, ..*setup }.check().is_ok()));
        policies.dedup();
        if shard == 1 {
            // There is nothing to gather.
            policies.truncate(1);
        }
        for reshard in policies {
            for batch in batches(setup) {
                let setup = Setup { mesh, reshard, batch, ..*setup };
                let memory = memory::of(&setup).total;
                if !setup.fits(memory) {
                    break;
                }
                choices.push(Choice { memory, ..choice(&setup) });
            }
        }
    }
    choices.sort_by(|a, b| b.tokens_per_s_per_rank.total_cmp(&a.tokens_per_s_per_rank));
    if let Some(fastest) = choices.first().map(|choice| choice.tokens_per_s_per_rank) {
        let alike = choices.partition_point(|choice| choice.tokens_per_s_per_rank >= fastest * (1. - ALIKE));
        choices[..alike].sort_by(|a, b| a.memory.total_cmp(&b.memory));
    }
    choices.truncate(top);
    choices
}

fn batches(setup: &Setup) -> Vec<usize> {
    match setup.device.memory {
        None => vec![setup.batch],
        Some(_) => {
            std::iter::successors(Some(1), |batch| Some(2 * batch)).take_while(|&b| b <= LARGEST_BATCH).collect()
        }
    }
}

fn choice(setup: &Setup) -> Choice {
    let time = time::of(setup);
    Choice {
        shard: setup.mesh.shard,
        replicate: setup.mesh.replicate,
        reshard_after_forward: setup.reshard,
        batch: setup.batch,
        memory: 0.,
        step: time.step,
        exposed: time.exposed,
        tokens_per_s_per_rank: time.tokens_per_s_per_rank,
        mfu: time.mfu,
    }
}
