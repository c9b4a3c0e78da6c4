//! Accumulation, unused parameters, norms and gradient scaling on 2-D meshes.

use candle_core::{DType, Module, Tensor};
use candle_nn::Init;
use fsdp_candle::{
    ClipOptions, Error, FullyShard, GradScaler, GradcheckOptions, NormType, ParallelPlan, Recurse, SequenceParallel,
    ShardedVarMap, ValuesOf, World, check_finite, clip_grad_norm_with, fully_shard, grad_norm, gradcheck, nn,
    parallelize,
};

use super::model::{HIDDEN, MESHES, Mesh, Model, WIDTH, build, loss, optimizer};
use crate::common::{Gradients, assert_close, elements, ranks, refused, scattered, times, unsharded};

const DP_TP: Mesh = Mesh::new(&[("dp", 2), ("tp", 2)], &["dp"], &[]);
const HSDP_TP: Mesh = Mesh::new(&[("replicate", 2), ("shard", 2), ("tp", 2)], &["shard"], &["replicate"]);

/// Every parameter's full gradient. Only the first of the ranks with the same region adds its values.
fn gradients(vars: &ShardedVarMap, grads: &candle_core::backprop::GradStore) -> Gradients {
    let whole = |param: &fsdp_candle::FsdpParam| {
        let (mesh, placements) = (param.device_mesh(), param.placements());
        let is_first = placements.iter().zip(mesh.coordinate()).all(|(p, at)| p.shard_dim().is_some() || at == 0);
        let grad = grads.get(param.var()).filter(|_| is_first);
        assert!(grad.is_none_or(|grad| grad.dims() == param.region().sizes));
        let full = scattered(param, grad.map_or(vec![], elements));
        (0..mesh.layout().shape().len())
            .fold(full, |full, dim| mesh.group(dim).unwrap().all_reduce_values(full, fsdp_core::ReduceOp::Sum).unwrap())
    };
    vars.trainable().iter().map(|param| (param.name().to_string(), whole(param))).collect()
}

fn plain(world: &World) -> (ShardedVarMap, Model) {
    let vars = unsharded(world);
    let model = build(&FullyShard::new(&vars), &vars).unwrap();
    (vars, model)
}

/// The gradients of the mean loss of some batches in one process.
fn reference(world: &World, batches: usize) -> Gradients {
    let (vars, model) = plain(world);
    gradients(&vars, &model.backward(&loss(&model, 0..batches)).unwrap())
}

#[test]
fn delayed_gradients_match_one_process() {
    for mesh in [DP_TP, HSDP_TP] {
        ranks(mesh.size(), |world| {
            let vars = mesh.vars(&world, true);
            let model = build(&FullyShard::new(&vars), &vars).unwrap();
            let (batch, batches) = mesh.batch_of(&vars);
            let want = reference(&world, batches);
            let backward = || model.backward(&loss(&model, [batch])).unwrap();
            assert_close(&gradients(&vars, &backward()), &want, 2e-5);

            let delivered = |grads: &_| gradients(&vars, grads).iter().flat_map(|(_, v)| v).any(|v| *v != 0.);
            model.set_requires_gradient_sync(false, Recurse::Yes);
            assert!(!delivered(&backward()));
            model.set_requires_gradient_sync(true, Recurse::Yes);
            assert_close(&gradients(&vars, &backward()), &times(&want, 2.), 2e-5);

            model.set_requires_all_reduce(false, Recurse::Yes);
            assert!(!delivered(&backward()));
            model.set_requires_all_reduce(true, Recurse::Yes);
            assert_close(&gradients(&vars, &backward()), &times(&want, 2.), 2e-5);

            model.set_manual_backward_finalization(true);
            let mut grads = backward();
            assert!(!delivered(&grads));
            model.finalize_backward(&mut grads).unwrap();
            assert_close(&gradients(&vars, &grads), &want, 2e-5);
            model.set_manual_backward_finalization(false);

            // Sums with a divisor: only the data parallel ranks count.
            model.set_force_sum_reduction_for_comms(true, Recurse::Yes);
            assert_close(&gradients(&vars, &backward()), &want, 2e-5);
            model.set_gradient_divide_factor(Some(1.), Recurse::Yes);
            assert_close(&gradients(&vars, &backward()), &times(&want, batches as f32), 2e-5);
        });
    }
}

