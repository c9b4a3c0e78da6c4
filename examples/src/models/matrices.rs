//! Which parameters are the matrices of blocks, by their names.

use fsdp_candle::nn::is_adapter;

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
