//! Weights under names that transformers has given up.

use fsdp_candle::Result;
use fsdp_candle::initializer::{Initializer, Pretrained, ShardRequest};

/// The end of a name, and what it was.
const OLD: [(&str, &str); 2] = [("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")];

/// A model's weights, of which some may have the names that the first checkpoints of BERT have: a norm's `gamma` and
/// `beta` are its `weight` and `bias`, as they are to transformers.
pub struct OldNames(Pretrained);

impl OldNames {
    /// The weights in a model directory.
    pub fn new(weights: Pretrained) -> Self {
        OldNames(weights)
    }

    /// What the weights call a parameter.
    fn name_of(&self, name: &str) -> String {
        let old = OLD.iter().find_map(|(now, then)| Some(format!("{}{then}", name.strip_suffix(now)?)));
        old.filter(|old| !self.0.contains(name) && self.0.contains(old)).unwrap_or_else(|| name.into())
    }
}

impl Initializer for OldNames {
    fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> Result<()> {
        self.0.fill(&ShardRequest { name: &self.name_of(request.name), ..*request }, shard)
    }

    fn check(&self, request: &ShardRequest<'_>) -> Result<()> {
        self.0.check(&ShardRequest { name: &self.name_of(request.name), ..*request })
    }

    fn contains(&self, name: &str) -> bool {
        self.0.contains(&self.name_of(name))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use candle_core::DType;
    use candle_nn::Init;
    use fsdp_candle::World;
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
        let weights = OldNames::new(Pretrained::open(dir.path().join("model")).unwrap());
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
