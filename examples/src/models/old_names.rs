//! Weights under names that transformers has given up.

use std::collections::BTreeMap;
use std::path::Path;

use fsdp_candle::Result;
use fsdp_candle::initializer::Pretrained;
use fsdp_ckpt::TensorSource;
use fsdp_ckpt::hf::HfModel;

/// The end of a name, and what it was.
const OLD: [(&str, &str); 2] = [("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")];

/// The weights in a model directory, of which some may have the names that the first checkpoints of BERT have: a norm's
/// `gamma` and `beta` are its `weight` and `bias`, as they are to transformers.
///
/// # Errors
/// Those of [`Pretrained::open`].
pub fn pretrained(dir: &Path) -> Result<Pretrained> {
    let model = HfModel::open(dir)?;
    let now_called = |name: &String| {
        let new = OLD.iter().find_map(|(now, then)| Some(format!("{}{now}", name.strip_suffix(then)?)))?;
        (!model.tensors().contains_key(&new)).then(|| (new, name.clone()))
    };
    let old: BTreeMap<String, String> = model.tensors().keys().filter_map(now_called).collect();
    Ok(Pretrained::of(model, move |name| old.get(name).map_or(name, String::as_str).into()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use candle_core::DType;
    use candle_nn::Init;
    use fsdp_candle::World;
    use fsdp_candle::initializer::{Initializer, ShardRequest};
    use fsdp_ckpt::{TensorShard, hf};
    use fsdp_core::Buffer;
    use fsdp_core::layout::Region;

    #[test]
    fn norms_are_found_under_both_names() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name: &str, value| TensorShard::whole(name, &[1], Arc::new(Buffer::F32(vec![value])));
        let saved = [("a.LayerNorm.gamma", 1.), ("a.LayerNorm.beta", 2.), ("b.LayerNorm.weight", 3.), ("gamma", 4.)];
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
        for (name, value) in [("a.LayerNorm.weight", 1.), ("a.LayerNorm.bias", 2.), ("b.LayerNorm.weight", 3.)] {
            assert!(weights.contains(name));
            assert_eq!(read(name).unwrap(), value, "{name}");
        }
        assert!(!weights.contains("b.LayerNorm.bias") && !weights.contains("weight"));
        assert!(read("b.LayerNorm.bias").unwrap_err().to_string().contains("`b.LayerNorm.bias`"));
    }
}
