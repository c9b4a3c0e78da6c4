//! Files of exported classifiers and embedding models, as transformers and sentence-transformers write them.

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};

use crate::data::records::SINGLE_LABEL;
use crate::models::Pooling;

/// Names of transformers' classes by `model_type`: the start, and the class without a head.
const FAMILIES: [(&str, &str); 14] = [
    ("bert", "Bert"),
    ("deepseek_v2", "DeepseekV2"),
    ("deepseek_v3", "DeepseekV3"),
    ("gemma2", "Gemma2"),
    ("gemma3_text", "Gemma3Text"),
    ("gpt2", "GPT2"),
    ("gpt_oss", "GptOss"),
    ("llama", "Llama"),
    ("mistral", "Mistral"),
    ("mixtral", "Mixtral"),
    ("phi3", "Phi3"),
    ("qwen2", "Qwen2"),
    ("qwen3", "Qwen3"),
    ("qwen3_moe", "Qwen3Moe"),
];

fn with_architecture(config: &str, end: &str) -> Result<Map<String, Value>> {
    let mut config: Map<String, Value> = serde_json::from_str(config).context("config.json is not a JSON object")?;
    let family = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let Some((_, class)) = FAMILIES.iter().find(|(name, _)| *name == family) else {
        bail!("model_type \"{family}\" has no known class in transformers")
    };
    config.insert("architectures".into(), json!([format!("{class}{end}")]));
    Ok(config)
}

/// Returns the `config.json` of a classifier with these labels. `padding` is the padding token, if the configuration
/// names none.
pub fn classifier_config(config: &str, labels: &[String], padding: Option<u32>) -> Result<Value> {
    let mut config = with_architecture(config, "ForSequenceClassification")?;
    let names: Map<String, Value> = labels.iter().enumerate().map(|(id, name)| (id.to_string(), json!(name))).collect();
    let ids: Map<String, Value> = labels.iter().enumerate().map(|(id, name)| (name.clone(), json!(id))).collect();
    config.insert("num_labels".into(), json!(labels.len()));
    config.insert("id2label".into(), names.into());
    config.insert("label2id".into(), ids.into());
    config.insert("problem_type".into(), json!(SINGLE_LABEL));
    if let Some(padding) = padding
        && config.get("pad_token_id").is_none_or(Value::is_null)
    {
        config.insert("pad_token_id".into(), json!(padding));
    }
    Ok(config.into())
}

/// Returns the `config.json` of a model without a head.
pub fn embedding_config(config: &str) -> Result<Value> {
    Ok(with_architecture(config, "Model")?.into())
}

/// Returns the name that a parameter has in transformers' model of the same task.
pub fn exported_name(name: &str, is_embedding: bool) -> String {
    let without_head = ["bert.", "model.", "transformer."].iter().find_map(|prefix| name.strip_prefix(prefix));
    match without_head {
        Some(rest) if is_embedding => rest.into(),
        // GPT-2's own files have no prefix.
        None if !is_embedding && ["h.", "wte.", "wpe.", "ln_f."].iter().any(|start| name.starts_with(start)) => {
            format!("transformer.{name}")
        }
        _ => name.into(),
    }
}

/// Returns sentence-transformers' files besides the model: their paths and contents.
pub fn sentence_transformers_files(
    width: usize,
    pooling: Pooling,
    normalizes: bool,
    seq_len: usize,
) -> Vec<(&'static Path, Value)> {
    let module = |idx: usize, path: &str, class: &str| json!({ "idx": idx, "name": idx.to_string(), "path": path, "type": format!("sentence_transformers.models.{class}") });
    let mut modules = vec![module(0, "", "Transformer"), module(1, "1_Pooling", "Pooling")];
    if normalizes {
        modules.push(module(2, "2_Normalize", "Normalize"));
    }
    let mut pooling_config = json!({ "word_embedding_dimension": width, "include_prompt": true });
    for (flag, is_set) in pooling.flags() {
        pooling_config[flag] = is_set.into();
    }
    vec![
        (Path::new("modules.json"), modules.into()),
        (Path::new("1_Pooling/config.json"), pooling_config),
        (Path::new("sentence_bert_config.json"), json!({ "max_seq_length": seq_len, "do_lower_case": false })),
        (
            Path::new("config_sentence_transformers.json"),
            json!({ "prompts": {}, "default_prompt_name": null, "similarity_fn_name": "cosine" }),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations_name_class_and_labels() {
        let labels = ["neg".to_owned(), "pos".into()];
        let config =
            classifier_config(r#"{"model_type": "gemma3_text", "pad_token_id": null}"#, &labels, Some(3)).unwrap();
        assert_eq!(config["architectures"], json!(["Gemma3TextForSequenceClassification"]));
        assert_eq!(config["id2label"], json!({ "0": "neg", "1": "pos" }));
        assert_eq!(config["label2id"], json!({ "neg": 0, "pos": 1 }));
        assert_eq!((&config["num_labels"], &config["pad_token_id"]), (&json!(2), &json!(3)));
        let config = classifier_config(r#"{"model_type": "bert", "pad_token_id": 0}"#, &labels, Some(3)).unwrap();
        assert_eq!(config["pad_token_id"], 0);
        assert_eq!(embedding_config(r#"{"model_type": "bert"}"#).unwrap()["architectures"], json!(["BertModel"]));
        assert!(embedding_config(r#"{"model_type": "t5"}"#).unwrap_err().to_string().contains("\"t5\""));
    }

    #[test]
    fn names_are_those_of_transformers() {
        for (name, classifier, embedding) in [
            ("bert.pooler.dense.weight", "bert.pooler.dense.weight", "pooler.dense.weight"),
            ("classifier.bias", "classifier.bias", "classifier.bias"),
            ("model.norm.weight", "model.norm.weight", "norm.weight"),
            ("h.0.ln_1.weight", "transformer.h.0.ln_1.weight", "h.0.ln_1.weight"),
            ("transformer.wte.weight", "transformer.wte.weight", "wte.weight"),
            ("score.weight", "score.weight", "score.weight"),
        ] {
            assert_eq!((exported_name(name, false), exported_name(name, true)), (classifier.into(), embedding.into()));
        }
    }

    #[test]
    fn pooling_is_written_as_it_is_read() {
        for pooling in [Pooling::Mean, Pooling::Cls, Pooling::LastToken] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::create_dir(dir.path().join("1_Pooling")).unwrap();
            for (path, content) in sentence_transformers_files(8, pooling, true, 16) {
                std::fs::write(dir.path().join(path), content.to_string()).unwrap();
            }
            assert_eq!(Pooling::from_dir(dir.path()).unwrap(), Some(pooling));
            assert!(crate::models::normalizes(dir.path()).unwrap());
        }
    }
}
