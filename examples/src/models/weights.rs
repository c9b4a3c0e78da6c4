//! Telling weights on disk apart without reading them all.

use anyhow::Context;
use crc_fast::{CrcAlgorithm, Digest};
use fsdp_ckpt::TensorSource;
use fsdp_core::layout::Region;

/// The most elements of a row that are looked at.
const WIDTH: usize = 256;

/// What weights are, in words: their number, and a checksum of names, dtypes, shapes and a piece from the
/// beginning, the middle and the end of each. Of other weights something there is different.
///
/// # Errors
/// When they can't be read.
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

/// Pieces of rows: the first, one in the middle, the last.
fn pieces(shape: &[usize]) -> impl Iterator<Item = Region> {
    let last = shape.len().saturating_sub(1);
    let sizes: Vec<usize> =
        shape.iter().enumerate().map(|(dim, &size)| size.min(if dim == last { WIDTH } else { 1 })).collect();
    (0..3).map(move |third| Region {
        offsets: shape.iter().zip(&sizes).map(|(size, piece)| (size - piece) * third / 2).collect(),
        sizes: sizes.clone(),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use fsdp_candle::World;
    use fsdp_ckpt::TensorShard;
    use fsdp_ckpt::hf::{self, HfModel};
    use fsdp_core::Buffer;

    #[test]
    fn other_weights_have_another_fingerprint() {
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
        // The first row, the one in the middle, the last.
        for (i, at) in [0, 900, 1802].into_iter().enumerate() {
            assert_ne!(base, print(&format!("value-{i}"), "w", Some(at)), "{at}");
        }
        assert_ne!(base, print("name", "v", None));
        assert_ne!(base, print("shape", "wide", None));
    }
}
