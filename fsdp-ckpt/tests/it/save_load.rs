//! What one world saves, any world loads, to the bit.

use crate::world::{Global, fresh, line, list, read, save_all, zoo};
use fsdp_ckpt::{Checkpoint, TensorSource, latest};
use fsdp_core::layout::Region;
use fsdp_core::{DType, MeshLayout, Placement};
use proptest::prelude::*;

#[test]
fn every_world_loads_what_every_world_saves() {
    let globals = zoo();
    for size in 1..=4 {
        let (_root, dir) = fresh();
        let summaries = save_all(&dir, &globals, &line(size));
        let total: u64 = globals.iter().map(|global| global.bytes.len() as u64).sum();
        assert_eq!(summaries.iter().map(|summary| summary.bytes_by_this_rank).sum::<u64>(), total);
        assert!(summaries.iter().all(|summary| summary.bytes == total && summary.tensors == globals.len()));

        let checkpoint = Checkpoint::open(&dir).unwrap();
        assert_eq!((checkpoint.mesh(), checkpoint.world_size()), (Some(&line(size)), size));
        assert_eq!(checkpoint.values()["step"], 10);
        assert_eq!(checkpoint.values()["lr"].as_f64(), Some(0.1 / 3.0));
        assert_eq!(checkpoint.verify().unwrap().bytes, total);
        for global in &globals {
            let entry = checkpoint.tensor(&global.fqn).unwrap();
            assert_eq!((entry.dtype, &entry.shape), (global.dtype, &global.shape));
            for other in 1..=4 {
                for rank in 0..other {
                    let region = global.region(&line(other), rank);
                    assert_eq!(
                        read(&checkpoint, global, &region).unwrap(),
                        global.cut(&region),
                        "{global:?} {region:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn replicas_are_written_once_and_evenly() {
    let (_root, dir) = fresh();
    let globals: Vec<Global> =
        (0..8).map(|i| Global::new(&format!("w{i}"), DType::F32, &[64], &[Placement::Replicate])).collect();
    for summary in save_all(&dir, &globals, &line(4)) {
        assert_eq!(summary.bytes_by_this_rank, 2 * 64 * 4);
    }
    let checkpoint = Checkpoint::open(&dir).unwrap();
    assert!(checkpoint.tensors().values().all(|tensor| tensor.chunks.len() == 1));
}

#[test]
fn a_rank_with_nothing_to_write_has_no_file() {
    let (root, dir) = fresh();
    save_all(&dir, &[Global::new("w", DType::F32, &[2, 3], &[Placement::Shard(0)])], &line(4));
    let files = [
        "checkpoint.json",
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
    ];
    assert_eq!(list(&dir), files);
    assert_eq!(list(root.path()), ["step-00000010"]);
}

/// The keys are those of a file that PyTorch's HuggingFaceStorageWriter wrote.
#[test]
fn files_are_laid_out_as_pytorch_lays_them_out() {
    let (_root, dir) = fresh();
    let globals = zoo();
    save_all(&dir, &globals, &line(2));
    for rank in 0..2 {
        let file = std::fs::read(dir.join(format!("shard-{:05}-model-00001-of-00001.safetensors", rank + 1))).unwrap();
        let (header, metadata) = safetensors::SafeTensors::read_metadata(&file).unwrap();
        assert_eq!(header % 8, 0);
        let mut keys: Vec<&str> = metadata.metadata().as_ref().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(keys, ["DCP_SHARDING_INFO", "DCP_VERSION", "format"]);
        let about = metadata.metadata().as_ref().unwrap();
        assert_eq!((about["DCP_VERSION"].as_str(), about["format"].as_str()), ("1.0", "pt"));
        let sharding: serde_json::Value = serde_json::from_str(&about["DCP_SHARDING_INFO"]).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
        assert_eq!(sharding.as_object().unwrap().len(), tensors.len());
        for (name, view) in tensors.iter() {
            let global = globals.iter().find(|global| global.fqn == name).unwrap();
            let offsets = serde_json::from_value(sharding[name]["saved_offsets"].clone()).unwrap();
            let region = Region { offsets, sizes: view.shape().to_vec() };
            assert_eq!(view.data(), global.cut(&region), "{name}");
        }
    }
}

#[test]
fn the_latest_whole_checkpoint_is_found() {
    let (root, _) = fresh();
    assert_eq!(latest(root.path()).unwrap(), None);
    assert_eq!(latest(&root.path().join("not there")).unwrap(), None);
    let dir = |step: usize| root.path().join(format!("step-{step:08}"));
    for step in [9, 10, 11, 12] {
        save_all(&dir(step), &zoo(), &line(2));
    }
    std::fs::create_dir(root.path().join("step-00000099")).unwrap();
    std::fs::create_dir(root.path().join(".step-00000100.tmp-1")).unwrap();
    std::fs::write(root.path().join("step-00000101"), "a file").unwrap();
    std::fs::remove_file(dir(12).join("shard-00002-model-00001-of-00001.safetensors")).unwrap();
    std::fs::write(dir(11).join("checkpoint.json"), "{}").unwrap();
    assert_eq!(latest(root.path()).unwrap(), Some(dir(10)));
}

fn placement(dims: usize) -> impl Strategy<Value = Placement> {
    (0..=dims).prop_map(move |dim| if dim == dims { Placement::Replicate } else { Placement::Shard(dim) })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_mesh_and_shape_come_back(
        (shape, saved, loaded) in prop::collection::vec(0usize..7, 1..4).prop_flat_map(|shape| {
            let dims = shape.len();
            (Just(shape), [placement(dims), placement(dims)], [placement(dims), placement(dims)])
        }),
        mesh in (1usize..4, 1usize..3),
        other in (1usize..4, 1usize..4),
        dtype in prop::sample::select(DType::ALL.to_vec()),
    ) {
        let (_root, dir) = fresh();
        let mesh = MeshLayout::new(&[("a", mesh.0), ("b", mesh.1)]).unwrap();
        let other = MeshLayout::new(&[("a", other.0), ("b", other.1)]).unwrap();
        let global = Global::new("w", dtype, &shape, &saved);
        save_all(&dir, std::slice::from_ref(&global), &mesh);
        let checkpoint = Checkpoint::open(&dir).unwrap();
        checkpoint.verify().unwrap();
        let global = Global { placements: loaded.to_vec(), ..global };
        for rank in 0..other.size() {
            let region = global.region(&other, rank);
            prop_assert_eq!(read(&checkpoint, &global, &region).unwrap(), global.cut(&region));
        }
    }
}
