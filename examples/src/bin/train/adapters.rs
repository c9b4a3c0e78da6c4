//! Adapters on disk, as PEFT reads them: `adapter_model.safetensors` and `adapter_config.json`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use fsdp_candle::nn::{LoraConfig, is_adapter};
use fsdp_candle::{ShardedVarMap, StateDictOptions, World, get_model_state_dict};
use fsdp_ckpt::{TensorShard, hf};
use serde_json::{Value, json};

const WEIGHTS: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";

/// Writes the adapters alone. Collective.
pub(crate) fn export(
    dir: &Path,
    config: LoraConfig,
    base: Option<&PathBuf>,
    world: &World,
    vars: &ShardedVarMap,
) -> anyhow::Result<()> {
    let weights = dir.join(WEIGHTS);
    ensure!(!weights.exists(), "{} exists already: export to another directory, or move it away", weights.display());
    let tensors: Vec<TensorShard> = get_model_state_dict(vars, &StateDictOptions::default())?
        .shards("")
        .into_iter()
        .filter(|tensor| is_adapter(&tensor.fqn))
        .map(|tensor| TensorShard { fqn: format!("base_model.model.{}", in_transformers(&tensor.fqn)), ..tensor })
        .collect();
    let names: Vec<String> = vars.params().iter().map(|param| param.name().to_string()).collect();
    hf::export(dir, world.group().as_ref(), &tensors, &[])
        .with_context(|| format!("can't export the adapters to {}", dir.display()))?;
    if world.rank() == 0 {
        std::fs::rename(dir.join("model.safetensors"), &weights)
            .with_context(|| format!("can't name {}", weights.display()))?;
        let config = peft_config(config, base.map(PathBuf::as_path), &names);
        std::fs::write(dir.join(CONFIG), format!("{config:#}\n"))
            .with_context(|| format!("can't write {}/{CONFIG}", dir.display()))?;
    }
    Ok(())
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
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
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
        let config = peft_config(LoraConfig { rank: 8, alpha: 16. }, None, &["h.0.attn.c_attn.lora_A.weight".into()]);
        assert_eq!(config["fan_in_fan_out"], true);
        assert_eq!(in_transformers("h.0.attn.c_attn.lora_A.weight"), "transformer.h.0.attn.c_attn.lora_A.weight");
    }
}
