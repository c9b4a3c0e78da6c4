//! Weights in model directories: their names in the model, and fingerprints.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use crc_fast::{CrcAlgorithm, Digest};
use fsdp_candle::initializer::Pretrained;
use fsdp_ckpt::hf::{ExpertNames, Part, Renamed, SplitExperts, same_values, unfused};
use fsdp_ckpt::{TensorSource, open_weights};
use fsdp_core::layout::Region;

use crate::models::config::ModelConfig;
use crate::models::config::experts::ExpertsConfig;
use crate::models::heads::Head;

/// Maximal number of elements per row in a fingerprint.
const WIDTH: usize = 256;

/// Describes weights by their count, and a checksum of names, dtypes, shapes and samples from the first, middle and
/// last row of each tensor. Reads only these samples.
pub fn fingerprint(weights: &dyn TensorSource) -> anyhow::Result<String> {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    for (name, entry) in weights.tensors() {
        digest.update(format!("{name} {} {:?}\n", entry.dtype, entry.shape).as_bytes());
        for region in pieces(&entry.shape) {
            let mut bytes = vec![0; region.elements() * entry.dtype.size()];
            weights.read(name, &region, &mut bytes).with_context(|| format!("can't read {name}"))?;
            digest.update(&bytes);
        }
    }
    Ok(format!("{} tensors with checksum {:016x}", weights.tensors().len(), digest.finalize()))
}

/// Returns the sampled parts of the first, middle and last row.
fn pieces(shape: &[usize]) -> impl Iterator<Item = Region> {
    let last = shape.len().saturating_sub(1);
    let sizes: Vec<usize> =
        shape.iter().enumerate().map(|(dim, &size)| size.min(if dim == last { WIDTH } else { 1 })).collect();
    (0..3).map(move |third| Region {
        offsets: shape.iter().zip(&sizes).map(|(size, piece)| (size - piece) * third / 2).collect(),
        sizes: sizes.clone(),
    })
}

/// Ends of names, new and old.
const OLD: [(&str, &str); 2] = [("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")];

/// Starts of names in files of a model without a head, such as `BertModel` and `LlamaModel`, and the prefix that the
/// same names have in a model with a head.
const WITHOUT_HEAD: [(&str, &str); 6] = [
    ("embeddings.", "bert."),
    ("encoder.layer.", "bert."),
    ("pooler.dense.", "bert."),
    ("embed_tokens.", "model."),
    ("layers.", "model."),
    ("norm.", "model."),
];

/// Starts of the names of output layers, of any task.
const OUTPUTS: [&str; 7] =
    ["lm_head.", "cls.", "score.", "classifier.", "qa_outputs.", "multiple_choice_head.", "bert.pooler."];

/// Names that an error lists.
const LISTED: usize = 4;

/// Weights in a model directory, under the names of the model's parameters.
pub struct Weights {
    source: Arc<Renamed<Box<dyn TensorSource>>>,
    /// Warnings about the file.
    warnings: Vec<String>,
}

impl Weights {
    /// Opens the weights in a model directory: safetensors, or `pytorch_model.bin`. As transformers does, accepts the
    /// names in the first BERT files, where a norm's `weight` and `bias` are `gamma` and `beta`, names of models without
    /// a head, fused experts, and a file with either of two tied weights. If the file has both with different values,
    /// unties them in `config`. `None` for a directory without weights.
    pub fn open(dir: &Path, config: &mut ModelConfig, head: Head) -> anyhow::Result<Option<Self>> {
        let Some(source) = open_weights(dir)? else { return Ok(None) };
        Ok(Some(Self::of(source, config, head)?))
    }

