//! Frozen parameters in fewer bits train as decoded weights do.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::initializer::{Initializer, Philox, ShardRequest};
use fsdp_candle::{
    AdamW, AdamWConfig, ColwiseParallel, Ema, FsdpModule, FullyShard, MixedPrecisionPolicy, OffloadPolicy,
    ParallelPlan, ReshardAfterForward, RowwiseParallel, ShardPlacement, ShardedVarMap, StateDictOptions, ValuesOf,
    WeightFormat, World, check_finite, fully_shard, get_model_state_dict, load_model, model_tensors, nn, parallelize,
    set_model_state_dict,
};
use fsdp_ckpt::{LoadOptions, SaveState, TensorSource, convert::View};

use crate::common::{Gradients, batch, dict_elements, elements, full, mean_square, ranks, refused, vars_on, weights};

const WIDTH: usize = 64;
const HIDDEN: usize = 128;
const FORMATS: [WeightFormat; 3] = [WeightFormat::Bf16, WeightFormat::Int8, WeightFormat::Nf4];

/// A residual MLP, whose first layer has an adapter.
struct Block {
    up: nn::Linear,
    down: nn::Linear,
}

impl Block {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Block {
            up: nn::linear(WIDTH, HIDDEN, vb.pp("up"))?,
            down: nn::linear_no_bias(HIDDEN, WIDTH, vb.pp("down"))?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x + self.down.forward(&nn::gelu(&self.up.forward(x)?)?)?
    }
}

type Model = FsdpModule<Vec<FsdpModule<Block>>>;

fn is_stored(name: &str) -> bool {
    name.ends_with("weight") && !nn::is_adapter(name)
}

/// The values that Philox draws, encoded and decoded.
struct Decoded(WeightFormat);

impl Initializer for Decoded {
    fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> fsdp_candle::Result<()> {
        Philox::new(3).fill(request, shard)?;
        if is_stored(request.name) {
            let values: &mut [f32] = bytemuck::cast_slice_mut(shard);
            match self.0.blocks() {
                Some(format) => {
                    let mut blocks = vec![0; format.bytes(values.len())];
                    format.encode(values, &mut blocks);
                    format.decode(&blocks, values, |value| value);
                }
                None => {
                    let mut rounded = vec![0u8; 2 * values.len()];
                    let request = ShardRequest { dtype: DType::BF16, ..*request };
                    Philox::new(3).fill(&request, &mut rounded)?;
                    let halves = rounded.as_chunks::<2>().0.iter();
                    let wide = |half: &[u8; 2]| f32::from_bits(u32::from(u16::from_ne_bytes(*half)) << 16);
                    values.iter_mut().zip(halves).for_each(|(value, half)| *value = wide(half));
                }
            }
        }
        Ok(())
    }
}

/// A mesh and options of the units.
struct Case {
    ranks: usize,
    mesh: &'static [(&'static str, usize)],
    tensor_parallel: bool,
    options: fn(FullyShard) -> FullyShard,
}

fn map(world: &World, mesh: &[(&str, usize)], tensor_parallel: bool) -> ShardedVarMap {
    let vars = match tensor_parallel {
        false => vars_on(world, mesh),
        true => {
            let mesh = world.mesh(mesh).unwrap();
            let dims = fsdp_candle::DataParallelMeshDims { shard: &["dp"], replicate: &[] };
            let vars = ShardedVarMap::with_dp_mesh_dims(&mesh, &dims, world.device()).unwrap();
            let plan = ParallelPlan::new()
                .module("*.up", ColwiseParallel::default())
                .module("*.down", RowwiseParallel::default());
            parallelize(&vars, &mesh.slice(&["tp"]).unwrap(), &plan).unwrap();
            vars
        }
    };
    vars.freeze(|name| !nn::is_adapter(name)).unwrap();
    vars.adapt(nn::LoraConfig { rank: 2, alpha: 3. }, |layer| layer.ends_with("up")).unwrap();
    vars
}

fn build(vars: &ShardedVarMap, opts: &FullyShard) -> fsdp_candle::Result<Model> {
    let vb = vars.builder(DType::F32);
    let block = |i: usize| fully_shard(opts, vb.pp(i), Block::new);
    let blocks = (0..3).map(block).collect::<fsdp_candle::Result<Vec<_>>>()?;
    fully_shard(opts, vb, |_| Ok(blocks))
}