#[test]
fn parameters_used_by_some_ranks() {
    ranks(4, |world| {
        let vars = {
            let dims = fsdp_candle::DataParallelMeshDims { shard: &["dp"], replicate: &[] };
            ShardedVarMap::with_dp_mesh_dims(&world.mesh(DP_TP.dims).unwrap(), &dims, world.device()).unwrap()
        };
        let tp = vars.mesh().slice(&["tp"]).unwrap();
        let plan = ParallelPlan::new().module("*", SequenceParallel { sequence_dim: 0 });
        parallelize(&vars, &tp, &plan).unwrap();
        let scale = |name: &'static str| {
            move |vb: candle_nn::VarBuilder| vb.pp(name).get_with_hints(3, "weight", Init::Const(1.))
        };
        let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
            Ok([scale("chosen")(vb.clone())?, scale("never")(vb.clone())?, scale("always")(vb)?])
        })
        .unwrap();
        model.set_reduce_scatter_unused_params(true, Recurse::Yes);
        let (dp, part) = (world.rank() / 2, world.rank() % 2);
        for _ in 0..2 {
            // Each rank has one term of a sum.
            let x = Tensor::full((part + 1) as f32, 3, world.device()).unwrap();
            let y = model.call(|[chosen, _, always]| {
                let y = always.mul(&x)?;
                if dp == 0 { y + chosen.mul(&x)? } else { Ok(y) }
            });
            let grads = gradients(&vars, &model.backward(&y.unwrap().sum_all().unwrap()).unwrap());
            let expected = [("chosen.weight", 1.5), ("never.weight", 0.), ("always.weight", 3.)];
            let expected: Gradients = expected.map(|(name, value)| (name.to_string(), vec![value; 3])).into();
            assert_eq!(grads, expected);
            assert_eq!(model.unused_parameters(), ["never.weight"]);
        }
    });
}

#[test]
fn norms_count_each_shard_once() {
    for mesh in MESHES {
        ranks(mesh.size(), |world| {
            let vars = mesh.vars(&world, true);
            let model = build(&FullyShard::new(&vars), &vars).unwrap();
            let (batch, batches) = mesh.batch_of(&vars);
            let mut grads = model.backward(&loss(&model, [batch])).unwrap();
            let (plain_vars, plain_model) = plain(&world);
            let mut want = plain_model.backward(&loss(&plain_model, 0..batches)).unwrap();
            for norm_type in [NormType::Two, NormType::P(1.), NormType::P(3.), NormType::Infinity] {
                let options = ClipOptions { max_norm: f64::INFINITY, norm_type, error_if_nonfinite: true };
                let got = clip_grad_norm_with(&vars, &mut grads, &options).unwrap();
                let want = clip_grad_norm_with(&plain_vars, &mut want, &options).unwrap();
                assert!((got - want).abs() <= 2e-5 * want, "{mesh:?} {norm_type:?}: {got} instead of {want}");
            }
            let options = ClipOptions { max_norm: 0.1, norm_type: NormType::Two, error_if_nonfinite: true };
            clip_grad_norm_with(&vars, &mut grads, &options).unwrap();
            assert!((grad_norm(&vars, &grads).unwrap() - 0.1).abs() < 1e-5);
        });
    }
}

