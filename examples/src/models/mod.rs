//! Language models, built from Hugging Face directories.
//!
//! A model is a plain Candle module whose blocks are FSDP units. [`build`] creates it bottom-up: each block, then the
//! root with the remaining parameters. The embedding and the head of a decoder are units too, unless they are tied.
//! `decoder` covers the Llama-like families, whose options `config` reads; `gpt2` and `bert` are separate. `parallel`
//! holds the tensor-parallel plan of decoders.

use anyhow::{Context, bail, ensure};
pub use base::Base;
use candle_core::DType;
use candle_nn::VarBuilder;
pub use compute::Compute;
use config::DecoderConfig;
pub use config::{Dropout, ModelConfig};
use decoder::Decoder;
use fsdp_candle::activation_checkpoint::CheckpointPolicy;
use fsdp_candle::{FsdpModule, FullyShard, ShardedVarMap, Unit, fully_shard, shard};
pub use heads::{Head, Pooling};
pub use heads::{is_classifier, is_unused_by_embeddings, normalizes, sequence_outputs};
pub use language_model::Batch;
pub use language_model::LanguageModel;
pub use language_model::{cross_entropy, cross_entropy_sum, loss};
use layers::Layer;
pub use layers::ModelDropout;
pub use parallel::TensorParallel;
pub use parameter_names::{Lora, Targets};
pub use parameter_names::{is_block_matrix, is_router_bias};
pub use preference::{PairLogProbs, PairLoss};
use rotary::RotaryTables;
pub use rows::Rows;
pub use size::{ModelSize, UnitSize};
pub use weights::Weights;
pub use weights::fingerprint;

mod attention;
mod base;
pub mod bert;
mod compute;
pub mod config;
pub mod decoder;
mod experts;
pub mod gpt2;
mod heads;
mod language_model;
mod latent_attention;
pub mod layers;
mod mlp;
mod norm;
pub mod parallel;
mod parameter_names;
mod preference;
pub mod rotary;
mod router;
mod rows;
mod size;
#[cfg(test)]
mod tests;
mod weights;

/// Options of [`build`].
#[derive(Clone)]
pub struct ModelOptions {
    /// Dtype of shards, gradients and optimizer state.
    pub dtype: DType,
    /// Length of the longest sequence.
    pub positions: usize,
    /// Blocks that recompute their activations in backward.
    pub checkpoints: CheckpointPolicy,
    /// Dropout while the model trains ([`LanguageModel::set_training`]).
    pub dropout: Dropout,
    /// Tensor-parallel ranks, on the mesh of the variables.
    pub parallel: Option<TensorParallel>,
}

/// Builds a model bottom-up: every block is a unit, so are an embedding and a head that are not tied, and the root has the
/// remaining parameters.
pub fn build(
    config: &ModelConfig,
    opts: &FullyShard,
    vars: &ShardedVarMap,
    options: ModelOptions,
) -> anyhow::Result<FsdpModule<LanguageModel>> {
    build_with_head(config, opts, vars, options, Head::Vocabulary)
}

/// [`build`] for a model with another output. Only language models can be tensor-parallel.
pub fn build_with_head(
    config: &ModelConfig,
    opts: &FullyShard,
    vars: &ShardedVarMap,
    options: ModelOptions,
    head: Head,
) -> anyhow::Result<FsdpModule<LanguageModel>> {
    let parallel = options.parallel.as_ref();
    ensure!(
        parallel.is_none() || head == Head::Vocabulary,
        "tensor parallelism does not support classes or embeddings"
    );
    parallel.map_or(Ok(()), |parallel| parallel.apply(config, vars))?;
    let vb = vars.builder(options.dtype);
    let checkpoints = &options.checkpoints;
    let names = block_names(config, &vb);
    if let Some(pattern) = checkpoints.unmatched(&names) {
        let of = |name: Option<&String>| name.map_or("none", String::as_str).to_owned();
        let (first, last) = (of(names.first()), of(names.last()));
        bail!("--activation-checkpoint: `{pattern}` matches no block of the model; its blocks are {first} to {last}");
    }
    let drops = ModelDropout::new(options.dropout, parallel);
    let model = match config {
        ModelConfig::Decoder(config) => {
            // Split sequences may be padded.
            let positions = parallel.map_or(options.positions, |parallel| parallel.padded(options.positions));
            let head_dim = config.rotary_dim();
            let rotary = RotaryTables::new(&config.rope, config.local_rope.as_ref(), head_dim, positions, vb.device())?;
            let block = |i, vb| decoder::Block::new(config, i, &rotary, &drops, parallel, vb);
            let blocks = build_blocks(names, opts, &vb, checkpoints, block)?;
            fully_shard(opts, vb, |vb| {
                Ok(LanguageModel::Decoder(Decoder::new(config, blocks, drops, parallel, head, Some(opts), vb)?))
            })
        }
        ModelConfig::Gpt2(config) => {
            let prefix = gpt2_prefix(&vb);
            let block = |_, vb| gpt2::Block::new(config, &drops, vb);
            let blocks = build_blocks(names, opts, &vb, checkpoints, block)?;
            fully_shard(opts, vb, |vb| {
                Ok(LanguageModel::Gpt2(gpt2::Gpt2::new(config, prefix, blocks, drops, head, vb)?))
            })
        }
        ModelConfig::Bert(config) => {
            let block = |_, vb| bert::Block::new(config, &drops, vb);
            let blocks = build_blocks(names, opts, &vb, checkpoints, block)?;
            fully_shard(opts, vb, |vb| Ok(LanguageModel::Bert(bert::Bert::new(config, blocks, drops, head, vb)?)))
        }
    };
    model.context("can't build the model")
}

