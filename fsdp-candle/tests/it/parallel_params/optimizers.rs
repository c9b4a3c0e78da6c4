//! Optimizers, clipped groups and moving averages on 2-D meshes give the bits of one process.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use fsdp_candle::{
    Adam, AdamConfig, AdamW, AdamWConfig, ClipOptions, Ema, FsdpParam, FullyShard, Muon, MuonConfig, NormType,
    Optimizers, ShardedOptimizer, ShardedVarMap, clip_grad_norm_of, get_ema_state_dict, get_optimizer_state_dict,
    set_optimizer_state_dict,
};

use super::model::{MESHES, Mesh, Model, Values, build, loss, values};
use crate::common::{device, full, one_of, ranks};

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

fn gradient(param: &FsdpParam, step: usize) -> Tensor {
    let seed = param.name().len() + step * 13;
    let value = |at: usize| ((at * 7919 + at * at * 31 + seed * 101) % 64) as f32 / 64. - 0.5;
    let all: Vec<f32> = (0..param.shape().elem_count()).map(value).collect();
    Tensor::from_vec(all, param.shape(), &device()).unwrap()
}

/// Replaces the gradients of backward with known ones.
fn backward(model: &Model, vars: &ShardedVarMap, step: usize) -> GradStore {
    let mut grads = model.backward(&loss(model, [0])).unwrap();
    for param in vars.trainable().iter().filter(|param| !param.region().is_empty()) {
        let region = param.region();
        let part = |part: Tensor, dim: usize| part.narrow(dim, region.offsets[dim], region.sizes[dim]).unwrap();
        let own = (0..region.sizes.len()).fold(gradient(param, step), part).force_contiguous().unwrap();
        grads.insert(param.var(), own);
    }
    grads
}

fn elements(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The norms of a group before it is clipped, the weights after some steps, their moving average, and all optimizer
/// state.
fn trained(mesh: &Mesh) -> (Vec<f64>, Values, Values, Values) {
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
        let mut all = vec![];
        for dict in [
            get_ema_state_dict(&vars, &ema, &full()).unwrap(),
            get_optimizer_state_dict(&vars, &optim, &full()).unwrap(),
        ] {
            let of = |(name, state): (&String, &fsdp_candle::StateTensor)| (name.clone(), elements(&state.tensor));
            all.push(dict.tensors.iter().map(of).collect::<Values>());
        }
        let state = all.pop().unwrap();
        (norms, values(&vars), all.pop().unwrap(), state)
    });
    for (at, outcome) in outcomes.iter().enumerate() {
        assert!(*outcome == outcomes[0], "{mesh:?}: rank {at} is not as rank 0");
    }
    outcomes.into_iter().next().unwrap()
}

#[test]
fn muon_orthogonalizes_whole_matrices_on_every_mesh() {
    let (norms, weights, means, state) = trained(&MESHES[0]);
    for mesh in MESHES[1..].iter().step_by(one_of(3)) {
        let (own_norms, own_weights, own_means, own_state) = trained(mesh);
        for (own, norm) in own_norms.iter().zip(&norms) {
            assert!((own - norm).abs() < 1e-6 * norm, "{mesh:?}: {own} instead of {norm}");
        }
        let pairs = [(own_weights, &weights), (own_means, &means), (own_state, &state)];
        for ((name, own), (_, one)) in pairs.iter().flat_map(|(own, one)| own.iter().zip(one.iter())) {
            assert_eq!(own, one, "{name} on {mesh:?}");
        }
    }
}
