//! The region of a parameter that each rank holds, and plans that are errors.

use candle_core::{DType, Tensor};
use candle_nn::{Init, VarBuilder};
use fsdp_candle::{
    ActivationLayout, ColwiseParallel, DataParallelMeshDims, FsdpParam, FullyShard, ParallelPlan, ParallelStyle,
    Placement, RowwiseParallel, SequenceParallel, ShardMesh, ShardPlacement, ShardedVarMap, VocabParallel, World,
    fully_shard, nn, parallelize,
};
use fsdp_core::layout::chunk_range;

use super::model::{HIDDEN, MESHES, Mesh, VOCABULARY, WIDTH, build, plan};
use crate::common::{ranks, refused, vars_on};

/// Every rank's region of a parameter, as the elements in it.
fn covered(vars: &ShardedVarMap, param: &FsdpParam) -> Vec<u8> {
    let (shape, region) = (param.shape().dims(), param.region());
    let mut inside = vec![0u8; shape.iter().product()];
    for (index, element) in inside.iter_mut().enumerate() {
        let (mut rest, mut is_inside) = (index, true);
        for dim in (0..shape.len()).rev() {
            let at = rest % shape[dim];
            is_inside &= (region.offsets[dim]..region.offsets[dim] + region.sizes[dim]).contains(&at);
            rest /= shape[dim];
        }
        *element = u8::from(is_inside);
    }
    assert_eq!(inside.iter().map(|&here| usize::from(here)).sum::<usize>(), param.var().elem_count());
    let mesh = vars.mesh();
    (0..mesh.layout().shape().len()).fold(inside, |inside, dim| {
        mesh.group(dim).unwrap().all_reduce_values(inside, fsdp_core::ReduceOp::Sum).unwrap()
    })
}

#[test]
fn regions_cover_each_parameter_once_per_replica() {
    for mesh in MESHES {
        ranks(mesh.size(), |world| {
            let vars = mesh.vars(&world, true);
            build(&FullyShard::new(&vars), &vars).unwrap();
            for param in vars.params() {
                let on = param.device_mesh();
                let placements = param.placements();
                assert_eq!((placements.len(), on.size()), (on.layout().shape().len(), world.size()));
                let dims = placements.iter().zip(on.layout().shape());
                let copies: usize = dims.filter(|(p, _)| **p == Placement::Replicate).map(|(_, size)| size).product();
                assert!(covered(&vars, &param).iter().all(|&times| usize::from(times) == copies), "{mesh:?} {param:?}");
            }
        });
    }
}