/// Builds the blocks, each a unit.
fn build_blocks<B>(
    names: Vec<String>,
    opts: &FullyShard,
    vb: &VarBuilder<'static>,
    checkpoints: &CheckpointPolicy,
    block: impl Fn(usize, VarBuilder<'static>) -> candle_core::Result<B>,
) -> anyhow::Result<Vec<FsdpModule<Layer<B>>>> {
    let unit = |(i, name): (usize, String)| {
        fully_shard(opts, vb.pp(&name), |vb| Ok(Layer::new(block(i, vb)?, i, name, checkpoints)))
    };
    let blocks = names.into_iter().enumerate().map(unit).collect::<fsdp_candle::Result<_>>();
    blocks.context("can't build the blocks")
}

/// Returns the names of the blocks in forward order.
fn block_names(config: &ModelConfig, vb: &VarBuilder) -> Vec<String> {
    let (list, count) = match config {
        ModelConfig::Decoder(config) => ("model.layers".to_owned(), config.layers),
        ModelConfig::Gpt2(config) => (format!("{}h", gpt2_prefix(vb)), config.n_layer),
        ModelConfig::Bert(config) => ("bert.encoder.layer".to_owned(), config.num_hidden_layers),
    };
    (0..count).map(|i| format!("{list}.{i}")).collect()
}

/// Returns the prefix of GPT-2's names. Files on the Hub have `wte.weight` or `transformer.wte.weight`.
fn gpt2_prefix(vb: &VarBuilder) -> &'static str {
    if vb.contains_tensor("wte.weight") { "" } else { "transformer." }
}

/// Builds a decoder without wrapped blocks, whose units are found by name.
pub fn build_by_name(
    config: &DecoderConfig,
    opts: FullyShard,
    vars: &ShardedVarMap,
    options: ModelOptions,
) -> anyhow::Result<FsdpModule<Decoder<Layer<decoder::Block>>>> {
    if options.parallel.is_some() {
        bail!("tensor parallelism does not support units by name: wrap the blocks instead");
    }
    let vb = vars.builder(options.dtype);
    let (positions, head_dim) = (options.positions, config.rotary_dim());
    let rotary = RotaryTables::new(&config.rope, config.local_rope.as_ref(), head_dim, positions, vb.device())?;
    let drops = ModelDropout::new(options.dropout, None);
    let model = shard(&opts, &["model.layers.*"], vb, |vb| {
        let block = |i| {
            let name = format!("model.layers.{i}");
            let block = decoder::Block::new(config, i, &rotary, &drops, None, vb.pp(&name))?;
            Ok(Layer::new(block, i, name, &options.checkpoints))
        };
        let blocks = (0..config.layers).map(block).collect::<candle_core::Result<_>>()?;
        Decoder::new(config, blocks, drops.clone(), None, Head::Vocabulary, None, vb)
    });
    model.context("can't build the model")
}

/// A unit whose prefetch lists can be set.
trait Prefetches {
    fn unit(&self) -> Unit;
    fn set_prefetch(&self, in_forward: &[Unit], in_backward: &[Unit]) -> fsdp_candle::Result<()>;
}

impl<M> Prefetches for FsdpModule<M> {
    fn unit(&self) -> Unit {
        FsdpModule::unit(self)
    }

    fn set_prefetch(&self, in_forward: &[Unit], in_backward: &[Unit]) -> fsdp_candle::Result<()> {
        self.set_modules_to_forward_prefetch(in_forward)?;
        self.set_modules_to_backward_prefetch(in_backward)
    }
}

/// Gathers the parameters of `ahead` units ahead, in forward and backward.
pub fn set_prefetch(model: &FsdpModule<LanguageModel>, ahead: usize) -> fsdp_candle::Result<()> {
    // Units gather one unit ahead by default.
    model.set_implicit_prefetch(ahead == 1);
    if ahead <= 1 {
        return Ok(());
    }
    let modules: Vec<&dyn Prefetches> = match model.inner() {
        LanguageModel::Decoder(decoder) => {
            let (first, last) = (decoder.embedding.unit(), decoder.last.unit());
            let first = first.into_iter().map(|unit| unit as &dyn Prefetches);
            first.chain(units_of(&decoder.blocks)).chain(last.map(|unit| unit as &dyn Prefetches)).collect()
        }
        LanguageModel::Gpt2(gpt2) => units_of(&gpt2.blocks).collect(),
        LanguageModel::Bert(bert) => units_of(&bert.blocks).collect(),
    };
    let units: Vec<Unit> = modules.iter().map(|module| module.unit()).collect();
    let before = |end: usize| -> Vec<Unit> { units[..end].iter().rev().take(ahead).cloned().collect() };
    let after = |start: usize| &units[start..start.saturating_add(ahead).min(units.len())];
    Prefetches::set_prefetch(model, after(0), &before(units.len()))?;
    for (i, module) in modules.iter().enumerate() {
        module.set_prefetch(after(i + 1), &before(i))?;
    }
    Ok(())
}

fn units_of<B>(blocks: &[FsdpModule<B>]) -> impl Iterator<Item = &dyn Prefetches> {
    blocks.iter().map(|block| block as &dyn Prefetches)
}
