//! Groups of parameters that share hyper-parameters.

use std::sync::Arc;

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::fsdp::FsdpParam;
use crate::pattern::NamePattern;

/// A group of an optimizer's parameters: one of PyTorch's `param_groups`.
#[derive(Clone, Debug)]
pub struct ParamGroup {
    /// The hyper-parameters by PyTorch's names, such as `lr` and `betas`.
    pub hyper: Map<String, Value>,
    /// The parameters that they are for, in the optimizer's order.
    pub params: Vec<Arc<FsdpParam>>,
}

/// Parts parameters by their names: first those that no pattern means, then a part for each list of patterns. A pattern
/// means a parameter by its whole name or by what that ends with; of several parts that mean a parameter, the first
/// gets it.
///
/// ```
/// # use candle_core::DType;
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// use fsdp_candle::{group_by_name, AdamW, AdamWConfig, NamePattern};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::layer_norm(4, 1e-5, vb))?;
///
/// let biases = [NamePattern::new("bias")?];
/// let [rest, biases] = group_by_name(vars.trainable(), [&biases[..]])?.try_into().unwrap();
/// let config = AdamWConfig::default();
/// let optim = AdamW::with_groups(vec![(rest, config), (biases, AdamWConfig { weight_decay: 0., ..config })])?;
/// assert_eq!(optim.param_groups()[1].params[0].name(), "bias");
/// # use fsdp_candle::ShardedOptimizer;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When a pattern means none of the parameters, or only such as an earlier part got.
pub fn group_by_name<'a>(
    params: Vec<Arc<FsdpParam>>,
    parts: impl IntoIterator<Item = &'a [NamePattern]>,
) -> Result<Vec<Vec<Arc<FsdpParam>>>> {
    let example = params.first().map_or_else(|| "none".to_string(), |param| format!("`{}`", param.name()));
    let (mut rest, mut groups) = (params, vec![]);
    for patterns in parts {
        for pattern in patterns {
            if !rest.iter().any(|param| pattern.matches_end(param.name())) {
                return Err(Error::Argument(format!(
                    "`{pattern}` means no parameter that is trained and in no earlier group; their names are such as \
                     {example}"
                )));
            }
        }
        let group;
        (group, rest) =
            rest.into_iter().partition(|param| patterns.iter().any(|pattern| pattern.matches_end(param.name())));
        groups.push(group);
    }
    groups.insert(0, rest);
    Ok(groups)
}