fn forward(model: &Model, x: &Tensor) -> Tensor {
    model.call(|blocks| blocks.iter().try_fold(x.clone(), |x, block| block.forward(&x))).unwrap()
}

/// The losses of some steps.
fn train(world: &World, vars: &ShardedVarMap, model: &Model) -> Vec<f32> {
    let mut optim = AdamW::new(vars.trainable(), AdamWConfig { lr: 0.02, ..AdamWConfig::default() }).unwrap();
    let x = batch(world.rank(), WIDTH);
    let step = |_| {
        let loss = mean_square(&(forward(model, &x) - 0.5).unwrap().to_dtype(DType::F32).unwrap());
        optim.step(&model.backward(&loss).unwrap()).unwrap();
        loss.to_scalar().unwrap()
    };
    (0..4).map(step).collect()
}

fn adapters(vars: &ShardedVarMap) -> Gradients {
    let options = StateDictOptions { ignore_frozen_params: true, ..full() };
    dict_elements(&get_model_state_dict(vars, &options).unwrap())
}

#[test]
fn training_has_the_bits_of_decoded_weights() {
    let shard = |ranks, mesh, options| Case { ranks, mesh, tensor_parallel: false, options };
    let cases = [
        shard(1, &[("dp_shard", 1)], |opts| opts),
        shard(2, &[("dp_shard", 2)], |opts| opts.reshard_after_forward(ReshardAfterForward::Always)),
        shard(3, &[("dp_shard", 3)], |opts| {
            opts.mp_policy(MixedPrecisionPolicy { param_dtype: Some(DType::BF16), ..Default::default() })
        }),
        shard(4, &[("dp_shard", 4)], |opts| opts.reshard_after_forward(ReshardAfterForward::To(2))),
        shard(4, &[("dp_replicate", 2), ("dp_shard", 2)], |opts| opts.shard_optimizer_over_replicas(true)),
        shard(2, &[("dp_shard", 2)], |opts| opts.offload_policy(OffloadPolicy::Cpu { pin_memory: true })),
        // Columns of whole blocks.
        shard(2, &[("dp_shard", 2)], |opts| {
            opts.shard_placement_fn(|name, _| name.ends_with("down.weight").then(|| ShardPlacement::from(1)))
        }),
        Case { ranks: 4, mesh: &[("dp", 2), ("tp", 2)], tensor_parallel: true, options: |opts| opts },
    ];
    for Case { ranks: size, mesh, tensor_parallel, options } in cases {
        for format in FORMATS {
            ranks(size, |world| {
                let run = |stored: bool| {
                    let vars = map(&world, mesh, tensor_parallel);
                    let opts = options(FullyShard::new(&vars));
                    match stored {
                        true => vars.init_with(Philox::new(3)).unwrap(),
                        false => vars.init_with(Decoded(format)).unwrap(),
                    }
                    let opts = opts.store(move |name, _| (stored && is_stored(name)).then_some(format));
                    let model = build(&vars, &opts).unwrap();
                    let losses = train(&world, &vars, &model);
                    (losses, adapters(&vars))
                };
                let (stored, decoded) = (run(true), run(false));
                assert!(stored.0[3] < stored.0[0]);
                assert_eq!(stored.0, decoded.0, "{format:?} on {mesh:?}");
                assert!(stored.1 == decoded.1, "{format:?} on {mesh:?}");
            });
        }
    }
}

