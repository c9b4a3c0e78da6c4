//! `load` and `save` of a map, as `candle_nn::VarMap` has them.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fsdp_candle::{FullyShard, ShardedVarMap, WeightFormat, World, fully_shard, nn};

use crate::common::{Gradients, WIDTH, built, device, elements, input, plain, ranks, refused, vars, vars_on, weights};

fn tensors(path: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

fn values(map: &VarMap, like: &Gradients) -> Gradients {
    let data = map.data().lock().unwrap();
    like.iter().map(|(name, _)| (name.clone(), elements(&data[name]))).collect()
}

#[test]
fn files_pass_between_a_map_and_candles_varmap_at_any_number_of_ranks() {
    let root = tempfile::tempdir().unwrap();
    // From plain Candle.
    let map = VarMap::new();
    let _model = plain(VarBuilder::from_varmap(&map, DType::F32, &device()), WIDTH).unwrap();
    let candles = root.path().join("candle.safetensors");
    map.save(&candles).unwrap();
    let like = ranks(1, |world| weights(&built(&world, WIDTH).0)).swap_remove(0);
    let want = values(&map, &like);
    for size in 1..=3 {
        let ours = root.path().join(format!("{size}/ours.safetensors"));
        for got in ranks(size, |world| {
            let (vars, _model) = built(&world, WIDTH);
            vars.load(&candles).unwrap();
            vars.save(&ours).unwrap();
            vars.save(ours.to_str().unwrap()).unwrap(); // replaces it, and takes texts
            weights(&vars)
        }) {
            assert_eq!(got, want);
        }
        // Back to plain Candle.
        let mut again = VarMap::new();
        let _model = plain(VarBuilder::from_varmap(&again, DType::F32, &device()), WIDTH).unwrap();
        assert_ne!(values(&again, &like), want);
        again.load(&ours).unwrap();
        assert_eq!(values(&again, &like), want);
        assert_eq!(std::fs::read_dir(ours.parent().unwrap()).unwrap().count(), 1, "no temporary file stays");
    }
}

#[test]
fn a_mesh_of_replicas_saves_and_loads() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("model.safetensors");
    std::fs::write(root.path().join("model.safetensors.index.json"), "{}").unwrap(); // any neighbours
    ranks(4, |world| {
        let vars = vars_on(&world, &[("dp_replicate", 2), ("dp_shard", 2)]);
        let model =
            fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::batch_norm(5, 1e-5, vb)).unwrap();
        model.forward_t(&input(1, &[4, 5]), true).unwrap();
        vars.save(&file).unwrap();
        let (before, statistics) = (weights(&vars), elements::<f32>(&vars.buffers()[0].1));
        vars.params()
            .iter()
            .for_each(|param| param.set_full(&Tensor::zeros(5, DType::F32, &device()).unwrap()).unwrap());
        model.forward_t(&input(2, &[4, 5]), true).unwrap();
        vars.load(&file).unwrap();
        assert_eq!((weights(&vars), elements::<f32>(&vars.buffers()[0].1)), (before, statistics));
    });
    assert_eq!(tensors(&file).len(), 4); // the buffers, too
}

#[test]
fn misfits_are_errors_by_name_that_change_nothing() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("model.safetensors");
    let layer = |world: &World| {
        let vars = vars(world);
        let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear(4, 2, vb)).unwrap();
        (vars, model)
    };
    let write = |tensors: &[(&str, Tensor)]| {
        let named: HashMap<String, Tensor> =
            tensors.iter().map(|(name, tensor)| (name.to_string(), tensor.clone())).collect();
        candle_core::safetensors::save(&named, &file).unwrap();
    };
    let of = |shape: &[usize], dtype| Tensor::ones(shape, dtype, &Device::Cpu).unwrap();
    let refused_by_all = |parts: &[&str]| {
        ranks(2, |world| {
            let (vars, _model) = layer(&world);
            let before = weights(&vars);
            refused(vars.load(&file), parts);
            assert_eq!(weights(&vars), before);
        });
    };
    refused_by_all(&["model.safetensors"]); // no file
    write(&[("weight", of(&[2, 4], DType::F32))]);
    refused_by_all(&["bias"]);
    write(&[("weight", of(&[4, 2], DType::F32)), ("bias", of(&[2], DType::F32))]);
    refused_by_all(&["weight", "shape [4, 2], expected [2, 4]"]);
    write(&[("weight", of(&[2, 4], DType::U32)), ("bias", of(&[2], DType::F32))]);
    refused_by_all(&["weight", "dtype"]);
    // Other floats are converted, and names that the map lacks are ignored, as VarMap does.
    write(&[("weight", of(&[2, 4], DType::BF16)), ("bias", of(&[2], DType::F64)), ("head", of(&[1], DType::F32))]);
    ranks(2, |world| {
        let (vars, _model) = layer(&world);
        vars.load(&file).unwrap();
        assert!(weights(&vars).iter().all(|(_, values)| values.iter().all(|value| *value == 1.)));
    });
}

#[test]
fn all_ranks_learn_that_one_failed() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("model.safetensors");
    ranks(2, |world| {
        let (vars, _model) = built(&world, WIDTH);
        vars.save(&file).unwrap();
        let path = if world.rank() == 0 { file.clone() } else { root.path().join("missing.safetensors") };
        let expected = if world.rank() == 0 { "rank 1 failed to load" } else { "missing.safetensors" };
        refused(vars.load(path), &[expected]);
        // A directory is in the way on every rank.
        let before = std::fs::read(&file).unwrap();
        refused(vars.save(root.path()), &["exists"]);
        assert_eq!(std::fs::read(&file).unwrap(), before);
        // A map without parameters loads nothing, and does not replace a file.
        let empty = crate::common::vars(&world);
        refused(empty.load(&file), &["no parameters", "init_with"]);
        refused(empty.save(&file), &["no parameters", "after the model is built"]);
        assert_eq!(std::fs::read(&file).unwrap(), before);
    });
}

#[test]
fn blocks_are_saved_as_bytes_and_refuse_floats() {
    let root = tempfile::tempdir().unwrap();
    let [file, floats] = ["blocks.safetensors", "floats.safetensors"].map(|name| root.path().join(name));
    let build = |world: &World, format: Option<WeightFormat>| {
        let vars: ShardedVarMap = vars(world);
        vars.freeze(|_| true).unwrap();
        let opts = FullyShard::new(&vars).store(move |_, _| format);
        let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(64, 4, vb)).unwrap();
        (vars, model)
    };
    ranks(2, |world| {
        build(&world, None).0.save(&floats).unwrap();
        let (vars, _model) = build(&world, Some(WeightFormat::Nf4));
        vars.save(&file).unwrap();
        vars.load(&file).unwrap();
        refused(vars.load(&floats), &["parameter `weight`", "as floats", "before the model is built"]);
    });
    assert!(tensors(&file).contains_key("weight.nf4"));
}
