//! Writing checkpoints for PyTorch.

use std::path::Path;

use fsdp_ckpt::torch::{DcpOptions, TorchDcp, write_dcp};
use fsdp_ckpt::{Checkpoint, Error, TensorSource, open};
use serde_json::{Map, json};

use super::{assert_same_tensors, recorded};
use crate::world::{damage, fresh, line, list, save_all, zoo};

fn written(dst: &Path, source: &dyn TensorSource, world_size: usize) -> TorchDcp {
    let written = write_dcp(dst, source, &DcpOptions::new(world_size)).unwrap();
    assert_eq!(written.bytes, source.tensors().values().map(|tensor| tensor.bytes()).sum::<u64>());
    assert_eq!((written.tensors, written.files), (source.tensors().len(), world_size));
    let dcp = TorchDcp::open(dst).unwrap();
    dcp.verify().unwrap();
    dcp
}

#[test]
fn dcp_round_trips_at_any_world_size() {
    let (root, dir) = fresh();
    save_all(&dir, &zoo(), &line(2));
    let source = Checkpoint::open(&dir).unwrap();
    for world in [1, 2, 3, 6] {
        let dst = root.path().join(format!("dcp-{world}"));
        let dcp = written(&dst, &source, world);
        assert_same_tensors(&dcp, &source);
        assert_eq!(dcp.values(), source.values());
        let files = list(&dst);
        assert_eq!(files.len(), world + 1);
        assert_eq!(files[..2], [".metadata", "__0_0.distcp"]);
        assert_eq!(
            dcp.tensors()["model.uneven.weight"].chunks.len(),
            world.min(7).min(if world == 6 { 4 } else { world })
        );
    }
}

#[test]
fn rewrites_a_checkpoint_of_pytorch() {
    for run in ["llama_tiny", "gpt2_tiny"] {
        let root = tempfile::tempdir().unwrap();
        let source = open(recorded(run).join("dcp_step10")).unwrap();
        let dcp = written(&root.path().join("again"), &*source, 3);
        assert_same_tensors(&dcp, &*source);
        assert_eq!(dcp.values(), source.values());
    }
}

#[test]
fn writes_hyper_parameters_of_each_parameter() {
    let (root, dir) = fresh();
    save_all(&dir, &zoo(), &line(1));
    let source = Checkpoint::open(&dir).unwrap();
    let mut options = DcpOptions::new(1);
    options.hyper_parameters = Map::from_iter([("lr".into(), json!(0.1)), ("betas".into(), json!([0.9, 0.5]))]);
    let dst = root.path().join("dcp");
    write_dcp(&dst, &source, &options).unwrap();
    let dcp = TorchDcp::open(&dst).unwrap();
    let mut expected = source.values().clone();
    expected.insert("optim.param_groups.even.weight.lr".into(), json!(0.1));
    expected.insert("optim.param_groups.even.weight.betas".into(), json!([0.9, 0.5]));
    assert_eq!(*dcp.values(), expected);
}

#[test]
fn failed_writes_leave_no_files() {
    let (root, dir) = fresh();
    save_all(&dir, &zoo(), &line(1));
    let source = Checkpoint::open(&dir).unwrap();
    let before = list(root.path());
    let write = |dst: &Path, world| write_dcp(dst, &source, &DcpOptions::new(world)).unwrap_err();
    assert!(matches!(write(&dir, 1), Error::AlreadyExists { path } if path == dir));
    assert!(write(&root.path().join("dcp"), 0).to_string().contains("can't write a checkpoint of 0 ranks"));
    let file = source.files().keys().next().unwrap().clone();
    damage(&dir.join(&file));
    assert!(matches!(write(&root.path().join("dcp"), 1), Error::Checksum { .. }));
    assert_eq!(list(root.path()), before);
}
