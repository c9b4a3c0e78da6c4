//! Shards on disk give the bits of shards in memory, and their checkpoints. Layers compute on the host.

use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Tensor};
use fsdp_candle::initializer::Philox;
use fsdp_candle::{
    AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, CandleOptimizer, Ema, Error, Float8, FsdpModule, FullyShard,
    GradcheckOptions, MixedPrecisionPolicy, Muon, MuonConfig, ReshardAfterForward, SGD, SgdConfig, ShardedOptimizer,
    ShardedVarMap, StateDictOptions, StateOnDisk, ValuesOf, WeightFormat, World, check_finite, clip_grad_norm,
    fully_shard, get_model_state_dict, gradcheck, load_model, load_optimizer, model_tensors, nn, optimizer_tensors,
    set_model_state_dict,
};
use fsdp_ckpt::{LoadOptions, SaveState, save};
use fsdp_core::process_group::local;
use fsdp_test_support::files;

use crate::common::{elements, full, on_cuda, refused};

const WIDTH: usize = 128;

/// Two layers. With the smallest blocks, `up` takes several of them. On four ranks, two shards of `down` are empty.
struct Layers(nn::Linear, FsdpModule<nn::Linear>);

impl Module for Layers {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.1.forward(&nn::gelu(&self.0.forward(x)?)?)
    }
}

type Model = FsdpModule<Layers>;
type Options<'a> = dyn Fn(FullyShard) -> FullyShard + Sync + 'a;

fn disk(dir: &Path) -> StateOnDisk {
    StateOnDisk::new(dir).memory_bytes(0)
}

fn map(world: &World, mesh: &[(&str, usize)], dir: Option<&Path>) -> ShardedVarMap {
    let vars = ShardedVarMap::new(&world.mesh(mesh).unwrap(), &Device::Cpu);
    vars.init_with(Philox::new(7)).unwrap();
    dir.into_iter().for_each(|dir| vars.store_on_disk(&disk(dir)).unwrap());
    vars
}

fn build(vars: &ShardedVarMap, opts: &FullyShard, dtype: DType) -> fsdp_candle::Result<Model> {
    let vb = vars.builder(dtype);
    let down = fully_shard(opts, vb.pp("down"), |vb| nn::linear(131, 2, vb))?;
    fully_shard(opts, vb, |vb| Ok(Layers(nn::linear(WIDTH, 131, vb.pp("up"))?, down)))
}

