//! From the command line to a model and its data.

use anyhow::{Context, bail, ensure};
use candle_core::DType;
use fsdp_candle::initializer::{Fallback, Philox, Pretrained};
use fsdp_candle::nn::{LoraConfig, is_adapter};
use fsdp_candle::{DeviceMesh, FsdpModule, FullyShard, MixedPrecisionPolicy, OffloadPolicy, ShardedVarMap, World};
use fsdp_examples::data::{BatchShape, Batches, Data, Text};
use fsdp_examples::generate;
use fsdp_examples::models::{self, LanguageModel, ModelConfig, ModelOptions};

use crate::args::{ActivationCheckpoint, Args, DeviceChoice, InitChoice, Resume};

/// Ids of the data that start the sample, and ids that continue them.
const PROMPT_TOKENS: usize = 16;
const SAMPLE_TOKENS: usize = 48;
/// Ids that the model sees when it continues them.
const SAMPLE_CONTEXT: usize = 64;

/// All that a run is made of.
pub(crate) struct Setup {
    pub(crate) vars: ShardedVarMap,
    pub(crate) model: FsdpModule<LanguageModel>,
    pub(crate) batches: Batches,
    pub(crate) text: Text,
    pub(crate) config: ModelConfig,
}

impl Setup {
    pub(crate) fn new(args: &Args, world: &World) -> anyhow::Result<Self> {
        if args.device == DeviceChoice::Cuda {
            bail!("--device cuda: this build computes on CPUs only; use --device cpu or auto");
        }
        let config = match &args.model {
            Some(dir) => ModelConfig::from_dir(dir)?,
            None => ModelConfig::builtin()?,
        };
        ensure!(
            args.seq_len <= config.max_positions(),
            "--seq-len {} is beyond the model's {} positions",
            args.seq_len,
            config.max_positions()
        );

        // Data before the model: what is wrong with it shows at once.
        let text = Text::new(args.model.as_deref())?;
        let data = Data::load(args.data.as_deref(), &text, config.vocab_size())?;
        let shape = BatchShape {
            world_size: world.size(),
            rank: world.rank(),
            batch_size: args.batch_size,
            grad_accum: args.grad_accum,
            seq_len: args.seq_len,
        };
        let batches = Batches::new(data, shape)?;

        let vars = ShardedVarMap::new(&mesh(args, world)?, world.device());
        let weights = args.model.as_deref().filter(|dir| has_weights(dir));
        match (args.init, weights) {
            (InitChoice::Random, _) | (InitChoice::Auto, None) => vars.init_with(Philox::new(args.seed)),
            (InitChoice::Auto | InitChoice::Pretrained, Some(dir)) => {
                let weights =
                    Pretrained::open(dir).with_context(|| format!("can't read the weights in {}", dir.display()))?;
                vars.init_with(Fallback::new(weights, Philox::new(args.seed), is_adapter));
            }
            (InitChoice::Pretrained, None) => match &args.model {
                Some(dir) => bail!(
                    "--init pretrained: {} has neither model.safetensors nor model.safetensors.index.json; add one, or use --init random",
                    dir.display()
                ),
                None => bail!(
                    "--init pretrained needs --model DIR with weights; the built-in model starts from random ones"
                ),
            },
        }
        if world.rank() == 0 && args.resume == Resume::None && (args.init == InitChoice::Random || weights.is_none()) {
            eprintln!("starting from random weights (seed {})", args.seed);
        }
        let lora = lora(args);
        if lora.is_some() {
            vars.freeze(|name| !is_adapter(name));
        }
        let options = ModelOptions {
            dtype: DType::F32,
            positions: args.seq_len.max(SAMPLE_CONTEXT),
            activation_checkpoint: args.activation_checkpoint == ActivationCheckpoint::Full,
            lora,
        };
        let policy = MixedPrecisionPolicy {
            param_dtype: Some(args.param_dtype.dtype()),
            reduce_dtype: Some(args.reduce_dtype.dtype()),
            ..Default::default()
        };
        let offload = if args.cpu_offload { OffloadPolicy::Cpu { pin_memory: true } } else { OffloadPolicy::None };
        let opts = FullyShard::new(&vars)
            .mp_policy(policy)
            .offload_policy(offload)
            .reshard_after_forward(args.reshard_after_forward);
        let model = models::build(&config, &opts, &vars, options)?;
        models::set_prefetch(&model, args.prefetch);
        Ok(Setup { vars, model, batches, text, config })
    }
}

/// The ranks as copies of shards.
fn mesh(args: &Args, world: &World) -> anyhow::Result<DeviceMesh> {
    let (ranks, copies) = (world.size(), args.replicate);
    ensure!(
        ranks.is_multiple_of(copies),
        "--replicate {copies} does not divide the {ranks} processes: start a multiple of {copies}, or change it"
    );
    Ok(match copies {
        1 => world.mesh(&[("dp_shard", ranks)])?,
        _ => world.mesh(&[("dp_replicate", copies), ("dp_shard", ranks / copies)])?,
    })
}

/// The adapters that the run trains.
pub(crate) fn lora(args: &Args) -> Option<LoraConfig> {
    args.lora_rank.map(|rank| LoraConfig { rank, alpha: 2. * rank as f64 })
}

fn has_weights(dir: &std::path::Path) -> bool {
    ["model.safetensors", "model.safetensors.index.json"].iter().any(|name| dir.join(name).exists())
}

/// Bytes that this rank keeps between steps: its shards, their gradients, and AdamW's two moments.
pub(crate) fn shard_bytes(vars: &ShardedVarMap) -> u64 {
    vars.params()
        .iter()
        .map(|param| {
            let copies = if param.trainable() { 4 } else { 1 };
            (copies * param.region().elements() * param.dtype().size_in_bytes()) as u64
        })
        .sum()
}

/// A continuation of the data's first words. Collective.
pub(crate) fn sample(
    model: &FsdpModule<LanguageModel>,
    batches: &Batches,
    text: &Text,
    config: &ModelConfig,
    world: &World,
) -> anyhow::Result<String> {
    let prompt = batches.prompt(PROMPT_TOKENS);
    let context = config.max_positions().min(SAMPLE_CONTEXT);
    let ids = generate::sample(model, &prompt, SAMPLE_TOKENS, context, 0.8, 0, world.device())
        .context("can't generate a sample")?;
    Ok(format!("{:?} -> {:?}", text.decode(&prompt)?, text.decode(&ids)?))
}
