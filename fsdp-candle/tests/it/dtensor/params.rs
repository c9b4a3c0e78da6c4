//! Parameters, gradients and entries of state dicts as DTensors.

use super::*;
use crate::common::{address, batch, built, gradients, loss_of, sharded, vars, vars_on, whole};
use candle_core::Module;
use fsdp_candle::{
    AdamW, AdamWConfig, ColwiseParallel, DataParallelMeshDims, FullyShard, ParallelPlan, RowwiseParallel,
    ShardedVarMap, StateDictOptions, StateTensor, distribute_tensor, fully_shard, get_model_state_dict,
    get_optimizer_state_dict, parallelize, set_model_state_dict,
};

const WIDTH: usize = 5;

/// Runs a closure with a model on 1, 2, 3 and 4 ranks, and with replicas.
fn with_models(f: impl Fn(&World, &ShardedVarMap) + Sync) {
    for size in [1, 2, 3, 4] {
        ranks(size, |world| f(&world, &vars(&world)));
    }
    ranks(4, |world| f(&world, &vars_on(&world, &[("replicate", 2), ("shard", 2)])));
}

#[test]
fn parameters_share_memory_with_their_dtensors() {
    with_models(|_, vars| {
        let _model = sharded(&FullyShard::new(vars), vars, WIDTH);
        for param in vars.params() {
            let dtensor = param.dtensor().unwrap();
            assert_eq!((dtensor.shape(), dtensor.dtype()), (param.shape().dims(), param.dtype()));
            assert_eq!(dtensor.placements(), param.placements());
            assert_eq!(dtensor.device_mesh().layout(), vars.mesh().layout());
            let region = dtensor.spec().local_region(vars.mesh().rank()).unwrap();
            assert_eq!(&region, param.region());
            if !region.is_empty() {
                assert_eq!(address(dtensor.to_local()), address(param.var()), "{}", param.name());
            }
            let full = values(&dtensor.full_tensor().unwrap());
            assert_eq!(full, whole(vars, &param, param.var()).into_iter().map(f64::from).collect::<Vec<_>>());
        }
    });
}

#[test]
fn gradients_are_dtensors() {
    with_models(|world, vars| {
        let model = sharded(&FullyShard::new(vars), vars, WIDTH);
        let loss = loss_of(&model, &batch(world.rank(), WIDTH));
        let grads = model.backward(&loss).unwrap();
        let wholes = gradients(vars, &grads);
        for (param, (name, want)) in vars.trainable().iter().zip(wholes) {
            let grad = param.grad(&grads).unwrap().unwrap();
            assert_eq!(grad.placements(), param.placements());
            assert_eq!(grad.to_local().dims(), param.region().sizes);
            let got = values(&grad.full_tensor().unwrap());
            assert_eq!(got, want.into_iter().map(f64::from).collect::<Vec<_>>(), "{name}");
        }
        // The norm of all gradients, computed with DTensors only.
        let squares: f64 = (vars.trainable().iter())
            .map(|param| {
                let norm = param.grad(&grads).unwrap().unwrap().norm(fsdp_candle::NormType::Two).unwrap();
                values(&norm.full_tensor().unwrap())[0].powi(2)
            })
            .sum();
        let norm = fsdp_candle::grad_norm(vars, &grads).unwrap();
        assert!((squares.sqrt() - norm).abs() < 1e-5 * norm);
    });
    ranks(2, |world| {
        let (vars, model) = built(&world, WIDTH);
        let loss = loss_of(model.inner().blocks.first().unwrap(), &batch(world.rank(), WIDTH));
        let grads = model.backward(&loss).unwrap();
        assert!(vars.get("head.weight").unwrap().grad(&grads).unwrap().is_none());
    });
}

#[test]
fn set_values_invalidate_gathered_parameters() {
    with_models(|_, vars| {
        let model = sharded(&FullyShard::new(vars), vars, WIDTH);
        let x = batch(0, WIDTH);
        let before = values(&model.forward(&x).unwrap().detach());
        for param in vars.params() {
            // The root's parameters are gathered since the forward, and all of them by `unshard`.
            model.unshard().unwrap();
            let full = param.dtensor().unwrap().full_tensor().unwrap();
            param.set_full(&(&full * 2.).unwrap().to_dtype(DType::F64).unwrap()).unwrap();
            let doubled = param.dtensor().unwrap();
            assert_eq!(values(&doubled.full_tensor().unwrap()), values(&(full * 2.).unwrap()));
            assert!(!param.is_unsharded(), "{} is still the old one where layers look", param.name());
        }
        let after = values(&model.forward(&x).unwrap().detach());
        assert_ne!(before, after);
        for param in vars.params() {
            model.unshard().unwrap();
            param.set_local(param.dtensor().unwrap().mul(0.5).unwrap().to_local()).unwrap();
        }
        assert_eq!(values(&model.forward(&x).unwrap().detach()), before);
    });
}

#[test]
fn refuses_values_of_other_shapes_and_dtypes() {
    ranks(2, |world| {
        let (vars, _model) = built(&world, WIDTH);
        let param = vars.get("head.weight").unwrap();
        let before = values(param.var());
        let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &device()).unwrap();
        let shape = "parameter `head.weight`: expected shape [2, 5], found [2, 4]";
        refused(param.set_full(&zeros(&[2, 4], DType::F32)), &[shape]);
        refused(param.set_local(&zeros(&[2, 5], DType::F32)), &["has shape [1, 5], found [2, 5]"]);
        refused(param.set_local(&zeros(&[1, 5], DType::U32)), &["expected a floating point tensor, found U32"]);
        assert_eq!(values(param.var()), before);
    });
}

