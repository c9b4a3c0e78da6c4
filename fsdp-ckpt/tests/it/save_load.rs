//! What a save leaves on disk, and finding it.

use crate::world::{Global, fresh, line, list, save_all, zoo};
use fsdp_ckpt::{Checkpoint, TensorSource, latest};
use fsdp_core::layout::Region;
use fsdp_core::{DType, Placement};

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
        assert_eq!(keys, ["DCP_SHARDING_INFO", "DCP_VERSION", "candle_fsdp_manifest", "format"]);
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
