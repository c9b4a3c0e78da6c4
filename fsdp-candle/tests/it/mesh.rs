//! The meshes that a unit and a parameter may use.

use candle_core::{DType, Tensor};
use fsdp_candle::{
    AdamW, AdamWConfig, FullyShard, GradScaler, ReshardAfterForward, ShardMesh, ShardPlacement, ShardedVarMap,
    fully_shard, nn,
};
use fsdp_core::DeviceMesh;

use crate::common::{WIDTH, batch, loss_of, ranks, refused, vars};

#[test]
fn refuses_trained_parameters_on_part_of_the_ranks() {
    ranks(4, |world| {
        let grid = world.mesh(&[("replicate", 2), ("shard", 2)]).unwrap();
        let rows = grid.slice(&["shard"]).unwrap();
        let columns = grid.slice(&["replicate"]).unwrap();
        let pair = world.group().split(world.rank() % 2, world.rank()).unwrap();
        let unrelated = DeviceMesh::from_group("pair", &pair).unwrap();
        let build = |map: &DeviceMesh, unit: &DeviceMesh, frozen: bool, placed: bool| {
            let vars = ShardedVarMap::new(map, world.device());
            vars.freeze(move |_| frozen).unwrap();
            let opts = FullyShard::new(&vars);
            let opts = if placed {
                let mesh = ShardMesh::new(unit).unwrap();
                opts.shard_placement_fn(move |_, _| Some(ShardPlacement { dim: 0, mesh: Some(mesh.clone()) }))
            } else {
                opts.mesh(unit).unwrap()
            };
            fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 4, vb.pp("head"))).map(drop)
        };
        for placed in [false, true] {
            for (map, unit) in [(&grid, &rows), (&grid, &unrelated), (&rows, &columns)] {
                let parts = [
                    "parameter `head.weight`: it is trained on the mesh ",
                    &format!("{} of 2 rank(s)", unit.layout()),
                    &map.layout().to_string(),
                    "(replicate, shard) of all ranks",
                    "of their own",
                ];
                refused(build(map, unit, false, placed), &parts);
                // Replicas of a frozen parameter stay equal.
                build(map, unit, true, placed).unwrap();
            }
            for (map, unit) in [(&grid, &grid), (&rows, &rows), (&rows, &grid), (&unrelated, &grid)] {
                build(map, unit, false, placed).unwrap();
            }
        }
    });
}

#[test]
fn refusals_list_possible_reshard_sizes() {
    for (size, want) in [
        (1, "there is only one shard rank. Choose `always`"),
        (3, "only 1 and 3 divide the 3 shard ranks. Choose `always`"),
        (4, "expected a proper divisor of the 4 shard ranks. Choose 2, `always`"),
    ] {
        ranks(size, |world| {
            for bad in [0, 1, 3, size, usize::MAX] {
                let vars = vars(&world);
                let opts = FullyShard::new(&vars).reshard_after_forward(ReshardAfterForward::To(bad));
                let built = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear(4, 4, vb));
                refused(built, &[&format!("reshard_after_forward = {bad}: "), want]);
            }
        });
    }
}

#[test]
fn overflow_checks_cover_all_ranks_of_a_parameter() {
    let verdicts = ranks(4, |world| {
        let grid = world.mesh(&[("stage", 2), ("shard", 2)]).unwrap();
        // A map over the ranks of one pipeline stage, and a parameter shared by the stages.
        let vars = ShardedVarMap::new(&grid.slice(&["shard"]).unwrap(), world.device());
        let opts = FullyShard::new(&vars).mesh(&world.mesh(&[("all", 4)]).unwrap()).unwrap();
        let tied =
            fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(WIDTH, 4, vb.pp("tied"))).unwrap();
        let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
        let mut scaler = GradScaler::new(1024.);
        let mut steps = vec![];
        for odd in [None, Some(0), Some(3)] {
            let loss = scaler.scale(&loss_of(&tied, &batch(world.rank(), WIDTH))).unwrap();
            let mut grads = tied.backward(&loss).unwrap();
            if odd == Some(world.rank()) {
                let shard = vars.params()[0].var().clone();
                grads.insert(&shard, Tensor::full(f32::INFINITY, shard.dims(), world.device()).unwrap());
            }
            scaler.unscale(&vars, &mut grads).unwrap();
            steps.push(scaler.step(&mut optim, &grads).unwrap());
            scaler.update().unwrap();
        }
        (steps, scaler.current_scale())
    });
    assert!(verdicts.iter().all(|verdict| *verdict == (vec![true, false, false], 256.)), "{verdicts:?}");
}
