//! Which layers of a model get low-rank adapters.
//! Which parameters are the matrices of blocks, by their names.

use fsdp_candle::nn::{LoraConfig, is_adapter};
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

/// What the names of the blocks' parameters begin with, in all families.
const BLOCKS: [&str; 4] = ["model.layers.", "h.", "transformer.h.", "bert.encoder.layer."];
/// The layer that chooses experts: it is small, and a choice changes all at once.
const ROUTER: &str = "gate";

/// Whether a parameter is the weight of a fully connected layer in a block. Routers of experts and adapters are not
/// meant.
///
/// ```
/// use fsdp_examples::models::is_block_matrix;
///
/// assert!(is_block_matrix("model.layers.0.mlp.gate_proj.weight") && is_block_matrix("h.0.attn.c_attn.weight"));
/// assert!(!is_block_matrix("model.layers.0.input_layernorm.weight") && !is_block_matrix("lm_head.weight"));
/// ```
pub fn is_block_matrix(name: &str) -> bool {
    let Some(layer) = name.strip_suffix(".weight") else { return false };
    let layer = layer.rsplit('.').next().unwrap_or(layer);
    let is_norm = layer.to_lowercase().contains("norm") || layer.starts_with("ln_");
    BLOCKS.iter().any(|block| name.starts_with(block)) && !is_norm && layer != ROUTER && !is_adapter(name)
}