#[test]
fn fsdp_shards_the_tensor_parallel_part() {
    let strided = |split_factor| Placement::StridedShard { dim: 0, split_factor };
    ranks(6, |world| {
        let mesh = Mesh::new(&[("dp", 3), ("tp", 2)], &["dp"], &[]);
        let vars = mesh.vars(&world, false);
        build(&FullyShard::new(&vars), &vars).unwrap();
        let (dp, tp) = (world.rank() / 2, world.rank() % 2);
        let up = vars.get("blocks.0.up.weight").unwrap();
        assert_eq!((up.shape().dims(), up.unsharded_shape().dims()), (&[HIDDEN, WIDTH][..], &[HIDDEN / 2, WIDTH][..]));
        assert_eq!(up.placements(), [strided(2), Placement::Shard(0)]);
        let rows = chunk_range(HIDDEN / 2, 3, dp);
        assert_eq!(up.region().offsets, [tp * HIDDEN / 2 + rows.start, 0]);
        assert_eq!(up.var().dims(), [rows.len(), WIDTH]);
        let down = vars.get("blocks.0.down.weight").unwrap();
        assert_eq!(down.unsharded_shape().dims(), [WIDTH, HIDDEN / 2]);
        assert_eq!(down.placements(), [Placement::Shard(0), Placement::Shard(1)]);
        assert_eq!(down.region().offsets, [chunk_range(WIDTH, 3, dp).start, tp * HIDDEN / 2]);
        let bias = vars.get("blocks.0.down.bias").unwrap();
        assert_eq!(bias.placements(), [Placement::Shard(0), Placement::Replicate]);
        let embed = vars.get("embed.weight").unwrap();
        assert_eq!(embed.unsharded_shape().dims(), [VOCABULARY / 2, WIDTH]);
        let shown = vars.to_string();
        assert!(
            shown.contains("up.weight [20, 8] F32 (_S(0, 2), S(0))") && shown.contains("ColwiseParallel"),
            "{shown}"
        );
    });
    // The mesh dimension further left shards first.
    ranks(4, |world| {
        let vars = Mesh::new(&[("tp", 2), ("dp", 2)], &["dp"], &[]).vars(&world, false);
        build(&FullyShard::new(&vars), &vars).unwrap();
        let up = vars.get("blocks.0.up.weight").unwrap();
        assert_eq!(up.placements(), [Placement::Shard(0), Placement::Shard(0)]);
        assert_eq!(up.region().offsets[0], world.rank() * HIDDEN / 4);
    });
    // Dimensions that shard together are flattened into one; those that replicate are kept.
    ranks(8, |world| {
        let vars = Mesh::new(&[("outer", 2), ("tp", 2), ("inner", 2)], &["outer", "inner"], &[]).vars(&world, false);
        build(&FullyShard::new(&vars), &vars).unwrap();
        let up = vars.get("blocks.0.up.weight").unwrap();
        assert_eq!(up.device_mesh().layout().to_string(), "(outer_inner: 4, tp: 2)");
        assert_eq!(up.placements(), [strided(2), Placement::Shard(0)]);
        let vars = Mesh::new(&[("outer", 2), ("inner", 2), ("tp", 2)], &[], &["outer", "inner"]).vars(&world, false);
        build(&FullyShard::new(&vars), &vars).unwrap();
        let up = vars.get("blocks.0.up.weight").unwrap();
        assert_eq!(up.placements(), [Placement::Replicate, Placement::Replicate, Placement::Shard(0)]);
        assert_eq!(up.var().dims(), [HIDDEN / 2, WIDTH]);
    });
    // Tensor parallelism and FSDP shard the same dimension, which is not the first.
    ranks(4, |world| {
        let vars = Mesh::new(&[("dp", 2), ("tp", 2)], &["dp"], &[]).vars(&world, false);
        let second = |_: &str, shape: &[usize]| (shape.len() == 2).then(|| ShardPlacement::from(1));
        build(&FullyShard::new(&vars).shard_placement_fn(second), &vars).unwrap();
        let down = vars.get("blocks.0.down.weight").unwrap();
        let strided = Placement::StridedShard { dim: 1, split_factor: 2 };
        assert_eq!(down.placements(), [strided, Placement::Shard(1)]);
        let (dp, tp) = (world.rank() / 2, world.rank() % 2);
        assert_eq!(down.region().offsets, [0, tp * HIDDEN / 2 + dp * HIDDEN / 4]);
    });
}

const DP_TP: &[(&str, usize)] = &[("dp", 2), ("tp", 2)];

fn map(world: &World) -> ShardedVarMap {
    let dims = DataParallelMeshDims { shard: &["dp"], replicate: &[] };
    ShardedVarMap::with_dp_mesh_dims(&world.mesh(DP_TP).unwrap(), &dims, world.device()).unwrap()
}

/// Asserts that building a model under a plan is an error that contains all of `parts`.
fn refuses<M>(
    world: &World,
    plan: ParallelPlan,
    parts: &[&str],
    build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
) {
    let vars = map(world);
    parallelize(&vars, &vars.mesh().slice(&["tp"]).unwrap(), &plan).unwrap();
    refused(fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), build), parts);
    assert!(vars.params().is_empty(), "a failed build leaves parameters");
}