#[test]
fn shards_have_the_bytes_of_the_whole_at_every_world_size() {
    let bytes = |size: usize, format: WeightFormat| {
        let of_ranks = ranks(size, |world| {
            let vars = map(&world, &[("dp_shard", world.size())], false);
            build(&vars, &FullyShard::new(&vars).store(move |name, _| is_stored(name).then_some(format))).unwrap();
            let dict = get_model_state_dict(&vars, &full()).unwrap();
            let part = vars.get("0.up.weight").unwrap();
            let held = part.var().elem_count() * part.dtype().size_in_bytes();
            let per_weight = held as f64 / part.region().elements() as f64;
            assert_eq!(vars.params().len(), 3 * 5);
            let mut all = vec![];
            for (name, state) in &dict.tensors {
                let numbers = state.tensor.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
                all.push((name.clone(), numbers.flatten_all().unwrap().to_vec1::<f32>().unwrap()));
            }
            (per_weight, all)
        });
        of_ranks.into_iter().next().unwrap()
    };
    for (format, per_weight) in
        [(WeightFormat::Bf16, 2.), (WeightFormat::Int8, 66. / 64.), (WeightFormat::Nf4, 34. / 64.)]
    {
        let one = bytes(1, format);
        assert_eq!(one.0, per_weight);
        for size in 2..5 {
            assert!(bytes(size, format) == one, "{format:?} on {size} ranks");
        }
    }
}

#[test]
fn checkpoints_keep_blocks_and_load_at_another_world_size() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("step-1");
    let store =
        |vars: &ShardedVarMap| FullyShard::new(vars).store(|name, _| is_stored(name).then_some(WeightFormat::Nf4));
    let outputs = |model: &Model| elements::<f32>(&forward(model, &batch(0, WIDTH)));
    let saved = ranks(2, |world| {
        let vars = map(&world, &[("dp_shard", 2)], false);
        let model = build(&vars, &store(&vars)).unwrap();
        train(&world, &vars, &model);
        let state = SaveState {
            mesh: vars.mesh().layout().clone(),
            tensors: model_tensors(&vars).unwrap(),
            values: Default::default(),
        };
        fsdp_ckpt::save(&dir, world.group(), &state).unwrap();
        outputs(&model)
    });
    let source = fsdp_ckpt::open(&dir).unwrap();
    let entry = source.tensor("model.0.up.weight.nf4").unwrap();
    assert_eq!((entry.dtype, &entry.shape[..]), (fsdp_core::DType::U8, &[HIDDEN, 34][..]));
    for size in [1, 3, 4] {
        ranks(size, |world| {
            let vars = map(&world, &[("dp_shard", size)], false);
            vars.init_with(Philox::new(99)).unwrap();
            let model = build(&vars, &store(&vars)).unwrap();
            load_model(&vars, &*source, &LoadOptions::default()).unwrap();
            assert_eq!(outputs(&model), saved[0]);
        });
    }
    // Another program reads floats.
    ranks(2, |world| {
        let vars = map(&world, &[("dp_shard", 2)], false);
        vars.init_with(Philox::new(99)).unwrap();
        let model = build(&vars, &FullyShard::new(&vars)).unwrap();
        load_model(&vars, &View::training(&*source).decoded(), &LoadOptions::default()).unwrap();
        assert_eq!(outputs(&model), saved[0]);
        let weights = weights(&vars);
        let (_, values) = weights.iter().find(|(name, _)| name == "0.up.weight").unwrap();
        // Regions that cut blocks are decoded as well.
        let view = View::model(&*source);
        let region = fsdp_core::layout::Region { offsets: vec![5, 30], sizes: vec![2, 20] };
        let mut part = vec![0f32; 40];
        view.read("0.up.weight", &region, bytemuck::cast_slice_mut(&mut part)).unwrap();
        assert_eq!(part[..20], values[5 * WIDTH + 30..5 * WIDTH + 50]);
        assert_eq!(part[20..], values[6 * WIDTH + 30..6 * WIDTH + 50]);
    });
}

#[test]
fn state_dicts_of_blocks_are_set_again() {
    ranks(2, |world| {
        let vars = map(&world, &[("dp_shard", 2)], false);
        let opts = FullyShard::new(&vars).store(|name, _| is_stored(name).then_some(WeightFormat::Int8));
        let model = build(&vars, &opts).unwrap();
        let dict = get_model_state_dict(&vars, &full()).unwrap();
        let before = forward(&model, &batch(0, WIDTH));
        let other = map(&world, &[("dp_shard", 2)], false);
        other.init_with(Philox::new(4)).unwrap();
        let opts = FullyShard::new(&other).store(|name, _| is_stored(name).then_some(WeightFormat::Int8));
        let model = build(&other, &opts).unwrap();
        set_model_state_dict(&other, &dict, &full()).unwrap();
        assert_eq!(elements::<f32>(&forward(&model, &batch(0, WIDTH))), elements::<f32>(&before));
        check_finite(&other, &[ValuesOf::Parameters]).unwrap();
        assert!(other.to_string().contains("stored as Int8"));
    });
}

