//! Recurrent models, whose forwards take and return the state of a layer.

use candle_core::{DType, Result, Tensor};
use candle_nn::rnn::{GRUState, LSTMState};
use candle_nn::{Module, VarBuilder};
use fsdp_candle::nn::{self, RNN};
use fsdp_candle::{FsdpModule, FullyShard, Tensors, shard};

use crate::common::{Plain, alone, assert_close, gradients, input, mean, mean_square, ranks, vars, weights};

/// A recurrent layer and a head.
struct Recurrent<R> {
    layer: R,
    head: nn::Linear,
}

impl<R: RNN> Recurrent<R> {
    fn new(layer: impl FnOnce(VarBuilder<'static>) -> Result<R>, vb: VarBuilder<'static>) -> Result<Self> {
        Ok(Recurrent { layer: layer(vb.pp("layer"))?, head: nn::linear(6, 2, vb.pp("head"))? })
    }

    fn forward(&self, x: &Tensor, state: &R::State) -> Result<(Tensor, R::State)> {
        let mut states = self.layer.seq_init(x, state)?;
        // Candle's GRU joins the states of a sequence in one row.
        let y = self.head.forward(&self.layer.states_to_tensor(&states)?.reshape(((), 6))?)?;
        Ok((y, states.swap_remove(states.len() - 1)))
    }
}

/// The loss over two windows of a sequence. The second begins with the state that the first returned.
fn loss<S>(rank: usize, first: S, mut forward: impl FnMut(&Tensor, &S) -> Result<(Tensor, S)>) -> Tensor {
    let (y, state) = forward(&input(rank, &[4, 3, 5]), &first).unwrap();
    let (z, _) = forward(&input(rank + 7, &[4, 2, 5]), &state).unwrap();
    (mean_square(&y) + mean_square(&z)).unwrap()
}

fn matches_plain_candle<R: RNN<State: Tensors>>(build: fn(VarBuilder<'static>) -> Result<R>) {
    let sharded = |world: &fsdp_candle::World| {
        let vars = vars(world);
        let opts = FullyShard::new(&vars);
        let model: FsdpModule<_> =
            shard(&opts, &["layer"], vars.builder(DType::F32), |vb| Recurrent::new(build, vb)).unwrap();
        (vars, model)
    };
    let plain = {
        let (vars, _model) = sharded(&alone());
        Plain::new(&weights(&vars), |vb| Recurrent::new(build, vb))
    };
    for size in [1, 2, 3] {
        let losses: Vec<Tensor> = (0..size)
            .map(|rank| {
                let first = plain.model.layer.zero_state(4).unwrap();
                loss(rank, first, |x, state| plain.model.forward(x, state))
            })
            .collect();
        let want = plain.gradients(&mean(&losses).backward().unwrap());
        ranks(size, |world| {
            let (vars, model) = sharded(&world);
            for _ in 0..2 {
                let first = model.inner().layer.zero_state(4).unwrap();
                let loss = loss(world.rank(), first, |x, state| model.call(|model| model.forward(x, state)));
                assert_close(&gradients(&vars, &model.backward(&loss).unwrap()), &want, 1e-4);
            }
        });
    }
}

#[test]
fn states_cross_calls_with_their_gradients() {
    matches_plain_candle(|vb| nn::lstm(5, 6, Default::default(), vb));
    matches_plain_candle(|vb| nn::gru(5, 6, Default::default(), vb));
}

/// Replaces each tensor by twice its values, and returns them in order.
fn doubled<T: Tensors>(value: T) -> Vec<f64> {
    let mut seen = vec![];
    let mut double = |tensor: Tensor| {
        let tensor = (tensor * 2.)?;
        seen.push(tensor.to_scalar::<f64>()?);
        Ok(tensor)
    };
    value.map_tensors(&mut double).unwrap();
    seen
}

#[test]
fn forwards_return_states_and_tuples() {
    let scalar = |value: f64| Tensor::new(value, &candle_core::Device::Cpu).unwrap();
    let [a, b, c, d, e, f] = [1., 2., 3., 4., 5., 6.].map(scalar);
    assert_eq!(doubled(LSTMState { h: a.clone(), c: b.clone() }), [2., 4.]);
    assert_eq!(doubled(GRUState { h: c.clone() }), [6.]);
    let six = (a, (b, vec![c]), Some(d), (), e, f);
    assert_eq!(doubled(six), [2., 4., 6., 8., 10., 12.]);
}
