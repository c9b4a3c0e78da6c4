//! What ranks tell each other: one rank's answer for all, every rank's for every one, and the worst of what each has
//! found.

use anyhow::anyhow;
use fsdp_candle::{ReduceOp, World};
use serde::{Deserialize, Serialize};

/// What a rank has found in a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Finding {
    Good,
    /// It could not be read, for another reason than damage.
    Failed(String),
    /// It is not what was written.
    Damaged(String),
}

impl Finding {
    fn badness(&self) -> u8 {
        match self {
            Finding::Good => 0,
            Finding::Failed(_) => 1,
            Finding::Damaged(_) => 2,
        }
    }
}

/// The worst finding, of the first rank that has one so bad, on every rank. Collective.
pub(crate) fn worst(world: &World, own: Finding) -> anyhow::Result<Finding> {
    let badness = f64::from(own.badness());
    let most = world.all_reduce(&[badness], ReduceOp::Max)?[0];
    if most == 0. {
        return Ok(Finding::Good);
    }
    let bearer = if badness == most { world.rank() } else { world.size() };
    let first = world.all_reduce(&[bearer as f64], ReduceOp::Min)?[0] as usize;
    from_rank(world, first, || Ok(own))
}

/// One rank's answer, on every rank; of its error, the words. Collective.
pub(crate) fn from_rank<T: Serialize + for<'de> Deserialize<'de>>(
    world: &World,
    rank: usize,
    ask: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let text = if world.rank() == rank {
        serde_json::to_vec(&ask().map_err(|error| format!("{error:#}")))?
    } else {
        Vec::new()
    };
    let texts = world.group().gather_bytes(text)?;
    let answer: Result<T, String> = serde_json::from_slice(&texts[rank])?;
    answer.map_err(|message| anyhow!(message))
}

/// Every rank's answer, by rank, on every rank. Collective.
pub(crate) fn from_every_rank<T: Serialize + for<'de> Deserialize<'de>>(
    world: &World,
    own: &T,
) -> anyhow::Result<Vec<T>> {
    let texts = world.group().gather_bytes(serde_json::to_vec(own)?)?;
    Ok(texts.iter().map(|text| serde_json::from_slice(text)).collect::<Result<_, _>>()?)
}
