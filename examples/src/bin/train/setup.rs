//! From the command line to a model and its data.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use candle_core::DType;
use fsdp_candle::initializer::{Fallback, Philox};
use fsdp_candle::nn::is_adapter;
use fsdp_candle::{FsdpModule, FullyShard, MixedPrecisionPolicy, ShardedVarMap, World};
use fsdp_ckpt::TensorSource;
use fsdp_ckpt::hf::HfModel;
use fsdp_examples::console::Console;
use fsdp_examples::data::{Batches, Data, Examples, Masking, PackingOptions, Source, Text, mask_token};
use fsdp_examples::models::{self, LanguageModel, ModelConfig, ModelOptions, TensorParallel, parallel};

use crate::alike::{self, Words};
use crate::args::{Args, InitChoice, Resume};
use crate::evaluate::Evaluation;
use crate::lora::Adapters;
use crate::memory;
use crate::peft::Peft;
use crate::sample;

/// Of a masked model, the share of tokens that it has to tell.
const MLM_PROBABILITY: f64 = 0.15;

/// All that a run is made of.
pub(crate) struct Setup {
    pub(crate) config: ModelConfig,
    pub(crate) vars: ShardedVarMap,
    pub(crate) model: FsdpModule<LanguageModel>,
    pub(crate) batches: Batches,
    pub(crate) evaluation: Option<Evaluation>,
    pub(crate) text: Text,
    pub(crate) adapters: Option<Adapters>,
    /// The longest sequence that the model can be asked for.
    pub(crate) positions: usize,
}

impl Setup {
    pub(crate) fn new(args: &Args, world: &World) -> anyhow::Result<Self> {
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
        parallel::check(&config, args.tensor_parallel)?;

        // Data before the model: what is wrong with it shows at once.
        let text = Text::new(args.model.as_deref())?;
        let (batches, evaluation) = data(args, &config, &text, world)?;
        let weights = pretrained(args)?;
        let adapters = Adapters::of(args)?;
        alike::inputs(read(&config, &batches, evaluation.as_ref(), weights, adapters.as_ref())?, args, world)?;
        if world.rank() == 0 {
            let all = [Some(&batches), evaluation.as_ref().map(|evaluation| &evaluation.batches)];
            let of_adapters = adapters.as_ref().and_then(|adapters| adapters.from.as_ref()?.remark());
            let remarks = all.into_iter().flatten().filter_map(Batches::remark).chain(of_adapters);
            remarks.for_each(|remark| Console::Stderr.line(format_args!("warning: {remark}")));
        }
        let positions = args.seq_len.max(sample::CONTEXT);
        memory::check(args, &config, adapters.as_ref().map(|adapters| &adapters.lora), positions, world)?;

        let ranks = args.ranks(world)?;
        let vars = ranks.vars(world)?;
        let of_layers = ranks.tensor_mesh(&vars)?;
        if world.rank() == 0 && args.resume == Resume::None && weights.is_none() {
            Console::Stderr.line(format_args!("starting from random weights (seed {})", args.seed));
        }
        let random = Philox::new(args.seed);
        let cant_read = |dir: &Path| format!("can't read the weights in {}", dir.display());
        let weights = weights.map(|dir| models::pretrained(dir).with_context(|| cant_read(dir))).transpose()?;
        let peft = adapters.as_ref().and_then(|adapters| adapters.from.as_ref());
        let peft = peft.map(Peft::initializer).transpose()?;
        match (weights, peft) {
            (None, None) => vars.init_with(random),
            (None, Some(peft)) => vars.init_with(Fallback::new(peft, random, |name| !is_adapter(name))),
            (Some(weights), None) => vars.init_with(Fallback::new(weights, random, is_adapter)),
            (Some(weights), Some(peft)) => vars.init_with(Fallback::new(weights, peft, is_adapter)),
        }
        if let Some(adapters) = &adapters {
            adapters.apply(&vars);
        }
        let options = ModelOptions {
            dtype: DType::F32,
            positions,
            checkpoints: args.activation_checkpoint.policy(args.checkpoint_keep.clone())?,
            dropout: args.dropout.of(&config),
            parallel: of_layers.map(|mesh| TensorParallel::new(mesh, args.sequence_parallel)).transpose()?,
        };
        let policy = MixedPrecisionPolicy {
            param_dtype: Some(args.param_dtype.dtype()),
            reduce_dtype: Some(args.reduce_dtype.dtype()),
            ..Default::default()
        };
        let all_gather = args.all_gather;
        let opts = FullyShard::new(&vars)
            .mp_policy(policy)
            .all_gather_extension(move |name| all_gather.extension(name))
            .reshard_after_forward(args.reshard_after_forward)
            .shard_optimizer_over_replicas(args.shard_optimizer_over_replicas)
            .offload_policy(args.offload.policy());
        let model = models::build(&config, &opts, &vars, options)?;
        if let Some(adapters) = &adapters {
            adapters.check(args, &vars)?;
        }
        models::set_prefetch(&model, args.prefetch);
        let positions = positions.min(config.max_positions());
        Ok(Setup { config, vars, model, batches, evaluation, text, adapters, positions })
    }
}

