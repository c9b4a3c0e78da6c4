//! Experts by name, of which each rank uses different ones.

use candle_core::{DType, Module, Result, Tensor};
use fsdp_candle::{FsdpModule, FullyShard, Recurse, ReshardAfterForward, ShardedVarMap, World, nn, shard};

use crate::common::{
    Gradients, WIDTH, all_refused, assert_close, assert_resharded, batch, elements, gradients, mean_square, ranks,
    sorted, vars,
};

const LAYERS: usize = 2;
const EXPERTS: usize = 3;

struct Layer {
    up: nn::Linear,
    experts: Vec<nn::Linear>,
}

struct Model(Vec<Layer>);

impl Model {
    fn new(vb: candle_nn::VarBuilder) -> Result<Self> {
        let layer = |i| {
            let vb: candle_nn::VarBuilder = vb.pp(format!("layers.{i}"));
            let expert = |j| nn::linear(WIDTH, WIDTH, vb.pp(format!("experts.{j}")));
            // Built in a different order than they run in.
            let experts = (0..EXPERTS).map(expert).collect::<Result<_>>()?;
            Ok(Layer { experts, up: nn::linear(WIDTH, WIDTH, vb.pp("up"))? })
        };
        Ok(Model((0..LAYERS).map(layer).collect::<Result<_>>()?))
    }

    /// The output of the experts in `used`; with `all` the other experts have a factor of 0.
    fn forward(&self, x: &Tensor, used: impl Fn(usize, usize) -> bool, all: bool) -> Result<Tensor> {
        let mut x = x.clone();
        for (i, layer) in self.0.iter().enumerate() {
            x = nn::gelu(&layer.up.forward(&x)?)?;
            let mut sum = x.clone();
            for (j, expert) in layer.experts.iter().enumerate() {
                match (used(i, j), all) {
                    (true, _) => sum = (sum + expert.forward(&x)?)?,
                    (false, true) => sum = (sum + (expert.forward(&x)? * x.zeros_like()?)?)?,
                    (false, false) => {}
                }
            }
            x = sum;
        }
        Ok(x)
    }
}

fn build(world: &World, names: &[&str], policy: ReshardAfterForward) -> (ShardedVarMap, FsdpModule<Model>) {
    let vars = vars(world);
    let opts = FullyShard::new(&vars).reshard_after_forward(policy);
    let model = shard(&opts, names, vars.builder(DType::F32), |vb| Model::new(vb)).unwrap();
    (vars, model)
}

fn step(world: &World, vars: &ShardedVarMap, model: &FsdpModule<Model>, step: usize, all: bool) -> Gradients {
    let used = |i: usize, j: usize| !(world.rank() + 2 * i + 3 * j + step).is_multiple_of(3);
    let y = model.call(|m| m.forward(&batch(world.rank(), WIDTH), used, all)).unwrap();
    let grads = gradients(vars, &model.backward(&mean_square(&y)).unwrap());
    assert_resharded(vars);
    sorted(grads)
}

#[test]
fn different_experts_match_zero_weighted_ones() {
    use ReshardAfterForward::{Default, Never, To};
    for size in [1, 2, 3, 4] {
        for policy in [Default, Never, To(2)] {
            if policy == To(2) && size < 4 {
                continue;
            }
            ranks(size, |world| {
                let names = ["layers.*", "layers.*.experts.*"];
                let (vars, model) = build(&world, &names, policy);
                assert_eq!(model.units().len(), LAYERS * (EXPERTS + 1) + 1);
                model.set_reduce_scatter_unused_params(true, Recurse::Yes);
                let (other_vars, other) = build(&world, &["layers.*"], policy);
                for i in 0..3 {
                    let got = step(&world, &vars, &model, i, false);
                    let want = step(&world, &other_vars, &other, i, true);
                    assert_close(&got, &want, 1e-6);
                }
            });
        }
    }
}

#[test]
fn different_experts_need_the_setting() {
    let errors = ranks(2, |world| {
        let (_vars, model) = build(&world, &["layers.*", "layers.*.experts.*"], ReshardAfterForward::Default);
        let used = |_: usize, j: usize| j == world.rank();
        let x = batch(world.rank(), WIDTH);
        model.call(|m| m.forward(&x, used, false)).unwrap_err().to_string()
    });
    all_refused(errors, &["experts.", "set_reduce_scatter_unused_params"]);
}

#[test]
fn reports_unused_experts() {
    for size in [1, 2, 3] {
        ranks(size, |world| {
            let names = ["layers.*", "layers.*.experts.*"];
            let (vars, model) = build(&world, &names, ReshardAfterForward::Default);
            model.set_reduce_scatter_unused_params(true, Recurse::Yes);
            assert!(model.unused_parameters().is_empty());
            // Each rank uses one expert of each layer, all ranks together two of three.
            let chosen = |step: usize, rank: usize, i: usize| (i + step + rank.min(1)) % EXPERTS;
            for step in 0..3 {
                let used = |i: usize, j: usize| j == chosen(step, world.rank(), i);
                let y = model.call(|m| m.forward(&batch(world.rank(), WIDTH), used, false)).unwrap();
                let grads = model.backward(&mean_square(&y)).unwrap();
                let by_nobody = |i: usize, j: usize| (0..size).all(|rank| j != chosen(step, rank, i));
                let mut expected = vec![];
                for (i, j) in (0..LAYERS).flat_map(|i| (0..EXPERTS).map(move |j| (i, j))) {
                    if by_nobody(i, j) {
                        expected.extend(["bias", "weight"].map(|name| format!("layers.{i}.experts.{j}.{name}")));
                    }
                }
                let mut unused = model.unused_parameters();
                unused.sort();
                assert_eq!(unused, expected, "step {step}");
                assert_eq!(unused.len(), 2 * LAYERS * (EXPERTS - size.min(2)));
                for name in unused {
                    let param = vars.get(&name).unwrap();
                    let grad = elements::<f32>(grads.get(param.var()).unwrap());
                    assert!(grad.iter().all(|v| *v == 0.), "{name}");
                }
            }
        });
    }
}
