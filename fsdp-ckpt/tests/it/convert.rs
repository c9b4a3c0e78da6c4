//! The commands `convert` and `consolidate`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::cli::{fails, fsdp_ckpt, json, succeeds, text};
use crate::world::{Global, damage, fresh, line, list, read, save_all, saved, zoo};
use fsdp_ckpt::{Checkpoint, TensorSource, open};
use fsdp_core::layout::Region;
use fsdp_core::{DType, MeshLayout, Placement};
use half::bf16;
use proptest::prelude::*;

/// Returns the bytes of every file below a directory, by path.
fn tree(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(tree(&path));
        } else {
            files.insert(path.clone(), std::fs::read(&path).unwrap());
        }
    }
    files
}

fn assert_holds(dir: &Path, globals: &[Global]) {
    let checkpoint = Checkpoint::open(dir).unwrap();
    assert_eq!(checkpoint.tensors().len(), globals.len());
    for global in globals {
        assert_eq!(checkpoint.tensor(&global.fqn).unwrap().shape, global.shape);
        assert_eq!(read(&checkpoint, global, &Region::whole(&global.shape)).unwrap(), global.bytes, "{}", global.fqn);
    }
    checkpoint.verify().unwrap();
}

#[test]
fn convert_to_fsdp_equals_a_save_of_that_mesh() {
    let (root, src) = saved(2);
    let before = tree(&src);
    for (args, mesh) in [
        (["--world-size", "1"], line(1)),
        (["--world-size", "3"], line(3)),
        (["--world-size", "6"], line(6)),
        (["--mesh", "2x4"], MeshLayout::new(&[("dp_replicate", 2), ("dp_shard", 4)]).unwrap()),
    ] {
        let dst = root.path().join(args.concat());
        let out = succeeds(&["convert", text(&src), text(&dst), "--to", "fsdp", args[0], args[1]]);
        assert!(out.contains(": fsdp, 9 tensors, "), "{out}");
        assert_holds(&dst, &zoo());

        // The files equal a save of that mesh, with every tensor sharded.
        let last = mesh.shape().len() - 1;
        let mut globals = zoo();
        for global in &mut globals {
            global.placements = vec![Placement::Replicate; last + 1];
            if !global.shape.is_empty() {
                global.placements[last] = Placement::Shard(0);
            }
        }
        let saved = root.path().join("saved").join(args.concat());
        save_all(&saved, &globals, &mesh);
        assert_eq!(list(&dst), list(&saved));
        for name in list(&dst) {
            assert!(std::fs::read(dst.join(&name)).unwrap() == std::fs::read(saved.join(&name)).unwrap(), "{name}");
        }
    }
    assert!(tree(&src) == before, "the source was touched");
}

