//! Model, data and adapters of a run, built from the command line.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use candle_core::DType;
use fsdp_candle::activation_checkpoint::CheckpointPolicy;
use fsdp_candle::initializer::{Fallback, Philox};
use fsdp_candle::nn::is_adapter;
use fsdp_candle::{
    ContextParallel, FsdpModule, FullyShard, MixedPrecisionPolicy, Recurse, ShardedVarMap, StateOnDisk, World,
};
use fsdp_ckpt::{TensorSource, find_weights};
use fsdp_train::console::Console;
use fsdp_train::data::{
    Batches, Corpora, Data, Examples, Masking, PackingOptions, PairOptions, Pairs, Source, Text, mask_token,
};
use fsdp_train::models::{self, Dropout, Head, LanguageModel, ModelConfig, ModelOptions, TensorParallel, Weights};
use fsdp_train::models::{is_classifier, is_unused_by_embeddings, parallel};
use fsdp_train::ranks::Ranks;

use crate::adapters::{Adapters, Peft};
use crate::agreement::{self, Fields, broadcast_result};
use crate::args::Args;
use crate::evaluate::{Evaluation, SAMPLE_CONTEXT};
use crate::flag_types::{InitChoice, Resume};
use crate::memory_check;
use crate::objective::{self, DPO_BETA, Objective, Preference, Reference};
use crate::task::{Language, Task, TaskChoice};
use crate::texts::Texts;

/// Default for --mlm-probability.
const MLM_PROBABILITY: f64 = 0.15;

/// Flag of the evaluation data.
const EVAL: &str = "--eval";

/// Names of the initial weights in comparisons.
const FIRST_WEIGHTS: &str = "the first weights";
const FIRST_ADAPTERS: &str = "the first adapters";

/// Model, data and adapters of a run.
pub(crate) struct Setup {
    pub(crate) config: ModelConfig,
    pub(crate) vars: ShardedVarMap,
    pub(crate) model: FsdpModule<LanguageModel>,
    pub(crate) task: Box<dyn Task>,
    pub(crate) adapters: Option<Adapters>,
}

