//! Optimizers, clipped groups and moving averages on 2-D meshes give the bits of one process.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use fsdp_candle::{
    Adam, AdamConfig, AdamW, AdamWConfig, ClipOptions, Ema, FsdpParam, FullyShard, Muon, MuonConfig, NormType,
    Optimizers, ShardedOptimizer, ShardedVarMap, clip_grad_norm_of, get_ema_state_dict, get_optimizer_state_dict,
    set_optimizer_state_dict,
};

use super::model::{MESHES, Mesh, Model, build, loss, values};
use crate::common::{Gradients, cut, dict_elements, full, one_of, ranks};
use crate::muon::full_rank;

type Params = Vec<Arc<FsdpParam>>;

/// Muon for matrices, and another optimizer for the rest.
fn make(vars: &ShardedVarMap) -> Optimizers {
    let (matrices, rest): (Params, Params) = vars.trainable().into_iter().partition(|p| p.shape().rank() == 2);
    let (blocks, others) = matrices.into_iter().partition(|param| param.name().starts_with("blocks"));
    let muon = Muon::new(blocks, MuonConfig { lr: 0.02, ..MuonConfig::default() }).unwrap();
    let adam = Adam::new(others, AdamConfig { weight_decay: 0.1, ..AdamConfig::default() }).unwrap();
    let adamw = AdamW::new(rest, AdamWConfig::default()).unwrap();
    Optimizers::new(vec![Box::new(muon), Box::new(adam), Box::new(adamw)]).unwrap()
}

/// Replaces the gradients of backward with known ones.
fn backward(model: &Model, vars: &ShardedVarMap, step: usize) -> GradStore {
    let mut grads = model.backward(&loss(model, [0])).unwrap();
    for param in vars.trainable().iter().filter(|param| !param.region().is_empty()) {
        grads.insert(param.var(), cut(param, &full_rank(param.name().len() + step * 13, param.shape())));
    }
    grads
}

/// The norms of a group before it is clipped, the weights after some steps, their moving average, and all optimizer
/// state.
fn trained(mesh: &Mesh) -> (Vec<f64>, [Gradients; 3]) {
    let outcomes = ranks(mesh.size(), |world| {
        let vars = mesh.vars(&world, false);
        let model = build(&FullyShard::new(&vars), &vars).unwrap();
        let mut optim = make(&vars);
        let mut ema = Ema::new(vars.params(), 0.75).unwrap();
        let mut norms = vec![];
        for step in 0..4 {
            if step == 2 {
                // Loaded from a state dict without changes.
                let dict = get_optimizer_state_dict(&vars, &optim, &full()).unwrap();
                optim = make(&vars);
                set_optimizer_state_dict(&vars, &mut optim, &dict, &full()).unwrap();
            }
            let mut grads = backward(&model, &vars, step);
            let group = &optim.param_groups()[0].params;
            let options = ClipOptions { max_norm: f64::INFINITY, norm_type: NormType::Two, error_if_nonfinite: true };
            norms.push(clip_grad_norm_of(&vars, group, &mut grads, &options).unwrap());
            optim.step(&grads).unwrap();
            ema.update().unwrap();
        }
        let means = dict_elements(&get_ema_state_dict(&vars, &ema, &full()).unwrap());
        let state = dict_elements(&get_optimizer_state_dict(&vars, &optim, &full()).unwrap());
        (norms, [values(&vars), means, state])
    });
    for (at, outcome) in outcomes.iter().enumerate() {
        assert!(*outcome == outcomes[0], "{mesh:?}: rank {at} is not as rank 0");
    }
    outcomes.into_iter().next().unwrap()
}

#[test]
fn muon_orthogonalizes_whole_matrices_on_every_mesh() {
    let (norms, all) = trained(&MESHES[0]);
    for mesh in MESHES[1..].iter().step_by(one_of(3)) {
        let (own_norms, own) = trained(mesh);
        for (own, norm) in own_norms.iter().zip(&norms) {
            assert!((own - norm).abs() < 1e-6 * norm, "{mesh:?}: {own} instead of {norm}");
        }
        for ((name, own), (_, one)) in own.iter().flatten().zip(all.iter().flatten()) {
            assert_eq!(own, one, "{name} on {mesh:?}");
        }
    }
}
