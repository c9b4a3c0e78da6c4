//! Which layers of a model get low-rank adapters.

use fsdp_candle::nn::LoraConfig;
use fsdp_candle::{NamePattern, Result};

/// Every fully connected layer but the head, as PEFT calls them.
const ALL: &str = "all-linear";
/// The heads, which belong to the embedding as much.
const HEADS: [&str; 2] = ["lm_head", "cls.predictions.decoder"];

/// The layers that a list of patterns means, by their FQNs or what these end with.
///
/// ```
/// use fsdp_examples::models::Targets;
///
/// let targets = Targets::new(["q_proj", "model.layers.0.mlp.*"])?;
/// assert!(targets.meant("model.layers.3.self_attn.q_proj") && targets.meant("model.layers.0.mlp.up_proj"));
/// assert!(!targets.meant("model.layers.1.mlp.up_proj"));
/// assert!(Targets::new(["all-linear"])?.meant("h.0.mlp.c_fc"));
/// # Ok::<(), fsdp_candle::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Targets {
    patterns: Vec<NamePattern>,
    all: bool,
}

impl Targets {
    /// Reads the patterns; `all-linear` means every fully connected layer but the head.
    ///
    /// # Errors
    /// When one is no pattern.
    pub fn new<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        let mut targets = Targets::default();
        for pattern in patterns {
            match pattern {
                ALL => targets.all = true,
                _ => targets.patterns.push(NamePattern::new(pattern)?),
            }
        }
        Ok(targets)
    }

    /// Whether a layer is meant, if it is fully connected.
    pub fn meant(&self, layer: &str) -> bool {
        (self.all && !HEADS.contains(&layer)) || self.patterns.iter().any(|pattern| pattern.matches_end(layer))
    }

    /// The first pattern that means none of these layers.
    pub fn idle(&self, layers: &[String]) -> Option<&NamePattern> {
        self.patterns.iter().find(|pattern| !layers.iter().any(|layer| pattern.matches_end(layer)))
    }
}

/// Adapters of a model.
#[derive(Clone, Debug)]
pub struct Lora {
    /// How large they are.
    pub config: LoraConfig,
    /// Whose they are.
    pub targets: Targets,
}
