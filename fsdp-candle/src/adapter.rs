//! Which layers get low-rank adapters, and what their parameters are called.

/// How large an adapter is, and how much it counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraConfig {
    /// The rank `r`.
    pub rank: usize,
    /// The adapter's output is multiplied by `alpha / rank`.
    pub alpha: f64,
}

/// Which layers get adapters.
pub(crate) struct Adapters {
    pub(crate) config: LoraConfig,
    /// By a layer's FQN.
    pub(crate) targets: Box<dyn Fn(&str) -> bool + Send + Sync>,
}

impl Adapters {
    /// The adapter of the layer whose weight is called `weight`.
    pub(crate) fn of(&self, weight: &str) -> Option<LoraConfig> {
        let layer = weight.strip_suffix("weight")?;
        let layer = if layer.is_empty() { layer } else { layer.strip_suffix('.')? };
        (!is_adapter(weight) && (self.targets)(layer)).then_some(self.config)
    }
}

/// What the name of the matrix `A` ends with, behind the layer's.
const DOWN: &str = "lora_A.weight";
const UP: &str = "lora_B.weight";

/// Whether a parameter of this name belongs to an adapter: its last parts are `lora_A.weight` or `lora_B.weight`.
pub fn is_adapter(name: &str) -> bool {
    [DOWN, UP].iter().any(|end| layer_of(name, end).is_some())
}

/// The layer whose adapter has a matrix `A` of this name.
pub(crate) fn adapted_layer(name: &str) -> Option<&str> {
    layer_of(name, DOWN)
}

/// The layer that an adapter's matrix of this name belongs to, and whether it is `B`.
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
