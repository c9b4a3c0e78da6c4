//! Tensor parallelism of decoders and expert parallelism of mixtures: the plans, and the checks that a model can be split.

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use candle_core::{D, Result, Tensor};
use fsdp_candle::collectives::{Consumers, all_gather, copy, split};
use fsdp_candle::{
    ActivationLayout, AttentionExchange, ColwiseParallel, ExpertParallel, ParallelPlan, RowwiseParallel,
    SequenceParallel, ShardedVarMap, VocabParallel, parallelize,
};
use fsdp_ckpt::hf::ExpertNames;
use fsdp_core::{DeviceMesh, ProcessGroup};

use crate::models::config::experts::ExpertsConfig;
use crate::models::config::latent::LatentConfig;
use crate::models::config::{DecoderConfig, ModelConfig};
use crate::ranks::sequence_multiple;

/// Tensor-parallel ranks of a model.
#[derive(Clone)]
pub struct TensorParallel(Arc<Parts>);

struct Parts {
    mesh: DeviceMesh,
    group: ProcessGroup,
    sequence: bool,
}

impl TensorParallel {
    /// Creates the ranks from a mesh of one dimension. `sequence` also splits sequences between the layers that see all
    /// of them.
    pub fn new(mesh: DeviceMesh, sequence: bool) -> anyhow::Result<Self> {
        let group = mesh.group(0)?.clone();
        Ok(TensorParallel(Arc::new(Parts { mesh, group, sequence })))
    }

    /// Applies the plan to the next model built on `vars`.
    pub(super) fn apply(&self, config: &ModelConfig, vars: &ShardedVarMap) -> anyhow::Result<()> {
        check(config, self.0.group.size())?;
        let plan = plan(decoder(config, self.0.group.size())?, self.0.sequence);
        parallelize(vars, &self.0.mesh, &plan).context("can't parallelize the layers")
    }

    /// Returns the group of tensor-parallel ranks.
    pub(super) fn group(&self) -> &ProcessGroup {
        &self.0.group
    }

    /// Returns whether ranks split sequences.
    pub(super) fn shares_sequences(&self) -> bool {
        self.0.sequence
    }

    /// Gathers a residual stream `[B, T / N, C]` along time, for computations that all ranks repeat.
    pub(super) fn whole_sequence(&self, x_btc: &Tensor) -> Result<Tensor> {
        match self.0.sequence {
            true => all_gather(x_btc, 1, &self.0.group, Consumers::Same),
            false => Ok(x_btc.clone()),
        }
    }

    /// Returns this rank's part of a whole residual stream.
    pub(super) fn own_sequence(&self, x_btc: &Tensor) -> Result<Tensor> {
        match self.0.sequence {
            true => split(x_btc, 1, &self.0.group),
            false => Ok(x_btc.clone()),
        }
    }

    /// Returns this rank's part of values `[heads]`, which are whole on every rank.
    pub(super) fn own_heads(&self, values: &Tensor) -> Result<Tensor> {
        let group = &self.0.group;
        let own = values.dim(0)? / group.size();
        // Each rank has the gradient of its part only.
        copy(values, group)?.narrow(0, group.rank() * own, own)?.contiguous()
    }

    /// Returns a tensor `[B, T, ..]` of the residual stream for computations of this rank's heads: `[B, T / N, ..]` is
    /// gathered along time.
    pub(super) fn for_own_heads(&self, x: &Tensor) -> Result<Tensor> {
        match self.0.sequence {
            true => all_gather(x, 1, &self.0.group, Consumers::Differ),
            false => copy(x, &self.0.group),
        }
    }

    /// Gathers the logits `[.., V]` from the parts of the vocabulary.
    pub(super) fn whole_vocabulary(&self, logits: &Tensor) -> Result<Tensor> {
        all_gather(logits, D::Minus1, &self.0.group, Consumers::Same)
    }

    /// Returns the number of positions rounded up to a multiple of the ranks.
    pub(super) fn padded(&self, positions: usize) -> usize {
        if self.0.sequence { positions.next_multiple_of(self.0.group.size()) } else { positions }
    }
}

