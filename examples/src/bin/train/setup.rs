//! From the command line to a model and its data.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use candle_core::DType;
use fsdp_candle::initializer::{Fallback, Philox, Pretrained};
use fsdp_candle::nn::{LoraConfig, is_adapter};
use fsdp_candle::{DeviceMesh, FsdpModule, FullyShard, MixedPrecisionPolicy, ShardedVarMap, World, no_grad};
use fsdp_examples::console::Console;
use fsdp_examples::data::{Batches, Data, Masking, Text, mask_token};
use fsdp_examples::generate;
use fsdp_examples::models::{self, LanguageModel, ModelConfig, ModelOptions, OldNames};

use crate::alike::{self, Words};
use crate::args::{ActivationCheckpoint, Args, DeviceChoice, InitChoice, Resume};
use crate::feed::Feed;
use crate::memory;

/// Ids of the data that start the sample, and ids that continue them.
const PROMPT_TOKENS: usize = 16;
const SAMPLE_TOKENS: usize = 48;
/// Ids that the model sees when it continues them, or when it tells every so many-th of them.
const SAMPLE_CONTEXT: usize = 64;
const SAMPLE_MASKED: usize = 8;
/// Of a masked model, the share of tokens that it has to tell.
const MLM_PROBABILITY: f64 = 0.15;

/// All that a run is made of.
pub(crate) struct Setup {
    pub(crate) vars: ShardedVarMap,
    pub(crate) model: FsdpModule<LanguageModel>,
    pub(crate) feed: Feed,
    pub(crate) text: Text,
    pub(crate) config: ModelConfig,
}

