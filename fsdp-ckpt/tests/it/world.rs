//! Global tensors, their shards, and groups of ranks for the tests.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use fsdp_ckpt::{Checkpoint, Result, SaveState, SaveSummary, TensorShard, TensorSource, save};
use fsdp_core::layout::{Region, local_region};
use fsdp_core::process_group::local;
use fsdp_core::{Buffer, DType, MeshLayout, Placement, ProcessGroup, Readable};
use tempfile::TempDir;

/// A whole tensor and its placements on a mesh.
#[derive(Clone, Debug)]
pub(crate) struct Global {
    pub(crate) fqn: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) placements: Vec<Placement>,
    pub(crate) bytes: Vec<u8>,
}

impl Global {
    pub(crate) fn new(fqn: &str, dtype: DType, shape: &[usize], placements: &[Placement]) -> Self {
        let count = shape.iter().product::<usize>() * dtype.size();
        let seed = fqn.bytes().fold(7u8, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte));
        let bytes = (0..count).map(|i| (i as u8).wrapping_mul(37).wrapping_add((i >> 8) as u8) ^ seed).collect();
        Global { fqn: fqn.into(), dtype, shape: shape.to_vec(), placements: placements.to_vec(), bytes }
    }

    /// Copies a region element by element.
    pub(crate) fn cut(&self, region: &Region) -> Vec<u8> {
        let size = self.dtype.size();
        let mut out = Vec::new();
        for i in 0..region.elements() {
            let (mut rest, mut at, mut stride) = (i, 0, 1);
            for dim in (0..self.shape.len()).rev() {
                at += (region.offsets[dim] + rest % region.sizes[dim]) * stride;
                rest /= region.sizes[dim];
                stride *= self.shape[dim];
            }
            out.extend(&self.bytes[at * size..(at + 1) * size]);
        }
        out
    }

    pub(crate) fn region(&self, mesh: &MeshLayout, rank: usize) -> Region {
        local_region(&self.shape, mesh, &mesh.coordinate_of(rank).unwrap(), &self.placements).unwrap()
    }

    pub(crate) fn shard(&self, mesh: &MeshLayout, rank: usize) -> TensorShard {
        let region = self.region(mesh, rank);
        let mut data = Buffer::zeros(self.dtype, region.elements());
        data.bytes_mut().copy_from_slice(&self.cut(&region));
        TensorShard { fqn: self.fqn.clone(), shape: self.shape.clone(), region, data: Arc::new(data) }
    }
}

/// Tensors sharded evenly, unevenly, with empty shards and on dimension 1; replicated; a scalar; an empty tensor;
/// several dtypes.
pub(crate) fn zoo() -> Vec<Global> {
    let (s0, s1, r) = (Placement::Shard(0), Placement::Shard(1), Placement::Replicate);
    vec![
        Global::new("model.even.weight", DType::F32, &[12, 5], &[s0]),
        Global::new("model.uneven.weight", DType::BF16, &[7, 3], &[s0]),
        Global::new("model.short.bias", DType::F32, &[2], &[s0]),
        Global::new("model.columns.weight", DType::F16, &[3, 12, 2], &[s1]),
        Global::new("model.norm.weight", DType::F32, &[9], &[r]),
        Global::new("model.buffer", DType::U8, &[5, 1], &[r]),
        Global::new("optim.state.even.weight.step", DType::F32, &[], &[r]),
        Global::new("optim.state.even.weight.exp_avg", DType::F64, &[12, 5], &[s0]),
        Global::new("model.empty", DType::I64, &[0, 4], &[s0]),
    ]
}

pub(crate) fn line(size: usize) -> MeshLayout {
    MeshLayout::new(&[("dp_shard", size)]).unwrap()
}

pub(crate) fn state(globals: &[Global], mesh: &MeshLayout, rank: usize) -> SaveState {
    let mut values = serde_json::Map::new();
    values.insert("step".into(), 10.into());
    values.insert("lr".into(), (0.1f64 / 3.0).into());
    SaveState { mesh: mesh.clone(), tensors: globals.iter().map(|global| global.shard(mesh, rank)).collect(), values }
}

/// Runs a function on every rank of a group of threads. Returns the results by rank.
pub(crate) fn world<T: Send>(size: usize, rank: impl Fn(&ProcessGroup) -> T + Sync) -> Vec<T> {
    local::run(size, |group| rank(&group))
}

/// Saves from every rank, which must succeed.
pub(crate) fn save_all(dir: &Path, globals: &[Global], mesh: &MeshLayout) -> Vec<SaveSummary> {
    let saved: Result<Vec<_>> =
        world(mesh.size(), |group| save(dir, group, &state(globals, mesh, group.rank()))).into_iter().collect();
    saved.unwrap()
}

/// Saves from every rank, which must fail with one message. Returns the message.
pub(crate) fn save_fails(dir: &Path, size: usize, state: impl Fn(usize) -> SaveState + Sync) -> String {
    let mut messages: Vec<String> = world(size, |group| save(dir, group, &state(group.rank())))
        .into_iter()
        .map(|saved| saved.unwrap_err().to_string())
        .collect();
    messages.dedup();
    assert_eq!(messages.len(), 1, "ranks fail differently: {messages:?}");
    messages.remove(0)
}

pub(crate) fn read(checkpoint: &Checkpoint, global: &Global, region: &Region) -> Result<Vec<u8>> {
    let mut bytes = vec![0xEE; region.elements() * global.dtype.size()];
    checkpoint.read(&global.fqn, region, &mut bytes)?;
    Ok(bytes)
}

/// Creates a directory and the path of a checkpoint in it.
pub(crate) fn fresh() -> (TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("step-00000010");
    (root, dir)
}

/// Returns the sorted names in a directory.
pub(crate) fn list(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Saves the zoo from `ranks` ranks to a new directory.
pub(crate) fn saved(ranks: usize) -> (TempDir, PathBuf) {
    let (root, dir) = fresh();
    save_all(&dir, &zoo(), &line(ranks));
    (root, dir)
}

/// Returns the name of a rank's file.
pub(crate) fn shard_file(rank: usize) -> String {
    format!("shard-{:05}-model-00001-of-00001.safetensors", rank + 1)
}

/// Changes a file's bytes.
pub(crate) fn change(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).unwrap();
    change(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

/// Flips a bit of the last byte of a file, which belongs to a tensor.
pub(crate) fn damage(path: &Path) {
    change(path, |bytes| *bytes.last_mut().unwrap() ^= 1);
}

/// Memory of f32 that can't be read.
pub(crate) struct Broken(pub(crate) usize);

impl Readable for Broken {
    fn dtype(&self) -> DType {
        DType::F32
    }
    fn len(&self) -> usize {
        self.0
    }
    fn read(&self, _: &mut dyn FnMut(&[u8])) -> std::result::Result<(), String> {
        Err("its storage has been resharded".into())
    }
}