impl Setup {
    pub(crate) fn new(args: &Args, world: &World) -> anyhow::Result<Self> {
        let mut config = match &args.model {
            Some(dir) => ModelConfig::from_dir(dir)?,
            None => ModelConfig::builtin()?,
        };
        if let Some(dir) = args.model.as_ref().filter(|_| world.rank() == 0) {
            let unknown = config.unknown_keys(dir)?;
            if !unknown.is_empty() {
                Console::Stderr.line(format_args!(
                    "warning: {} has keys that have no effect, here and in transformers: {}",
                    dir.join("config.json").display(),
                    unknown.join(", ")
                ));
            }
        }
        ensure!(
            args.seq_len <= config.max_positions(),
            "--seq-len {} is beyond the model's {} positions",
            args.seq_len,
            config.max_positions()
        );
        if counts_expert_tokens(args, world)? {
            config.count_expert_tokens();
        }
        parallel::check(&config, args.tensor_parallel)?;
        parallel::check_experts(&config, args.expert_parallel)?;

        // Data is read before the model is built, so that its errors show at once.
        let directory = pretrained(args)?;
        let mut text = Text::new(args.model.as_deref())?;
        if directory.is_some() {
            text.expect_vocabulary(config.vocab_size());
        }
        objective::check_weights(args)?;
        let ranks = args.ranks(world)?;
        let vars = ranks.vars(world)?;
        let context = ranks.context(&vars, args.exchange())?;
        parallel::check_context(&config, args.context_parallel, args.tensor_parallel, args.exchange())?;
        let positions = args.seq_len.max(SAMPLE_CONTEXT);
        let mut task: Box<dyn Task> = match args.task {
            TaskChoice::Language => {
                let (batches, evaluation) = data(args, &config, &text, context.as_ref(), world)?;
                let positions = positions.min(config.max_positions());
                let (objective, has_examples) = (Objective::Tokens, args.has_examples());
                Box::new(Language { batches, evaluation, text, positions, has_examples, objective, context })
            }
            TaskChoice::Classify | TaskChoice::Embed => Box::new(Texts::new(args, &config, text, context, world)?),
        };
        let head = task.head();
        let weights = directory.map(|dir| open(dir, &mut config, head)).transpose()?.flatten();
        let adapters = Adapters::of(args)?;
        let read = read_inputs(&config, &*task, weights.as_ref(), adapters.as_ref())?;
        let start: Fields = [FIRST_WEIGHTS, FIRST_ADAPTERS]
            .into_iter()
            .filter_map(|name| Some((name.to_owned(), read.get(name)?.clone())))
            .collect();
        agreement::check_inputs(read, args, world)?;
        if world.rank() == 0 {
            let of_adapters = adapters.as_ref().and_then(|adapters| adapters.from.as_ref()?.warning());
            let of_weights = weights.iter().flat_map(Weights::warnings).cloned();
            let warnings = task.warnings().into_iter().chain(of_adapters).chain(of_weights);
            warnings.for_each(|warning| Console::Stderr.line(format_args!("warning: {warning}")));
            let (data, shape) = (task.description(), args.batch_shape(world)?);
            Console::Stderr.line(format_args!("training on {data}: {shape} per step"));
        }
        memory_check::check(args, &config, &*task, adapters.as_ref(), positions, world)?;

        if world.rank() == 0 && args.resume == Resume::None && weights.is_none() {
            Console::Stderr.line(format_args!("starting from random weights (seed {})", args.seed));
        }
        initialize(args, &config, &vars, weights.as_ref(), adapters.as_ref(), head, world)?;
        match (&adapters, head) {
            (Some(adapters), _) => adapters.apply(&vars, head)?,
            (None, Head::Embedding(_)) => vars.freeze(is_unused_by_embeddings)?,
            (None, _) => {}
        }
        let checkpoints = args.activation_checkpoint.policy(args.checkpoint_keep.clone())?;
        let options = ModelOptions {
            dtype: DType::F32,
            positions,
            checkpoints: args.activation_offload.offload(checkpoints, world)?,
            dropout: args.dropout.of(&config),
            parallel: None,
        };
        let model = build(args, &config, &vars, options.clone(), ranks, head)?;
        if let Some(weights) = &weights {
            let (params, buffers) = (vars.params(), vars.buffers());
            let names = params.iter().map(|param| param.name());
            weights.check_all_used(names.chain(buffers.iter().map(|(name, _)| name.as_str())))?;
        }
        if let Some(adapters) = &adapters {
            adapters.check(args, &vars)?;
        }
        if args.dpo.is_some() {
            let reference = match has_reference_copy(args, adapters.is_some()) {
                false => Reference::Base,
                true => {
                    let copy = ranks.vars(world)?;
                    initialize(args, &config, &copy, weights.as_ref(), adapters.as_ref(), head, world)?;
                    copy.freeze(|_| true)?;
                    if let Some(adapters) = &adapters {
                        adapters.adapt(&copy)?;
                    }
                    let (checkpoints, dropout) = (CheckpointPolicy::none(), Dropout::default());
                    let options = ModelOptions { checkpoints, dropout, ..options };
                    Reference::Copy(Box::new(build(args, &config, &copy, options, ranks, head)?), copy)
                }
            };
            task.prefer(Preference { beta: args.dpo_beta.unwrap_or(DPO_BETA), reference, start });
        }
        Ok(Setup { config, vars, model, task, adapters })
    }
}

/// Returns whether the reference model of preference tuning is a copy. New adapters add nothing before the first step,
/// so the model without them is the reference.
pub(crate) fn has_reference_copy(args: &Args, has_adapters: bool) -> bool {
    args.dpo.is_some() && (!has_adapters || args.lora_from.is_some())
}

/// Sets the initial values of the next model's parameters.
fn initialize(
    args: &Args,
    config: &ModelConfig,
    vars: &ShardedVarMap,
    weights: Option<&Weights>,
    adapters: Option<&Adapters>,
    head: Head,
    world: &World,
) -> anyhow::Result<()> {
    let random = Philox::new(args.seed);
    let peft = adapters.and_then(|adapters| adapters.from.as_ref());
    let peft = peft.map(Peft::initializer).transpose()?;
    if let (Some(weights), Head::Classes(_)) = (weights, head)
        && world.rank() == 0
        && let Some(layer) = ["classifier", "score"].iter().find(|layer| is_head_of(config, layer))
        && !weights.contains(&format!("{layer}.weight"))
        && args.resume == Resume::None
    {
        let (seed, dir) = (args.seed, args.model.as_deref().unwrap_or(Path::new("")).display());
        Console::Stderr.line(format_args!("{dir} has no {layer}.weight: starting from a random one (seed {seed})"));
    }
    let is_new = move |name: &str| is_adapter(name) || (matches!(head, Head::Classes(_)) && is_classifier(name));
    match (weights.map(Weights::initializer), peft) {
        (None, None) => vars.init_with(random)?,
        (None, Some(peft)) => vars.init_with(Fallback::new(peft, random, |name| !is_adapter(name)))?,
        (Some(weights), None) => vars.init_with(Fallback::new(weights, random, is_new))?,
        (Some(weights), Some(peft)) => vars.init_with(Fallback::new(weights, peft, is_adapter))?,
    }
    Ok(())
}

