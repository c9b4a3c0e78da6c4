//! Dropout in sharded models: the same masks for every world size, and again when a checkpoint recomputes.

use std::sync::Arc;

use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fsdp_candle::activation_checkpoint::checkpoint;
use fsdp_candle::random::{self, Part, RngState};
use fsdp_candle::{FsdpModule, FullyShard, fully_shard, nn};

use crate::common::{Gradients, WIDTH, assert_close, batch, device, elements, gradients, mean_square, ranks, vars};

/// The number of rows of all ranks.
const ROWS: usize = 12;

struct Layer(nn::Linear, nn::Linear, nn::Dropout);

impl Layer {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let h = self.2.forward(&nn::gelu(&self.0.forward(x)?)?, true)?;
        x + self.2.forward(&self.1.forward(&h)?, true)?
    }
}

type Model = FsdpModule<Vec<FsdpModule<Arc<Layer>>>>;

fn forward(model: &Model, x: &Tensor, again: bool) -> candle_core::Result<Tensor> {
    let run = |x: Tensor, layer: &FsdpModule<Arc<Layer>>| match again {
        true => layer.call(|layer| {
            let layer = layer.clone();
            checkpoint(move |x: Tensor| layer.forward(&x), x)
        }),
        false => layer.call(|layer| layer.forward(&x)),
    };
    model.call(|layers| layers.iter().try_fold(x.clone(), run))
}

/// The losses and gradients of two micro-batches with one reduction, of two forwards each.
fn step(size: usize, again: bool, seed: u64) -> Vec<(Vec<f32>, Gradients)> {
    ranks(size, |world| {
        let vars = vars(&world);
        let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
        let layer = |i| {
            fully_shard(&opts, vb.pp(i), |vb| {
                let (up, down) = (nn::linear(WIDTH, 10, vb.pp("up"))?, nn::linear(10, WIDTH, vb.pp("down"))?);
                Ok(Arc::new(Layer(up, down, nn::Dropout::new(0.3))))
            })
        };
        let layers = (0..3).map(layer).collect::<fsdp_candle::Result<Vec<_>>>().unwrap();
        let model = fully_shard(&opts, vb.clone(), |_| Ok(layers)).unwrap();
        let all = Tensor::cat(&[batch(0, WIDTH), batch(1, WIDTH), batch(2, WIDTH)], 0).unwrap();
        let own = ROWS / size;
        let first = world.rank() * own;
        random::set_rng_state(RngState { first_row: first as u64, ..RngState::new(seed) });
        let x = all.narrow(0, first, own).unwrap();
        let y = (forward(&model, &x, again).unwrap() + forward(&model, &x, again).unwrap()).unwrap();
        assert_eq!(random::get_rng_state().calls, 12);
        let grads = model.backward(&mean_square(&y)).unwrap();
        // Recomputing in backward has drawn no new numbers.
        assert_eq!(random::get_rng_state().calls, 12);
        (elements(&y), gradients(&vars, &grads))
    })
}

#[test]
fn masks_do_not_depend_on_ranks_or_checkpoints() {
    let want = step(1, false, 3).remove(0);
    for size in [1, 2, 3, 4] {
        let plain = step(size, false, 3);
        assert_eq!(plain.iter().flat_map(|rank| rank.0.clone()).collect::<Vec<_>>(), want.0);
        assert_close(&plain[0].1, &want.1, 2e-5);
        // Bit for bit.
        assert_eq!(step(size, true, 3), plain);
    }
    assert_ne!(step(1, false, 4)[0].0, want.0);
}

/// Together, tensor parallel ranks drop what one rank drops: each drops its heads in attention, and its tokens where
/// the sequence is sharded.
#[test]
fn masks_do_not_depend_on_parallel_layouts() {
    const STEPS: usize = 8;
    const HEADS: usize = 4;
    const WIDTH: usize = 8;
    let x = |seed: usize| {
        let rows = [batch(seed, STEPS * WIDTH), batch(seed + 1, STEPS * WIDTH)];
        Tensor::cat(&rows, 0).unwrap().reshape(((), STEPS, WIDTH)).unwrap()
    };
    let (q, k, v) = (x(0), x(2), x(4));
    let options = nn::AttentionOptions { dropout: 0.4, ..nn::AttentionOptions::causal(0.5) };
    // The order in a layer: heads, the residual stream, heads again.
    let layer = |part: Option<Part>| {
        random::set_rng_state(RngState { first_row: 3, ..RngState::new(6) });
        let Part { index, count, .. } = part.unwrap_or(Part { dim: 1, index: 0, count: 1 });
        let of_heads = |x: &Tensor| x.narrow(2, index * WIDTH / count, WIDTH / count).unwrap().contiguous().unwrap();
        let [own_q, own_k, own_v] = [&q, &k, &v].map(of_heads);
        let attention = || {
            let heads = HEADS / count;
            nn::attention(&own_q, &own_k, &own_v, heads, heads, &options).unwrap()
        };
        let tokens = q.narrow(1, index * STEPS / count, STEPS / count).unwrap();
        let hidden = || nn::ops::dropout(&tokens, 0.4).unwrap();
        let drawn = match part {
            Some(part) => [
                random::in_part(part, attention),
                random::in_part(part, hidden),
                nn::ops::dropout(&q, 0.4).unwrap(),
                random::in_part(part, attention),
            ],
            None => [attention(), hidden(), nn::ops::dropout(&q, 0.4).unwrap(), attention()],
        };
        assert_eq!(random::get_rng_state(), RngState { calls: 4, first_row: 3, ..RngState::new(6) });
        drawn
    };
    let values = elements::<f32>;
    let whole = layer(None);
    assert_ne!(values(&whole[0]), values(&whole[3]));
    for count in [1, 2, 4] {
        let parts: Vec<_> = (0..count).map(|index| layer(Some(Part { dim: 1, index, count }))).collect();
        for (number, (of_whole, dim)) in whole.iter().zip([2, 1, 0, 2]).enumerate() {
            if dim == 0 {
                // Replicated tensors.
                parts.iter().for_each(|part| assert_eq!(values(&part[number]), values(of_whole)));
                continue;
            }
            let of_parts = parts.iter().map(|part| &part[number]).collect::<Vec<_>>();
            assert_eq!(values(&Tensor::cat(&of_parts, dim).unwrap()), values(of_whole), "{count} parts, draw {number}");
        }
    }
}

#[test]
fn checkpoints_redraw_a_parts_masks() {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &device());
    let layer = Arc::new(nn::linear(WIDTH, WIDTH, vb).unwrap());
    let drawn = |index: usize, again: bool| {
        random::manual_seed(8);
        let x = candle_core::Var::from_tensor(&batch(0, WIDTH)).unwrap();
        let run = {
            let layer = layer.clone();
            move |x: Tensor| nn::ops::dropout(&layer.forward(&x)?, 0.5)
        };
        let y = random::in_part(Part { dim: 1, index, count: 2 }, || match again {
            true => checkpoint(run, x.as_tensor().clone()),
            false => run(x.as_tensor().clone()),
        });
        let grads = y.unwrap().sqr().unwrap().sum_all().unwrap().backward().unwrap();
        grads.get(&x).unwrap().to_vec2::<f32>().unwrap()
    };
    assert_eq!(drawn(0, true), drawn(0, false));
    assert_eq!(drawn(1, true), drawn(1, false));
    assert_ne!(drawn(0, true), drawn(1, true));
}
