//! Units by name compared with plain Candle in one process: tied weights, and pairs as in DPO.

use candle_core::{Module, Tensor};
use fsdp_candle::{FullyShard, nn, no_grad};

use super::EACH_LAYER;
use super::model::{Kind, Untouched, by_name, gradients_of, ids, loss_of, untouched, vars_of};
use crate::common::{
    Gradients, Plain, alone, assert_close, assert_resharded, elements, gradients, mean, ranks, sorted, weights,
};

/// The same model in plain Candle, with the parameters of a sharded model.
fn plain(kind: Kind) -> Plain<Untouched> {
    let vars = vars_of(&alone(), kind);
    let _model = by_name(&FullyShard::new(&vars), &vars, kind, EACH_LAYER);
    Plain::new(&sorted(weights(&vars)), |vb| untouched(kind, vb))
}

/// The embedding's gradient is the sum over its lookup and the head, from the first forward on.
#[test]
fn tied_models_match_plain_candle() {
    let kind = Kind { tied: true, ..Kind::default() };
    let plain = plain(kind);
    assert_eq!(plain.vars.iter().filter(|(name, _)| name.contains("head")).count(), 0);
    for size in [1, 2, 4] {
        let losses: Vec<Tensor> = (0..size).map(|rank| loss_of(&plain.model, &ids(rank, 0))).collect();
        let want = plain.gradients(&mean(&losses).backward().unwrap());
        ranks(size, |world| {
            for names in [EACH_LAYER, &["model", "model.layers.*"], &["**"]] {
                let vars = vars_of(&world, kind);
                let model = by_name(&FullyShard::new(&vars), &vars, kind, names);
                for _ in 0..2 {
                    assert_close(&gradients_of(&vars, &model, &ids(world.rank(), 0)), &want, 1e-4);
                }
            }
        });
    }
}

/// The loss of a pair: the difference between two losses, compared with that of a reference.
fn preference(model: &impl Module, rank: usize, reference: f64) -> Tensor {
    let [chosen, rejected] = [1, 2].map(|step| loss_of(model, &ids(rank, step)));
    let margin = ((rejected - chosen).unwrap() - reference).unwrap();
    // -log(sigmoid(margin))
    (margin.neg().unwrap().exp().unwrap() + 1.).unwrap().log().unwrap()
}

/// The margin of the reference: the model itself before training.
fn margin(model: &impl Module, rank: usize) -> f64 {
    let [chosen, rejected] = [1, 2].map(|step| loss_of(model, &ids(rank, step)).to_scalar::<f32>().unwrap());
    0.5 * f64::from(rejected - chosen)
}

/// Recomputed layers with units inside them, two forwards before one backward, and a reference without gradients.
#[test]
fn pairs_through_nested_recomputed_units_match_plain_candle() {
    for lora in [false, true] {
        let plain = plain(Kind { lora, ..Kind::default() });
        for size in [1, 2, 3] {
            let losses: Vec<Tensor> =
                (0..size).map(|rank| preference(&plain.model, rank, margin(&plain.model, rank))).collect();
            let want = mean(&losses).backward().unwrap();
            let is_trained = |name: &str| !lora || nn::is_adapter(name);
            let vars = plain.vars.iter().filter(|(name, _)| is_trained(name));
            let want: Gradients = vars.map(|(name, var)| (name.clone(), elements(want.get(var).unwrap()))).collect();
            ranks(size, |world| {
                let kind = Kind { again: true, lora, ..Kind::default() };
                let vars = vars_of(&world, kind);
                let names = ["model.layers.*", "model.layers.*.mlp"];
                let model = by_name(&FullyShard::new(&vars), &vars, kind, &names);
                for _ in 0..2 {
                    let reference = no_grad(|| margin(&model, world.rank()));
                    let grads = model.backward(&preference(&model, world.rank(), reference)).unwrap();
                    assert_close(&sorted(gradients(&vars, &grads)), &want, 1e-4);
                    assert_resharded(&vars);
                }
            });
        }
    }
}
