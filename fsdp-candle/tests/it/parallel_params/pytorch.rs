//! Placements and regions are those of PyTorch's FSDP2, as recorded by tests/interop/placements.py.

use candle_core::DType;
use fsdp_candle::{
    ColwiseParallel, DataParallelMeshDims, FsdpParam, FullyShard, ParallelPlan, RowwiseParallel, ShardPlacement,
    ShardedVarMap, fully_shard, parallelize,
};
use serde_json::Value;

use crate::common::ranks;

fn names(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect()
}

fn numbers(list: &Value) -> Vec<usize> {
    list.as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as usize).collect()
}

fn mesh(list: &Value) -> Vec<(&str, usize)> {
    let dim = |dim: &'_ Value| dim[1].as_u64().unwrap() as usize;
    list.as_array().unwrap().iter().map(|of| (of[0].as_str().unwrap(), dim(of))).collect()
}

#[test]
fn placements_match_pytorch() {
    let recorded: Value = serde_json::from_str(include_str!("pytorch.json")).unwrap();
    let shape = numbers(&recorded["shape"]);
    let cases = recorded["cases"].as_array().unwrap();
    assert!(cases.len() > 30);
    for case in cases {
        let dims = mesh(&case["dims"]);
        ranks(dims.iter().map(|(_, size)| size).product(), |world| {
            let mesh_of_ranks = world.mesh(&dims).unwrap();
            let roles = DataParallelMeshDims { shard: &names(&case["shard"]), replicate: &names(&case["replicate"]) };
            let vars = ShardedVarMap::with_dp_mesh_dims(&mesh_of_ranks, &roles, world.device()).unwrap();
            let plan = ParallelPlan::new();
            let plan = match case["cut"].as_u64() {
                Some(0) => Some(plan.module("m", ColwiseParallel::default())),
                Some(_) => Some(plan.module("m", RowwiseParallel::default())),
                None => None,
            };
            if let Some(plan) = plan {
                parallelize(&vars, &mesh_of_ranks.slice(&["tp"]).unwrap(), &plan).unwrap();
            }
            let dim = case["dim"].as_u64().unwrap() as usize;
            let opts = FullyShard::new(&vars).shard_placement_fn(move |_, _| Some(ShardPlacement::from(dim)));
            let unit = fully_shard(&opts, vars.builder(DType::F32), |vb| {
                let weight = vb.pp("m").get(shape.as_slice(), "weight")?;
                FsdpParam::register_tp_layer(&weight);
                Ok(weight)
            })
            .unwrap();
            let param = &unit.params()[0];
            let on = param.device_mesh().layout();
            let on: Vec<_> = on.names().iter().map(String::as_str).zip(on.shape().iter().copied()).collect();
            assert_eq!(on, mesh(&case["mesh"]), "{case}");
            let placements: Vec<String> = param.placements().iter().map(ToString::to_string).collect();
            assert_eq!(placements, names(&case["placements"]), "{case}");
            let of_rank = &case["boxes"][world.rank()];
            assert_eq!(param.region().sizes, numbers(&of_rank[1]), "{case}");
            if !of_rank[0].is_null() {
                assert_eq!(param.region().offsets, numbers(&of_rank[0]), "{case}");
            }
        });
    }
}
