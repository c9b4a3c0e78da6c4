//! The models that `train` knows, built from Hugging Face directories: plain Candle modules whose blocks are FSDP units.

pub mod config;
pub mod gpt2;
pub mod llama;

use anyhow::Context;
use candle_core::{DType, Module, Result, Tensor};
use fsdp_candle::nn::Rotary;
use fsdp_candle::{FsdpModule, FullyShard, ShardedVarMap, fully_shard};

pub use config::ModelConfig;

/// A causal language model: token ids `[batch, time]` to logits `[batch, time, vocabulary]`.
pub enum LanguageModel {
    /// A Llama.
    Llama(llama::Llama),
    /// A GPT-2.
    Gpt2(gpt2::Gpt2),
}

impl Module for LanguageModel {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        match self {
            LanguageModel::Llama(model) => model.forward(ids),
            LanguageModel::Gpt2(model) => model.forward(ids),
        }
    }
}

/// Builds the model bottom-up: every block a unit, and the root with what is left. It takes sequences of up to `positions` ids.
///
/// # Errors
/// When parameters can't be initialised.
pub fn build(
    config: &ModelConfig,
    opts: &FullyShard,
    vars: &ShardedVarMap,
    dtype: DType,
    positions: usize,
) -> anyhow::Result<FsdpModule<LanguageModel>> {
    let vb = vars.builder(dtype);
    let model = match config {
        ModelConfig::Llama(config) => {
            let rotary = Rotary::new(config.theta(), config.head_dim(), positions, vb.device())?;
            let blocks = (0..config.num_hidden_layers)
                .map(|i| {
                    fully_shard(opts, vb.pp(format!("model.layers.{i}")), |vb| llama::Block::new(config, &rotary, vb))
                })
                .collect::<fsdp_candle::Result<Vec<_>>>()
                .context("can't build the Llama's layers")?;
            fully_shard(opts, vb, |vb| Ok(LanguageModel::Llama(llama::Llama::new(config, blocks, vb)?)))
        }
        ModelConfig::Gpt2(config) => {
            // The checkpoints on the Hub say `wte.weight` or `transformer.wte.weight`, depending on who saved them.
            let prefix = if vb.contains_tensor("wte.weight") { "" } else { "transformer." };
            let blocks = (0..config.n_layer)
                .map(|i| fully_shard(opts, vb.pp(format!("{prefix}h.{i}")), |vb| gpt2::Block::new(config, vb)))
                .collect::<fsdp_candle::Result<Vec<_>>>()
                .context("can't build GPT-2's layers")?;
            fully_shard(opts, vb, |vb| Ok(LanguageModel::Gpt2(gpt2::Gpt2::new(config, prefix, blocks, vb)?)))
        }
    };
    model.context("can't build the model")
}