/// Returns the plan. The residual stream between the layers is whole on every rank, or split along time.
fn plan(config: &DecoderConfig, sequence: bool) -> ParallelPlan {
    let between = if sequence { ActivationLayout::Shard(1) } else { ActivationLayout::Replicate };
    let column = ColwiseParallel { input_layout: between, ..ColwiseParallel::default() };
    let row = RowwiseParallel { output_layout: between, ..RowwiseParallel::default() };
    let table = VocabParallel { output_layout: between, tied_head: column, ..VocabParallel::default() };
    let mut plan =
        ParallelPlan::new().module("model.embed_tokens", table).module("model.layers.*.self_attn.o_proj", row);
    plan = match config.latent {
        None => plan.module("model.layers.*.self_attn.[qkv]_proj", column),
        Some(latent) => latent_plan(plan, &latent, column, sequence),
    };
    if !config.tied {
        plan = plan.module("lm_head", column);
    }
    if sequence {
        plan = plan.module("model.layers.*.*_layernorm", SequenceParallel::default());
        plan = plan.module("model.norm", SequenceParallel::default());
    }
    if config.norms.heads {
        // Each rank normalises its own heads.
        plan = plan.module("model.layers.*.self_attn.[qk]_norm", SequenceParallel { sequence_dim: 2 });
    }
    let (has_mlp, experts) = kinds(config);
    if has_mlp {
        plan = plan.module("model.layers.*.mlp.gate_proj", column).module("model.layers.*.mlp.up_proj", column);
        plan = plan.module("model.layers.*.mlp.down_proj", row);
    }
    if experts.is_some_and(|experts| experts.shared.is_some()) {
        let of = |layer: &str| format!("model.layers.*.mlp.shared_experts.{layer}");
        plan = plan.module(of("gate_proj"), column).module(of("up_proj"), column).module(of("down_proj"), row);
    }
    if let Some(experts) = experts {
        // Experts see their tokens from the whole sequence.
        let ExpertNames { module: name, projections: [gate, up, down], .. } = experts.names;
        let of = |layer: &str| format!("model.layers.*.{name}.experts.*.{layer}");
        plan = plan.module(of(gate), ColwiseParallel::default()).module(of(up), ColwiseParallel::default());
        plan = plan.module(of(down), RowwiseParallel::default());
    }
    plan
}

/// Adds latent attention: all ranks compute the latent tensors, of their part of the sequence if it is split, and each its
/// own heads.
fn latent_plan(plan: ParallelPlan, latent: &LatentConfig, column: ColwiseParallel, sequence: bool) -> ParallelPlan {
    let of = |layer: &str| format!("model.layers.*.self_attn.{layer}");
    let mut plan = plan.module(of("kv_b_proj"), column);
    plan = plan.module(of(if latent.query_rank.is_some() { "q_b_proj" } else { "q_proj" }), column);
    if sequence {
        // Each rank has a term of their gradients.
        plan = plan.module(of("kv_a_*"), SequenceParallel::default());
        if latent.query_rank.is_some() {
            plan = plan.module(of("q_a_*"), SequenceParallel::default());
        }
    }
    plan
}

/// Fails unless `tensor` ranks can split the layers of the model.
pub fn check(config: &ModelConfig, tensor: usize) -> anyhow::Result<()> {
    if tensor == 1 {
        return Ok(());
    }
    let config = decoder(config, tensor)?;
    let numbers = numbers(config);
    let odd = numbers.iter().filter(|(_, number)| !number.is_multiple_of(tensor));
    let odd = odd.map(|(name, number)| format!("{name} = {number}")).collect::<Vec<_>>();
    let common = numbers.iter().fold(0, |common, (_, number)| gcd(common, *number));
    let advice = match divisors(common) {
        of if of.is_empty() => "its sizes have no common divisor but 1: leave it out".to_owned(),
        of => format!("their common divisors are {}", of.join(", ")),
    };
    ensure!(odd.is_empty(), "--tensor-parallel {tensor} does not divide the model's {}; {advice}", odd.join(" and "));
    Ok(())
}

/// Places the experts of the next model that is built on `vars` on the ranks of a mesh of one dimension, if there is one.
/// Collective.
pub fn place_experts(config: &ModelConfig, vars: &ShardedVarMap, mesh: Option<DeviceMesh>) -> anyhow::Result<()> {
    let Some(mesh) = mesh else { return Ok(()) };
    let Some(experts) = experts_over(config, mesh.size())? else { return Ok(()) };
    let plan = ParallelPlan::new().module(format!("model.layers.*.{}.experts", experts.names.module), ExpertParallel);
    parallelize(vars, &mesh, &plan).context("can't place the experts on the processes")
}

/// Fails unless `ranks` ranks can have different experts of a model.
pub fn check_experts(config: &ModelConfig, ranks: usize) -> anyhow::Result<()> {
    experts_over(config, ranks).map(|_| ())
}

