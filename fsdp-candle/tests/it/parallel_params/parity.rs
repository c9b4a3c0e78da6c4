//! On every mesh the model trains as in one process.

use candle_core::Module;
use fsdp_candle::{
    Float8, FsdpModule, FullyShard, MixedPrecisionPolicy, OffloadPolicy, ReduceOp, ReshardAfterForward, ShardMesh,
    ShardPlacement, ShardedVarMap, World, nn,
};

use super::model::{HIDDEN, MESHES, Mesh, Net, Run, WIDTH, build, build_by_name, reference, train, values};
use crate::common::{alone, assert_close, one_of, ranks, vars_on};

const TOLERANCE: f64 = 2e-5;

fn assert_same(world: &World, run: &Run, want: &Run, tolerance: f64, mesh: &Mesh) {
    let losses = world.all_reduce(&run.losses, ReduceOp::Avg).unwrap();
    for (got, want) in losses.iter().chain(&run.norms).zip(want.losses.iter().chain(&want.norms)) {
        assert!((got - want).abs() <= tolerance * want.abs(), "{mesh:?}: {got} instead of {want}");
    }
    // All ranks have the same norm, bit for bit.
    let mean = |op| world.all_reduce(&run.norms, op).unwrap();
    assert_eq!((mean(ReduceOp::Max), mean(ReduceOp::Min)), (run.norms.clone(), run.norms.clone()), "{mesh:?}");
    assert_close(&run.values, &want.values, 20. * tolerance as f32);
}

/// Trains a model, and compares with one process.
fn trains<B: Module>(
    world: &World,
    (mesh, vars, model): (&Mesh, &ShardedVarMap, &FsdpModule<Net<B>>),
    tolerance: f64,
    prepare: impl Fn(&ShardedVarMap),
) {
    let (batch, batches) = mesh.batch_of(vars);
    let run = train(model, vars, (batch, 1, batches));
    assert_same(world, &run, &reference(world, batches, prepare), tolerance, mesh);
}

/// Trains on a mesh with some options, and compares with one process.
fn with_options(mesh: Mesh, sequence: bool, tolerance: f64, opts: impl Fn(FullyShard) -> FullyShard + Sync) {
    ranks(mesh.size(), |world| {
        let vars = mesh.vars(&world, sequence);
        let model = build(&opts(FullyShard::new(&vars)), &vars).unwrap();
        trains(&world, (&mesh, &vars, &model), tolerance, |_| ());
    });
}

#[test]
fn every_mesh_starts_with_the_same_values() {
    let world = alone();
    let vars = vars_on(&world, &[("dp", 1)]);
    build(&FullyShard::new(&vars), &vars).unwrap();
    let want = values(&vars);
    for mesh in MESHES {
        ranks(mesh.size(), |world| {
            let vars = mesh.vars(&world, true);
            build(&FullyShard::new(&vars), &vars).unwrap();
            assert_eq!(values(&vars), want, "{mesh:?}");
        });
    }
}

#[test]
fn every_mesh_trains_as_one_process() {
    for mesh in MESHES.iter().step_by(one_of(3)) {
        with_options(*mesh, false, TOLERANCE, |opts| opts);
    }
}

#[test]
fn every_mesh_trains_with_sequence_parallelism() {
    for mesh in MESHES.iter().skip(1).step_by(one_of(3)).chain(&MESHES[..1]) {
        with_options(*mesh, true, TOLERANCE, |opts| opts);
    }
}

const DP_TP: Mesh = Mesh::new(&[("dp", 2), ("tp", 2)], &["dp"], &[]);
const FOUR_TP: Mesh = Mesh::new(&[("dp", 4), ("tp", 2)], &["dp"], &[]);

#[test]
fn every_reshard_policy() {
    for policy in [ReshardAfterForward::Always, ReshardAfterForward::Never, ReshardAfterForward::To(2)] {
        with_options(FOUR_TP, true, TOLERANCE, |opts| opts.reshard_after_forward(policy));
    }
}

#[test]
fn sharding_the_second_dimension() {
    // The same dimension for row-wise weights, another one for the others.
    with_options(DP_TP, true, TOLERANCE, |opts| {
        opts.shard_placement_fn(|_, shape| (shape.len() == 2).then(|| ShardPlacement::from(1)))
    });
}

