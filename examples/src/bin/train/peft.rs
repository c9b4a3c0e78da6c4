//! Adapters on disk, as PEFT has them: `adapter_model.safetensors` and `adapter_config.json`.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, ensure};
use fsdp_candle::ShardedVarMap;
use fsdp_candle::initializer::Pretrained;
use fsdp_candle::nn::{LoraConfig, is_adapter};
use fsdp_ckpt::hf::HfModel;
use fsdp_ckpt::{TensorShard, TensorSource};
use fsdp_examples::models::{Lora, Targets};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// PEFT's name for the file of weights.
pub(crate) const WEIGHTS: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";
/// What PEFT writes before the name that a parameter has in transformers' model.
const PREFIX: &str = "base_model.model.";
const DOWN: &str = ".lora_A.weight";
/// What transformers' models with a head write before the names of GPT-2's own tensors, and GPT-2's files often do not.
const GPT2: &str = "transformer.";

/// The adapters alone, by their names in PEFT's files.
pub(crate) fn of(tensors: Vec<TensorShard>) -> Vec<TensorShard> {
    let adapters = tensors.into_iter().filter(|tensor| is_adapter(&tensor.fqn));
    adapters.map(|tensor| TensorShard { fqn: in_peft(&tensor.fqn), ..tensor }).collect()
}

fn in_peft(name: &str) -> String {
    format!("{PREFIX}{}", in_transformers(name))
}

/// The name of a parameter in transformers' model, whatever the base model's file says.
fn in_transformers(name: &str) -> String {
    if name.starts_with("h.") { format!("{GPT2}{name}") } else { name.into() }
}

/// Writes what PEFT wants to know about the adapters of a model.
pub(crate) fn write_config(
    dir: &Path,
    config: LoraConfig,
    base: Option<&Path>,
    vars: &ShardedVarMap,
) -> anyhow::Result<()> {
    let matrices = vars.params().into_iter().filter(|param| param.shape().rank() == 2);
    let layers: Vec<String> = matrices
        .filter(|param| !is_adapter(param.name()))
        .filter_map(|param| Some(param.name().strip_suffix(".weight")?.to_string()))
        .collect();
    let config = config_of(config, base, &vars.adapted(), &layers);
    std::fs::write(dir.join(CONFIG), format!("{config:#}\n"))
        .with_context(|| format!("can't write {}/{CONFIG}", dir.display()))
}

/// `layers` are all that PEFT may take for adapted ones, too.
fn config_of(config: LoraConfig, base: Option<&Path>, adapted: &[String], layers: &[String]) -> Value {
    let last = |layer: &str| layer.rsplit('.').next().unwrap_or_default().to_string();
    let adapted: BTreeSet<&String> = adapted.iter().collect();
    // By the last word where that means no other layer, as PEFT's own files do.
    let others: BTreeSet<String> =
        layers.iter().filter(|layer| !adapted.contains(layer)).map(|layer| last(layer)).collect();
    let target = |layer: &&String| match last(layer) {
        word if others.contains(&word) => in_transformers(layer),
        word => word,
    };
    let targets: BTreeSet<String> = adapted.iter().map(target).collect();
    let is_gpt2 = adapted.iter().any(|layer| in_transformers(layer).starts_with(GPT2));
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
    // PEFT has no word for a masked language model.
    if !layers.iter().any(|layer| layer.starts_with("bert.")) {
        values["task_type"] = "CAUSAL_LM".into();
    }
    values
}

