//! Low-rank adapters: the layers that get one, and the names of its parameters.

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
        let layer = weight.strip_suffix("weight")?;
        let layer = if layer.is_empty() { layer } else { layer.strip_suffix('.')? };
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

fn layer_of<'a>(name: &'a str, end: &str) -> Option<&'a str> {
    let layer = name.strip_suffix(end)?;
    if layer.is_empty() { Some(layer) } else { layer.strip_suffix('.') }
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