    fn of(source: Box<dyn TensorSource>, config: &mut ModelConfig, head: Head) -> anyhow::Result<Self> {
        let split = match config {
            ModelConfig::Decoder(config) => config.experts.as_ref().filter(|it| it.names == ExpertNames::GPT_OSS),
            _ => None,
        };
        let source: Box<dyn TensorSource> = match split {
            Some(experts) => Box::new(SplitExperts::new(source, experts.count)?),
            None => source,
        };
        let mut parts = match config {
            ModelConfig::Decoder(config) => {
                let unfused = |experts: &ExpertsConfig| unfused(&*source, experts.names, experts.count);
                config.experts.as_ref().map(unfused).transpose()?
            }
            _ => None,
        }
        .unwrap_or_else(|| {
            let names = source.tensors().keys().chain(source.unreadable().keys());
            names.map(|name| (name.clone(), Part::whole(name))).collect()
        });
        let old: Vec<(String, String)> =
            parts.keys().filter_map(|name| Some((name.clone(), now_called(name)?))).collect();
        for (name, new) in old {
            if !parts.contains_key(&new)
                && let Some(part) = parts.remove(&name)
            {
                parts.insert(new, part);
            }
        }
        let mut warnings = Vec::new();
        for (own, shared) in tied(config, &parts) {
            match (parts.contains_key(&own), parts.get(&shared).cloned()) {
                (true, Some(_)) if head != Head::Vocabulary => {
                    parts.remove(&own);
                }
                (true, Some(part)) => {
                    if same_values(&*source, &parts[&own].tensor, &part.tensor)? {
                        parts.remove(&own);
                    } else {
                        warnings.push(untie(config, source.path(), &own, &shared)?);
                    }
                }
                (true, None) => {
                    let part = parts.remove(&own);
                    parts.extend(part.map(|part| (shared, part)));
                }
                (false, _) => {}
            }
        }
        let outputs = parts.keys().filter(|name| is_other_output(name, config, head));
        let outputs: Vec<String> = outputs.cloned().collect();
        if !outputs.is_empty() {
            let (path, names) = (source.path().display(), listed(outputs.iter()));
            warnings.push(format!("{path} has the output layers of another task, which are left out: {names}"));
        }
        let further: Vec<String> = parts.keys().filter(|name| predicts_further(name, config)).cloned().collect();
        if !further.is_empty() {
            let (path, names) = (source.path().display(), listed(further.iter()));
            warnings.push(format!(
                "{path} has layers that predict further tokens, which are left out of training and exports: {names}"
            ));
        }
        let left_out = |name: &String| outputs.contains(name) || further.contains(name) || is_ignored(name, config);
        parts.retain(|name, _| !left_out(name));
        Ok(Weights { source: Arc::new(Renamed::new(source, parts)?), warnings })
    }

    /// Returns an initializer that reads the weights.
    pub fn initializer(&self) -> Pretrained {
        Pretrained::of(Arc::clone(&self.source), |name| name.into())
    }

    /// Returns whether the weights have a parameter.
    pub fn contains(&self, name: &str) -> bool {
        self.source.tensors().contains_key(name)
    }

    /// Returns warnings about differences between the weights and `config.json`.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Returns the fingerprint of the files.
    pub fn fingerprint(&self) -> anyhow::Result<String> {
        fingerprint(self.source.source())
    }

    /// Fails if the weights have tensors that the model lacks. `parameters` lists the model's.
    pub fn check_all_used<'a>(&self, parameters: impl Iterator<Item = &'a str>) -> anyhow::Result<()> {
        let parameters: BTreeSet<&str> = parameters.collect();
        let names = self.source.tensors().keys().chain(self.source.unreadable().keys());
        let unused = names.filter(|name| !parameters.contains(name.as_str()));
        ensure!(
            unused.clone().next().is_none(),
            "{} has tensors that its config.json does not announce, so that training would leave them out: {}. Use the \
             config.json that belongs to these weights, or remove the tensors from the file",
            self.source.path().display(),
            listed(unused)
        );
        Ok(())
    }
}

/// Lists some names, and the number of the others.
fn listed<'a>(names: impl Iterator<Item = &'a String> + Clone) -> String {
    let mut text: Vec<String> = names.clone().take(LISTED).map(|name| format!("\"{name}\"")).collect();
    let more = names.count().saturating_sub(LISTED);
    if more > 0 {
        text.push(format!("and {more} others"));
    }
    text.join(", ")
}

