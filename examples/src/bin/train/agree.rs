//! What ranks tell each other: one rank's answer for all, every rank's for every one, and the worst of what each has
//! found.

use std::sync::Arc;

use anyhow::{anyhow, bail};
use fsdp_candle::{ReduceOp, World};
use fsdp_core::{Buffer, GatherPart, Heap};
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
    let mut text = if world.rank() == rank {
        serde_json::to_vec(&ask().map_err(|error| format!("{error:#}")))?
    } else {
        Vec::new()
    };
    let length = world.all_reduce(&[text.len() as f64], ReduceOp::Max)?[0] as usize;
    text.resize(length, 0);
    let answer = match world.group().broadcast(vec![Buffer::U8(text)], rank).wait()?.pop() {
        Some(Buffer::U8(text)) => serde_json::from_slice::<Result<T, String>>(&text)?,
        _ => bail!("a broadcast of U8 returned something else"),
    };
    answer.map_err(|message| anyhow!(message))
}

/// Every rank's answer, by rank, on every rank. Collective.
pub(crate) fn from_every_rank<T: Serialize + for<'de> Deserialize<'de>>(
    world: &World,
    own: &T,
) -> anyhow::Result<Vec<T>> {
    let text = serde_json::to_vec(own)?;
    let lengths = match gather(world, Buffer::I64(vec![text.len() as i64]), vec![1; world.size()])? {
        Buffer::I64(lengths) => lengths.into_iter().map(usize::try_from).collect::<Result<Vec<_>, _>>()?,
        other => bail!("an all-gather of I64 returned {}", other.dtype()),
    };
    let texts = match gather(world, Buffer::U8(text), lengths.clone())? {
        Buffer::U8(texts) => texts,
        other => bail!("an all-gather of U8 returned {}", other.dtype()),
    };
    let mut rest = &texts[..];
    let answers = lengths.into_iter().map(|length| {
        let (text, after) = rest.split_at(length);
        rest = after;
        Ok(serde_json::from_slice(text)?)
    });
    answers.collect()
}

/// The concatenation of the ranks' buffers, of `counts` elements each.
fn gather(world: &World, own: Buffer, counts: Vec<usize>) -> anyhow::Result<Buffer> {
    let part = GatherPart { input: Arc::new(own), counts };
    world.group().all_gather(vec![part], Heap::shared()).wait()?.pop().ok_or_else(|| anyhow!("an all-gather is empty"))
}