/// Builds a model with the flags' sharding. `options.parallel` is set here.
fn build(
    args: &Args,
    config: &ModelConfig,
    vars: &ShardedVarMap,
    options: ModelOptions,
    ranks: Ranks,
    head: Head,
) -> anyhow::Result<FsdpModule<LanguageModel>> {
    parallel::place_experts(config, vars, ranks.expert_mesh(vars)?)?;
    let of_layers = ranks.tensor_mesh(vars)?;
    let parallel = of_layers.map(|mesh| TensorParallel::new(mesh, args.sequence_parallel)).transpose()?;
    let policy = MixedPrecisionPolicy {
        param_dtype: Some(args.param_dtype.dtype()),
        reduce_dtype: Some(args.reduce_dtype.dtype()),
        ..Default::default()
    };
    let (all_gather, base) = (args.all_gather, args.base);
    args.compute.apply(vars)?;
    if let Some(dir) = args.offload.disk_of_shards() {
        vars.store_on_disk(&StateOnDisk::new(dir)).context("--offload")?;
    }
    let opts = FullyShard::new(vars)
        .mp_policy(policy)
        .all_gather_extension(move |name| all_gather.extension(name))
        .store(move |name, shape| base.format(name, shape).filter(|_| !Adapters::trains(name, head)))
        .reshard_after_forward(args.reshard_after_forward)
        .shard_optimizer_over_replicas(args.shard_optimizer_over_replicas)
        .offload_policy(args.offload.policy());
    let model = models::build_with_head(config, &opts, vars, ModelOptions { parallel, ..options }, head)?;
    models::set_prefetch(&model, args.prefetch)?;
    let from_process_group = args.allocate_memory_from_process_group_for_comm;
    let set = model.set_allocate_memory_from_process_group_for_comm(from_process_group, Recurse::Yes);
    set.context("--allocate-memory-from-process-group-for-comm")?;
    Ok(model)
}

/// Opens the training data and the evaluation data.
fn data(
    args: &Args,
    config: &ModelConfig,
    text: &Text,
    context: Option<&ContextParallel>,
    world: &World,
) -> anyhow::Result<(Batches, Option<Evaluation>)> {
    let (masking, vocab_size) = (masking(args, config, text)?, config.vocab_size());
    let source = |flag: &'static str, path: Option<&Path>, shuffle: Option<u64>| match path {
        Some(path) if args.sft.is_some() => {
            let examples = Examples::load(path, args.model.as_deref(), text, args.seq_len, vocab_size).context(flag)?;
            anyhow::Ok(Source::Examples(examples, PackingOptions { packing: args.packed(), shuffle }))
        }
        Some(path) if args.dpo.is_some() => {
            let multiple = args.sequence_multiple();
            let options = PairOptions { seq_len: args.seq_len, vocab_size, multiple, shuffle };
            let pairs = Pairs::load(path, args.model.as_deref(), text, options).context(flag)?;
            Ok(Source::Pairs(pairs))
        }
        Some(path) => {
            let corpora = Corpora::find(path, args.corpus_options(vocab_size)).context(flag)?;
            if flag != EVAL {
                corpora.check_flags()?;
            }
            if corpora.are_plain().context(flag)? {
                return Ok(Source::Stream(Data::load(Some(path), text, vocab_size).context(flag)?, shuffle));
            }
            let model = args.model.as_deref();
            match flag {
                EVAL => Ok(Source::Evaluation(corpora.evaluate(text, model).context(flag)?)),
                _ => {
                    let corpus = corpora.train(text, model, shuffle, world.group().clone()).context(flag)?;
                    Ok(Source::Corpus(Box::new(corpus)))
                }
            }
        }
        None => Ok(Source::Stream(Data::load(None, text, vocab_size)?, shuffle)),
    };
    let shape = args.batch_shape(world)?;
    let (flag, path) = args.training_data();
    let batches = Batches::new(source(flag, path, args.shuffled().then_some(args.seed))?, shape)?.masked(masking);
    let evaluation = match args.eval.as_deref() {
        Some(path) => {
            let batches = Batches::for_evaluation(source(EVAL, Some(path), None)?, shape).context(EVAL)?;
            Some(Evaluation::new(args, batches.masked(masking), context.cloned()))
        }
        None => None,
    };
    Ok((batches, evaluation))
}