impl Setup {
    pub(crate) fn new(args: &Args, world: &World) -> anyhow::Result<Self> {
        if args.device == DeviceChoice::Cuda {
            bail!(
                "--device cuda: GPUs are not there yet, and this build has no CUDA: it computes on CPUs. Use \
                 --device cpu"
            );
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
        let masking = masking(args, &config, &text)?;
        let data = Data::load(args.data.as_deref(), &text, config.vocab_size())?;
        let batches = Batches::new(data, args.batch_shape(world)?)?;
        let weights = pretrained(args)?;
        alike::inputs(read(&config, batches.data(), masking.as_ref(), weights)?, args, world)?;
        let feed = Feed::new(batches, masking, args);
        let positions = args.seq_len.max(SAMPLE_CONTEXT);
        memory::check(args, &config, positions, world)?;

        let vars = ShardedVarMap::new(&mesh(args, world)?, world.device());
        match weights {
            Some(dir) => {
                let weights =
                    Pretrained::open(dir).with_context(|| format!("can't read the weights in {}", dir.display()))?;
                vars.init_with(Fallback::new(OldNames::new(weights), Philox::new(args.seed), is_adapter));
            }
            None => vars.init_with(Philox::new(args.seed)),
        }
        if world.rank() == 0 && args.resume == Resume::None && weights.is_none() {
            Console::Stderr.line(format_args!("starting from random weights (seed {})", args.seed));
        }
        let lora = lora(args);
        if lora.is_some() {
            vars.freeze(|name| !is_adapter(name));
        }
        let options = ModelOptions {
            dtype: DType::F32,
            positions,
            activation_checkpoint: args.activation_checkpoint == ActivationCheckpoint::Full,
            lora,
        };
        let policy = MixedPrecisionPolicy {
            param_dtype: Some(args.param_dtype.dtype()),
            reduce_dtype: Some(args.reduce_dtype.dtype()),
            ..Default::default()
        };
        let opts = FullyShard::new(&vars).mp_policy(policy).reshard_after_forward(args.reshard_after_forward);
        let model = models::build(&config, &opts, &vars, options)?;
        models::set_prefetch(&model, args.prefetch);
        Ok(Setup { vars, model, feed, text, config })
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

/// What a masked model has to tell.
fn masking(args: &Args, config: &ModelConfig, text: &Text) -> anyhow::Result<Option<Masking>> {
    if !config.is_masked() {
        let flags =
            [("--mlm-probability", args.mlm_probability.is_some()), ("--mask-token", args.mask_token.is_some())];
        if let Some((flag, _)) = flags.iter().find(|(_, given)| *given) {
            bail!("{flag} is for masked language models (model type bert), and the model is none: leave it out");
        }
        return Ok(None);
    }
    let vocabulary = config.vocab_size();
    Ok(Some(Masking {
        probability: args.mlm_probability.unwrap_or(MLM_PROBABILITY),
        mask_token: mask_token(args.mask_token, args.model.as_deref(), text, vocabulary)?,
        vocabulary,
        seed: args.seed,
    }))
}

/// The adapters that the run trains.
pub(crate) fn lora(args: &Args) -> Option<LoraConfig> {
    args.lora_rank.map(|rank| LoraConfig { rank, alpha: 2. * rank as f64 })
}

/// Where the first weights are read from, unless they are random.
pub(crate) fn pretrained(args: &Args) -> anyhow::Result<Option<&Path>> {
    let has_weights =
        |dir: &&Path| ["model.safetensors", "model.safetensors.index.json"].iter().any(|name| dir.join(name).exists());
    let weights = args.model.as_deref().filter(has_weights);
    match (args.init, weights, &args.model) {
        (InitChoice::Random, ..) => Ok(None),
        (InitChoice::Auto, ..) | (InitChoice::Pretrained, Some(_), _) => Ok(weights),
        (InitChoice::Pretrained, None, Some(dir)) => bail!(
            "--init pretrained: {} has neither model.safetensors nor model.safetensors.index.json; add one, or use \
             --init random",
            dir.display()
        ),
        (InitChoice::Pretrained, None, None) => {
            bail!("--init pretrained needs --model DIR with weights; the built-in model starts from random ones")
        }
    }
}

/// What this rank has read, for the others to compare with.
fn read(config: &ModelConfig, data: &Data, masking: Option<&Masking>, weights: Option<&Path>) -> anyhow::Result<Words> {
    let weights = match weights {
        Some(dir) => {
            models::fingerprint(dir).with_context(|| format!("can't read the weights in {}", dir.display()))?
        }
        None => "random".into(),
    };
    let mut read = alike::words("config.json's ", config)?;
    read.insert("the data".into(), format!("{} tokens with checksum {:016x}", data.len(), data.checksum()));
    if let Some(masking) = masking {
        read.insert("the mask token".into(), masking.mask_token.to_string());
    }
    read.insert("the first weights".into(), weights);
    Ok(read)
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

/// A continuation of the data's first words, or, of a masked model, what it takes some of them for. Collective.
pub(crate) fn sample(
    model: &FsdpModule<LanguageModel>,
    feed: &Feed,
    text: &Text,
    config: &ModelConfig,
    world: &World,
) -> anyhow::Result<String> {
    let context = config.max_positions().min(SAMPLE_CONTEXT);
    if let Some(masking) = feed.masking() {
        let prompt = feed.batches().prompt(context)?;
        let hidden: Vec<usize> = (SAMPLE_MASKED / 2..prompt.len()).step_by(SAMPLE_MASKED).collect();
        let filled = no_grad(|| generate::fill(model, &prompt, &hidden, masking.mask_token, world.device()))
            .context("can't fill in a sample")?;
        let starts = std::iter::once(0).chain(hidden.iter().map(|at| at + 1));
        let ends = hidden.iter().copied().chain([prompt.len()]);
        let seen = starts.zip(ends).map(|(start, end)| text.decode(&prompt[start..end]));
        let seen = seen.collect::<anyhow::Result<Vec<_>>>()?.join("[MASK]");
        return Ok(format!("{seen:?} -> {:?}", text.decode(&filled)?));
    }
    let prompt = feed.batches().prompt(PROMPT_TOKENS)?;
    let ids = no_grad(|| generate::sample(model, &prompt, SAMPLE_TOKENS, context, 0.8, 0, world.device()))
        .context("can't generate a sample")?;
    Ok(format!("{:?} -> {:?}", text.decode(&prompt)?, text.decode(&ids)?))
}