#[test]
fn convert_to_hf_writes_parameters_by_fqn() {
    let (root, src) = saved(3);
    let before = tree(&src);
    let config = root.path().join("base");
    std::fs::create_dir(&config).unwrap();
    for (name, contents) in
        [("config.json", "{}"), ("tokenizer.json", "[]"), ("model.safetensors", "no"), ("notes", "")]
    {
        std::fs::write(config.join(name), contents).unwrap();
    }
    let whole = root.path().join("whole");
    let out = succeeds(&["convert", text(&src), text(&whole), "--to", "hf", "--config-from", text(&config)]);
    assert!(out.contains("2 tensors that are not parameters (optimizer state) were left out"), "{out}");
    assert_eq!(list(&whole), ["config.json", "model.safetensors", "tokenizer.json"]);
    let file = std::fs::read(whole.join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let parameters: Vec<Global> = zoo().into_iter().filter(|global| global.fqn.starts_with("model.")).collect();
    assert_eq!(tensors.len(), parameters.len());
    for global in &parameters {
        assert_eq!(tensors.tensor(&global.fqn["model.".len()..]).unwrap().data(), global.bytes);
    }

    let parts = root.path().join("parts");
    let about =
        json(&succeeds(&["convert", text(&src), text(&parts), "--to", "hf", "--max-shard-size", "200B", "--json"]));
    assert_eq!((&about["left_out"], &about["tensors"]), (&2.into(), &7.into()));
    let files = about["files"].as_u64().unwrap();
    assert!(files > 1);
    let index = json(&std::fs::read_to_string(parts.join("model.safetensors.index.json")).unwrap());
    assert_eq!(index["metadata"]["total_size"], about["bytes"]);
    assert_eq!(index["weight_map"].as_object().unwrap().len(), 7);
    assert_eq!(index["weight_map"]["uneven.weight"], format!("model-{files:05}-of-{files:05}.safetensors"));
    for name in list(&parts).iter().filter(|name| name.ends_with(".safetensors")) {
        let bytes = std::fs::read(parts.join(name)).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let sum: usize = tensors.iter().map(|(_, tensor)| tensor.data().len()).sum();
        assert!(sum <= 200 || tensors.len() == 1, "{name} has {sum} bytes");
    }
    // Compare in both directions.
    for dir in [&whole, &parts] {
        let out = succeeds(&["diff", text(dir), text(&src)]);
        assert!(
            out.contains("7 tensors equal to the bit, 0 differ") && out.contains("2 tensors of the other side"),
            "{out}"
        );
        succeeds(&["diff", text(&src), text(dir)]);
    }
    // The prefix comes back.
    let back = root.path().join("back");
    succeeds(&["convert", text(&parts), text(&back), "--to", "fsdp", "--world-size", "2"]);
    assert_holds(&back, &parameters);
    assert!(tree(&src) == before, "the source was touched");
    let out = fails(&["convert", text(&src), text(&root.path().join("x")), "--to", "hf", "--config-from", text(&src)]);
    assert!(out.contains("has no config.json"), "{out}");
}

#[test]
fn consolidate_keeps_names() {
    let (root, src) = saved(2);
    let dst = root.path().join("one");
    succeeds(&["consolidate", text(&src), text(&dst)]);
    let file = std::fs::read(dst.join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    assert_eq!(tensors.len(), 9);
    for global in zoo() {
        assert_eq!(tensors.tensor(&global.fqn).unwrap().data(), global.bytes);
    }
    let out = succeeds(&["diff", text(&dst), text(&src)]);
    assert!(out.starts_with("9 tensors equal to the bit, 0 differ"), "{out}");
    // Optimizer state marks a training state.
    let back = root.path().join("back");
    succeeds(&["convert", text(&dst), text(&back), "--to", "fsdp"]);
    assert_holds(&back, &zoo());
}

#[test]
fn convert_to_dcp_writes_optimizer_options() {
    let (root, src) = fresh();
    let mesh = line(2);
    crate::world::world(2, |group| {
        let mut state = crate::world::state(&zoo(), &mesh, group.rank());
        let group_of_ours = serde_json::json!([
            { "lr": 0.25, "betas": [0.9, 0.95], "params": ["even.weight"] },
            { "lr": 0.5, "momentum": 0.75, "params": ["of_sgd"] },
        ]);
        state.values.insert("optim.param_groups".into(), group_of_ours);
        fsdp_ckpt::save(&src, group, &state).unwrap();
    });
    let dcp = root.path().join("dcp");
    let out = succeeds(&["convert", text(&src), text(&dcp), "--to", "torch-dcp", "--world-size", "3"]);
    assert!(out.contains(": torch-dcp, 9 tensors, "), "{out}");
    assert_eq!(list(&dcp), [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]);
    let values = open(&dcp).unwrap().values().clone();
    let option = |key: &str| &values[&format!("optim.param_groups.even.weight.{key}")];
    assert_eq!((option("lr"), option("amsgrad"), option("fused")), (&0.25.into(), &false.into(), &().into()));
    assert!(!values.contains_key("optim.param_groups") && values["step"] == 10);
    assert_eq!(option("decoupled_weight_decay"), true);
    // SGD gets no options of AdamW.
    assert_eq!(values["optim.param_groups.of_sgd.momentum"], 0.75);
    assert!(!values.contains_key("optim.param_groups.of_sgd.amsgrad"));
    assert!(succeeds(&["verify", text(&dcp)]).contains("in 3 files"));
    succeeds(&["diff", text(&dcp), text(&src)]);

    let back = root.path().join("back");
    succeeds(&["convert", text(&dcp), text(&back), "--to", "fsdp", "--mesh", "2x2"]);
    assert_holds(&back, &zoo());
    assert_eq!(*open(&back).unwrap().values(), values);
}

#[test]
fn alias_writes_a_parameter_twice() {
    let (root, src) = fresh();
    save_all(&src, &zoo(), &line(2));
    let dcp = root.path().join("dcp");
    let alias = "--alias=model.head.weight=model.even.weight";
    let out = succeeds(&["convert", text(&src), text(&dcp), "--to", "torch-dcp", "--world-size", "2", alias]);
    assert!(out.contains(": torch-dcp, 10 tensors, ") && !out.contains("left out"), "{out}");
    let source = open(&dcp).unwrap();
    let whole = |name| {
        let mut bytes = vec![0; 240];
        source.read(name, &Region::whole(&[12, 5]), &mut bytes).unwrap();
        bytes
    };
    assert_eq!(whole("model.head.weight"), zoo()[0].bytes);
    assert_eq!(whole("model.even.weight"), zoo()[0].bytes);
    for (alias, part) in [
        ("a=model.nothing", "has no tensor \"model.nothing\""),
        ("model.even.weight=model.norm.weight", "already has a tensor \"model.even.weight\""),
    ] {
        let to = root.path().join("none");
        let said = fails(&["convert", text(&src), text(&to), "--to", "fsdp", "--alias", alias]);
        assert!(said.contains(part) && !to.exists(), "{said}");
    }
    let (code, _, said) = fsdp_ckpt(&["convert", text(&src), "none", "--to", "fsdp", "--alias", "a"]);
    assert!(code == 2 && said.contains("expected NEW=OLD"), "{said}");
}

/// The address space has room for half of the tensor.
#[test]
fn converts_a_tensor_larger_than_memory() {
    let root = tempfile::tempdir().unwrap();
    let (src, dst) = (root.path().join("large.safetensors"), root.path().join("dst"));
    let bytes = 512u64 << 20;
    let header = format!(r#"{{"w":{{"dtype":"F32","shape":[{},1024],"data_offsets":[0,{bytes}]}}}}"#, bytes / 4096);
    std::fs::write(&src, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    let file = std::fs::File::options().write(true).open(&src).unwrap();
    file.set_len(8 + header.len() as u64 + bytes).unwrap();
    drop(file);
    let converted = assert_cmd::Command::new("sh")
        .args(["-c", "ulimit -v 262144; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_fsdp-ckpt"), "convert"])
        .args([text(&src), text(&dst), "--to", "fsdp", "--world-size", "2", "--dtype", "bf16"])
        .env("RAYON_NUM_THREADS", "2")
        .timeout(std::time::Duration::from_secs(100))
        .assert()
        .success();
    let out = String::from_utf8_lossy(&converted.get_output().stdout).into_owned();
    assert!(out.contains("256.0 MiB in 2 files"), "{out}");
}

/// Runs the command after a shell command. It must fail with one line on stderr, which is returned.
fn fails_after(before: &str, args: &[&str]) -> String {
    let script = format!("{before}; exec \"$0\" \"$@\"");
    let mut command = assert_cmd::Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_fsdp-ckpt")]).args(args);
    let output = command.timeout(std::time::Duration::from_secs(100)).assert().code(1).get_output().clone();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.lines().count() == 1 && !said.contains("panicked"), "{said}");
    said
}

#[test]
fn a_file_beyond_the_limit_of_its_size_is_named() {
    let root = tempfile::tempdir().unwrap();
    let src = root.path().join("large.safetensors");
    let header = r#"{"w":{"dtype":"F32","shape":[256,1024],"data_offsets":[0,1048576]}}"#;
    let mut bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    bytes.resize(bytes.len() + (1 << 20), 0);
    std::fs::write(&src, bytes).unwrap();
    for to in ["fsdp", "hf", "torch-dcp"] {
        let dst = root.path().join("dst");
        let said = fails_after("ulimit -f 64", &["convert", text(&src), text(&dst), "--to", to]);
        let parts = ["can't ", "File too large", " bytes (ulimit -f). Raise the limit with `ulimit -f unlimited`"];
        assert!(parts.iter().all(|part| said.contains(part)) && said.contains(text(root.path())), "{to}: {said}");
        assert!(!dst.exists());
    }
}

#[test]
fn an_absurd_number_of_threads_is_refused() {
    for count in ["100000", "-1", "many"] {
        let said = fails_after(&format!("export RAYON_NUM_THREADS={count}"), &["inspect", "none"]);
        assert!(said.contains(&format!("RAYON_NUM_THREADS={count:?} is not a number of threads from 1 to ")), "{said}");
    }
}

#[test]
fn dtype_converts_only_floating_point_parameters() {
    let (root, src) = fresh();
    let mut globals = zoo();
    let numbers: Vec<f32> = (0..60).map(|i| if i == 7 { f32::MAX } else { i as f32 / 7.0 - 3.0 }).collect();
    globals[0].bytes = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    save_all(&src, &globals, &line(2));
    let dst = root.path().join("bf16");
    let out = succeeds(&["convert", text(&src), text(&dst), "--to", "fsdp", "--world-size", "2", "--dtype", "bf16"]);
    assert!(out.contains("3 tensors were converted from F32 to BF16"), "{out}");
    assert!(out.contains("1 tensors were converted from F16 to BF16"), "{out}");
    assert!(out.contains("1 numbers overflowed the new dtype and are infinite"), "{out}");
    let checkpoint = Checkpoint::open(&dst).unwrap();
    checkpoint.verify().unwrap();
    let mut bytes = vec![0; 120];
    checkpoint.read("model.even.weight", &Region::whole(&[12, 5]), &mut bytes).unwrap();
    let expected: Vec<u8> = numbers.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
    assert_eq!(bytes, expected);
    let dtype = |name: &str| checkpoint.tensor(name).unwrap().dtype;
    assert_eq!(dtype("model.buffer"), DType::U8);
    assert_eq!(dtype("optim.state.even.weight.step"), DType::F32);
    assert_eq!(dtype("optim.state.even.weight.exp_avg"), DType::F64);
    let (code, out, _) = fsdp_ckpt(&["diff", text(&src), text(&dst)]);
    assert!(code == 1 && out.contains("F32 against BF16"), "{out}");
}

#[test]
fn failed_conversions_leave_no_files() {
    let (root, src) = saved(2);
    let before = tree(&src);
    let there = root.path().join("there");
    std::fs::create_dir(&there).unwrap();
    let message = fails(&["convert", text(&src), text(&there), "--to", "hf"]);
    assert!(message.contains("exists already; choose another name or remove it"), "{message}");
    let within = src.join("new");
    let message = fails(&["convert", text(&src), text(&within), "--to", "hf"]);
    assert!(message.contains("is within the source"), "{message}");

    let path = src.join("shard-00001-model-00001-of-00001.safetensors");
    damage(&path);
    for args in [&["--to", "hf"][..], &["--to", "fsdp", "--world-size", "3"]] {
        let dst = root.path().join("dst");
        let message = fails(&[&["convert", text(&src), text(&dst)], args].concat());
        assert!(message.contains("is damaged: checksum"), "{message}");
    }
    damage(&path);
    assert_eq!(list(root.path()), ["step-00000010", "there"]);
    assert!(tree(&src) == before, "the source was touched");
}

#[test]
fn skip_unreadable_leaves_out_unsupported_dtypes() {
    let root = tempfile::tempdir().unwrap();
    let src = root.path().join("m.safetensors");
    let header = r#"{"mask":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]},
        "w":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}"#;
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[1, 0, 7]].concat();
    std::fs::write(&src, bytes).unwrap();
    let dst = root.path().join("dst");
    let message = fails(&["convert", text(&src), text(&dst), "--to", "fsdp"]);
    assert!(message.contains("has unsupported dtypes: \"mask\" (BOOL); expected"), "{message}");
    let out = succeeds(&["convert", text(&src), text(&dst), "--to", "fsdp", "--skip-unreadable"]);
    assert!(out.contains("1 tensors of unsupported dtypes were left out"), "{out}");
    assert_eq!(open(&dst).unwrap().tensors().len(), 1);
    assert!(succeeds(&["inspect", text(&src)]).contains("mask  BOOL"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn converts_between_any_meshes(
        shapes in prop::collection::vec(prop::collection::vec(1usize..9, 1..4), 1..5),
        dim in 0usize..3,
        from in 1usize..6,
        to in (1usize..4, 1usize..6),
    ) {
        let globals: Vec<Global> = shapes
            .iter()
            .enumerate()
            .map(|(i, shape)| {
                let placement = Placement::Shard(dim.min(shape.len() - 1) as _);
                Global::new(&format!("model.{i}"), DType::F16, shape, &[placement])
            })
            .collect();
        let (root, src) = fresh();
        save_all(&src, &globals, &line(from));
        let mesh = MeshLayout::new(&[("dp_replicate", to.0), ("dp_shard", to.1)]).unwrap();
        let (there, back) = (root.path().join("there"), root.path().join("back"));
        fsdp_ckpt::convert::write_fsdp(&there, &*open(&src).unwrap(), &mesh).unwrap();
        assert_holds(&there, &globals);
        fsdp_ckpt::hf::write(&back, &*open(&there).unwrap(), 64, &[]).unwrap();
        let back = open(&back).unwrap();
        for global in &globals {
            let mut bytes = vec![0; global.bytes.len()];
            back.read(&global.fqn, &Region::whole(&global.shape), &mut bytes).unwrap();
            prop_assert_eq!(&bytes, &global.bytes);
        }
    }
}
