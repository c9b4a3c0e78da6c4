//! Plans and mixtures that are refused, and ranks that fail.

use candle_core::{DType, Module, Tensor};
use fsdp_candle::{
    ColwiseParallel, DataParallelMeshDims, ExpertParallel, FullyShard, ParallelPlan, ShardMesh, ShardPlacement,
    ShardedVarMap, World, fully_shard, nn, parallelize,
};

use super::model::{Block, FOUR, Shape, WIDTH, build, tokens, vars};
use crate::common::{all_refused, input, mean_square, ranks, refused};

fn plan(pattern: &str) -> ParallelPlan {
    ParallelPlan::new().module(pattern, ExpertParallel)
}

fn map(world: &World, shard: &[&str]) -> ShardedVarMap {
    let mesh = world.mesh(&[("dp_shard", 1), ("ep", 2)]).unwrap();
    ShardedVarMap::with_dp_mesh_dims(&mesh, &DataParallelMeshDims { shard, replicate: &[] }, world.device()).unwrap()
}

fn apply(vars: &ShardedVarMap, plan: &ParallelPlan) -> fsdp_candle::Result<()> {
    parallelize(vars, &vars.mesh().slice(&["ep"]).unwrap(), plan)
}

#[test]
fn plans_of_experts_that_do_not_fit_are_refused() {
    ranks(2, |world| {
        let both = ["dp_shard", "ep"];
        let refuse = |shard: &[&str], plan: &ParallelPlan, parts: &[&str]| {
            refused(apply(&map(&world, shard), plan), parts);
        };
        refuse(&["dp_shard"], &plan("blocks.*.experts"), &["dimension \"ep\"", "does not shard", "[\"dp_shard\"]"]);
        let mixed = plan("blocks.*.experts").module("head", ColwiseParallel::default());
        refuse(&both, &mixed, &["makes `head` ColwiseParallel", "make a plan of each kind"]);
        refuse(&both, &plan("blocks.["), &["not a valid pattern"]);
        let vars = map(&world, &both);
        apply(&vars, &plan("blocks.*.experts")).unwrap();
        refused(apply(&vars, &plan("others.*")), &["has a plan of experts already"]);
        build(&FullyShard::new(&vars), &vars, DType::F32, FOUR);
        refused(apply(&vars, &plan("others.*")), &["is built already"]);

        // The model does not have these modules.
        let x = tokens(world.rank(), 0, DType::F32);
        for (pattern, parts) in [
            ("blocks.*.expert", &["the pattern `blocks.*.expert` of the plan matches no list of experts"][..]),
            ("head", &["parameter `head.weight`", "not a parameter of a numbered expert"]),
        ] {
            let vars = map(&world, &both);
            apply(&vars, &plan(pattern)).unwrap();
            let built = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
                Ok((Block::new(FOUR, vb.pp("blocks.0"))?, nn::linear(WIDTH, 3, vb.pp("head"))?))
            });
            match built {
                Ok(model) => refused(model.call(|(block, _)| block.forward(&x)), parts),
                Err(error) => refused::<(), _>(Err(error), parts),
            }
        }
        // A numbered layer is not an expert.
        let vars = map(&world, &both);
        apply(&vars, &plan("layers")).unwrap();
        let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
            nn::linear_no_bias(WIDTH, WIDTH, vb.pp("layers.0"))
        });
        refused(model.unwrap().forward(&x), &["parameter `layers.0.weight`", "no SwiGlu of fsdp_candle::nn holds it"]);
    });
}

#[test]
fn other_meshes_of_experts_are_refused() {
    ranks(2, |world| {
        let vars = vars(&world, &[("dp_shard", 1), ("ep", 2)], true);
        let other = ShardMesh::new(&vars.mesh().slice(&["ep"]).unwrap()).unwrap();
        let options = FullyShard::new(&vars).shard_placement_fn(move |name, _| {
            name.contains("experts.").then(|| ShardPlacement { dim: 0, mesh: Some(other.clone()) })
        });
        let model = fully_shard(&options, vars.builder(DType::F32).pp("blocks.0"), |vb| Block::new(FOUR, vb));
        let parts = ["parameter `blocks.0.experts.0.gate.weight`", "shard_placement_fn sets another"];
        refused(model.map(|_| ()), &parts);
        let ignoring = FullyShard::new(&vars).ignored_params(|name| name.contains("experts.1."));
        let model = fully_shard(&ignoring, vars.builder(DType::F32).pp("blocks.0"), |vb| Block::new(FOUR, vb));
        refused(model.map(|_| ()), &["`blocks.0.experts.1.gate.weight`", "it is ignored", "ExpertParallel"]);
    });
}