/// What counts of PEFT's `adapter_config.json`.
#[derive(Deserialize)]
struct PeftConfig {
    peft_type: String,
    r: usize,
    lora_alpha: f64,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Settings with which an adapter is more, or something else, than `alpha / r * B A x`.
const UNUSUAL: [&str; 18] = [
    "use_dora",
    "use_rslora",
    "use_qalora",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "megatron_config",
    "corda_config",
    "use_bdlora",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "arrow_config",
    "alora_invocation_tokens",
];

/// Adapters in a directory.
pub(crate) struct Peft {
    config: LoraConfig,
    weights: HfModel,
    /// The layers that have one, by their names in the file.
    layers: Vec<String>,
}

impl Peft {
    /// Opens a directory that PEFT or `--export-hf` has written.
    pub(crate) fn open(dir: &Path) -> anyhow::Result<Self> {
        let file = dir.join(CONFIG);
        let text = std::fs::read_to_string(&file).with_context(|| format!("can't read {}", file.display()))?;
        let config: PeftConfig = serde_json::from_str(&text)
            .with_context(|| format!("{} is no configuration of low-rank adapters", file.display()))?;
        ensure!(config.peft_type == "LORA", "{}: peft_type is {:?}, not LORA", file.display(), config.peft_type);
        let is_set = |value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Object(values) => !values.is_empty(),
            Value::Array(values) => !values.is_empty(),
            _ => true,
        };
        for key in UNUSUAL {
            let value = config.rest.get(key).unwrap_or(&Value::Null);
            ensure!(!is_set(value), "{}: {key} is {value}, which train does not have", file.display());
        }
        let bias = config.rest.get("bias").unwrap_or(&Value::Null);
        ensure!(
            bias.is_null() || bias == "none",
            "{}: bias is {bias}; train keeps biases as they are, as with \"none\"",
            file.display()
        );
        let weights = dir.join(WEIGHTS);
        let weights = HfModel::open_file(&weights).with_context(|| format!("can't read {}", weights.display()))?;
        let layers: Vec<String> = weights.tensors().keys().filter_map(|name| layer_of(name)).collect();
        ensure!(!layers.is_empty(), "{} holds no tensor {PREFIX}*{DOWN}", weights.path().display());
        let config = LoraConfig { rank: config.r, alpha: config.lora_alpha };
        Ok(Peft { config, weights, layers })
    }

    /// How large the adapters are, and whose.
    pub(crate) fn lora(&self) -> anyhow::Result<Lora> {
        let names = self.layers.iter().map(|layer| layer.strip_prefix(GPT2).unwrap_or(layer));
        Ok(Lora { config: self.config, targets: Targets::new(names)? })
    }

    /// The weights.
    pub(crate) fn weights(&self) -> &HfModel {
        &self.weights
    }

    /// The adapters' first values.
    pub(crate) fn initializer(&self) -> anyhow::Result<Pretrained> {
        Ok(Pretrained::of(HfModel::open_file(self.weights.path())?, in_peft))
    }

    /// Fails unless these layers of the model are those of the file.
    pub(crate) fn check(&self, adapted: &[String]) -> anyhow::Result<()> {
        let adapted: BTreeSet<String> = adapted.iter().map(|layer| in_transformers(layer)).collect();
        let missing = self.layers.iter().find(|layer| !adapted.contains(&in_transformers(layer)));
        ensure!(
            missing.is_none(),
            "{} has an adapter of {}, which is no fully connected layer of the model: pass the --model that it was \
             trained on",
            self.weights.path().display(),
            missing.map_or("", String::as_str)
        );
        Ok(())
    }
}

/// The layer, if it is the name of an adapter's first matrix.
fn layer_of(name: &str) -> Option<String> {
    Some(name.strip_prefix(PREFIX)?.strip_suffix(DOWN)?.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(adapted: &[&str], layers: &[&str]) -> Value {
        let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        config_of(LoraConfig { rank: 8, alpha: 16. }, None, &names(adapted), &names(layers))
    }

    #[test]
    fn the_configuration_says_what_peft_asks_for() {
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
    fn a_directory_that_is_none_or_has_more_than_plain_adapters_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |text: Option<&str>| {
            let file = dir.path().join(CONFIG);
            if let Some(text) = text {
                std::fs::write(&file, text).unwrap();
            }
            format!("{:#}", Peft::open(dir.path()).err().unwrap())
        };
        assert!(refused(None).contains("can't read"));
        for (text, expected) in [
            ("[", "is no configuration of low-rank adapters"),
            (r#"{"peft_type": "LORA", "r": -1, "lora_alpha": 1}"#, "is no configuration of low-rank adapters"),
            (r#"{"peft_type": "LOHA", "r": 1, "lora_alpha": 1}"#, r#"peft_type is "LOHA", not LORA"#),
            (r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "use_dora": true}"#, "use_dora is true"),
            (r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "rank_pattern": {"q": 2}}"#, "rank_pattern is"),
            (r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "bias": "all"}"#, r#"bias is "all""#),
            (r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "use_dora": false}"#, WEIGHTS),
        ] {
            let error = refused(Some(text));
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