#[test]
fn all_ranks_report_non_finite_values() {
    ranks(4, |world| {
        let vars = DP_TP.vars(&world, true);
        let model = build(&FullyShard::new(&vars), &vars).unwrap();
        let mut grads = model.backward(&loss(&model, [world.rank() / 2])).unwrap();
        check_finite(&vars, &[ValuesOf::Parameters, ValuesOf::Gradients(&grads)]).unwrap();
        let mut scaler = GradScaler::new(2.);
        assert!(!scaler.unscale(&vars, &mut grads).unwrap());
        scaler.step(&mut optimizer(&vars), &grads).unwrap();

        // A part that only the last rank holds, and one that both ranks of the first pair hold.
        let (cut, whole) = (vars.get("blocks.1.up.weight").unwrap(), vars.get("blocks.0.norm.weight").unwrap());
        let spoil = |param: &fsdp_candle::FsdpParam| (param.var().as_tensor() * f64::NAN).unwrap().detach();
        if world.rank() == 3 {
            cut.var().set(&spoil(&cut)).unwrap();
        }
        if world.rank() < 2 {
            whole.var().set(&spoil(&whole)).unwrap();
        }
        let Err(Error::NonFinite(found)) = check_finite(&vars, &[ValuesOf::Parameters]) else { panic!("not found") };
        let counts: Vec<_> = found.tensors.iter().map(|t| (t.parameter.as_str(), t.values, t.of)).collect();
        let quarter = (HIDDEN * WIDTH / 4) as u64;
        let (half, all) = (WIDTH as u64 / 2, WIDTH as u64);
        assert_eq!(counts, [("blocks.0.norm.weight", half, all), ("blocks.1.up.weight", quarter, 4 * quarter)]);
        assert_eq!(found.ranks, [0, 1, 3]);

        if world.rank() == 3 {
            grads.insert(cut.var().as_tensor(), spoil(&cut));
        }
        let options = ClipOptions { max_norm: 1., norm_type: NormType::Two, error_if_nonfinite: true };
        let Err(Error::NonFinite(found)) = clip_grad_norm_with(&vars, &mut grads, &options) else {
            panic!("not found")
        };
        assert_eq!((found.tensors.len(), found.tensors[0].values, found.ranks), (1, quarter, vec![3]));
        scaler.update().unwrap();
        assert!(scaler.unscale(&vars, &mut grads).unwrap());
    });
}

#[test]
fn gradcheck_passes_and_finds_missing_plans() {
    ranks(4, |world| {
        let checked = |mesh: Mesh, sequence: bool| {
            let vars = mesh.vars(&world, sequence);
            let model = build(&FullyShard::new(&vars), &vars).unwrap();
            let (batch, _) = mesh.batch_of(&vars);
            gradcheck(&model, &GradcheckOptions::default(), |model| Ok(loss(model, [batch])))
        };
        for sequence in [false, true] {
            assert_eq!(checked(DP_TP, sequence).unwrap().len(), 3);
            assert_eq!(checked(Mesh::new(&[("tp", 4)], &[], &[]), sequence).unwrap().len(), 3);
        }
    });
    // A norm on a part of the sequence that the plan does not mention has a part of its gradient.
    ranks(2, |world| {
        let dims = fsdp_candle::DataParallelMeshDims::default();
        let vars = ShardedVarMap::with_dp_mesh_dims(&world.mesh(&[("tp", 2)]).unwrap(), &dims, world.device()).unwrap();
        let tp = vars.mesh().slice(&["tp"]).unwrap();
        let group = tp.group(0).unwrap().clone();
        let plan = |of: &str| ParallelPlan::new().module(of, SequenceParallel { sequence_dim: 0 });
        parallelize(&vars, &tp, &plan("known")).unwrap();
        let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
            Ok((nn::rms_norm(4, 1e-5, vb.pp("known"))?, nn::rms_norm(4, 1e-5, vb.pp("unknown"))?))
        })
        .unwrap();
        let x = Tensor::arange(0f32, 16., world.device()).unwrap().sin().unwrap().reshape((4, 4)).unwrap();
        let check = |both: bool| {
            gradcheck(&model, &GradcheckOptions::default(), |model| {
                model.call(|(known, unknown)| {
                    let part = fsdp_candle::collectives::split(&x, 0, &group)?;
                    let y = if both { unknown.forward(&part)? } else { part };
                    let y = known.forward(&y)?.powf(3.)?;
                    let same = fsdp_candle::collectives::Consumers::Same;
                    fsdp_candle::collectives::all_gather(&y, 0, &group, same)?.sum_all()
                })
            })
        };
        check(false).unwrap();
        assert!(matches!(check(true), Err(Error::Gradcheck(_))));
        // The gradient norm is the same error.
        let part = fsdp_candle::collectives::split(&x, 0, &group).unwrap();
        let y = model.call(|(known, unknown)| known.forward(&unknown.forward(&part)?)?.powf(3.)?.sum_all()).unwrap();
        refused(grad_norm(&vars, &model.backward(&y).unwrap()), &["`unknown.weight`", "SequenceParallel"]);
    });
}