#[test]
fn offloaded_and_extended_gathers() {
    with_options(DP_TP, true, TOLERANCE, |opts| opts.offload_policy(OffloadPolicy::Cpu { pin_memory: true }));
    // The precision of eight bits.
    let matrices = |name: &str| name.ends_with("up.weight") || name.ends_with("down.weight");
    with_options(DP_TP, true, 0.05, |opts| {
        opts.all_gather_extension(move |name| matrices(name).then(|| std::sync::Arc::new(Float8) as _))
    });
}

#[test]
fn reduced_in_another_dtype() {
    let policy = MixedPrecisionPolicy { reduce_dtype: Some(candle_core::DType::F64), ..Default::default() };
    with_options(DP_TP, true, TOLERANCE, |opts| opts.mp_policy(policy.clone()));
    let policy = MixedPrecisionPolicy { reduce_dtype: Some(candle_core::DType::BF16), ..Default::default() };
    with_options(DP_TP, true, 0.02, |opts| opts.mp_policy(policy.clone()));
}

#[test]
fn units_by_name() {
    ranks(4, |world| {
        let vars = DP_TP.vars(&world, true);
        let model = build_by_name(&FullyShard::new(&vars), &vars).unwrap();
        assert!(model.unmanaged_parameters().is_empty());
        trains(&world, (&DP_TP, &vars, &model), TOLERANCE, |_| ());
    });
}

#[test]
fn adapters_of_parallel_layers() {
    let prepare = |vars: &ShardedVarMap| {
        vars.freeze(|name| !nn::is_adapter(name)).unwrap();
        vars.adapt(nn::LoraConfig { rank: 3, alpha: 6. }, |layer| layer.starts_with("blocks.") || layer == "head")
            .unwrap();
    };
    for sequence in [false, true] {
        for mesh in [DP_TP, Mesh::new(&[("tp", 4)], &[], &[])] {
            ranks(4, |world| {
                let vars = mesh.vars(&world, sequence);
                prepare(&vars);
                let model = build(&FullyShard::new(&vars), &vars).unwrap();
                assert_eq!((vars.adapted().len(), vars.trainable().len()), (5, 10));
                let part = |name: &str| vars.get(name).unwrap().unsharded_shape().dims().to_vec();
                let tp = mesh.dims.last().unwrap().1;
                assert_eq!(part("blocks.0.up.lora_A.weight"), [3, WIDTH]);
                assert_eq!(part("blocks.0.up.lora_B.weight"), [HIDDEN / tp, 3]);
                assert_eq!(part("blocks.0.down.lora_A.weight"), [3, HIDDEN / tp]);
                assert_eq!(part("blocks.0.down.lora_B.weight"), [WIDTH, 3]);
                trains(&world, (&mesh, &vars, &model), TOLERANCE, prepare);
            });
        }
    }
}

#[test]
fn units_on_a_slice_of_the_mesh() {
    ranks(4, |world| {
        let vars = DP_TP.vars(&world, true);
        let dp = vars.mesh().slice(&["dp"]).unwrap();
        let opts = FullyShard::new(&vars).mesh(&dp).unwrap();
        let dims = fsdp_candle::DataParallelMeshDims { shard: &["dp"], replicate: &[] };
        let same = ShardMesh::of_dims(vars.mesh(), &dims).unwrap();
        let opts = opts.shard_placement_fn(move |name, _| {
            name.contains("down").then(|| ShardPlacement { dim: 0, mesh: Some(same.clone()) })
        });
        let model = build(&opts, &vars).unwrap();
        for param in vars.params() {
            assert_eq!(param.device_mesh().layout(), vars.mesh().layout(), "{}", param.name());
        }
        trains(&world, (&DP_TP, &vars, &model), TOLERANCE, |_| ());
    });
    // The unit has its own roles: the map shards, the unit replicates.
    ranks(4, |world| {
        let vars = DP_TP.vars(&world, true);
        let dims = fsdp_candle::DataParallelMeshDims { shard: &[], replicate: &["dp"] };
        let opts = FullyShard::new(&vars).dp_mesh_dims(vars.mesh(), &dims).unwrap();
        let model = build(&opts, &vars).unwrap();
        let weight = vars.get("blocks.0.up.weight").unwrap();
        assert_eq!(weight.var().dims(), weight.unsharded_shape().dims());
        trains(&world, (&DP_TP, &vars, &model), TOLERANCE, |_| ());
    });
}
