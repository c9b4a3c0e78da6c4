//! Adapters on disk, as PEFT reads them: `adapter_model.safetensors` and `adapter_config.json`.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Context;
use fsdp_candle::ShardedVarMap;
use fsdp_candle::nn::{LoraConfig, is_adapter};
use fsdp_ckpt::TensorShard;
use serde_json::{Value, json};

/// PEFT's name for the file of weights.
pub(crate) const WEIGHTS: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";

/// The adapters alone, by their names in PEFT's files.
pub(crate) fn of(tensors: Vec<TensorShard>) -> Vec<TensorShard> {
    let adapters = tensors.into_iter().filter(|tensor| is_adapter(&tensor.fqn));
    adapters
        .map(|tensor| TensorShard { fqn: format!("base_model.model.{}", in_transformers(&tensor.fqn)), ..tensor })
        .collect()
}

/// Writes what PEFT wants to know about the adapters of a model.
pub(crate) fn write_config(
    dir: &Path,
    config: LoraConfig,
    base: Option<&Path>,
    vars: &ShardedVarMap,
) -> anyhow::Result<()> {
    let names: Vec<String> = vars.params().iter().map(|param| param.name().to_string()).collect();
    let config = peft_config(config, base, &names);
    std::fs::write(dir.join(CONFIG), format!("{config:#}\n"))
        .with_context(|| format!("can't write {}/{CONFIG}", dir.display()))
}

/// The name of a parameter in transformers' `GPT2LMHeadModel`, whatever the base model's file says.
fn in_transformers(name: &str) -> String {
    if name.starts_with("h.") { format!("transformer.{name}") } else { name.into() }
}

fn peft_config(config: LoraConfig, base: Option<&Path>, names: &[String]) -> Value {
    let targets: BTreeSet<&str> = names
        .iter()
        .filter_map(|name| name.strip_suffix(".lora_A.weight"))
        .map(|layer| layer.rsplit('.').next().unwrap_or(layer))
        .collect();
    // PEFT has no word for masked language models, and asks for none.
    let is_bert = names.iter().any(|name| name.starts_with("bert."));
    json!({
        "peft_type": "LORA",
        "task_type": if is_bert { None } else { Some("CAUSAL_LM") },
        "base_model_name_or_path": base.map(|path| path.display().to_string()),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": targets.contains("c_attn"),
        "target_modules": targets,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_says_what_peft_asks_for() {
        let names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.lora_A.weight"];
        let config = peft_config(LoraConfig { rank: 8, alpha: 16. }, None, &names.map(String::from));
        assert_eq!((&config["r"], &config["fan_in_fan_out"]), (&json!(8), &json!(false)));
        assert_eq!(config["target_modules"], json!(["q_proj"]));
        assert_eq!(config["task_type"], "CAUSAL_LM");
        let names = ["query", "value"].map(|name| format!("bert.encoder.layer.0.attention.self.{name}.lora_A.weight"));
        let config = peft_config(LoraConfig { rank: 8, alpha: 16. }, None, &names);
        assert_eq!((&config["task_type"], &config["target_modules"]), (&Value::Null, &json!(["query", "value"])));
        let config = peft_config(LoraConfig { rank: 8, alpha: 16. }, None, &["h.0.attn.c_attn.lora_A.weight".into()]);
        assert_eq!(config["fan_in_fan_out"], true);
        assert_eq!(in_transformers("h.0.attn.c_attn.lora_A.weight"), "transformer.h.0.attn.c_attn.lora_A.weight");
    }
}
