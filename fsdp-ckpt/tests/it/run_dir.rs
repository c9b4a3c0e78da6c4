//! The files of a save, and which checkpoints of a run are found and kept.

use std::num::NonZeroUsize;
use std::path::Path;

use fsdp_ckpt::{Checkpoint, TensorSource, alias_target, keep_newest, latest, survey};
use fsdp_core::layout::Region;
use fsdp_core::{DType, Placement};

use crate::world::{Global, fresh, line, list, save_all, shard_file, zoo};

#[test]
fn writes_replicas_once_and_evenly() {
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
fn rank_without_chunks_has_no_file() {
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

/// The keys are from a file of PyTorch's HuggingFaceStorageWriter.
#[test]
fn files_have_the_layout_of_pytorch() {
    let (_root, dir) = fresh();
    let globals = zoo();
    save_all(&dir, &globals, &line(2));
    for rank in 0..2 {
        let file = std::fs::read(dir.join(shard_file(rank))).unwrap();
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
fn latest_finds_the_newest_whole_checkpoint() {
    let (root, _) = fresh();
    assert_eq!(latest(root.path()).unwrap(), None);
    assert_eq!(latest(root.path().join("not there")).unwrap(), None);
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

fn keep(root: &Path, count: usize, spare: &[&Path]) -> Vec<String> {
    let removed = keep_newest(root, NonZeroUsize::new(count).unwrap(), spare).unwrap();
    removed.iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_string()).collect()
}

#[test]
fn keep_newest_counts_and_removes_whole_checkpoints() {
    let (root, _) = fresh();
    let dir = |step: usize| root.path().join(format!("step-{step}"));
    for step in [5, 6, 7, 8, 9, 10, 11] {
        save_all(&dir(step), &zoo(), &line(2));
    }
    // An unfinished one, one with another file, a link, and other names.
    std::fs::remove_file(dir(11).join("checkpoint.json")).unwrap();
    std::fs::write(dir(7).join("notes.txt"), "keep me").unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    std::fs::rename(dir(6), elsewhere.path().join("moved")).unwrap();
    std::os::unix::fs::symlink(elsewhere.path().join("moved"), dir(6)).unwrap();
    std::fs::create_dir(root.path().join("data-1")).unwrap();
    std::fs::write(root.path().join("log-2"), "").unwrap();

    assert_eq!(keep(root.path(), 2, &[&dir(8), &dir(99)]), ["step-5"]);
    let left = ["data-1", "log-2", "step-10", "step-11", "step-6", "step-7", "step-8", "step-9"];
    assert_eq!(list(root.path()), left);
    assert_eq!(keep(root.path(), 2, &[]), ["step-8"]);
    assert_eq!(latest(root.path()).unwrap(), Some(dir(10)));
    for step in [6, 7, 9, 10] {
        Checkpoint::open(dir(step)).unwrap().verify().unwrap();
    }
    assert!(keep(root.path(), 9, &[]).is_empty());
    assert!(keep(&root.path().join("not there"), 1, &[]).is_empty());
}

#[test]
fn links_are_not_checkpoints() {
    use std::os::unix::fs::symlink;
    let (root, _) = fresh();
    let elsewhere = tempfile::tempdir().unwrap();
    let dir = |step: usize| root.path().join(format!("step-{step:08}"));
    for step in [4, 8] {
        save_all(&dir(step), &zoo(), &line(2));
    }
    symlink("step-00000004", dir(12)).unwrap();
    save_all(&elsewhere.path().join("step-00000002"), &zoo(), &line(2));
    symlink(elsewhere.path().join("step-00000002"), dir(13)).unwrap();
    // Links to a missing target and to themselves.
    symlink("nowhere", dir(14)).unwrap();
    symlink(dir(15), dir(15)).unwrap();
    let found = survey(root.path()).unwrap();
    assert!(found.newest == Some(dir(8)) && found.skipped.is_empty(), "{found:?}");
    let moved = elsewhere.path().join("step-00000002").canonicalize().unwrap();
    let links = [(12, dir(4).canonicalize().unwrap()), (13, moved), (14, root.path().join("nowhere")), (15, dir(15))];
    assert_eq!(found.links, links.map(|(step, target)| (dir(step), target)));
    assert_eq!(alias_target(dir(12)), Some(dir(4).canonicalize().unwrap()));
    assert_eq!(alias_target(dir(4)), None);

    let out = crate::cli::succeeds(&["inspect", crate::cli::text(root.path())]);
    assert_eq!(out.matches("not used by runs").count(), 2, "{out}");
    assert!(out.lines().any(|line| line.contains("step-00000008") && line.contains("<- the newest")), "{out}");

    // A checkpoint moved to another disk, with a link in its place, still counts.
    for (name, target) in [("step-00000020", "step-00000020"), ("step-00000021", "moved")] {
        save_all(&elsewhere.path().join(target), &zoo(), &line(2));
        symlink(elsewhere.path().join(target), root.path().join(name)).unwrap();
        assert_eq!(latest(root.path()).unwrap(), Some(root.path().join(name)));
    }
    save_all(&dir(22), &zoo(), &line(2));
    assert_eq!(keep(root.path(), 1, &[]), ["step-00000008", "step-00000004"]);
    for step in [12, 13, 20, 21] {
        assert!(dir(step).symlink_metadata().unwrap().is_symlink(), "{step}");
    }
    for name in ["step-00000002", "step-00000020", "moved"] {
        Checkpoint::open(elsewhere.path().join(name)).unwrap().verify().unwrap();
    }
}