#[test]
fn refuses_sizes_that_do_not_divide() {
    ranks(4, |world| {
        let columns = || ParallelPlan::new().module("*", ColwiseParallel::default());
        let rows = || ParallelPlan::new().module("*", RowwiseParallel::default());
        refuses(
            &world,
            columns(),
            &["`up.weight`", "dimension 0", "[5, 4]", "size 5", "2 ranks", "(tp: 2)", "`*`"],
            |vb| nn::linear(4, 5, vb.pp("up")),
        );
        refuses(&world, rows(), &["`down.weight`", "dimension 1", "size 5"], |vb| nn::linear(5, 4, vb.pp("down")));
        let vocab = ParallelPlan::new().module("embed", VocabParallel::default());
        refuses(&world, vocab, &["`embed.weight`", "VocabParallel", "size 7"], |vb| {
            nn::embedding(7, 4, vb.pp("embed"))
        });
        refuses(&world, rows(), &["`odd.kernel`", "RowwiseParallel", "no such parameter"], |vb| {
            vb.pp("odd").get((4, 4), "kernel")
        });
        let both = columns().module("u?", RowwiseParallel::default());
        refuses(&world, both, &["`up.weight`", "`*` and `u?`", "both match"], |vb| nn::linear(4, 4, vb.pp("up")));
    });
}

#[test]
fn refuses_layers_without_tensor_parallelism() {
    ranks(4, |world| {
        let columns = || ParallelPlan::new().module("*", ColwiseParallel::default());
        let knows_nothing = ["`up.weight`", "ColwiseParallel", "does not support tensor parallelism"];
        refuses(&world, columns(), &knows_nothing, |vb| candle_nn::linear(4, 4, vb.pp("up")));
        refuses(&world, columns(), &knows_nothing, |vb| vb.pp("up").get((4, 4), "weight"));
        refuses(&world, columns(), &knows_nothing, |vb| nn::rms_norm(4, 1e-5, vb.pp("up")));
        let bias = ParallelPlan::new().module("*", RowwiseParallel::default());
        refuses(&world, bias, &["`down.bias`", "RowwiseParallel"], |vb| vb.pp("down").get(4, "bias"));

        // A user's layer that queries the plan is accepted, and one on a part of the sequence need not query it.
        let vars = map(&world);
        let tp = vars.mesh().slice(&["tp"]).unwrap();
        let plan = columns().module("a.norm", SequenceParallel { sequence_dim: 0 });
        parallelize(&vars, &tp, &plan).unwrap();
        fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
            let weight = vb.pp("up").get_with_hints((4, 6), "weight", Init::Const(1.))?;
            let (style, ranks) = FsdpParam::register_tp_layer(&weight).unwrap();
            assert_eq!(style, ParallelStyle::from(ColwiseParallel::default()));
            assert!(ranks.is(tp.group(0).unwrap()));
            assert_eq!(weight.dims(), [2, 6]);
            let scale = vb.pp("a.norm").get(4, "weight")?;
            assert!(FsdpParam::register_tp_layer(&Tensor::zeros(4, DType::F32, vb.device())?).is_none());
            Ok((weight, scale))
        })
        .unwrap();
    });
}

#[test]
fn refuses_late_and_unmatched_plans() {
    ranks(4, |world| {
        let vars = map(&world);
        let tp = vars.mesh().slice(&["tp"]).unwrap();
        let refuses = |mesh: &_, plan: &_, parts: &[&str]| refused(parallelize(&vars, mesh, plan), parts);
        let plan = plan(false);
        refuses(&vars.mesh().slice(&["dp"]).unwrap(), &plan, &["\"dp\"", "(dp: 2, tp: 2)", "data parallel"]);
        refuses(vars.mesh(), &plan, &["(dp: 2, tp: 2)", "not one dimension"]);
        let other = world.mesh(&[("x", 2), ("tp", 2)]).unwrap().slice(&["tp"]).unwrap();
        refuses(&other, &plan, &["(tp: 2)", "not a dimension of the map's mesh"]);
        let bad = ParallelPlan::new().module("up[", ColwiseParallel::default());
        refuses(&tp, &bad, &["`up[` is not a valid pattern"]);
        let other = if world.rank() == 3 { ParallelPlan::new() } else { plan.clone() };
        refuses(&tp, &other, &["different plans", "same on every rank"]);
        parallelize(&vars, &tp, &plan).unwrap();
        refuses(&tp, &plan, &["a plan already"]);

        // A 2-D mesh without roles is HSDP: both dimensions are data parallel.
        let vars = vars_on(&world, DP_TP);
        let tp = vars.mesh().slice(&["tp"]).unwrap();
        refused(parallelize(&vars, &tp, &plan), &["\"tp\"", "data parallel", "ShardedVarMap::with_dp_mesh_dims"]);

        let vars = map(&world);
        let tp = vars.mesh().slice(&["tp"]).unwrap();
        let linear = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear(4, 4, vb));
        refused(parallelize(&vars, &tp, &plan), &["`weight`", "before the model is built"]);
        drop(linear);

        let vars = map(&world);
        let tp = vars.mesh().slice(&["tp"]).unwrap();
        parallelize(&vars, &tp, &plan.module("blocks.*.gate", ColwiseParallel::default())).unwrap();
        let model = build(&FullyShard::new(&vars), &vars).unwrap();
        for _ in 0..2 {
            let ids = Tensor::zeros((1, 4), DType::U32, world.device()).unwrap();
            refused(
                candle_core::Module::forward(&model, &ids),
                &["`blocks.*.gate`", "no module", "`blocks.*.up`", "`embed`"],
            );
        }
    });
}