/// Returns the masking of a masked language model.
fn masking(args: &Args, config: &ModelConfig, text: &Text) -> anyhow::Result<Option<Masking>> {
    if !config.is_masked() {
        let flags =
            [("--mlm-probability", args.mlm_probability.is_some()), ("--mask-token", args.mask_token.is_some())];
        if let Some((flag, _)) = flags.iter().find(|(_, given)| *given) {
            bail!("{flag} is for masked language models (model type bert), found another model: leave it out");
        }
        return Ok(None);
    }
    if args.has_examples() {
        let (flag, _) = args.training_data();
        bail!("{flag} is for models that continue text, found a bert: pass text by --data");
    }
    let vocabulary = config.vocab_size();
    Ok(Some(Masking {
        probability: args.mlm_probability.unwrap_or(MLM_PROBABILITY),
        mask_token: mask_token(args.mask_token, args.model.as_deref(), text, vocabulary)?,
        vocabulary,
        seed: args.seed,
    }))
}

/// Returns the directory of the initial weights, or `None` if they are random.
pub(crate) fn pretrained(args: &Args) -> anyhow::Result<Option<&Path>> {
    let Some(dir) = args.model.as_deref().filter(|_| args.init != InitChoice::Random) else { return Ok(None) };
    let found =
        find_weights(dir).with_context(|| format!("{} (--init random draws weights instead)", cant_read(dir)))?;
    ensure!(
        found.is_some() || args.init != InitChoice::Pretrained,
        "--init pretrained: {} has no weights: expected model.safetensors, model.safetensors.index.json, \
         pytorch_model.bin or pytorch_model.bin.index.json; add one, or use --init random",
        dir.display()
    );
    Ok(found.map(|_| dir))
}

/// Opens the weights in `dir`.
fn open(dir: &Path, config: &mut ModelConfig, head: Head) -> anyhow::Result<Option<Weights>> {
    Weights::open(dir, config, head).with_context(|| cant_read(dir))
}

fn cant_read(dir: &Path) -> String {
    format!("can't read the weights in {}", dir.display())
}

/// Returns whether a classifier's layer has this name.
fn is_head_of(config: &ModelConfig, layer: &str) -> bool {
    (layer == "classifier") == matches!(config, ModelConfig::Bert(_))
}

/// Describes the inputs that this rank has read, for the comparison between ranks.
fn read_inputs(
    config: &ModelConfig,
    task: &dyn Task,
    weights: Option<&Weights>,
    adapters: Option<&Adapters>,
) -> anyhow::Result<Fields> {
    let weights = match weights {
        Some(weights) => weights.fingerprint().context("can't read the weights")?,
        None => "random".into(),
    };
    let mut read = agreement::fields("config.json's ", config)?;
    read.insert("the data".into(), task.summary());
    read.extend(task.inputs());
    read.insert(FIRST_WEIGHTS.into(), weights);
    if let Some(peft) = adapters.and_then(|adapters| adapters.from.as_ref()) {
        let print = models::fingerprint(&peft.weights);
        let path = peft.weights.path().display();
        read.insert(FIRST_ADAPTERS.into(), print.with_context(|| format!("can't read the weights in {path}"))?);
    }
    Ok(read)
}

/// Returns whether a run needs the tokens of each expert: for its biases, or for measurements, of which only rank 0 may have
/// the flags. Collective.
fn counts_expert_tokens(args: &Args, world: &World) -> anyhow::Result<bool> {
    let is_measured = args.metrics.is_some() || args.tensorboard.is_some();
    broadcast_result(world, 0, || Ok(is_measured || args.router_bias_rate.is_some()))
}

/// Returns the bytes of this rank's shards and gradients.
pub(crate) fn shard_bytes(vars: &ShardedVarMap) -> u64 {
    vars.params()
        .iter()
        .map(|param| {
            let copies = if param.trainable() { 2 } else { 1 };
            (copies * param.var().elem_count() * param.dtype().size_in_bytes()) as u64
        })
        .sum()
}
