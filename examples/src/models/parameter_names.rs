//! Selection of layers and parameters by name.

use fsdp_candle::nn::{LoraConfig, is_adapter};
use fsdp_candle::{NamePattern, Result};

/// PEFT's name for every fully connected layer except the head.
const ALL: &str = "all-linear";
/// Heads, which may share the embedding's weights or are trained whole, and the layer below BERT's classifier.
const HEADS: [&str; 5] = ["lm_head", "cls.predictions.decoder", "classifier", "score", "bert.pooler.dense"];

/// Query and value projections, or the layer that fuses them, in all model families.
const QUERIES_AND_VALUES: [&str; 6] = ["q_proj", "v_proj", "qkv_proj", "attn.c_attn", "self.query", "self.value"];

/// Patterns of layers that get adapters. A pattern matches a name or its end.
///
/// ```
/// use fsdp_train::models::Targets;
///
/// let targets = Targets::new(["q_proj", "model.layers.0.mlp.*"])?;
/// assert!(targets.matches("model.layers.3.self_attn.q_proj") && targets.matches("model.layers.0.mlp.up_proj"));
/// assert!(!targets.matches("model.layers.1.mlp.up_proj"));
/// assert!(Targets::new(["all-linear"])?.matches("h.0.mlp.c_fc"));
/// # Ok::<(), fsdp_candle::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Targets {
    patterns: Vec<NamePattern>,
    all: bool,
}

impl Targets {
    /// Parses the patterns. `all-linear` matches every fully connected layer except the head.
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

    /// Returns the query and value projections of every model family, which get adapters by default.
    pub fn queries_and_values() -> Result<Self> {
        Targets::new(QUERIES_AND_VALUES)
    }

    /// Returns whether a fully connected layer of this name gets an adapter.
    pub fn matches(&self, layer: &str) -> bool {
        (self.all && !HEADS.contains(&layer)) || self.patterns.iter().any(|pattern| pattern.matches_end(layer))
    }

    /// Returns the first pattern that matches none of the layers.
    pub fn unmatched(&self, layers: &[String]) -> Option<&NamePattern> {
        self.patterns.iter().find(|pattern| !layers.iter().any(|layer| pattern.matches_end(layer)))
    }
}

/// Adapters of a model.
#[derive(Clone, Debug)]
pub struct Lora {
    /// Rank and alpha.
    pub config: LoraConfig,
    /// Layers that get adapters.
    pub targets: Targets,
}

/// Prefixes of the blocks' parameters in all families.
const BLOCKS: [&str; 4] = ["model.layers.", "h.", "transformer.h.", "bert.encoder.layer."];
/// End of the name of a router's bias.
const ROUTER_BIAS: &str = ".e_score_correction_bias";
/// Layers that choose experts. Small changes of their weights can change the choice.
const ROUTERS: [&str; 2] = ["gate", "router"];

/// Returns whether a buffer is the bias by which a router chooses experts.
pub fn is_router_bias(name: &str) -> bool {
    name.ends_with(ROUTER_BIAS)
}

/// Returns whether a parameter is the weight of a fully connected layer in a block. Excludes routers and adapters.
///
/// ```
/// use fsdp_train::models::is_block_matrix;
///
/// assert!(is_block_matrix("model.layers.0.mlp.gate_proj.weight") && is_block_matrix("h.0.attn.c_attn.weight"));
/// assert!(!is_block_matrix("model.layers.0.input_layernorm.weight") && !is_block_matrix("lm_head.weight"));
/// ```
pub fn is_block_matrix(name: &str) -> bool {
    let Some(layer) = name.strip_suffix(".weight") else { return false };
    let layer = layer.rsplit('.').next().unwrap_or(layer);
    let is_norm = layer.to_lowercase().contains("norm") || layer.starts_with("ln_");
    BLOCKS.iter().any(|block| name.starts_with(block)) && !is_norm && !ROUTERS.contains(&layer) && !is_adapter(name)
}
