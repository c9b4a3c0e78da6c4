//! The code of docs/your-own-program.md, on ranks as threads.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Module, ModuleT, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::initializer::{Fallback, Philox, Pretrained};
use fsdp_candle::{
    AdamW, AdamWConfig, CheckpointManager, FsdpModule, FullyShard, ShardedVarMap, StateDictOptions, TrainState, World,
    get_model_state_dict, nn, no_grad, shard,
};
use fsdp_ckpt::hf;
use fsdp_test_support::{code_blocks, without_layout};

use crate::common::{device, input, ranks, refused};

#[test]
fn documented_code_is_this_code() {
    let source = without_layout(include_str!("own_program.rs"));
    let blocks = code_blocks("docs/your-own-program.md", "rust");
    assert_eq!(blocks.len(), 9);
    for block in blocks {
        assert!(source.contains(&without_layout(&block)), "not in this file:\n{block}");
    }
}

struct Model {
    layers: Vec<(nn::Linear, nn::Linear)>,
    head: nn::Linear,
}

impl Model {
    fn new(vb: VarBuilder) -> Result<Self> {
        let layer = |i| {
            let vb = vb.pp(format!("layers.{i}"));
            Ok((nn::linear(8, 32, vb.pp("up"))?, nn::linear(32, 8, vb.pp("down"))?))
        };
        Ok(Model { layers: (0..3).map(layer).collect::<Result<_>>()?, head: nn::linear(8, 4, vb.pp("head"))? })
    }
}

impl Module for Model {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let layer =
            |x: Tensor, (up, down): &(nn::Linear, nn::Linear)| &x + down.forward(&nn::gelu(&up.forward(&x)?)?)?;
        self.head.forward(&self.layers.iter().try_fold(x.clone(), layer)?)
    }
}

fn pretrained(weights: &Path, world: &World) -> anyhow::Result<(ShardedVarMap, FsdpModule<Model>)> {
    let vars = ShardedVarMap::of_world(world)?;
    vars.init_with(Pretrained::open(weights)?)?; // model.safetensors, or an index and its files
    let opts = FullyShard::new(&vars);
    let model = shard(&opts, &["layers.*"], vars.builder(DType::F32), Model::new)?;
    Ok((vars, model))
}

fn sample(model: &FsdpModule<Model>, x: &Tensor, world: &World) -> anyhow::Result<Option<Tensor>> {
    let _held = model.unshard_all()?; // every rank calls it
    Ok(match world.rank() {
        0 => Some(model.forward(x)?), // without a graph
        _ => None,
    })
}

fn state<'a>(vars: &'a ShardedVarMap, optim: &'a mut AdamW, rows_seen: &'a mut u64) -> TrainState<'a> {
    TrainState::new(vars).optimizer(optim).value("rows_seen", rows_seen)
}

fn run(
    dir: &Path,
    vars: &ShardedVarMap,
    model: &FsdpModule<Model>,
    optim: &mut AdamW,
    steps: usize,
    world: &World,
) -> anyhow::Result<Vec<f64>> {
    let mut checkpoints = CheckpointManager::new(world, dir).keep_newest(3).asynchronous();
    let mut rows_seen = 0;
    let resumed = checkpoints.resume(state(vars, optim, &mut rows_seen))?;
    let mut losses = vec![];
    for step in resumed.map_or(0, |from| from.step) + 1..=steps {
        losses.push(train_step(model, optim, &mut rows_seen, world)?);
        checkpoints.save(step, state(vars, optim, &mut rows_seen))?;
    }
    checkpoints.finish()?; // waits for the last save
    Ok(losses)
}

fn evaluate(vars: &ShardedVarMap, model: &FsdpModule<nn::BatchNorm>, x: &Tensor) -> anyhow::Result<Tensor> {
    vars.average_buffers()?; // every rank calls it
    Ok(no_grad(|| model.call(|model| model.forward_t(x, false)))?)
}

const LORA: nn::LoraConfig = nn::LoraConfig { rank: 2, alpha: 4. };

fn with_adapters(weights: &Path, world: &World) -> anyhow::Result<(ShardedVarMap, FsdpModule<Model>)> {
    let vars = ShardedVarMap::of_world(world)?;
    vars.init_with(Fallback::new(Pretrained::open(weights)?, Philox::new(0), nn::is_adapter))?;
    vars.freeze(|name| !nn::is_adapter(name))?;
    vars.adapt(LORA, |layer| layer.ends_with("up"))?;
    let opts = FullyShard::new(&vars);
    let model = shard(&opts, &["layers.*"], vars.builder(DType::F32), Model::new)?;
    Ok((vars, model))
}