#[test]
fn mixtures_that_ranks_cannot_share_are_refused() {
    let errors = ranks(3, |world| {
        let vars = vars(&world, &[("ep", 3)], true);
        let model = build(&FullyShard::new(&vars), &vars, DType::F32, Shape { experts: 2, per_token: 1, ..FOUR });
        model.forward(&tokens(world.rank(), 0, DType::F32)).unwrap_err().to_string()
    });
    all_refused(
        errors,
        &["rank 2 of the 3 ranks of experts has none of the 2 experts", "blocks.0.experts.0.down.weight"],
    );
    ranks(2, |world| {
        let vars = vars(&world, &[("ep", 2)], true);
        let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32).pp("blocks.0.experts"), |vb| {
            let layer = |name: &str| nn::linear_no_bias(WIDTH, WIDTH, vb.pp(name));
            Ok(nn::SwiGlu::new(layer("1.gate")?, layer("1.up")?, layer("1.down")?))
        });
        let called = model.unwrap().forward(&tokens(0, 0, DType::F32));
        match world.rank() {
            0 => refused(called, &["the expert is on rank 1 of 2 ranks of experts, not on rank 0"]),
            _ => assert_eq!(called.unwrap().dims()[1], WIDTH),
        }
    });
}

/// A mixture of two lists, of which the plan names the first.
#[test]
fn mixtures_that_are_partly_planned_are_refused() {
    ranks(2, |world| {
        let vars = map(&world, &["dp_shard", "ep"]);
        apply(&vars, &plan("planned")).unwrap();
        let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
            let expert = |list: &str, number: usize| {
                let layer = |name: &str| nn::linear_no_bias(WIDTH, WIDTH, vb.pp(format!("{list}.{number}.{name}")));
                candle_core::Result::Ok(nn::SwiGlu::new(layer("gate")?, layer("up")?, layer("down")?))
            };
            Ok([expert("planned", 0)?, expert("planned", 1)?, expert("others", 0)?])
        });
        let x = tokens(world.rank(), 0, DType::F32);
        let chosen = Tensor::zeros((x.dims()[0], 1), DType::U32, x.device()).unwrap();
        let weights = Tensor::ones((x.dims()[0], 1), DType::F32, x.device()).unwrap();
        let mixed = model.unwrap().call(|experts| nn::mixture_of_experts(&x, experts, &chosen, &weights));
        refused(mixed, &["makes `planned.0.down.weight` and not expert 2 ExpertParallel"]);
    });
}

/// Rank 1 fails in the forward of the second block, between exchanges. The other rank gets an error that names it.
#[test]
fn ranks_that_fail_between_exchanges_are_named() {
    let errors = ranks(2, |world| {
        let vars = vars(&world, &[("ep", 2)], true);
        let model = build(&FullyShard::new(&vars), &vars, DType::F32, FOUR);
        let loss = mean_square(&model.forward(&tokens(world.rank(), 0, DType::F32)).unwrap());
        if world.rank() == 1 {
            return None;
        }
        Some(model.backward(&loss).unwrap_err().to_string())
    });
    let error = errors[0].as_ref().unwrap();
    assert!(error.contains("rank 1"), "{error}");
}

/// One rank passes another number of layers.
#[test]
fn different_mixtures_on_ranks_are_refused() {
    let errors = ranks(2, |world| {
        let vars = vars(&world, &[("ep", 2)], true);
        let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
            Ok((Block::new(FOUR, vb.pp("blocks.0"))?, Block::new(FOUR, vb.pp("blocks.1"))?))
        });
        let x: Tensor = input(world.rank(), &[4, WIDTH]);
        let call = model.unwrap().call(|(first, second)| if world.rank() == 0 { first } else { second }.forward(&x));
        call.unwrap_err().to_string()
    });
    all_refused(errors, &["the mixture of parameter `blocks.0.experts.0.down.weight`"]);
}
