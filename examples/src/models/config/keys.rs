//! Keys of `config.json` that no configuration holds: refused where they change a model, and known or unknown otherwise.

use anyhow::ensure;
use serde_json::{Map, Value};

use crate::models::config::fields::RopeParameters;
use crate::models::config::gpt2::GENERAL_NAMES;

/// Keys that transformers reads and that do not change a model's training: how to load and run it, what `generate` does,
/// and names of classes, which `--task classify` reads.
const WITHOUT_EFFECT: [&str; 36] = [
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "cache_implementation",
    // Computes an MLP in parts, with the same result.
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "experts_implementation",
    "id2label",
    "label2id",
    "n_ctx",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    // A setting of an old tensor parallelism in transformers.
    "pretraining_tp",
    "problem_type",
    // The sum of two other sizes.
    "qk_head_dim",
    // Files of weights describe their format themselves.
    "quantization_config",
    "return_dict",
    "sep_token_id",
    // GPT-2's heads with a second classifier.
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
];

/// Fails for a key that changes the model in a way that is not supported.
pub(super) fn check(family: &str, keys: &Map<String, Value>) -> anyhow::Result<()> {
    let encoder_decoder = keys.get("is_encoder_decoder").is_some_and(|value| *value != Value::Bool(false));
    ensure!(!encoder_decoder, "is_encoder_decoder = {} is not supported; expected false", keys["is_encoder_decoder"]);
    let is_empty = |value: &Value| value.is_null() || value.as_object().is_some_and(Map::is_empty);
    ensure!(
        keys.get("per_layer_config").is_none_or(is_empty),
        "per_layer_config is not supported: all layers have the same configuration"
    );
    if family == "gpt2" {
        ensure!(
            keys.get("add_cross_attention").is_none_or(|value| *value == Value::Bool(false)),
            "add_cross_attention = {} is not supported for GPT-2; expected false",
            keys["add_cross_attention"]
        );
    }
    Ok(())
}

/// Returns the keys that neither `fields`, those of the parsed configuration, nor transformers know.
pub(super) fn unknown(fields: &Value, keys: &Map<String, Value>) -> Vec<String> {
    let is_known = |key: &str| {
        fields.get(key).is_some()
            || WITHOUT_EFFECT.contains(&key)
            || ["model_type", "pad_token_id", "is_encoder_decoder", "per_layer_config", "add_cross_attention"]
                .contains(&key)
            || GENERAL_NAMES.iter().any(|(other, _)| *other == key)
            || ["_attn_implementation", "_sliding_window_pattern"].contains(&key)
    };
    let mut unknown: Vec<String> = keys.keys().filter(|key| !is_known(key)).cloned().collect();
    for name in ["rope_scaling", "rope_parameters"] {
        if let Some(own) = keys.get(name).and_then(Value::as_object) {
            unknown_of_rope(own, name, &mut unknown);
        }
    }
    unknown
}

