//! State dicts and checkpoints, between meshes of all kinds.

use candle_core::DType;
use fsdp_candle::{
    AdamW, AdamWConfig, CheckpointManager, FsdpModule, FullyShard, ShardedVarMap, StateDictOptions, TrainState, World,
    get_state_dict, set_state_dict,
};

use super::model::{FOUR, Mesh, Model, Shape, build, tokens, vars};
use crate::common::{dict_elements, full, mean_square, one_of, ranks};

/// A mesh, and whether experts live on the ranks of its dimension `ep`.
type Place = (Mesh<'static>, bool);

const PLACES: [Place; 5] = [
    (&[("ep", 1)], false),
    (&[("dp_shard", 1), ("ep", 2)], true),
    (&[("dp_shard", 2), ("ep", 2)], true),
    (&[("dp_replicate", 2), ("dp_shard", 1), ("ep", 2)], true),
    (&[("dp_shard", 1), ("ep", 3)], false),
];

const SHAPE: Shape = Shape { experts: 5, ..FOUR };

fn built(world: &World, (mesh, is_parallel): Place) -> (ShardedVarMap, FsdpModule<Model>, AdamW) {
    let vars = vars(world, mesh, is_parallel);
    let model = build(&FullyShard::new(&vars), &vars, DType::F32, SHAPE);
    let optimizer = AdamW::new(vars.trainable(), AdamWConfig { lr: 1e-2, ..AdamWConfig::default() }).unwrap();
    (vars, model, optimizer)
}

fn size((mesh, _): Place) -> usize {
    mesh.iter().map(|(_, size)| size).product()
}

/// All values of the model and of the optimizer, the same on every rank.
fn values(vars: &ShardedVarMap, optimizer: &AdamW) -> Vec<(String, Vec<f32>)> {
    let (model, moments) = get_state_dict(vars, optimizer, &full()).unwrap();
    [dict_elements(&model), dict_elements(&moments)].concat()
}

fn step(world: &World, model: &FsdpModule<Model>, optimizer: &mut AdamW, number: usize) {
    use candle_core::Module;
    let loss = mean_square(&model.forward(&tokens(world.rank(), number, DType::F32)).unwrap());
    optimizer.step(&model.backward(&loss).unwrap()).unwrap();
}

#[test]
fn checkpoints_move_between_numbers_of_ranks_with_experts() {
    for from in PLACES.into_iter().step_by(one_of(2)) {
        let dir = tempfile::tempdir().unwrap();
        let saved = ranks(size(from), |world| {
            let (vars, model, mut optimizer) = built(&world, from);
            step(&world, &model, &mut optimizer, 0);
            let mut checkpoints = CheckpointManager::new(&world, dir.path());
            checkpoints.save(1, TrainState::new(&vars).optimizer(&mut optimizer)).unwrap();
            values(&vars, &optimizer)
        });
        assert!(saved.iter().all(|values| *values == saved[0]), "{from:?}");
        for to in PLACES.into_iter().step_by(one_of(3)) {
            ranks(size(to), |world| {
                let (vars, model, mut optimizer) = built(&world, to);
                let mut checkpoints = CheckpointManager::new(&world, dir.path());
                checkpoints.resume(TrainState::new(&vars).optimizer(&mut optimizer)).unwrap();
                assert_eq!(values(&vars, &optimizer), saved[0], "{from:?} to {to:?}");
                step(&world, &model, &mut optimizer, 1);
            });
        }
    }
}

#[test]
fn state_dicts_of_experts_round_trip() {
    for place in PLACES.into_iter().step_by(one_of(2)) {
        ranks(size(place), |world| {
            let (vars, model, mut optimizer) = built(&world, place);
            step(&world, &model, &mut optimizer, 0);
            let wanted = values(&vars, &optimizer);
            let broadcast = StateDictOptions { broadcast_from_rank0: true, cpu_offload: true, ..full() };
            for options in [StateDictOptions { cpu_offload: true, ..StateDictOptions::default() }, full(), broadcast] {
                let (of_model, moments) = get_state_dict(&vars, &optimizer, &options).unwrap();
                let of_model = of_model.clone();
                step(&world, &model, &mut optimizer, 1);
                assert_ne!(values(&vars, &optimizer), wanted);
                set_state_dict(&vars, &mut optimizer, &of_model, &moments, &options).unwrap();
                assert_eq!(values(&vars, &optimizer), wanted, "{place:?}");
            }
        });
    }
}