#[test]
fn state_dict_entries_convert_to_dtensors() {
    with_models(|world, vars| {
        let model = sharded(&FullyShard::new(vars), vars, WIDTH);
        let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
        let loss = loss_of(&model, &batch(world.rank(), WIDTH));
        optim.step(&model.backward(&loss).unwrap()).unwrap();
        let options = StateDictOptions::default();
        let mut dict = get_model_state_dict(vars, &options).unwrap();
        let moments = get_optimizer_state_dict(vars, &optim, &options).unwrap();
        for (name, entry) in &mut dict.tensors {
            let param = vars.get(name).unwrap();
            let dtensor = entry.dtensor().unwrap().unwrap();
            assert_eq!((dtensor.placements(), dtensor.shape()), (&param.placements()[..], param.shape().dims()));
            let moment = moments.tensors[&format!("state.{name}.exp_avg")].dtensor().unwrap().unwrap();
            assert_eq!(moment.spec(), dtensor.spec());
            // Each to a full tensor and back.
            let full = dtensor.full_tensor().unwrap();
            let again = distribute_tensor(&(full + 1.).unwrap(), dtensor.device_mesh(), dtensor.placements()).unwrap();
            let region = entry.region.clone();
            *entry = StateTensor::of(&again).unwrap();
            assert_eq!(entry.region, region);
        }
        let before: Vec<_> = vars.params().iter().map(|param| values(param.var())).collect();
        set_model_state_dict(vars, &dict, &options).unwrap();
        for (param, before) in vars.params().iter().zip(before) {
            assert_eq!(values(param.var()), before.iter().map(|x| f64::from(*x as f32 + 1.)).collect::<Vec<_>>());
        }
        let step = &moments.tensors["state.head.weight.step"];
        assert!(step.dtensor().unwrap().is_none());
    });
    on_mesh(&[2], |mesh| {
        let full = numbers(&[8], DType::F32);
        refused(
            StateTensor::of(&laid_out(&full, mesh, &[SUM])),
            &["a term of a reduction is not a value; redistribute it first"],
        );
        refused(StateTensor::of(&laid_out(&full, mesh, &[strided(0, 2)])), &["not one box"]);
    });
}

struct Mlp {
    up: fsdp_candle::nn::Linear,
    down: fsdp_candle::nn::Linear,
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.down.forward(&self.up.forward(x)?.relu()?)
    }
}

/// Under tensor parallelism a parameter is on the whole mesh, and strided if both shard one dimension.
#[test]
fn tensor_parallel_parameters_span_the_mesh() {
    let whole = Tensor::arange(0f32, 48., &Device::Cpu).unwrap().reshape((8, 6)).unwrap();
    ranks(4, |world| {
        let mesh = world.mesh(&[("dp", 2), ("tp", 2)]).unwrap();
        let dims = DataParallelMeshDims { shard: &["dp"], replicate: &[] };
        let parallel = ShardedVarMap::with_dp_mesh_dims(&mesh, &dims, world.device()).unwrap();
        let plan = ParallelPlan::new().module("up", ColwiseParallel::default());
        let plan = plan.module("down", RowwiseParallel::default());
        parallelize(&parallel, &mesh.slice(&["tp"]).unwrap(), &plan).unwrap();
        let build = |vars: &ShardedVarMap| {
            fully_shard(&FullyShard::new(vars), vars.builder(DType::F32), |vb| {
                use fsdp_candle::nn::linear;
                Ok(Mlp { up: linear(6, 8, vb.pp("up"))?, down: linear(8, 6, vb.pp("down"))? })
            })
            .unwrap()
        };
        let (model, data) = (build(&parallel), vars(&world));
        let sharded = build(&data);
        let x = (whole.to_device(&device()).unwrap() / 50.).unwrap();
        let of = |model: &fsdp_candle::FsdpModule<Mlp>| model.backward(&loss_of(model, &x)).unwrap();
        let (grads, wanted) = (of(&model), of(&sharded));
        for (name, placements) in [
            ("up.weight", [strided(0, 2), Shard(0)]),
            ("up.bias", [strided(0, 2), Shard(0)]),
            ("down.weight", [Shard(0), Shard(1)]),
            ("down.bias", [Shard(0), Replicate]),
        ] {
            let (param, plain) = (parallel.get(name).unwrap(), data.get(name).unwrap());
            let (dtensor, grad) = (param.dtensor().unwrap(), param.grad(&grads).unwrap().unwrap());
            assert_eq!((dtensor.placements(), dtensor.device_mesh().size()), (&placements[..], 4), "{name}");
            let full = |dtensor: DTensor| values(&dtensor.full_tensor().unwrap());
            assert_eq!(full(dtensor), full(plain.dtensor().unwrap()), "{name}");
            let near = |(a, b): (f64, f64)| (a - b).abs() < 1e-6;
            let want = full(plain.grad(&wanted).unwrap().unwrap());
            assert!(full(grad).into_iter().zip(want).all(near), "{name}");
        }
        let weight = parallel.get("up.weight").unwrap();
        weight.set_full(&whole).unwrap();
        assert_eq!(values(&weight.dtensor().unwrap().full_tensor().unwrap()), values(&whole));
        let options = StateDictOptions::default();
        let entry = &get_model_state_dict(&parallel, &options).unwrap().tensors["up.weight"];
        assert_eq!(entry.dtensor().unwrap().unwrap().placements(), [strided(0, 2), Shard(0)]);
    });
}