fn export_adapters(dir: &Path, vars: &ShardedVarMap, world: &World) -> anyhow::Result<()> {
    let mut tensors = get_model_state_dict(vars, &StateDictOptions::default())?.shards("base_model.model.");
    tensors.retain(|tensor| nn::is_adapter(&tensor.fqn));
    let file = "adapter_model.safetensors".into();
    hf::export_with(dir, world.group(), &tensors, &hf::ExportOptions { file, ..Default::default() })?;
    if world.rank() == 0 {
        let config = serde_json::json!({
            "peft_type": "LORA", "r": LORA.rank, "lora_alpha": LORA.alpha, "target_modules": ["up"],
        });
        std::fs::write(dir.join("adapter_config.json"), config.to_string())?;
    }
    Ok(())
}

fn export(dir: &Path, vars: &ShardedVarMap, world: &World) -> anyhow::Result<()> {
    let tensors = get_model_state_dict(vars, &StateDictOptions::default())?.shards("");
    hf::export(dir, world.group(), &tensors, &[])?; // the last argument: files to copy, such as config.json
    Ok(())
}

/// Rows of every step, which the ranks share.
const ROWS: usize = 4;

/// Trains on the rows after the first `rows_seen`, and returns the mean loss.
fn train_step(model: &FsdpModule<Model>, optim: &mut AdamW, rows_seen: &mut u64, world: &World) -> anyhow::Result<f64> {
    let (rows, step) = (ROWS / world.size(), *rows_seen as usize / ROWS);
    let share = |seed, width| input(seed, &[ROWS, width]).narrow(0, world.rank() * rows, rows);
    let loss = nn::loss::mse(&model.forward(&share(step, 8)?)?, &share(step + 100, 4)?)?;
    optim.step(&model.backward(&loss)?)?;
    *rows_seen += ROWS as u64;
    Ok(world.all_reduce(&[f64::from(loss.to_scalar::<f32>()?)], fsdp_candle::ReduceOp::Avg)?[0])
}

/// Trains the first steps. Only trainable parameters get gradients.
fn train(vars: &ShardedVarMap, model: &FsdpModule<Model>, optim: &mut AdamW, steps: usize, world: &World) {
    let mut rows_seen = 0;
    for _ in 0..steps {
        train_step(model, optim, &mut rows_seen, world).unwrap();
    }
    let grads = model.backward(&model.forward(&input(0, &[ROWS, 8])).unwrap().sum_all().unwrap()).unwrap();
    for param in vars.params() {
        assert_eq!(grads.get(param.var()).is_some(), param.trainable(), "{}", param.name());
    }
}

fn adamw(vars: &ShardedVarMap, lr: f64) -> AdamW {
    AdamW::new(vars.trainable(), AdamWConfig { lr, ..AdamWConfig::default() }).unwrap()
}

/// Writes the weights of a model in plain Candle to `model.safetensors`, and returns them.
fn write_weights(dir: &Path) -> BTreeMap<String, Tensor> {
    let map = candle_nn::VarMap::new();
    Model::new(VarBuilder::from_varmap(&map, DType::F32, &device())).unwrap();
    for (name, var) in map.data().lock().unwrap().iter() {
        var.set(&input(name.bytes().map(usize::from).sum(), var.dims())).unwrap();
    }
    map.save(dir.join("model.safetensors")).unwrap();
    read(&dir.join("model.safetensors"))
}