#[test]
fn refuses_incompatible_meshes() {
    ranks(4, |world| {
        let mesh = world.mesh(DP_TP).unwrap();
        let on = |shard, replicate| {
            let dims = DataParallelMeshDims { shard, replicate };
            ShardedVarMap::with_dp_mesh_dims(&mesh, &dims, world.device())
        };
        refused(on(&["cp"], &[]), &["no dimension \"cp\"", "\"dp\""]);
        refused(on(&["dp"], &["dp"]), &["\"dp\"", "twice"]);
        let own: &[&str] = if world.rank() == 0 { &["dp"] } else { &[] };
        refused(on(own, &[]), &["different roles", "(dp: 2, tp: 2)"]);

        // A unit's own mesh without the plan's dimension, and one that shards over that dimension.
        let vars = map(&world);
        parallelize(&vars, &mesh.slice(&["tp"]).unwrap(), &plan(false)).err().unwrap();
        parallelize(&vars, &vars.mesh().slice(&["tp"]).unwrap(), &plan(false)).unwrap();
        let flat = world.mesh(&[("all", 4)]).unwrap();
        refused(
            build(&FullyShard::new(&vars).mesh(&flat).unwrap(), &vars),
            &["`blocks.0.up.weight`", "ColwiseParallel", "(all: 4)"],
        );
        let both = DataParallelMeshDims { shard: &["dp", "tp"], replicate: &[] };
        let opts = FullyShard::new(&vars).dp_mesh_dims(vars.mesh(), &both).unwrap();
        refused(build(&opts, &vars), &["`blocks.0.up.weight`", "beside those that shard"]);
        // Roles that leave out ranks with the same parameters.
        let none = ShardMesh::of_dims(vars.mesh(), &DataParallelMeshDims::default()).unwrap();
        let opts = FullyShard::new(&vars)
            .shard_placement_fn(move |_, _| Some(ShardPlacement { dim: 0, mesh: Some(none.clone()) }));
        refused(build(&opts, &vars), &["`blocks.0.norm.weight`", "leaves out"]);
        let opts = FullyShard::new(&vars).ignored_params(|name| name.ends_with("down.bias"));
        refused(build(&opts, &vars), &["down.bias", "ignored", "RowwiseParallel"]);
    });
    // To treat both dimensions as one, build the map without tensor parallelism.
    ranks(4, |world| {
        let dims = DataParallelMeshDims { shard: &["dp", "tp"], replicate: &[] };
        let vars = ShardedVarMap::with_dp_mesh_dims(&world.mesh(DP_TP).unwrap(), &dims, world.device()).unwrap();
        refused(parallelize(&vars, &vars.mesh().slice(&["tp"]).unwrap(), &plan(false)), &["\"tp\"", "data parallel"]);
        let layout = ActivationLayout::Shard(-1);
        assert_eq!(ColwiseParallel::default().output_layout, layout);
    });
}
