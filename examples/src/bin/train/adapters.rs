//! LoRA adapters of a run: created from flags, or read and written in PEFT's format (`adapter_model.safetensors` and
//! `adapter_config.json`).

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, bail, ensure};
use fsdp_candle::ShardedVarMap;
use fsdp_candle::initializer::Pretrained;
use fsdp_candle::nn::{LoraConfig, is_adapter};
use fsdp_ckpt::hf::HfModel;
use fsdp_ckpt::{TensorShard, TensorSource};
use fsdp_train::input::read_text;
use fsdp_train::models::{Head, Lora, Targets, is_classifier};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::args::Args;
use crate::task::TextExport;

/// Maximal number of layers that an error lists.
const MAX_LISTED: usize = 16;

/// Adapters that a run trains.
pub(crate) struct Adapters {
    pub(crate) lora: Lora,
    /// Adapters to continue with (--lora-from).
    pub(crate) from: Option<Peft>,
    /// Layers of the model that can have adapters.
    layers: Arc<Mutex<BTreeSet<String>>>,
}

impl Adapters {
    /// Reads the flags. Returns `None` for a run without adapters.
    pub(crate) fn of(args: &Args) -> anyhow::Result<Option<Self>> {
        if let Some(dir) = &args.lora_from {
            let from = Peft::open(dir).with_context(|| format!("--lora-from {}", dir.display()))?;
            return Ok(Some(Adapters { lora: from.lora()?, from: Some(from), layers: Arc::default() }));
        }
        let Some(rank) = args.lora_rank else { return Ok(None) };
        let targets = match &args.lora_targets[..] {
            [] => Targets::queries_and_values(),
            patterns => Targets::new(patterns.iter().map(String::as_str)),
        };
        let config = LoraConfig { rank, alpha: args.lora_alpha.unwrap_or(2. * rank as f64) };
        let lora = Lora { config, targets: targets.context("--lora-targets")? };
        Ok(Some(Adapters { lora, from: None, layers: Arc::default() }))
    }

    /// Returns whether a run with adapters trains the parameter: an adapter, or the classifier.
    pub(crate) fn trains(name: &str, head: Head) -> bool {
        is_adapter(name) || matches!(head, Head::Classes(_)) && is_classifier(name)
    }

    /// Freezes the parameters of the next model except a classifier, and adds adapters to it.
    pub(crate) fn apply(&self, vars: &ShardedVarMap, head: Head) -> fsdp_candle::Result<()> {
        vars.freeze(move |name| !Adapters::trains(name, head))?;
        self.adapt(vars)
    }

    /// Adds adapters to the next model.
    pub(crate) fn adapt(&self, vars: &ShardedVarMap) -> fsdp_candle::Result<()> {
        let (targets, layers) = (self.lora.targets.clone(), self.layers.clone());
        vars.adapt(self.lora.config, move |layer| {
            layers.lock().unwrap_or_else(PoisonError::into_inner).insert(layer.to_string());
            targets.matches(layer)
        })
    }

    /// Fails unless the targets match layers of the model, and PEFT can load the adapters that are exported.
    pub(crate) fn check(&self, args: &Args, vars: &ShardedVarMap) -> anyhow::Result<()> {
        let adapted = vars.adapted();
        if let Some(from) = &self.from {
            return from.check(&adapted);
        }
        let idle = match args.lora_targets.is_empty() {
            true => None,
            false => self.lora.targets.unmatched(&adapted),
        };
        ensure!(
            idle.is_none() && !adapted.is_empty(),
            "--lora-targets: {} matches no fully connected layer of the model; it has {}",
            idle.map_or("the default".into(), |pattern| format!("`{pattern}`")),
            listed(&self.layers.lock().unwrap_or_else(PoisonError::into_inner))
        );
        let of_expert = adapted.iter().find(|layer| layer.contains(".experts."));
        if let (Some(layer), Some(_)) = (of_expert, &args.export_hf) {
            bail!(
                "--lora-targets: PEFT can't load the adapters of experts, such as {layer}, because transformers has one \
                 tensor for all of a layer's experts. Leave them out of --lora-targets, or train without --export-hf and \
                 merge the last checkpoint: fsdp-ckpt convert STEP DIR --to hf --lora-alpha ALPHA"
            );
        }
        Ok(())
    }
}

