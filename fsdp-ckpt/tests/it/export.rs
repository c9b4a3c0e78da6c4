//! Shards become one Hugging Face weights file.

use std::path::Path;
use std::sync::Arc;

use crate::world::{Global, line, list, world, zoo};
use fsdp_ckpt::hf::{HfModel, export};
use fsdp_ckpt::{TensorShard, TensorSource};
use fsdp_core::layout::Region;
use fsdp_core::{Buffer, DType, MeshLayout, Placement};

fn export_all(dir: &Path, globals: &[Global], mesh: &MeshLayout) -> Vec<fsdp_ckpt::Result<u64>> {
    let config = dir.with_file_name("config.json");
    std::fs::write(&config, "{}").unwrap();
    world(mesh.size(), |group| {
        let shards: Vec<TensorShard> = globals.iter().map(|global| global.shard(mesh, group.rank())).collect();
        export(dir, group, &shards, std::slice::from_ref(&config))
    })
}

#[test]
fn what_is_exported_is_what_was_sharded() {
    for size in 1..=4 {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("model");
        let bytes = export_all(&dir, &zoo(), &line(size));
        let file = std::fs::read(dir.join("model.safetensors")).unwrap();
        assert!(bytes.into_iter().all(|bytes| bytes.unwrap() == file.len() as u64));
        assert_eq!(list(&dir), ["config.json", "model.safetensors"]);
        let (_, header) = safetensors::SafeTensors::read_metadata(&file).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
        let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
        assert_eq!(tensors.len(), zoo().len());
        let model = HfModel::open(&dir).unwrap();
        for global in zoo() {
            assert_eq!(tensors.tensor(&global.fqn).unwrap().data(), global.bytes, "{}", global.fqn);
            assert_eq!(model.tensor(&global.fqn).unwrap().shape, global.shape);
            let part = global.region(&line(3), 1);
            let mut slice = vec![0; part.elements() * global.dtype.size()];
            model.read(&global.fqn, &part, &mut slice).unwrap();
            assert_eq!(slice, global.cut(&part));
        }
    }
}

#[test]
fn replicated_and_sharded_on_a_grid() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    let mesh = MeshLayout::new(&[("replicate", 2), ("shard", 2)]).unwrap();
    let globals = [
        Global::new("rows", DType::F32, &[5, 4], &[Placement::Replicate, Placement::Shard(0)]),
        Global::new("grid", DType::BF16, &[5, 4], &[Placement::Shard(0), Placement::Shard(1)]),
    ];
    export_all(&dir, &globals, &mesh).into_iter().for_each(|bytes| assert!(bytes.is_ok(), "{bytes:?}"));
    let model = HfModel::open(&dir).unwrap();
    for global in &globals {
        let mut whole = vec![0; global.bytes.len()];
        model.read(&global.fqn, &Region::whole(&global.shape), &mut whole).unwrap();
        assert_eq!(whole, global.bytes);
    }
}

#[test]
fn several_files_with_an_index_are_one_model() {
    let root = tempfile::tempdir().unwrap();
    let globals = &zoo()[..4];
    for (i, half) in globals.chunks(2).enumerate() {
        let dir = root.path().join(format!("part{i}"));
        export_all(&dir, half, &line(1)).remove(0).unwrap();
        std::fs::copy(dir.join("model.safetensors"), root.path().join(format!("part-{i}.safetensors"))).unwrap();
    }
    let map: serde_json::Map<String, serde_json::Value> = globals
        .iter()
        .enumerate()
        .map(|(i, global)| (global.fqn.clone(), format!("part-{}.safetensors", i / 2).into()))
        .collect();
    let index = serde_json::json!({ "metadata": { "total_size": 1 }, "weight_map": map });
    std::fs::write(root.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let model = HfModel::open(root.path()).unwrap();
    assert_eq!(model.names().count(), 4);
    for global in globals {
        let mut whole = vec![0; global.bytes.len()];
        model.read(&global.fqn, &Region::whole(&global.shape), &mut whole).unwrap();
        assert_eq!(whole, global.bytes);
    }
}

#[test]
fn failures_leave_no_file_and_reach_every_rank() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    let messages = world(2, |group| {
        let shard = zoo()[0].shard(&line(2), group.rank());
        let config = root.path().join("no-config.json");
        export(&dir, group, &[shard], &[config]).unwrap_err().to_string()
    });
    assert!(messages[0].starts_with("rank 0 failed to finish the export: can't copy"), "{messages:?}");
    assert_eq!(messages[0], messages[1]);
    assert!(list(&dir).is_empty());

    let gap = world(2, |group| {
        let data = Arc::new(Buffer::F32(vec![0.0; 2]));
        let region = Region { offsets: vec![0], sizes: vec![2] };
        let shard = TensorShard { fqn: "w".into(), shape: vec![3], region, data };
        export(&dir, group, &[shard], &[]).unwrap_err().to_string()
    });
    assert!(gap.iter().all(|message| message.contains("no rank holds 1 of the elements")), "{gap:?}");

    export_all(&dir, &zoo(), &line(2)).into_iter().for_each(|bytes| assert!(bytes.is_ok()));
    for again in export_all(&dir, &zoo(), &line(2)) {
        assert!(again.unwrap_err().to_string().contains("model.safetensors exists already"));
    }
}
