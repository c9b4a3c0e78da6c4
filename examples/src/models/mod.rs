//! The models that `train` knows, built from Hugging Face directories: plain Candle modules whose blocks are FSDP
//! units.

mod batch;
pub mod bert;
pub mod config;
pub mod decoder;
pub mod gpt2;
mod language_model;
pub mod layer;
mod linear;
mod lora;
mod loss;
mod matrices;
mod old_names;
pub mod parallel;
mod size;
#[cfg(test)]
mod tests;
mod weights;

use anyhow::{Context, bail};
use candle_core::DType;
use fsdp_candle::{FsdpModule, FullyShard, ShardedVarMap, Unit, fully_shard, shard};

pub use batch::Batch;
use config::DecoderConfig;
pub use config::ModelConfig;
use decoder::{Decoder, Turns};
pub use language_model::LanguageModel;
use layer::Layer;
pub use lora::{Lora, Targets};
pub use loss::{cross_entropy, cross_entropy_sum, loss};
pub use matrices::is_block_matrix;
pub use old_names::pretrained;
pub use parallel::TensorParallel;
pub use size::{ModelSize, UnitSize};
pub use weights::fingerprint;

/// How a model is built.
#[derive(Clone)]
pub struct ModelOptions {
    /// Of the shards, and so of gradients and optimizer state.
    pub dtype: DType,
    /// Ids of the longest sequence.
    pub positions: usize,
    /// Keep the blocks' inputs alone for backward, and run each block again there.
    pub activation_checkpoint: bool,
    /// The ranks that compute each layer together, where there are several: of the map's mesh.
    pub parallel: Option<TensorParallel>,
}

/// Builds the model bottom-up: every block a unit, and the root with what is left.
///
/// # Errors
/// When parameters can't be initialised, or several ranks can't compute such a model's layers together.
pub fn build(
    config: &ModelConfig,
    opts: &FullyShard,
    vars: &ShardedVarMap,
    options: ModelOptions,
) -> anyhow::Result<FsdpModule<LanguageModel>> {
    let parallel = options.parallel.as_ref();
    parallel.map_or(Ok(()), |parallel| parallel.apply(config, vars))?;
    let vb = vars.builder(options.dtype);
    let again = options.activation_checkpoint;
    let model = match config {
        ModelConfig::Decoder(config) => {
            let (positions, head_dim) = (options.positions, config.head_dim);
            let turns = Turns::new(&config.rope, config.local_rope.as_ref(), head_dim, positions, vb.device())?;
            let blocks = (0..config.layers)
                .map(|i| {
                    fully_shard(opts, vb.pp(format!("model.layers.{i}")), |vb| {
                        Ok(Layer::new(decoder::Block::new(config, i, &turns, parallel, vb)?, again))
                    })
                })
                .collect::<fsdp_candle::Result<Vec<_>>>()
                .context("can't build the layers")?;
            fully_shard(opts, vb, |vb| Ok(LanguageModel::Decoder(decoder::Decoder::new(config, blocks, parallel, vb)?)))
        }
        ModelConfig::Gpt2(config) => {
            // The checkpoints on the Hub say `wte.weight` or `transformer.wte.weight`, depending on who saved them.
            let prefix = if vb.contains_tensor("wte.weight") { "" } else { "transformer." };
            let blocks = (0..config.n_layer)
                .map(|i| {
                    fully_shard(opts, vb.pp(format!("{prefix}h.{i}")), |vb| {
                        Ok(Layer::new(gpt2::Block::new(config, vb)?, again))
                    })
                })
                .collect::<fsdp_candle::Result<Vec<_>>>()
                .context("can't build GPT-2's layers")?;
            fully_shard(opts, vb, |vb| Ok(LanguageModel::Gpt2(gpt2::Gpt2::new(config, prefix, blocks, vb)?)))
        }
        ModelConfig::Bert(config) => {
            let blocks = (0..config.num_hidden_layers)
                .map(|i| {
                    fully_shard(opts, vb.pp(format!("bert.encoder.layer.{i}")), |vb| {
                        Ok(Layer::new(bert::Block::new(config, vb)?, again))
                    })
                })
                .collect::<fsdp_candle::Result<Vec<_>>>()
                .context("can't build BERT's layers")?;
            fully_shard(opts, vb, |vb| Ok(LanguageModel::Bert(bert::Bert::new(config, blocks, vb)?)))
        }
    };
    model.context("can't build the model")
}

/// The same decoder without a wrapped module: its blocks are units by their names.
///
/// # Errors
/// When parameters can't be initialised.
pub fn build_by_name(
    config: &DecoderConfig,
    opts: FullyShard,
    vars: &ShardedVarMap,
    options: ModelOptions,
) -> anyhow::Result<FsdpModule<Decoder<Layer<decoder::Block>>>> {
    if options.parallel.is_some() {
        bail!("a decoder whose units are named is not computed by several ranks together: wrap its blocks");
    }
    let vb = vars.builder(options.dtype);
    let (positions, head_dim) = (options.positions, config.head_dim);
    let turns = Turns::new(&config.rope, config.local_rope.as_ref(), head_dim, positions, vb.device())?;
    let model = shard(&opts.units(["model.layers.*"]), vb, |vb| {
        let block = |i| {
            let block = decoder::Block::new(config, i, &turns, None, vb.pp(format!("model.layers.{i}")))?;
            Ok(Layer::new(block, options.activation_checkpoint))
        };
        Decoder::new(config, (0..config.layers).map(block).collect::<candle_core::Result<_>>()?, None, vb)
    });
    model.context("can't build the model")
}

/// Gathers parameters of `ahead` blocks ahead, in forward and in backward.
pub fn set_prefetch(model: &FsdpModule<LanguageModel>, ahead: usize) {
    match model.inner() {
        LanguageModel::Decoder(decoder) => prefetch_blocks(model, decoder.blocks(), ahead),
        LanguageModel::Gpt2(gpt2) => prefetch_blocks(model, gpt2.blocks(), ahead),
        LanguageModel::Bert(bert) => prefetch_blocks(model, bert.blocks(), ahead),
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
