//! The models that `train` knows, built from Hugging Face directories: plain Candle modules whose blocks are FSDP
//! units.

mod batch;
pub mod config;
pub mod decoder;
pub mod gpt2;
pub mod layer;
mod size;
#[cfg(test)]
mod tests;
mod weights;

use anyhow::Context;
use candle_core::{DType, Module, Result, Tensor};
use fsdp_candle::nn::{self, CrossEntropyOptions, Documents, LoraConfig, Reduction};
use fsdp_candle::{FsdpModule, FullyShard, ShardedVarMap, Unit, fully_shard};

pub use batch::Batch;
pub use config::ModelConfig;
use decoder::Turns;
use layer::Layer;
pub use size::ModelSize;
pub use weights::fingerprint;

/// A causal language model: token ids `[batch, time]` to logits `[batch, time, vocabulary]`.
pub enum LanguageModel {
    /// A Llama, or one of its like.
    Decoder(decoder::Decoder),
    /// A GPT-2.
    Gpt2(gpt2::Gpt2),
}

impl LanguageModel {
    /// Logits, and what is to be added to their loss, if anything.
    fn outputs(&self, ids: &Tensor, documents: Option<&Documents>) -> Result<(Tensor, Option<Tensor>)> {
        match self {
            LanguageModel::Decoder(model) => model.forward(ids, documents),
            LanguageModel::Gpt2(model) => Ok((model.forward(ids, documents)?, None)),
        }
    }
}

impl Module for LanguageModel {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        Ok(self.outputs(ids, None)?.0)
    }
}

/// The sum of the losses of all targets that count.
///
/// # Errors
/// Those of the model.
pub fn cross_entropy_sum(model: &FsdpModule<LanguageModel>, batch: &Batch) -> Result<Tensor> {
    reduced(&outputs(model, batch)?.0, batch, Reduction::Sum)
}

/// The mean loss over the targets that count, 0 where none does.
///
/// # Errors
/// Those of the model.
pub fn cross_entropy(model: &FsdpModule<LanguageModel>, batch: &Batch) -> Result<Tensor> {
    mean(&outputs(model, batch)?.0, batch)
}

/// [`cross_entropy`], with the loss that keeps experts equally busy where the configuration asks for it.
///
/// # Errors
/// Those of the model.
pub fn loss(model: &FsdpModule<LanguageModel>, batch: &Batch) -> Result<Tensor> {
    let (logits, auxiliary) = outputs(model, batch)?;
    let loss = mean(&logits, batch)?;
    match auxiliary {
        Some(auxiliary) => loss + auxiliary,
        None => Ok(loss),
    }
}

fn mean(logits: &Tensor, batch: &Batch) -> Result<Tensor> {
    // The mean of nothing is no number, its sum is 0.
    let reduction = if batch.counted > 0 { Reduction::Mean } else { Reduction::Sum };
    reduced(logits, batch, reduction)
}

fn outputs(model: &FsdpModule<LanguageModel>, batch: &Batch) -> Result<(Tensor, Option<Tensor>)> {
    let input = (batch.ids.clone(), batch.documents.clone());
    model.call_with(input, |model, (ids, documents)| model.outputs(&ids, documents.as_ref()))
}

fn reduced(logits: &Tensor, batch: &Batch, reduction: Reduction) -> Result<Tensor> {
    nn::cross_entropy_with(logits, &batch.targets, &CrossEntropyOptions { reduction, ..Default::default() })
}

/// How a model is built.
#[derive(Clone, Copy, Debug)]
pub struct ModelOptions {
    /// Of the shards, and so of gradients and optimizer state.
    pub dtype: DType,
    /// Ids of the longest sequence.
    pub positions: usize,
    /// Keep the blocks' inputs alone for backward, and run each block again there.
    pub activation_checkpoint: bool,
    /// Adapters beside the attention's query and value projections: `q_proj` and `v_proj`, or the one
    /// layer that makes both, a Phi-3's `qkv_proj` and a GPT-2's `c_attn`. The caller freezes the rest.
    pub lora: Option<LoraConfig>,
}

/// Builds the model bottom-up: every block a unit, and the root with what is left.
///
/// # Errors
/// When parameters can't be initialised.
pub fn build(
    config: &ModelConfig,
    opts: &FullyShard,
    vars: &ShardedVarMap,
    options: ModelOptions,
) -> anyhow::Result<FsdpModule<LanguageModel>> {
    let vb = vars.builder(options.dtype);
    let again = options.activation_checkpoint;
    let model = match config {
        ModelConfig::Decoder(config) => {
            let (positions, head_dim) = (options.positions, config.head_dim);
            let turns = Turns::new(&config.rope, config.local_rope.as_ref(), head_dim, positions, vb.device())?;
            let blocks = (0..config.layers)
                .map(|i| {
                    fully_shard(opts, vb.pp(format!("model.layers.{i}")), |vb| {
                        Ok(Layer::new(decoder::Block::new(config, i, &turns, options.lora, vb)?, again))
                    })
                })
                .collect::<fsdp_candle::Result<Vec<_>>>()
                .context("can't build the layers")?;
            fully_shard(opts, vb, |vb| Ok(LanguageModel::Decoder(decoder::Decoder::new(config, blocks, vb)?)))
        }
        ModelConfig::Gpt2(config) => {
            // The checkpoints on the Hub say `wte.weight` or `transformer.wte.weight`, depending on who saved them.
            let prefix = if vb.contains_tensor("wte.weight") { "" } else { "transformer." };
            let blocks = (0..config.n_layer)
                .map(|i| {
                    fully_shard(opts, vb.pp(format!("{prefix}h.{i}")), |vb| {
                        Ok(Layer::new(gpt2::Block::new(config, options.lora, vb)?, again))
                    })
                })
                .collect::<fsdp_candle::Result<Vec<_>>>()
                .context("can't build GPT-2's layers")?;
            fully_shard(opts, vb, |vb| Ok(LanguageModel::Gpt2(gpt2::Gpt2::new(config, prefix, blocks, vb)?)))
        }
    };
    model.context("can't build the model")
}

/// Gathers parameters of `ahead` blocks ahead, in forward and in backward.
pub fn set_prefetch(model: &FsdpModule<LanguageModel>, ahead: usize) {
    match model.inner() {
        LanguageModel::Decoder(decoder) => prefetch_blocks(model, decoder.blocks(), ahead),
        LanguageModel::Gpt2(gpt2) => prefetch_blocks(model, gpt2.blocks(), ahead),
    }
}

fn prefetch_blocks<R, B>(root: &FsdpModule<R>, blocks: &[FsdpModule<B>], ahead: usize) {
    // One block ahead is what units do by themselves.
    root.set_implicit_prefetch(ahead == 1);
    if ahead <= 1 {
        return;
    }
    let units: Vec<Unit> = blocks.iter().map(FsdpModule::unit).collect();
    let before = |end: usize| -> Vec<Unit> { units[..end].iter().rev().take(ahead).cloned().collect() };
    let after = |start: usize| &units[start..start.saturating_add(ahead).min(units.len())];
    root.set_modules_to_forward_prefetch(after(0));
    root.set_modules_to_backward_prefetch(&before(units.len()));
    for (i, block) in blocks.iter().enumerate() {
        block.set_modules_to_forward_prefetch(after(i + 1));
        block.set_modules_to_backward_prefetch(&before(i));
    }
}