#[test]
fn ranks_without_rows_have_no_blocks() {
    ranks(3, |world| {
        let output = |stored: bool| {
            let vars = map(&world, &[("dp_shard", 3)], false);
            match stored {
                true => vars.init_with(Philox::new(3)).unwrap(),
                false => vars.init_with(Decoded(WeightFormat::Nf4)).unwrap(),
            }
            let opts = FullyShard::new(&vars).store(move |_, _| stored.then_some(WeightFormat::Nf4));
            let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(WIDTH, 2, vb)).unwrap();
            assert_eq!(vars.get("weight").unwrap().region().is_empty(), world.rank() == 2);
            check_finite(&vars, &[ValuesOf::Parameters]).unwrap();
            assert_eq!(get_model_state_dict(&vars, &full()).unwrap().tensors.len(), 1);
            elements::<f32>(&model.forward(&batch(0, WIDTH)).unwrap())
        };
        assert_eq!(output(true), output(false));
    });
}

/// Values of which one is not finite.
struct Infinite;

impl Initializer for Infinite {
    fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> fsdp_candle::Result<()> {
        Philox::new(0).fill(request, shard)?;
        if request.name == "1.down.weight" && request.region.offsets[0] == 0 {
            shard[..4].copy_from_slice(&f32::INFINITY.to_ne_bytes());
        }
        Ok(())
    }
}

#[test]
fn bad_uses_are_refused() {
    ranks(2, |world| {
        let vars = || map(&world, &[("dp_shard", 2)], false);
        let refuse = |opts: &dyn Fn(FullyShard) -> FullyShard, parts: &[&str]| {
            let vars = vars();
            refused(build(&vars, &opts(FullyShard::new(&vars))), parts);
        };
        let nf4 = Some(WeightFormat::Nf4);
        refuse(
            &|opts| opts.store(move |name, _| nf4.filter(|_| nn::is_adapter(name))),
            &["0.up.lora_A", "trained: freeze it"],
        );
        refuse(&|opts| opts.store(move |_, _| nf4), &["0.up.bias", "blocks of 64", "[128]", "BF16"]);
        let columns = |opts: FullyShard| {
            opts.shard_placement_fn(|name, _| (name == "0.up.weight").then(|| ShardPlacement::from(1)))
                .store(move |name, _| nf4.filter(|_| is_stored(name)))
        };
        refuse(&columns, &["0.up.weight", "64 columns are divided", "shard dimension 0"]);
        let extended = |opts: FullyShard| {
            opts.all_gather_extension(|name| is_stored(name).then(|| std::sync::Arc::new(fsdp_candle::Float8) as _))
                .store(move |name, _| nf4.filter(|_| is_stored(name)))
        };
        refuse(&extended, &["all-gather extension"]);

        let narrow = vars();
        let opts = FullyShard::new(&narrow).store(move |name, _| nf4.filter(|_| is_stored(name)));
        let built = fully_shard(&opts, narrow.builder(DType::F32), |vb| nn::linear(100, 4, vb));
        refused(built, &["`weight`", "last dimension of 100 is not a multiple"]);

        let vars = vars();
        vars.init_with(Infinite).unwrap();
        let opts = FullyShard::new(&vars).store(move |name, _| nf4.filter(|_| is_stored(name)));
        build(&vars, &opts).unwrap();
        refused(check_finite(&vars, &[ValuesOf::Parameters]), &["1.down.weight"]);
        let weight = vars.get("0.up.weight").unwrap();
        refused(
            weight.set_full(&Tensor::zeros((HIDDEN, WIDTH), DType::F32, world.device()).unwrap()),
            &["stored as nf4"],
        );
        refused(vars.set_requires_grad(true, |name| name == "0.up.weight"), &["0.up.weight", "stored as Nf4"]);
        refused(Ema::new(vars.params(), 0.9), &["0.up.weight", "nf4"]);
    });
}