/// Returns the experts that `ranks` ranks have, if there are several ranks. Fails unless each has one.
fn experts_over(config: &ModelConfig, ranks: usize) -> anyhow::Result<Option<&ExpertsConfig>> {
    if ranks == 1 {
        return Ok(None);
    }
    let experts = match config {
        ModelConfig::Decoder(config) => kinds(config).1,
        ModelConfig::Gpt2(_) | ModelConfig::Bert(_) => None,
    };
    let Some(experts) = experts else {
        bail!("--expert-parallel {ranks} is for mixtures of experts, and this model has no experts: leave it out")
    };
    ensure!(
        ranks <= experts.count,
        "--expert-parallel {ranks} is more than the model's {} experts: each process needs one",
        experts.count
    );
    Ok(Some(experts))
}

/// Fails unless `context` ranks, each of `tensor` that split heads, can share the attention of a model.
pub fn check_context(
    config: &ModelConfig,
    context: usize,
    tensor: usize,
    exchange: AttentionExchange,
) -> anyhow::Result<()> {
    let kv_heads = match config {
        ModelConfig::Decoder(config) => config.kv_heads,
        ModelConfig::Gpt2(config) => config.n_head,
        ModelConfig::Bert(config) => config.num_attention_heads,
    };
    ensure!(
        exchange == AttentionExchange::Gather || (kv_heads / tensor).is_multiple_of(context),
        "--context-exchange heads splits the model's {kv_heads} key heads over {} processes, which do not divide them: use \
         --context-exchange gather",
        context * tensor
    );
    Ok(())
}

/// Fails unless `context` ranks, each of `tensor` that split sequences again if `sequence`, can share sequences of the
/// given `(flag, length)`.
pub fn check_sequence(
    context: usize,
    tensor: usize,
    sequence: bool,
    (flag, length): (&str, usize),
) -> anyhow::Result<()> {
    ensure!(!sequence || tensor > 1, "--sequence-parallel has no effect without --tensor-parallel: leave it out");
    let multiple = sequence_multiple(context, if sequence { tensor } else { 1 });
    let flags = match (context > 1, sequence) {
        (true, true) => "--context-parallel and --sequence-parallel",
        (true, false) => "--context-parallel",
        (false, _) => "--sequence-parallel",
    };
    ensure!(
        length.is_multiple_of(multiple),
        "{flag} {length} can't be split as {flags} needs: pass a multiple of {multiple}, or leave the flags out"
    );
    Ok(())
}

/// Number of layers to look at. Later layers of real configurations do not differ.
const MOST_LAYERS: usize = 10_000;

/// Returns whether a layer has an MLP, and the experts of a layer that has some.
fn kinds(config: &DecoderConfig) -> (bool, Option<&ExpertsConfig>) {
    let layers = || 0..config.layers.min(MOST_LAYERS);
    (layers().any(|layer| config.experts(layer).is_none()), layers().find_map(|layer| config.experts(layer)))
}

fn decoder(config: &ModelConfig, tensor: usize) -> anyhow::Result<&DecoderConfig> {
    let refused = |family: &str, why: &str| {
        format!(
            "--tensor-parallel {tensor} is not for {family}: {why}. Leave it out; the processes then shard the model"
        )
    };
    match config {
        ModelConfig::Decoder(config) if config.fused => {
            bail!(refused("phi3", "its queries, keys and values are one matrix, and so are its gates and inner layers"))
        }
        ModelConfig::Decoder(config) => Ok(config),
        ModelConfig::Gpt2(_) => bail!(refused("gpt2", "its queries, keys and values are one matrix")),
        ModelConfig::Bert(_) => bail!(refused("bert", "it is for decoders")),
    }
}

/// Returns the sizes that ranks split, with their names in `config.json`.
fn numbers(config: &DecoderConfig) -> Vec<(&'static str, usize)> {
    let mut numbers = vec![
        ("num_attention_heads", config.heads),
        ("num_key_value_heads", config.kv_heads),
        ("vocab_size", config.vocabulary),
    ];
    let (has_mlp, experts) = kinds(config);
    if has_mlp {
        numbers.push(("intermediate_size", config.inner));
    }
    if let Some(experts) = experts {
        numbers.push((experts.width_name, experts.inner));
    }
    numbers
}

/// Returns the greatest common divisor.
pub fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Returns the divisors above 1 in ascending order.
fn divisors(number: usize) -> Vec<String> {
    /// Largest useful number of ranks.
    const MOST: usize = 64;
    (2..=number.min(MOST))
        .filter(|divisor| number.is_multiple_of(*divisor))
        .map(|divisor| divisor.to_string())
        .collect()
}