/// Lists layers, with `*` in place of their numbers.
fn listed(layers: &BTreeSet<String>) -> String {
    let mut names: Vec<String> = vec![];
    for layer in layers {
        let parts = layer.split('.').map(|part| if part.parse::<u64>().is_ok() { "*" } else { part });
        let name = parts.collect::<Vec<_>>().join(".");
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let more = names.len().saturating_sub(MAX_LISTED);
    names.truncate(MAX_LISTED);
    if more > 0 {
        names.push(format!("{more} more"));
    }
    names.join(", ")
}

/// File name of the weights.
pub(crate) const PEFT_WEIGHTS: &str = "adapter_model.safetensors";
const PEFT_CONFIG: &str = "adapter_config.json";
/// Prefix of parameter names in PEFT's files.
const PREFIX: &str = "base_model.model.";
const DOWN: &str = ".lora_A.weight";
const UP: &str = ".lora_B.weight";
/// Prefix of GPT-2's tensors in transformers, which GPT-2's own files often lack.
const GPT2: &str = "transformer.";

/// PEFT's task type of classifiers.
pub(crate) const CLASSIFIER_TASK: &str = "SEQ_CLS";

/// Selects the adapters, and the classifier of a run that trains one, and renames them as in PEFT's files.
pub(crate) fn adapter_tensors(tensors: Vec<TensorShard>, texts: Option<&TextExport>) -> Vec<TensorShard> {
    let has_classifier = texts.is_some_and(|texts| texts.peft_task == CLASSIFIER_TASK);
    let is_trained = |name: &str| is_adapter(name) || has_classifier && is_classifier(name);
    let adapters = tensors.into_iter().filter(|tensor| is_trained(&tensor.fqn));
    adapters.map(|tensor| TensorShard { fqn: peft_name(&tensor.fqn), ..tensor }).collect()
}

fn peft_name(name: &str) -> String {
    format!("{PREFIX}{}", transformers_name(name))
}

/// Returns the name of a parameter in transformers' model.
fn transformers_name(name: &str) -> String {
    if name.starts_with("h.") { format!("{GPT2}{name}") } else { name.into() }
}

/// Writes `adapter_config.json`.
pub(crate) fn write_peft_config(
    dir: &Path,
    config: LoraConfig,
    base: Option<&Path>,
    vars: &ShardedVarMap,
    texts: Option<&TextExport>,
) -> anyhow::Result<()> {
    let matrices = vars.params().into_iter().filter(|param| param.shape().rank() == 2);
    let layers: Vec<String> = matrices
        .filter(|param| !is_adapter(param.name()))
        .filter_map(|param| Some(param.name().strip_suffix(".weight")?.to_string()))
        .collect();
    let mut config = peft_config(config, base, &vars.adapted(), &layers);
    if let Some(texts) = texts {
        config["task_type"] = texts.peft_task.into();
        if texts.peft_task == CLASSIFIER_TASK {
            let saved = ["classifier", "score", "pooler"].into_iter();
            let is_there = |part: &&str| layers.iter().any(|layer| layer.split('.').any(|word| word == *part));
            config["modules_to_save"] = saved.filter(is_there).collect::<Vec<_>>().into();
        }
    }
    std::fs::write(dir.join(PEFT_CONFIG), format!("{config:#}\n"))
        .with_context(|| format!("can't write {}/{PEFT_CONFIG}", dir.display()))
}

/// `layers` lists all layers that PEFT's target names could match.
fn peft_config(config: LoraConfig, base: Option<&Path>, adapted: &[String], layers: &[String]) -> Value {
    let last = |layer: &str| layer.rsplit('.').next().unwrap_or_default().to_string();
    let adapted: BTreeSet<&String> = adapted.iter().collect();
    // Targets are the last part of the name, as in PEFT's own files, unless another layer has the same last part.
    let others: BTreeSet<String> =
        layers.iter().filter(|layer| !adapted.contains(layer)).map(|layer| last(layer)).collect();
    let target = |layer: &&String| match last(layer) {
        word if others.contains(&word) => transformers_name(layer),
        word => word,
    };
    let targets: BTreeSet<String> = adapted.iter().map(target).collect();
    let is_gpt2 = adapted.iter().any(|layer| transformers_name(layer).starts_with(GPT2));
    let mut values = json!({
        "peft_type": "LORA",
        "base_model_name_or_path": base.map(|path| path.display().to_string()),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": is_gpt2,
        "target_modules": targets,
    });
    // PEFT has no task type for masked language models.
    if !layers.iter().any(|layer| layer.starts_with("bert.")) {
        values["task_type"] = "CAUSAL_LM".into();
    }
    values
}

/// The fields of `adapter_config.json` that are read.
#[derive(Deserialize)]
struct PeftConfig {
    peft_type: String,
    r: usize,
    lora_alpha: f64,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Settings that do not change what adapters compute. Any other setting could mean more than `alpha / r * B A x`.
const IGNORED_SETTINGS: [&str; 18] = [
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "exclude_modules",
    // PEFT sets it by the type of each layer, whatever the file says.
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
];
/// Initialisations that keep the base model's weights. `gaussian` may have any case.
const ALLOWED_INITS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// Adapters in a directory.
pub(crate) struct Peft {
    config: LoraConfig,
    pub(crate) weights: HfModel,
    /// Names of the adapted layers in the file.
    layers: Vec<String>,
    /// Dropout of the adapters' inputs in PEFT's training.
    dropout: f64,
}

impl Peft {
    /// Opens a directory that PEFT or `--export-hf` wrote.
    pub(crate) fn open(dir: &Path) -> anyhow::Result<Self> {
        let file = dir.join(PEFT_CONFIG);
        let text = read_text(&file).with_context(|| format!("can't read {}", file.display()))?;
        let config: PeftConfig =
            serde_json::from_str(&text).with_context(|| format!("{} is not a LoRA configuration", file.display()))?;
        ensure!(config.peft_type == "LORA", "{}: peft_type is {:?}, not LORA", file.display(), config.peft_type);
        let is_set = |value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Object(values) => !values.is_empty(),
            Value::Array(values) => !values.is_empty(),
            _ => true,
        };
        for (key, value) in config.rest.iter().filter(|(key, _)| !IGNORED_SETTINGS.contains(&key.as_str())) {
            let (is_taken, why) = match key.as_str() {
                "bias" => (value.is_null() || value == "none", "train supports only bias \"none\""),
                "init_lora_weights" => (keeps_base_weights(value), UNSUPPORTED_INIT),
                _ => (
                    !is_set(value),
                    "train does not support it: merge the adapters into the model in PEFT, or create plain LoRA adapters",
                ),
            };
            ensure!(is_taken, "{}: {key} is {value}; {why}", file.display());
        }
        let weights = dir.join(PEFT_WEIGHTS);
        let weights = HfModel::open_file(&weights).with_context(|| format!("can't read {}", weights.display()))?;
        ensure!(
            weights.unreadable().is_empty(),
            "{} holds tensors of dtypes that are not read: {:?}",
            weights.path().display(),
            weights.unreadable()
        );
        let layers: Vec<String> = weights.tensors().keys().filter_map(|name| layer_of(name, DOWN)).collect();
        let other = weights.tensors().keys().find(|name| layer_of(name, DOWN).or_else(|| layer_of(name, UP)).is_none());
        ensure!(
            other.is_none(),
            "{} holds {}, which PEFT loads and train does not: merge the adapters into the model, or keep only adapters of \
             fully connected layers (save_embedding_layers=False leaves out what PEFT saves beside them)",
            weights.path().display(),
            other.map_or("", String::as_str)
        );
        ensure!(!layers.is_empty(), "{} holds no tensor {PREFIX}*{DOWN}", weights.path().display());
        let dropout = config.rest.get("lora_dropout").and_then(Value::as_f64).unwrap_or(0.);
        let config = LoraConfig { rank: config.r, alpha: config.lora_alpha };
        Ok(Peft { config, weights, layers, dropout })
    }

    /// Returns a warning about settings that train ignores, if any.
    pub(crate) fn warning(&self) -> Option<String> {
        let (dropout, file) = (self.dropout, self.weights.path().with_file_name(PEFT_CONFIG));
        let warning =
            || format!("{}: lora_dropout is {dropout}; train uses no dropout on adapter inputs", file.display());
        (dropout != 0.).then(warning)
    }

    /// Returns rank, alpha and target layers.
    pub(crate) fn lora(&self) -> anyhow::Result<Lora> {
        let names = self.layers.iter().map(|layer| layer.strip_prefix(GPT2).unwrap_or(layer));
        Ok(Lora { config: self.config, targets: Targets::new(names)? })
    }

    /// Returns an initialiser that reads the adapters.
    pub(crate) fn initializer(&self) -> anyhow::Result<Pretrained> {
        Ok(Pretrained::of(HfModel::open_file(self.weights.path())?, peft_name))
    }

    /// Fails unless the model's adapted layers include all layers of the file.
    pub(crate) fn check(&self, adapted: &[String]) -> anyhow::Result<()> {
        let adapted: BTreeSet<String> = adapted.iter().map(|layer| transformers_name(layer)).collect();
        let missing = self.layers.iter().find(|layer| !adapted.contains(&transformers_name(layer)));
        ensure!(
            missing.is_none(),
            "{} has an adapter of {}, which is not a fully connected layer of the model: pass the --model that it was \
             trained on",
            self.weights.path().display(),
            missing.map_or("", String::as_str)
        );
        Ok(())
    }
}

/// Reason to refuse other initialisations.
const UNSUPPORTED_INIT: &str = "with it, PEFT may replace weights of the base model when it loads adapters. Convert \
                                them by path_initial_model_for_weight_conversion of PEFT's save_pretrained, or use \
                                true, false, \"gaussian\", \"eva\" or \"orthogonal\"";

/// Returns whether PEFT keeps the base model's weights. It initialises adapters before it loads them.
fn keeps_base_weights(init_lora_weights: &Value) -> bool {
    match init_lora_weights {
        Value::Null | Value::Bool(_) => true,
        Value::String(name) => ALLOWED_INITS.contains(&name.as_str()) || name.eq_ignore_ascii_case(ALLOWED_INITS[0]),
        _ => false,
    }
}

/// Returns the layer that an adapter's matrix belongs to.
fn layer_of(name: &str, matrix: &str) -> Option<String> {
    Some(name.strip_prefix(PREFIX)?.strip_suffix(matrix)?.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fsdp_candle::World;
    use fsdp_ckpt::hf;
    use fsdp_core::Buffer;

    use super::*;

    fn config(adapted: &[&str], layers: &[&str]) -> Value {
        let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        peft_config(LoraConfig { rank: 8, alpha: 16. }, None, &names(adapted), &names(layers))
    }

    #[test]
    fn peft_configuration_is_complete() {
        let (q, k, other) = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "layers.1.q_proj");
        let all = config(&[q], &[q, k]);
        assert_eq!(
            (&all["r"], &all["fan_in_fan_out"], &all["task_type"]),
            (&json!(8), &json!(false), &json!("CAUSAL_LM"))
        );
        assert_eq!(all["target_modules"], json!(["q_proj"]));
        // Not every layer of the name has one.
        assert_eq!(config(&[q], &[q, k, other])["target_modules"], json!([q]));
        let gpt2 = config(&["h.0.attn.c_proj"], &["h.0.attn.c_proj", "h.0.mlp.c_proj"]);
        assert_eq!(gpt2["fan_in_fan_out"], true);
        assert_eq!(gpt2["target_modules"], json!(["transformer.h.0.attn.c_proj"]));
        let bert = config(&["bert.layer.0.query"], &["bert.layer.0.query"]);
        assert!(bert.get("task_type").is_none());
    }

    #[test]
    fn unsupported_adapters_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |text: Option<&str>| {
            let file = dir.path().join(PEFT_CONFIG);
            if let Some(text) = text {
                std::fs::write(&file, text).unwrap();
            }
            format!("{:#}", Peft::open(dir.path()).err().unwrap())
        };
        assert!(refused(None).contains("can't read"));
        for (text, expected) in [
            ("[", "is not a LoRA configuration"),
            (r#"{"peft_type": "LORA", "r": -1, "lora_alpha": 1}"#, "is not a LoRA configuration"),
            (r#"{"peft_type": "LOHA", "r": 1, "lora_alpha": 1}"#, r#"peft_type is "LOHA", not LORA"#),
        ] {
            let error = refused(Some(text));
            assert!(error.contains(expected), "{text}: {error}");
        }
        let with = |setting: &str| {
            refused(Some(&format!("{{\"peft_type\": \"LORA\", \"r\": 1, \"lora_alpha\": 1, {setting}}}")))
        };
        for setting in [
            r#""use_dora": true"#,
            r#""use_rslora": true"#,
            r#""rank_pattern": {"q": 2}"#,
            r#""alpha_pattern": {"q": 2}"#,
            r#""modules_to_save": ["lm_head"]"#,
            r#""ensure_weight_tying": true"#,
            r#""bias": "all""#,
            r#""bias": "lora_only""#,
            // A key of a later PEFT.
            r#""use_next": 0"#,
            r#""init_lora_weights": "pissa""#,
            r#""init_lora_weights": "pissa_niter_4""#,
            r#""init_lora_weights": "olora""#,
            r#""init_lora_weights": "OLoRA""#,
            r#""init_lora_weights": "corda""#,
            r#""init_lora_weights": "loftq""#,
            r#""init_lora_weights": "lora_ga""#,
            r#""init_lora_weights": "mica""#,
            r#""init_lora_weights": 1"#,
        ] {
            let (key, value) = setting.split_once(": ").unwrap();
            let (error, key) = (with(setting), key.trim_matches('"'));
            let value = value.replace(": ", ":");
            assert!(
                error.contains(&format!("{PEFT_CONFIG}: {key} is {value}; ")) && !error.contains(PEFT_WEIGHTS),
                "{error}"
            );
        }
        for setting in [
            r#""use_dora": false, "rank_pattern": {}, "modules_to_save": null, "layer_replication": []"#,
            r#""bias": "none", "lora_dropout": 0.1, "layers_to_transform": [1], "layers_pattern": "layers""#,
            r#""exclude_modules": ["q"], "fan_in_fan_out": true, "megatron_core": "megatron.core""#,
            r#""init_lora_weights": true"#,
            r#""init_lora_weights": false"#,
            r#""init_lora_weights": null"#,
            r#""init_lora_weights": "Gaussian""#,
            r#""init_lora_weights": "eva", "eva_config": {"rho": 2.0}"#,
            r#""init_lora_weights": "orthogonal""#,
        ] {
            let error = with(setting);
            assert!(error.contains(PEFT_WEIGHTS), "{setting}: {error}");
        }
    }

    #[test]
    fn files_with_other_tensors_are_refused() {
        let world = World::single().unwrap();
        let root = tempfile::tempdir().unwrap();
        let layer = "base_model.model.model.layers.0.self_attn.q_proj";
        let adapter = [format!("{layer}{DOWN}"), format!("{layer}{UP}")];
        let open = |number: usize, more: Option<&str>| {
            let dir = root.path().join(number.to_string());
            let tensor = |name: &str| TensorShard::whole(name, &[1, 1], Arc::new(Buffer::F32(vec![1.])));
            let tensors: Vec<_> = adapter.iter().map(String::as_str).chain(more).map(tensor).collect();
            hf::export(&dir, world.group(), &tensors, &[]).unwrap();
            std::fs::rename(dir.join("model.safetensors"), dir.join(PEFT_WEIGHTS)).unwrap();
            std::fs::write(dir.join(PEFT_CONFIG), r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1}"#).unwrap();
            Peft::open(&dir).map(|peft| peft.layers).map_err(|error| error.to_string())
        };
        assert_eq!(open(0, None).unwrap(), ["model.layers.0.self_attn.q_proj"]);
        for (number, more) in
            ["lm_head.weight", "model.layers.0.self_attn.q_proj.lora_B.bias", "model.embed_tokens.lora_embedding_A"]
                .into_iter()
                .enumerate()
        {
            let error = open(number + 1, Some(&format!("base_model.model.{more}"))).unwrap_err();
            assert!(error.contains(&format!("holds base_model.model.{more}, which PEFT loads")), "{error}");
        }
    }
}