/// Returns the present name of a parameter that had another one, or that is of a model without a head.
fn now_called(name: &str) -> Option<String> {
    let norm = OLD.iter().find_map(|(now, then)| Some(format!("{}{now}", name.strip_suffix(then)?)));
    let mut new = norm.unwrap_or_else(|| name.to_owned());
    if let Some((_, prefix)) = WITHOUT_HEAD.iter().find(|(start, _)| new.starts_with(start)) {
        new.insert_str(0, prefix);
    }
    (new != name).then_some(new)
}

/// Returns the names of tied weights: the head's, and the one that it shares.
fn tied(config: &ModelConfig, parts: &BTreeMap<String, Part>) -> Vec<(String, String)> {
    let names: &[(&str, &str)] = match config {
        ModelConfig::Decoder(config) if !config.tied => &[],
        ModelConfig::Decoder(_) => &[("lm_head.weight", "model.embed_tokens.weight")],
        ModelConfig::Gpt2(_) if parts.keys().any(|name| name.starts_with("transformer.")) => {
            &[("lm_head.weight", "transformer.wte.weight")]
        }
        ModelConfig::Gpt2(_) => &[("lm_head.weight", "wte.weight")],
        ModelConfig::Bert(_) => &[
            ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
            ("cls.predictions.decoder.bias", "cls.predictions.bias"),
        ],
    };
    names.iter().map(|(own, shared)| ((*own).to_owned(), (*shared).to_owned())).collect()
}

/// Unties a head with its own weights, and returns a warning. Fails for families whose head is always tied.
fn untie(config: &mut ModelConfig, dir: &Path, own: &str, shared: &str) -> anyhow::Result<String> {
    let found = format!("config.json ties {own} and {shared}, but {} has both with different values", dir.display());
    let ModelConfig::Decoder(config) = config else {
        bail!("{found}, and this model type has no head of its own: remove {own} from the file, or train it elsewhere")
    };
    config.tied = false;
    Ok(format!("{found}. Both are trained, as transformers does, and an export has tie_word_embeddings = false"))
}

/// Returns whether a tensor is an output layer of another task.
fn is_other_output(name: &str, config: &ModelConfig, head: Head) -> bool {
    let own: &[&str] = match (head, config) {
        (Head::Vocabulary, ModelConfig::Bert(_)) => &["cls.predictions."],
        (Head::Vocabulary, _) => &["lm_head."],
        (Head::Classes(_), ModelConfig::Bert(_)) => &["classifier.", "bert.pooler."],
        (Head::Classes(_), _) => &["score."],
        (Head::Embedding(_), ModelConfig::Bert(_)) => &["bert.pooler."],
        (Head::Embedding(_), _) => &[],
    };
    let starts = |starts: &[&str]| starts.iter().any(|start| name.starts_with(start));
    starts(&OUTPUTS) && !starts(own)
}

/// Returns whether a tensor is of a layer after the last one, which predicts further tokens.
fn predicts_further(name: &str, config: &ModelConfig) -> bool {
    let layer = || name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok();
    matches!(config, ModelConfig::Decoder(config) if layer().is_some_and(|layer| config.is_prediction_layer(layer)))
}