/// What is trained on, and what is evaluated on.
fn data(
    args: &Args,
    config: &ModelConfig,
    text: &Text,
    world: &World,
) -> anyhow::Result<(Batches, Option<Evaluation>)> {
    let (masking, vocab_size) = (masking(args, config, text)?, config.vocab_size());
    let source = |flag: &'static str, path: Option<&Path>, shuffle: Option<u64>| match (path, args.sft.is_some()) {
        (Some(path), true) => {
            let examples = Examples::load(path, args.model.as_deref(), text, args.seq_len, vocab_size).context(flag)?;
            anyhow::Ok(Source::Examples(examples, PackingOptions { packing: args.packed(), shuffle }))
        }
        (Some(path), false) => Ok(Source::Stream(Data::load(Some(path), text, vocab_size).context(flag)?, shuffle)),
        (None, _) => Ok(Source::Stream(Data::load(None, text, vocab_size)?, shuffle)),
    };
    let shape = args.batch_shape(world)?;
    let (flag, path) = match &args.sft {
        Some(path) => ("--sft", Some(path.as_path())),
        None => ("--data", args.data.as_deref()),
    };
    let batches = Batches::new(source(flag, path, args.shuffled().then_some(args.seed))?, shape)?.masked(masking);
    let evaluation = match args.eval.as_deref() {
        Some(path) => {
            let flag = "--eval";
            let batches = Batches::for_evaluation(source(flag, Some(path), None)?, shape).context(flag)?;
            Some(Evaluation::new(args, batches.masked(masking)))
        }
        None => None,
    };
    Ok((batches, evaluation))
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
    if args.sft.is_some() {
        bail!("--sft is for models that continue text; a bert tells masked tokens: pass text by --data");
    }
    let vocabulary = config.vocab_size();
    Ok(Some(Masking {
        probability: args.mlm_probability.unwrap_or(MLM_PROBABILITY),
        mask_token: mask_token(args.mask_token, args.model.as_deref(), text, vocabulary)?,
        vocabulary,
        seed: args.seed,
    }))
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
fn read(
    config: &ModelConfig,
    batches: &Batches,
    evaluation: Option<&Evaluation>,
    weights: Option<&Path>,
    adapters: Option<&Adapters>,
) -> anyhow::Result<Words> {
    let print = |weights: &HfModel| {
        models::fingerprint(weights).with_context(|| format!("can't read the weights in {}", weights.path().display()))
    };
    let weights = match weights {
        Some(dir) => {
            print(&HfModel::open(dir).with_context(|| format!("can't read the weights in {}", dir.display()))?)?
        }
        None => "random".into(),
    };
    let mut read = alike::words("config.json's ", config)?;
    read.insert("the data".into(), batches.account());
    if let Some(masking) = batches.masking() {
        read.insert("the mask token".into(), masking.mask_token.to_string());
    }
    if let Some(evaluation) = evaluation {
        read.insert("the data of --eval".into(), evaluation.batches.account());
    }
    read.insert("the first weights".into(), weights);
    if let Some(peft) = adapters.and_then(|adapters| adapters.from.as_ref()) {
        read.insert("the first adapters".into(), print(peft.weights())?);
    }
    Ok(read)
}

/// Bytes that this rank keeps between steps beside the optimizer's: its shards and their gradients.
pub(crate) fn shard_bytes(vars: &ShardedVarMap) -> u64 {
    vars.params()
        .iter()
        .map(|param| {
            let copies = if param.trainable() { 2 } else { 1 };
            (copies * param.region().elements() * param.dtype().size_in_bytes()) as u64
        })
        .sum()
}