/// Adds the keys of a rotary embedding that are not known.
fn unknown_of_rope(keys: &Map<String, Value>, name: &str, unknown: &mut Vec<String>) {
    let known = serde_json::to_value(RopeParameters::default()).unwrap_or_default();
    for (key, value) in keys {
        let path = format!("{name}.{key}");
        match (known.get(key), value) {
            // Gemma 3 has one for each kind of layer.
            (Some(_), Value::Object(inner)) => unknown_of_rope(inner, &path, unknown),
            (Some(_), _) => {}
            (None, _) => unknown.push(path),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::models::ModelConfig;

    /// Keys that transformers has in a family's class, and whose models do not read.
    const OF_FAMILY_WITHOUT_EFFECT: [(&str, &[&str]); 7] = [
        ("_sliding_window_pattern", &["gemma3_text"]),
        ("layer_types", &["qwen3_moe"]),
        ("max_window_layers", &["qwen3_moe"]),
        ("pad_token_id", &["gpt2"]),
        ("partial_rotary_factor", &["gpt2", "bert"]),
        ("rope_scaling", &["gpt2", "bert"]),
        ("rope_theta", &["gpt2", "bert"]),
    ];

    fn base(family: &str) -> Value {
        match family {
            "gpt2" => json!({"n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 16, "vocab_size": 16}),
            "bert" => {
                json!({"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 8,
                "vocab_size": 16})
            }
            "deepseek_v2" | "deepseek_v3" => {
                json!({"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2,
                "intermediate_size": 8, "moe_intermediate_size": 8, "vocab_size": 16, "n_routed_experts": 8,
                "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2})
            }
            _ => json!({"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
                "intermediate_size": 8, "moe_intermediate_size": 8, "vocab_size": 16, "pad_token_id": 0,
                "head_dim": 4}),
        }
    }

    /// Returns the configuration without the file's fields, or the error.
    fn resolved(config: &Value) -> Result<String, String> {
        let config = ModelConfig::parse(&config.to_string()).map_err(|error| format!("{error:#}"))?;
        let text = format!("{config:?}");
        Ok(match &config {
            ModelConfig::Decoder(_) => text.split_once(", width: ").expect("the width").1.to_string(),
            _ => text,
        })
    }

    /// `tests/golden/config_keys.py` recorded the keys that transformers reads for each family.
    #[test]
    fn every_key_of_transformers_is_applied_refused_or_without_effect() {
        let recorded: Value = serde_json::from_str(include_str!("../../../../tests/golden/config_keys.json")).unwrap();
        let others = [
            json!(true),
            json!(false),
            json!(null),
            json!(1),
            json!(2),
            json!(3),
            json!(0.25),
            json!("gelu"),
            json!("relative_key"),
            json!({"0": {"head_dim": 2}}),
            json!({"rope_type": "linear", "factor": 2.0}),
            json!(["sliding_attention", "sliding_attention"]),
            json!([0]),
        ];
        let mut unknown = vec![];
        for (family, keys) in recorded["families"].as_object().unwrap() {
            for key in keys.as_array().unwrap().iter().map(|key| key.as_str().unwrap()) {
                // Experts, windows and the sliding rotary embedding are used only beside other keys.
                let mut known = base(family);
                known["model_type"] = json!(family);
                let more: &[(&str, Value)] = match key {
                    "sliding_window" | "max_window_layers" => &[("use_sliding_window", json!(true))],
                    "layer_types" | "use_sliding_window" => {
                        &[("use_sliding_window", json!(true)), ("sliding_window", json!(4))]
                    }
                    "router_aux_loss_coef" => &[("output_router_logits", json!(true))],
                    "n_group" | "topk_group" if family == "deepseek_v2" => {
                        &[("topk_method", json!("group_limited_greedy"))]
                    }
                    "num_local_experts" => &[("num_experts_per_tok", json!(1))],
                    "original_max_position_embeddings" => {
                        let factors = json!([1.0, 1.0]);
                        let long = json!({"rope_type": "longrope", "short_factor": factors, "long_factor": factors});
                        &[("original_max_position_embeddings", json!(4)), ("rope_scaling", long)]
                    }
                    "partial_rotary_factor" => &[("rope_scaling", json!({"rope_type": "linear", "factor": 2.0}))],
                    _ => &[],
                };
                more.iter().for_each(|(key, value)| known[*key] = value.clone());
                let usual = resolved(&known).unwrap_or_else(|error| panic!("{family}: {error}"));
                let outcomes = others.iter().map(|value| {
                    let mut changed = known.clone();
                    changed[key] = value.clone();
                    resolved(&changed)
                });
                let has_effect = outcomes.into_iter().any(|outcome| match outcome {
                    Ok(other) => other != usual,
                    Err(error) => error.contains(key),
                });
                let is_without = WITHOUT_EFFECT.contains(&key)
                    || OF_FAMILY_WITHOUT_EFFECT.iter().any(|(other, of)| *other == key && of.contains(&&**family));
                if has_effect == is_without {
                    unknown.push(format!("{family}: {key} has {}an effect", if has_effect { "" } else { "not " }));
                }
            }
        }
        assert!(unknown.is_empty(), "{unknown:#?}");
    }

    #[test]
    fn unknown_keys_are_named() {
        let mut config = base("llama");
        (config["model_type"], config["rope_thetaa"], config["use_cache"]) = (json!("llama"), json!(1.0), json!(true));
        let parsed = serde_json::to_value(ModelConfig::parse(&config.to_string()).unwrap()).unwrap();
        assert_eq!(unknown(&parsed, config.as_object().unwrap()), ["rope_thetaa"]);
        config["rope_scaling"] = json!({"rope_type": "linear", "factor": 2.0, "factr": 1.0});
        assert_eq!(unknown(&parsed, config.as_object().unwrap()), ["rope_thetaa", "rope_scaling.factr"]);
    }

    #[test]
    fn keys_that_change_the_model_are_refused() {
        for (family, key, value) in [
            ("llama", "is_encoder_decoder", json!(true)),
            ("bert", "per_layer_config", json!({"1": {"num_attention_heads": 1}})),
            ("gpt2", "add_cross_attention", json!(true)),
        ] {
            let mut config = base(family);
            (config["model_type"], config[key]) = (json!(family), value);
            let error = ModelConfig::parse(&config.to_string()).unwrap_err().to_string();
            assert!(error.contains(key), "{error}");
        }
    }
}
