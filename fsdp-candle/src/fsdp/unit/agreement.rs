//! Numbers that all ranks of a model agree on.

use std::sync::Arc;

use candle_core::{Result, bail};
use fsdp_core::{ProcessGroup, ReduceOp};

use super::group::ParamGroup;
use crate::storage::{from_numbers, to_numbers};
use crate::tensor_parallel::Parallel;

/// The way out for ranks that do not compare the same.
const ADVICE: &str = "Ranks that may use different parameters compare what their losses reach when a backward begins: \
                      every rank calls backward as often, of a model with the same units";

/// The largest of all ranks' numbers, each by itself: over the shard ranks, the replicas and the tensor-parallel ranks
/// of all `units`. Numbers are below 2^24.
pub(crate) fn largest(units: &[Arc<ParamGroup>], numbers: Vec<usize>) -> Result<Vec<usize>> {
    let mut groups: Vec<(Arc<ParamGroup>, ProcessGroup)> = vec![];
    for unit in units {
        for param in unit.params() {
            let ranks = param.ranks();
            let parallel = param.parallel().map(Parallel::group);
            for group in [Some(ranks.shard()), ranks.replicate(), parallel].into_iter().flatten() {
                if group.size() > 1 && !groups.iter().any(|(_, known)| known.is(group)) {
                    groups.push((unit.clone(), group.clone()));
                }
            }
        }
    }
    let mut numbers: Vec<f32> = numbers.into_iter().map(|number| number as f32).collect();
    if numbers.is_empty() {
        return Ok(vec![]);
    }
    for (unit, group) in groups {
        let Some(param) = unit.params().first() else { continue };
        let signature = unit.members().signature([]).with_how(", units that losses reach").with_advice(ADVICE);
        let buffer = from_numbers(&numbers, param.device())?;
        let reduced = group.signed(signature).all_reduce(vec![buffer], ReduceOp::Max).wait();
        let reduced = reduced.map_err(|source| unit.members().communication_failed("all-reduce", source))?;
        let [reduced] = &reduced[..] else { bail!("an all-reduce of one buffer returned {}", reduced.len()) };
        numbers = to_numbers(reduced)?;
    }
    Ok(numbers.into_iter().map(|number| number as usize).collect())
}
