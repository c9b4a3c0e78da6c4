//! Losses, norms and weights of training runs.

use candle_core::DType;
use candle_core::backprop::GradStore;
use candle_core::{Module, Result};
use fsdp_candle::{
    AdamW, AdamWConfig, FsdpModule, FullyShard, GradScaler, MixedPrecisionPolicy, Muon, MuonConfig, Recurse,
    ReshardAfterForward, SGD, SgdConfig, ShardedOptimizer, ShardedVarMap, World, clip_grad_norm, nn,
};

use super::model::{FOUR, Mesh, Model, Shape, Skew, assert_near, build, mean, tokens, vars, weights};
use crate::common::{mean_square, one_of, ranks};

/// How a model is built and trained.
#[derive(Clone, Copy)]
pub(super) struct Setup {
    pub(super) shape: Shape,
    pub(super) dtype: DType,
    /// Changes the map before the model is built.
    pub(super) prepare: fn(&ShardedVarMap),
    pub(super) options: fn(FullyShard) -> FullyShard,
    pub(super) optimizer: fn(&ShardedVarMap) -> Box<dyn Steps>,
    /// Whether two batches make a step, of which only the second is reduced.
    pub(super) accumulates: bool,
    pub(super) steps: usize,
    pub(super) tolerance: f64,
}

pub(super) const SETUP: Setup = Setup {
    shape: FOUR,
    dtype: DType::F32,
    prepare: |_| (),
    options: |options| options,
    optimizer: |vars| {
        let config = AdamWConfig { lr: 1e-2, ..AdamWConfig::default() };
        Box::new(AdamW::new(vars.trainable(), config).unwrap())
    },
    accumulates: false,
    steps: 5,
    tolerance: 2e-5,
};

/// An optimizer of any kind.
pub(super) trait Steps {
    fn step(&mut self, grads: &GradStore) -> Result<()>;
}

impl<O: ShardedOptimizer> Steps for O {
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        Ok(ShardedOptimizer::step_scaled(self, grads, 1.)?)
    }
}

/// Returns losses, gradients' norms, and weights. Ranks of the last mesh dimension `tp` have the same batches.
fn train(
    world: &World,
    (vars, model): (&ShardedVarMap, &FsdpModule<Model>),
    setup: &Setup,
    batch: usize,
) -> Vec<(String, Vec<f64>)> {
    let mut optimizer = (setup.optimizer)(vars);
    let mut found = vec![];
    for step in 0..setup.steps {
        let loss = |number| mean_square(&model.forward(&tokens(batch, number, setup.dtype)).unwrap());
        if setup.accumulates {
            model.set_requires_gradient_sync(false, Recurse::Yes);
            model.backward(&loss(100 + step)).unwrap();
            model.set_requires_gradient_sync(true, Recurse::Yes);
        }
        let loss = loss(step);
        let mut grads = model.backward(&loss).unwrap();
        let norm = clip_grad_norm(vars, &mut grads, 0.5).unwrap();
        optimizer.step(&grads).unwrap();
        found.push((format!("loss and norm of step {step}"), vec![mean(world, &loss), norm]));
    }
    found.extend(weights(vars));
    found
}

pub(super) fn sgd(vars: &ShardedVarMap) -> Box<dyn Steps> {
    let config = SgdConfig { lr: 0.1, momentum: 0.9, ..SgdConfig::default() };
    Box::new(SGD::new(vars.trainable(), config).unwrap())
}

/// Compares a run on a mesh with and without experts on different ranks.
fn compare(mesh: Mesh<'_>, setup: Setup) {
    compare_prepared(mesh, setup, &setup.prepare);
}

/// [`compare`], with another function that changes the map.
pub(super) fn compare_prepared(mesh: Mesh<'_>, setup: Setup, prepare: &(dyn Fn(&ShardedVarMap) + Sync)) {
    let size = mesh.iter().map(|(_, size)| size).product();
    let alike = mesh.iter().find(|(name, _)| *name == "tp").map_or(1, |(_, size)| *size);
    ranks(size, |world| {
        let run = |is_parallel| {
            let vars = vars(&world, mesh, is_parallel);
            prepare(&vars);
            let model = build(&(setup.options)(FullyShard::new(&vars)), &vars, setup.dtype, setup.shape);
            train(&world, (&vars, &model), &setup, world.rank() / alike)
        };
        let (found, wanted) = (run(true), run(false));
        let what = format!("{mesh:?}, {:?}, rank {}", setup.shape, world.rank());
        assert_near(&what, &found, &wanted, setup.tolerance);
        if one_of(2) == 1 {
            assert_eq!(run(true), found, "{what}: other bits");
        }
    });
}