fn read(file: &Path) -> BTreeMap<String, Tensor> {
    candle_core::safetensors::load(file, &Device::Cpu).unwrap().into_iter().collect()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns the outputs of a plain model with these weights.
fn plain_outputs(weights: BTreeMap<String, Tensor>) -> Vec<f32> {
    let vb = VarBuilder::from_tensors(weights.into_iter().collect(), DType::F32, &device());
    values(&Model::new(vb).unwrap().forward(&input(0, &[ROWS, 8])).unwrap())
}

/// Asserts that two lists of numbers differ only by rounding.
fn assert_near<T: Copy + Into<f64> + std::fmt::Debug>(a: &[T], b: &[T]) {
    assert_eq!(a.len(), b.len());
    assert!(a.iter().zip(b).all(|(&a, &b)| (a.into() - b.into()).abs() < 4e-6), "{a:?} {b:?}");
}

#[test]
fn starts_from_files_and_exports_to_them() {
    let root = tempfile::tempdir().unwrap();
    let weights = write_weights(root.path());
    let exported = root.path().join("exported");
    let outputs = ranks(2, |world| {
        let (vars, model) = pretrained(root.path(), &world).unwrap();
        assert!(vars.params().iter().all(|param| param.var().dims()[0] < param.shape().dims()[0]));
        assert_eq!(model.units().len(), 4);
        export(&exported, &vars, &world).unwrap();
        values(&model.forward(&input(0, &[ROWS, 8])).unwrap())
    });
    let again = read(&exported.join("model.safetensors"));
    assert!(again.keys().eq(weights.keys()));
    for (name, weight) in &weights {
        assert_eq!(values(weight), values(&again[name]), "{name}");
    }
    // The file is a model of plain Candle.
    let plain = plain_outputs(again);
    outputs.iter().for_each(|output| assert_near(output, &plain));
}

#[test]
fn an_export_that_would_be_refused_is_refused_before_training() {
    let root = tempfile::tempdir().unwrap();
    write_weights(root.path());
    let exported = root.path().join("exported");
    let mut options = hf::ExportOptions::default();
    let check = |options: &hf::ExportOptions| {
        ranks(2, |world| hf::check_export(&exported, world.group(), options).map_err(|error| error.to_string()))
    };
    assert_eq!(check(&options), [Ok(()), Ok(())]);
    assert!(!exported.exists());
    ranks(2, |world| export(&exported, &pretrained(root.path(), &world).unwrap().0, &world).unwrap());
    for error in check(&options) {
        refused(error, &["rank 0", "exported/model.safetensors exists already"]);
    }
    options.replace = true;
    assert_eq!(check(&options), [Ok(()), Ok(())]);
    options.config_files = vec![root.path().join("config.json")];
    for error in check(&options) {
        refused(error, &["rank 0", "config.json"]);
    }
}

#[test]
fn an_export_on_one_rank_names_the_export() {
    let root = tempfile::tempdir().unwrap();
    write_weights(root.path());
    let exported = root.path().join("exported");
    let errors = ranks(2, |world| {
        let (vars, model) = pretrained(root.path(), &world).unwrap();
        match world.rank() {
            0 => export(&exported, &vars, &world).map_err(|error| format!("{error:#}")),
            _ => no_grad(|| model.forward(&input(0, &[ROWS, 8]))).map(drop).map_err(|error| error.to_string()),
        }
    });
    for error in errors {
        refused(
            error,
            &["[0] issued all_reduce(export of `exported/model.safetensors`; ", "[1] issued all_gather(unit "],
        );
    }
}

#[test]
fn samples_on_one_rank() {
    let root = tempfile::tempdir().unwrap();
    let plain = plain_outputs(write_weights(root.path()));
    let samples = ranks(2, |world| {
        let (_vars, model) = pretrained(root.path(), &world).unwrap();
        sample(&model, &input(0, &[ROWS, 8]), &world).unwrap().map(|y| values(&y))
    });
    assert!(samples[1].is_none());
    assert_near(samples[0].as_ref().unwrap(), &plain);
}

#[test]
fn weights_come_from_files_and_boxed_sources() {
    let root = tempfile::tempdir().unwrap();
    let weights = write_weights(root.path());
    let file = root.path().join("model.safetensors");
    let names = weights.keys().map(|name| (name.clone(), serde_json::json!("model.safetensors")));
    let index = serde_json::json!({ "weight_map": names.collect::<serde_json::Map<_, _>>() });
    let index_file = root.path().join("other.safetensors.index.json");
    std::fs::write(&index_file, index.to_string()).unwrap();
    let sources: [(&str, &(dyn Fn() -> Pretrained + Sync)); 4] = [
        ("a file", &|| Pretrained::open(&file).unwrap()),
        ("an index", &|| Pretrained::open(&index_file).unwrap()),
        ("a box", &|| Pretrained::of(fsdp_ckpt::open(&file).unwrap(), |name| name.into())),
        ("a shared box", &|| Pretrained::of(Arc::new(fsdp_ckpt::open(&index_file).unwrap()), |name| name.into())),
    ];
    for (what, source) in sources {
        ranks(2, |world| {
            let vars = ShardedVarMap::of_world(&world).unwrap();
            vars.init_with(source()).unwrap();
            shard(&FullyShard::new(&vars), &[], vars.builder(DType::F32), Model::new).unwrap();
            for param in vars.params() {
                let full = param.dtensor().unwrap().full_tensor().unwrap();
                assert_eq!(values(&full), values(&weights[param.name()]), "{what}: {}", param.name());
            }
        });
    }
}

#[test]
fn a_wrong_shape_names_file_tensor_and_shapes() {
    let root = tempfile::tempdir().unwrap();
    write_weights(root.path());
    let file = root.path().join("model.safetensors");
    let errors = ranks(2, |world| {
        let vars = ShardedVarMap::of_world(&world).unwrap();
        vars.init_with(Pretrained::of(fsdp_ckpt::open(&file).unwrap(), |name| format!("head.{name}"))).unwrap();
        let built = shard(&FullyShard::new(&vars), &[], vars.builder(DType::F32), |vb| nn::linear(8, 5, vb));
        built.map(drop).unwrap_err().to_string()
    });
    let file = file.display().to_string();
    for error in errors {
        let parts =
            ["parameter `weight`", "[5, 8]", "tensor `head.weight`", &file, "[4, 8]", "the arguments of its `new`"];
        refused(Err::<(), _>(error), &parts);
    }
}

#[test]
fn resumes_at_another_world_size() {
    let root = tempfile::tempdir().unwrap();
    write_weights(root.path());
    let losses = ranks(2, |world| {
        let (vars, model) = pretrained(root.path(), &world).unwrap();
        run(&root.path().join("whole"), &vars, &model, &mut adamw(&vars, 0.01), 6, &world).unwrap()
    });
    for size in [1, 2, 4] {
        let dir = root.path().join(format!("run-{size}"));
        ranks(2, |world| {
            let (vars, model) = pretrained(root.path(), &world).unwrap();
            run(&dir, &vars, &model, &mut adamw(&vars, 0.01), 3, &world).unwrap()
        });
        let resumed = ranks(size, |world| {
            let (vars, model) = pretrained(root.path(), &world).unwrap();
            // The checkpoint has the learning rate.
            run(&dir, &vars, &model, &mut adamw(&vars, 0.5), 6, &world).unwrap()
        });
        match size {
            2 => assert_eq!(resumed[0], losses[0][3..]),
            _ => assert_near(&resumed[0], &losses[0][3..]),
        }
    }
}

#[test]
fn evaluates_with_the_statistics_of_all_ranks() {
    let build = |world: &World| {
        let vars = ShardedVarMap::of_world(world).unwrap();
        let build = |vb: VarBuilder| nn::batch_norm(5, 1e-5, vb);
        let model = shard(&FullyShard::new(&vars), &[], vars.builder(DType::F32), build).unwrap();
        model.call(|model| model.forward_t(&input(world.rank(), &[ROWS, 5]), true)).unwrap();
        (vars, model)
    };
    let outputs = ranks(2, |world| {
        let (vars, model) = build(&world);
        let x = input(7, &[ROWS, 5]);
        let own = values(&no_grad(|| model.call(|model| model.forward_t(&x, false))).unwrap());
        (own, values(&evaluate(&vars, &model, &x).unwrap()))
    });
    assert_ne!(outputs[0].0, outputs[1].0);
    assert_eq!(outputs[0].1, outputs[1].1);
}

#[test]
fn trains_and_exports_adapters() {
    let root = tempfile::tempdir().unwrap();
    let weights = write_weights(root.path());
    let adapters = root.path().join("adapters");
    let outputs = ranks(2, |world| {
        let (vars, model) = with_adapters(root.path(), &world).unwrap();
        train(&vars, &model, &mut adamw(&vars, 0.01), 5, &world);
        export_adapters(&adapters, &vars, &world).unwrap();
        values(&model.forward(&input(0, &[ROWS, 8])).unwrap())
    });
    let layer = |i: usize| ["A", "B"].map(|m| format!("base_model.model.layers.{i}.up.lora_{m}.weight"));
    assert!(read(&adapters.join("adapter_model.safetensors")).into_keys().eq((0..3).flat_map(layer)));

    // Merged into the weights, in plain Candle.
    let base = fsdp_ckpt::open(root.path()).unwrap();
    let merged = fsdp_ckpt::merge::Merged::new(&*base, &adapters).unwrap();
    hf::write(root.path().join("merged"), &merged, 1 << 30, &[]).unwrap();
    let merged = read(&root.path().join("merged/model.safetensors"));
    for (name, weight) in &weights {
        assert_eq!(values(weight) != values(&merged[name]), name.ends_with("up.weight"), "{name}");
    }
    let plain = plain_outputs(merged);
    outputs.iter().for_each(|output| assert_near(output, &plain));
}

#[test]
fn weights_of_another_model_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let mut weights = write_weights(root.path());
    weights.remove("head.bias");
    let weights = weights.into_iter().collect();
    candle_core::safetensors::save(&weights, root.path().join("model.safetensors")).unwrap();
    refused(ranks(1, |world| pretrained(root.path(), &world).map(|_| ())).remove(0), &["`head.bias`"]);
}
