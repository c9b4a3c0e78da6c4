//! State dicts and checkpoints between all meshes.

use std::path::Path;

use fsdp_candle::{
    AdamW, FullyShard, ShardedVarMap, StateDictOptions, World, get_state_dict, load_model, load_optimizer,
    model_tensors, optimizer_tensors, optimizer_values, set_state_dict,
};
use fsdp_ckpt::{LoadOptions, SaveState, save};

use super::model::{Mesh, Model, build, loss, optimizer};
use crate::common::{Gradients, dict_elements, full, ranks};

/// The meshes that save and load.
const MESHES: &[Mesh] = &[
    Mesh::new(&[("dp", 2), ("tp", 2)], &["dp"], &[]),
    Mesh::new(&[("tp", 4)], &[], &[]),
    Mesh::new(&[("dp", 3)], &["dp"], &[]),
    Mesh::new(&[("dp", 1)], &["dp"], &[]),
    Mesh::new(&[("replicate", 2), ("shard", 1), ("tp", 2)], &["shard"], &["replicate"]),
    Mesh::new(&[("tp", 2), ("dp", 2)], &["dp"], &[]),
    Mesh::new(&[("dp", 3), ("tp", 2)], &["dp"], &[]),
    Mesh::new(&[("outer", 2), ("tp", 2), ("inner", 2)], &["outer", "inner"], &[]),
];

fn on(mesh: &Mesh, world: &World) -> (ShardedVarMap, Model, AdamW) {
    let vars = mesh.vars(world, true);
    let model = build(&FullyShard::new(&vars), &vars).unwrap();
    let optim = optimizer(&vars);
    (vars, model, optim)
}

fn step(mesh: &Mesh, vars: &ShardedVarMap, model: &Model, optim: &mut AdamW) {
    let (batch, _) = mesh.batch_of(vars);
    optim.step(&model.backward(&loss(model, [batch])).unwrap()).unwrap();
}

/// Full parameters and moments.
fn whole(vars: &ShardedVarMap, optim: &AdamW) -> Gradients {
    let (model, moments) = get_state_dict(vars, optim, &full()).unwrap();
    [dict_elements(&model), dict_elements(&moments)].concat()
}

#[test]
fn state_dicts_round_trip_on_every_mesh() {
    for mesh in MESHES {
        ranks(mesh.size(), |world| {
            let (vars, model, mut optim) = on(mesh, &world);
            step(mesh, &vars, &model, &mut optim);
            let want = whole(&vars, &optim);
            let copies = StateDictOptions { cpu_offload: true, ..StateDictOptions::default() };
            let broadcast = StateDictOptions { broadcast_from_rank0: true, cpu_offload: true, ..full() };
            for options in [copies, full(), broadcast] {
                let (parameters, moments) = get_state_dict(&vars, &optim, &options).unwrap();
                step(mesh, &vars, &model, &mut optim);
                assert_ne!(whole(&vars, &optim), want);
                set_state_dict(&vars, &mut optim, &parameters, &moments, &options).unwrap();
                assert_eq!(whole(&vars, &optim), want, "{mesh:?} {options:?}");
            }
        });
    }
}

/// Saves after two steps on a mesh, and returns the saved values.
fn saved(mesh: &Mesh, dir: &Path) -> Gradients {
    let all = ranks(mesh.size(), |world| {
        let (vars, model, mut optim) = on(mesh, &world);
        step(mesh, &vars, &model, &mut optim);
        step(mesh, &vars, &model, &mut optim);
        let mut tensors = model_tensors(&vars).unwrap();
        tensors.extend(optimizer_tensors(&optim).unwrap());
        let values = optimizer_values(&optim);
        save(dir, world.group(), &SaveState { mesh: vars.mesh().layout().clone(), tensors, values }).unwrap();
        whole(&vars, &optim)
    });
    assert!(all.iter().all(|values| *values == all[0]), "{mesh:?}");
    all.into_iter().next().unwrap()
}

/// The values that a mesh loads from a checkpoint.
fn loaded(mesh: &Mesh, dir: &Path) -> Gradients {
    let all = ranks(mesh.size(), |world| {
        let (vars, _model, mut optim) = on(mesh, &world);
        let source = fsdp_ckpt::open(dir).unwrap();
        load_model(&vars, &*source, &LoadOptions::default()).unwrap();
        load_optimizer(&mut optim, &*source, &LoadOptions::default()).unwrap();
        whole(&vars, &optim)
    });
    assert!(all.iter().all(|values| *values == all[0]), "{mesh:?}");
    all.into_iter().next().unwrap()
}

#[test]
fn checkpoints_reshard_between_any_two_meshes() {
    let root = tempfile::tempdir().unwrap();
    for (at, from) in MESHES.iter().enumerate() {
        let dir = root.path().join(at.to_string());
        let want = saved(from, &dir);
        let manifest = std::fs::read_to_string(dir.join("checkpoint.json")).unwrap();
        let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
        let shape: Vec<usize> = from.dims.iter().map(|(_, size)| *size).collect();
        assert_eq!(manifest["mesh"]["shape"], serde_json::json!(shape), "{from:?}");
        for to in MESHES {
            assert_eq!(loaded(to, &dir), want, "from {from:?} to {to:?}");
        }
    }
}