fn batch(seed: usize, dtype: DType) -> Tensor {
    let values: Vec<f32> = (0..4 * WIDTH).map(|at| ((at * 37 + seed * 101) % 61) as f32 / 61. - 0.5).collect();
    Tensor::from_vec(values, (4, WIDTH), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn loss(model: &Model, x: &Tensor) -> Tensor {
    model.forward(x).unwrap().to_dtype(DType::F32).unwrap().sqr().unwrap().mean_all().unwrap()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    AdamW,
    MomentsOnDisk,
    MomentsOnDiskIn8Bits,
    Sgd,
    Muon,
}

fn optimizer(kind: Kind, vars: &ShardedVarMap, dir: Option<&Path>) -> Box<dyn ShardedOptimizer> {
    let adamw = AdamWConfig { lr: 0.02, ..AdamWConfig::default() };
    let (params, matrices) = (vars.trainable(), |param: &Arc<_>| fsdp_candle::FsdpParam::shape(param).rank() == 2);
    match (kind, dir) {
        (Kind::MomentsOnDisk, Some(dir)) => Box::new(AdamW::on_disk(vec![(params, adamw)], &disk(dir)).unwrap()),
        (Kind::AdamW | Kind::MomentsOnDisk, _) => Box::new(AdamW::new(params, adamw).unwrap()),
        (Kind::MomentsOnDiskIn8Bits, dir) => {
            let groups = vec![(params, AdamW8bitConfig { min_8bit_size: 1000, ..AdamW8bitConfig::default() })];
            match dir {
                Some(dir) => Box::new(AdamW8bit::on_disk(groups, &disk(dir)).unwrap()),
                None => Box::new(AdamW8bit::with_groups(groups).unwrap()),
            }
        }
        (Kind::Sgd, _) => Box::new(SGD::new(params, SgdConfig { lr: 0.1, ..SgdConfig::default() }).unwrap()),
        (Kind::Muon, _) => {
            let matrices = params.into_iter().filter(matrices).collect();
            Box::new(Muon::new(matrices, MuonConfig::default()).unwrap())
        }
    }
}

/// Trains for three steps, in backward if `in_backward` is set. Returns losses and, as bytes of f64, whole weights.
fn train(
    world: &World,
    mesh: &[(&str, usize)],
    options: &Options<'_>,
    (kind, dtype, in_backward): (Kind, DType, bool),
    dir: Option<&Path>,
) -> Vec<Vec<f64>> {
    let vars = map(world, mesh, dir);
    let model = build(&vars, &options(FullyShard::new(&vars)), dtype).unwrap();
    let optim = Arc::new(Mutex::new(optimizer(kind, &vars, dir)));
    if in_backward {
        let optim = optim.clone();
        let step = move |grads: GradStore| Ok(optim.lock().unwrap().step(&grads)?);
        model.set_post_accumulate_grad_hook(Some(Arc::new(step)));
    }
    let mut losses = vec![];
    for step in 0..3 {
        let loss = loss(&model, &batch(10 * step + world.rank(), dtype));
        let mut grads = model.backward(&loss).unwrap();
        if !in_backward {
            clip_grad_norm(&vars, &mut grads, 0.1).unwrap();
            optim.lock().unwrap().step(&grads).unwrap();
        }
        losses.push(f64::from(loss.to_scalar::<f32>().unwrap()));
    }
    let mut all = vec![losses];
    all.extend(get_model_state_dict(&vars, &full()).unwrap().tensors.values().map(|state| elements(&state.tensor)));
    all
}

fn check(size: usize, mesh: &[(&str, usize)], what: &str, options: &Options<'_>, run: (Kind, DType, bool)) {
    let dir = tempfile::tempdir().unwrap();
    let [in_memory, on_disk] =
        [None, Some(dir.path())].map(|dir| local::run(size, |group| train(&World::of(group), mesh, options, run, dir)));
    assert!(in_memory == on_disk, "{what}, {size} ranks, {run:?}");
    assert!(on_disk.iter().flatten().flatten().all(|value| value.is_finite()));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn bits_equal_shards_in_memory() {
    for size in 1..=4 {
        for kind in [Kind::AdamW, Kind::MomentsOnDisk, Kind::MomentsOnDiskIn8Bits, Kind::Sgd, Kind::Muon] {
            check(size, &[("dp_shard", size)], "default", &|opts| opts, (kind, DType::F32, false));
        }
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let run = (Kind::MomentsOnDisk, dtype, true);
            check(size, &[("dp_shard", size)], "in backward", &|opts| opts, run);
        }
    }
}

#[test]
fn bits_equal_shards_in_memory_with_every_option() {
    let run = (Kind::MomentsOnDisk, DType::F32, false);
    let replicas = [("dp_replicate", 2), ("dp_shard", 2)];
    check(4, &replicas, "HSDP", &|opts| opts, run);
    check(4, &replicas, "divided replicas", &|opts| opts.shard_optimizer_over_replicas(true), run);
    let shards = [("dp_shard", 2)];
    let mixed = MixedPrecisionPolicy { param_dtype: Some(DType::BF16), ..MixedPrecisionPolicy::default() };
    check(2, &shards, "bf16", &|opts| opts.mp_policy(mixed.clone()), run);
    check(2, &shards, "ZeRO-2", &|opts| opts.reshard_after_forward(ReshardAfterForward::Never), run);
    let float8 =
        |opts: FullyShard| opts.all_gather_extension(|name| name.ends_with("up.weight").then(|| Arc::new(Float8) as _));
    check(2, &shards, "float8", &float8, run);
}

#[test]
fn frozen_weights_in_blocks_are_read_from_disk() {
    let dir = tempfile::tempdir().unwrap();
    let outputs = [None, Some(dir.path())].map(|dir| {
        local::run(2, |group| {
            let world = World::of(group);
            let vars = map(&world, &[("dp_shard", 2)], dir);
            vars.freeze(|name| name == "up.weight").unwrap();
            let opts = FullyShard::new(&vars).store(|name, _| (name == "up.weight").then_some(WeightFormat::Nf4));
            let model = build(&vars, &opts, DType::F32).unwrap();
            check_finite(&vars, &[ValuesOf::Parameters]).unwrap();
            elements::<f32>(&model.forward(&batch(world.rank(), DType::F32)).unwrap())
        })
    });
    assert_eq!(outputs[0], outputs[1]);
}

/// Saves a checkpoint. Collective.
fn checkpoint(path: &Path, world: &World, vars: &ShardedVarMap, optim: &dyn ShardedOptimizer) {
    let mut tensors = model_tensors(vars).unwrap();
    tensors.extend(optimizer_tensors(optim).unwrap());
    let state = SaveState { mesh: vars.mesh().layout().clone(), tensors, values: Default::default() };
    save(path, world.group(), &state).unwrap();
}

#[test]
fn checkpoints_have_the_same_files_and_load_at_another_world_size() {
    let dir = tempfile::tempdir().unwrap();
    let saved = |name: &str| dir.path().join(name);
    let save_after_steps = |name: &str, size: usize, on_disk: Option<&Path>, from: Option<&str>| {
        local::run(size, |group| {
            let world = World::of(group);
            let vars = map(&world, &[("dp_shard", size)], on_disk);
            let model = build(&vars, &FullyShard::new(&vars), DType::F32).unwrap();
            let mut optim = optimizer(Kind::MomentsOnDisk, &vars, on_disk);
            if let Some(from) = from {
                let source = fsdp_ckpt::open(saved(from)).unwrap();
                load_model(&vars, &*source, &LoadOptions::default()).unwrap();
                load_optimizer(&mut *optim, &*source, &LoadOptions::default()).unwrap();
            }
            // Every rank computes on the same batch, so the number of ranks does not matter to the gradients' mean.
            let grads = model.backward(&loss(&model, &batch(3, DType::F32))).unwrap();
            optim.step(&grads).unwrap();
            checkpoint(&saved(name), &world, &vars, &*optim);
        });
    };
    let temporary = tempfile::tempdir().unwrap();
    save_after_steps("memory", 2, None, None);
    save_after_steps("disk", 2, Some(temporary.path()), None);
    assert_eq!(files(&saved("memory")), files(&saved("disk")));
    save_after_steps("memory-3", 3, None, Some("disk"));
    save_after_steps("disk-3", 3, Some(temporary.path()), Some("memory"));
    assert_eq!(files(&saved("memory-3")), files(&saved("disk-3")));
}

#[test]
fn values_are_read_and_set() {
    let dir = tempfile::tempdir().unwrap();
    local::run(2, |group| {
        let world = World::of(group);
        let vars = map(&world, &[("dp_shard", 2)], Some(dir.path()));
        let model = build(&vars, &FullyShard::new(&vars), DType::F32).unwrap();
        let other = map(&world, &[("dp_shard", 2)], None);
        let in_memory = build(&other, &FullyShard::new(&other), DType::F32).unwrap();
        let x = batch(world.rank(), DType::F32);
        let same = || {
            let [ours, theirs] = [&vars, &other].map(|vars| get_model_state_dict(vars, &full()).unwrap().tensors);
            for (name, state) in &ours {
                assert_eq!(elements::<f32>(&state.tensor), elements::<f32>(&theirs[name].tensor), "{name}");
            }
            assert_eq!(loss(&model, &x).to_scalar::<f32>().unwrap(), loss(&in_memory, &x).to_scalar::<f32>().unwrap());
        };
        same();
        for vars in [&vars, &other] {
            let param = vars.get("up.weight").unwrap();
            param.set_full(&param.dtensor().unwrap().mul(2.).unwrap().full_tensor().unwrap()).unwrap();
        }
        same();
        for vars in [&vars, &other] {
            let mut ema = Ema::new(vars.params(), 0.5).unwrap();
            ema.update().unwrap();
            let param = vars.get("down.bias").unwrap();
            param.set_full(&Tensor::new(&[3f32, 5.], &Device::Cpu).unwrap()).unwrap();
            ema.update().unwrap();
            ema.copy_to(vars).unwrap();
        }
        same();
        // A sharded state dict has copies.
        for vars in [&vars, &other] {
            let dict = get_model_state_dict(vars, &StateDictOptions::default()).unwrap();
            let mut changed = dict.clone();
            for state in changed.tensors.values_mut() {
                state.tensor = (&state.tensor + 1.).unwrap();
            }
            set_model_state_dict(vars, &changed, &StateDictOptions::default()).unwrap();
        }
        same();
        let options = GradcheckOptions::default();
        gradcheck(&model, &options, |model| model.forward(&x)?.sqr()?.mean_all()).unwrap();
        same();
        vars.get("up.bias").unwrap().set_full(&Tensor::full(f32::NAN, 131, &Device::Cpu).unwrap()).unwrap();
        let Err(Error::NonFinite(found)) = check_finite(&vars, &[ValuesOf::Parameters]) else { panic!() };
        assert_eq!((found.tensors.len(), found.tensors[0].values), (1, 131));
    });
}

#[test]
fn bad_uses_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    local::run(1, |group| {
        let world = World::of(group);
        let vars = map(&world, &[("dp_shard", 1)], None);
        let missing = dir.path().join("missing");
        refused(vars.store_on_disk(&StateOnDisk::new(&missing)), &["rank 0", "missing", "can't create a file"]);
        let vars = map(&world, &[("dp_shard", 1)], Some(dir.path()));
        build(&vars, &FullyShard::new(&vars), DType::F32).unwrap();
        let error = vars.get("up.weight").unwrap().var().sum_all();
        assert!(error.is_err());
        refused(
            CandleOptimizer::<candle_nn::SGD>::without_state(vars.trainable(), 0.1),
            &["down.weight", "on disk", "AdamW or SGD of this crate"],
        );
    });
    if on_cuda() {
        crate::common::ranks(1, |world| {
            let vars = ShardedVarMap::of_world(&world).unwrap();
            refused(vars.store_on_disk(&disk(dir.path())), &["rank 0", "compute on the CPU", "OffloadPolicy::Cpu"]);
        });
    }
}