const MESHES: [Mesh<'static>; 7] = [
    &[("ep", 1)],
    &[("ep", 2)],
    &[("dp_shard", 1), ("ep", 3)],
    &[("dp_shard", 2), ("ep", 2)],
    &[("ep", 2), ("dp_shard", 2)],
    &[("dp_replicate", 2), ("ep", 2)],
    &[("dp_replicate", 2), ("dp_shard", 2), ("ep", 2)],
];

#[test]
fn experts_on_different_ranks_train_alike() {
    for mesh in MESHES.into_iter().step_by(one_of(3)) {
        for shape in [
            FOUR,
            Shape { experts: 5, per_token: 1, skew: Skew::OneExpert(2), ..FOUR },
            Shape { skew: Skew::First(2), ..FOUR },
            Shape { bias: true, recomputes: true, ..FOUR },
        ] {
            compare(mesh, Setup { shape, steps: 5 / one_of(2), ..SETUP });
        }
    }
}

const FOUR_RANKS: [Mesh<'static>; 2] = [&[("dp_shard", 2), ("ep", 2)], &[("ep", 4)]];

#[test]
fn experts_train_alike_in_half_precision() {
    fn mixed(options: FullyShard, dtype: DType) -> FullyShard {
        options.mp_policy(MixedPrecisionPolicy {
            param_dtype: Some(dtype),
            reduce_dtype: Some(DType::F32),
            ..MixedPrecisionPolicy::default()
        })
    }
    for mesh in FOUR_RANKS.into_iter().step_by(one_of(2)) {
        for options in [|options| mixed(options, DType::BF16), |options| mixed(options, DType::F16)] {
            compare(mesh, Setup { options, steps: 2, tolerance: 3e-2, ..SETUP });
        }
    }
}

#[test]
fn experts_train_alike_with_every_optimizer() {
    let muon: fn(&ShardedVarMap) -> Box<dyn Steps> = |vars| {
        let is_expert = |param: &std::sync::Arc<fsdp_candle::FsdpParam>| param.name().contains("experts.");
        let experts = vars.trainable().into_iter().filter(is_expert).collect();
        Box::new(Muon::new(experts, MuonConfig { lr: 1e-3, ..MuonConfig::default() }).unwrap())
    };
    let replicated: Mesh<'_> = &[("dp_replicate", 2), ("dp_shard", 2), ("ep", 2)];
    for mesh in FOUR_RANKS.into_iter().chain([replicated]).step_by(one_of(3)) {
        // Muon computes in bf16, whose rounding changes with the order of sums.
        compare(mesh, Setup { optimizer: muon, tolerance: 2e-3, ..SETUP });
        compare(mesh, Setup { optimizer: sgd, ..SETUP });
    }
}

#[test]
fn experts_train_alike_over_several_backwards() {
    let replicated: Mesh<'_> = &[("dp_replicate", 2), ("ep", 2)];
    for mesh in FOUR_RANKS.into_iter().chain([replicated]).step_by(one_of(2)) {
        compare(mesh, Setup { accumulates: true, ..SETUP });
    }
}

#[test]
fn experts_train_alike_with_each_policy_of_gathering() {
    for policy in [ReshardAfterForward::Never, ReshardAfterForward::Always] {
        for mesh in FOUR_RANKS.into_iter().step_by(one_of(2)) {
            let options: fn(FullyShard) -> FullyShard = match policy {
                ReshardAfterForward::Never => |options| options.reshard_after_forward(ReshardAfterForward::Never),
                _ => |options| options.reshard_after_forward(ReshardAfterForward::Always),
            };
            compare(mesh, Setup { options, ..SETUP });
        }
    }
}

#[test]
fn replicas_divide_shards_of_experts() {
    let mesh: Mesh<'_> = &[("dp_replicate", 2), ("dp_shard", 2), ("ep", 2)];
    compare(mesh, Setup { options: |options| options.shard_optimizer_over_replicas(true), ..SETUP });
}

#[test]
fn ranks_split_the_layers_of_experts() {
    let meshes: [Mesh<'_>; 2] = [&[("dp_shard", 1), ("ep", 2), ("tp", 2)], &[("dp_shard", 2), ("ep", 2), ("tp", 2)]];
    meshes.into_iter().step_by(one_of(2)).for_each(|mesh| compare(mesh, Setup { steps: 3, ..SETUP }));
}

/// Only parts are trained: a layer of one expert, experts, or all but experts. The first block's inputs have no graph.
#[test]
fn frozen_experts_train_alike() {
    let prepares: [fn(&ShardedVarMap); 4] = [
        |vars| vars.freeze(|name| name != "blocks.0.experts.3.down.weight").unwrap(),
        |vars| vars.freeze(|name| !name.contains("experts.")).unwrap(),
        |vars| vars.freeze(|name| name.contains("experts.")).unwrap(),
        |vars| vars.freeze(|name| name.starts_with("blocks.")).unwrap(),
    ];
    for mesh in FOUR_RANKS.into_iter().step_by(one_of(2)) {
        for prepare in prepares.into_iter().step_by(one_of(2)) {
            compare(mesh, Setup { prepare, ..SETUP });
            compare(mesh, Setup { prepare, shape: Shape { recomputes: true, ..FOUR }, ..SETUP });
        }
    }
}

#[test]
fn adapters_of_experts_train_alike() {
    let prepare: fn(&ShardedVarMap) = |vars| {
        vars.freeze(|name| !nn::is_adapter(name)).unwrap();
        vars.adapt(nn::LoraConfig { rank: 2, alpha: 4. }, |layer| layer.contains("experts.")).unwrap();
    };
    for mesh in FOUR_RANKS.into_iter().step_by(one_of(2)) {
        compare(mesh, Setup { prepare, ..SETUP });
    }
}

/// A block of four experts of `3 x 60` elements, with a norm of 6 and a router of 24.
#[test]
fn ranks_gather_only_their_experts() {
    let meshes: [(Mesh<'_>, usize); 3] = [(&[("ep", 2)], 2), (&[("dp_shard", 2), ("ep", 2)], 2), (&[("ep", 4)], 1)];
    for (mesh, experts) in meshes {
        ranks(mesh.iter().map(|(_, size)| size).product(), |world| {
            let vars = vars(&world, mesh, true);
            let options = FullyShard::new(&vars).reshard_after_forward(ReshardAfterForward::Never);
            let model = build(&options, &vars, DType::F32, FOUR);
            model.forward(&tokens(world.rank(), 0, DType::F32)).unwrap();
            let gathered = vars.memory_summary().unwrap().gathered;
            let block = gathered.iter().find(|(unit, _)| unit == "blocks.0").unwrap();
            assert_eq!(block.1, 4 * (experts * 3 * 60 + 6 + 24), "{mesh:?}");
        });
    }
}

#[test]
fn scaled_losses_of_experts_overflow_on_all_ranks() {
    ranks(2, |world| {
        let vars = vars(&world, &[("ep", 2)], true);
        let model = build(&FullyShard::new(&vars), &vars, DType::F32, FOUR);
        let mut optimizer = SGD::new(vars.trainable(), 0.1).unwrap();
        let mut scaler = GradScaler::default();
        // Only rank 1 has the expert whose gradient overflows.
        let before = weights(&vars);
        let loss = mean_square(&model.forward(&tokens(world.rank(), 0, DType::F32)).unwrap());
        let mut grads = model.backward(&scaler.scale(&loss).unwrap()).unwrap();
        let expert = vars.get("blocks.0.experts.1.gate.weight").unwrap();
        if world.rank() == 1 {
            let infinite = (grads.remove(expert.var()).unwrap() * f64::INFINITY).unwrap();
            grads.insert(expert.var(), infinite);
        }
        scaler.unscale(&vars, &mut grads).unwrap();
        assert!(!scaler.step(&mut optimizer, &grads).unwrap());
        scaler.update().unwrap();
        assert_eq!(weights(&vars), before);
    });
}
