//! Low-rank adapters: the layers that get one, the names of its parameters, and forwards without them.

use std::cell::Cell;

use scopeguard::defer;

use crate::autograd::no_grad;

/// Size and weight of an adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraConfig {
    /// The rank `r`.
    pub rank: usize,
    /// The adapter's output is multiplied by `alpha / rank`.
    pub alpha: f64,
}

/// Selection of the layers that get adapters.
pub(crate) struct Adapters {
    pub(crate) config: LoraConfig,
    /// Returns whether the layer with this FQN gets an adapter.
    pub(crate) targets: Box<dyn Fn(&str) -> bool + Send + Sync>,
}

impl Adapters {
    /// Returns the adapter of the layer whose weight is called `weight`.
    pub(crate) fn of(&self, weight: &str) -> Option<LoraConfig> {
        let layer = layer_of(weight, "weight")?;
        (!is_adapter(weight) && (self.targets)(layer)).then_some(self.config)
    }
}

/// Suffixes of the names of the matrices `A` and `B`, after the layer's name.
const DOWN: &str = "lora_A.weight";
const UP: &str = "lora_B.weight";

/// Returns whether a parameter belongs to an adapter: its name ends with `lora_A.weight` or `lora_B.weight`.
pub fn is_adapter(name: &str) -> bool {
    [DOWN, UP].iter().any(|end| layer_of(name, end).is_some())
}

/// Returns the layer whose adapter has a matrix `A` of this name.
pub(crate) fn adapted_layer(name: &str) -> Option<&str> {
    layer_of(name, DOWN)
}

/// Returns the layer of an adapter's matrix of this name, and whether the matrix is `B`.
pub(crate) fn adapter_of(name: &str) -> Option<(&str, bool)> {
    let of = |end, is_up| layer_of(name, end).map(|layer| (layer, is_up));
    of(DOWN, false).or_else(|| of(UP, true))
}

/// Returns the layer of a parameter whose name after the layer's is `end`.
pub(crate) fn layer_of<'a>(name: &'a str, end: &str) -> Option<&'a str> {
    let layer = name.strip_suffix(end)?;
    if layer.is_empty() { Some(layer) } else { layer.strip_suffix('.') }
}

thread_local! {
    static DISABLED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` without adapters and without a graph ([`no_grad`](crate::no_grad)): layers with an adapter return the base
/// layer's output. PEFT's `disable_adapter()` and `torch.no_grad()`. It holds for this thread and all models that `f`
/// calls. Preference tuning computes its reference log probabilities this way.
///
/// ```
/// # use candle_core::{DType, Device, Module, Tensor};
/// # use fsdp_candle::{nn, FullyShard, ShardedVarMap, World, fully_shard};
/// # let world = World::single()?;
/// let vars = ShardedVarMap::of_world(&world)?;
/// vars.adapt(nn::LoraConfig { rank: 2, alpha: 4. }, |_| true)?;
/// let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear(3, 5, vb))?;
/// let y = nn::without_adapters(|| model.forward(&Tensor::ones((1, 3), DType::F32, &Device::Cpu)?))?;
/// assert!(!y.track_op());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn without_adapters<T>(f: impl FnOnce() -> T) -> T {
    let before = DISABLED.replace(true);
    defer!(DISABLED.set(before));
    // Backward may recompute a forward, with adapters.
    no_grad(f)
}

/// Returns whether adapters are part of their layers on this thread.
pub(crate) fn are_enabled() -> bool {
    !DISABLED.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_known_by_the_names_of_their_weights() {
        let config = LoraConfig { rank: 1, alpha: 1. };
        let adapters = |targets: fn(&str) -> bool| Adapters { config, targets: Box::new(targets) };
        assert_eq!(adapters(|layer| layer == "a.q").of("a.q.weight"), Some(config));
        assert_eq!(adapters(|layer| layer.is_empty()).of("weight"), Some(config));
        for other in ["a.q.bias", "a.qweight", "a.q.lora_A.weight", "lora_B.weight"] {
            assert_eq!(adapters(|_| true).of(other), None, "{other}");
        }
        assert!(is_adapter("lora_A.weight") && is_adapter("a.lora_B.weight"));
        assert!(!is_adapter("a.xlora_B.weight") && !is_adapter("a.lora_B.bias"));
        assert_eq!((adapted_layer("a.q.lora_A.weight"), adapted_layer("a.q.lora_B.weight")), (Some("a.q"), None));
    }
}
