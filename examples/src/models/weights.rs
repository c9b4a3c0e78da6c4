//! Weights in model directories: fingerprints, and names of older versions.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;
use crc_fast::{CrcAlgorithm, Digest};
use fsdp_candle::Result;
use fsdp_candle::initializer::Pretrained;
use fsdp_ckpt::TensorSource;
use fsdp_ckpt::hf::HfModel;
use fsdp_core::layout::Region;

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

/// Opens the weights in a model directory. Accepts the names in the first BERT files, where a norm's `weight` and
/// `bias` are `gamma` and `beta`, and the names of models without a head, as transformers does.
pub fn pretrained(dir: &Path) -> Result<Pretrained> {
    let model = HfModel::open(dir)?;
    let now_called = |name: &String| {
        let norm = OLD.iter().find_map(|(now, then)| Some(format!("{}{now}", name.strip_suffix(then)?)));
        let mut new = norm.unwrap_or_else(|| name.clone());
        if let Some((_, prefix)) = WITHOUT_HEAD.iter().find(|(start, _)| new.starts_with(start)) {
            new.insert_str(0, prefix);
        }
        (!model.tensors().contains_key(&new)).then(|| (new, name.clone()))
    };
    let old: BTreeMap<String, String> = model.tensors().keys().filter_map(now_called).collect();
    Ok(Pretrained::of(model, move |name| old.get(name).map_or(name, String::as_str).into()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use candle_core::DType;
    use candle_nn::Init;
    use fsdp_candle::World;
    use fsdp_candle::initializer::{Initializer, ShardRequest};
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
        hf::export(&dir.path().join("model"), World::single().unwrap().group(), &shards, &[]).unwrap();
        let weights = pretrained(&dir.path().join("model")).unwrap();
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