/// Returns whether transformers knowingly ignores a tensor: a buffer that old versions saved.
fn is_ignored(name: &str, config: &ModelConfig) -> bool {
    match config {
        ModelConfig::Decoder(_) => name.contains("rotary_emb.inv_freq"),
        ModelConfig::Gpt2(_) => name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"),
        ModelConfig::Bert(_) => name == "position_ids" || name.ends_with(".position_ids"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use candle_core::DType;
    use candle_nn::Init;
    use fsdp_candle::World;
    use fsdp_candle::initializer::{Initializer, ShardRequest};
    use fsdp_ckpt::hf::HfModel;
    use fsdp_ckpt::{TensorShard, hf};
    use fsdp_core::Buffer;

    use super::*;

    #[test]
    fn fingerprints_differ_for_other_weights() {
        let root = tempfile::tempdir().unwrap();
        let world = World::single().unwrap();
        let print = |name: &str, fqn: &str, change: Option<usize>| {
            let mut values = vec![1f32; 601 * 3];
            change.into_iter().for_each(|at| values[at] = 2.);
            let shape: &[usize] = if fqn == "wide" { &[3, 601] } else { &[601, 3] };
            let shard =
                |fqn: &str, shape: &[usize], values| TensorShard::whole(fqn, shape, Arc::new(Buffer::F32(values)));
            let scalar = shard("scalar", &[], vec![1.]);
            let dir = root.path().join(name);
            hf::export(&dir, world.group(), &[shard(fqn, shape, values), scalar], &[]).unwrap();
            fingerprint(&HfModel::open(&dir).unwrap()).unwrap()
        };
        let base = print("base", "w", None);
        assert!(base.starts_with("2 tensors with checksum "), "{base}");
        assert_eq!(base, print("same", "w", None));
        // The first, middle and last row.
        for (i, at) in [0, 900, 1802].into_iter().enumerate() {
            assert_ne!(base, print(&format!("value-{i}"), "w", Some(at)), "{at}");
        }
        assert_ne!(base, print("name", "v", None));
        assert_ne!(base, print("shape", "wide", None));
    }

    #[test]
    fn layers_that_predict_further_tokens_are_left_out_with_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        let config = |predicted: usize| {
            let text = format!(
                r#"{{"model_type": "deepseek_v3", "hidden_size": 8, "intermediate_size": 7, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 11, "num_nextn_predict_layers": {predicted}}}"#
            );
            ModelConfig::parse(&text).unwrap()
        };
        let names = ["model.layers.1.input_layernorm.weight", "model.layers.2.eh_proj.weight"];
        let shards = names.map(|name| TensorShard::whole(name, &[1], Arc::new(Buffer::F32(vec![1.]))));
        hf::export(dir.path().join("model"), World::single().unwrap().group(), &shards, &[]).unwrap();
        let open = |mut config: ModelConfig| {
            Weights::open(&dir.path().join("model"), &mut config, Head::Vocabulary).unwrap().unwrap()
        };
        let weights = open(config(1));
        assert!(weights.contains(names[0]) && !weights.contains(names[1]));
        assert!(weights.warnings()[0].contains("layers that predict further tokens"), "{:?}", weights.warnings());
        assert!(weights.warnings()[0].contains(names[1]), "{:?}", weights.warnings());
        // Without such layers in the configuration, the tensor is not known.
        assert!(open(config(0)).contains(names[1]));
    }

    #[test]
    fn other_names_are_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name: &str, value| TensorShard::whole(name, &[1], Arc::new(Buffer::F32(vec![value])));
        let saved = [
            ("a.LayerNorm.gamma", 1.),
            ("a.LayerNorm.beta", 2.),
            ("b.LayerNorm.weight", 3.),
            ("gamma", 4.),
            ("embeddings.LayerNorm.gamma", 5.),
            ("layers.0.input_layernorm.weight", 6.),
        ];
        let shards = saved.map(|(name, value)| of(name, value));
        hf::export(dir.path().join("model"), World::single().unwrap().group(), &shards, &[]).unwrap();
        let mut config = ModelConfig::builtin().unwrap();
        let weights = Weights::open(&dir.path().join("model"), &mut config, Head::Vocabulary).unwrap().unwrap();
        let weights = weights.initializer();
        let region = Region::whole(&[1]);
        let read = |name: &str| {
            let request = ShardRequest { name, shape: &[1], dtype: DType::F32, region: &region, init: Init::Const(0.) };
            let mut bytes = [0; 4];
            weights
                .check(&request)
                .and_then(|()| weights.fill(&request, &mut bytes))
                .map(|()| f32::from_ne_bytes(bytes))
        };
        for (name, value) in [
            ("a.LayerNorm.weight", 1.),
            ("a.LayerNorm.bias", 2.),
            ("b.LayerNorm.weight", 3.),
            ("bert.embeddings.LayerNorm.weight", 5.),
            ("model.layers.0.input_layernorm.weight", 6.),
        ] {
            assert!(weights.contains(name));
            assert_eq!(read(name).unwrap(), value, "{name}");
        }
        assert!(!weights.contains("b.LayerNorm.bias") && !weights.contains("weight"));
        assert!(read("b.LayerNorm.bias").unwrap_err().to_string().contains("`b.LayerNorm.bias`"));
    }
}
