//! SwiGLU layers and mixtures of experts with sharded weights.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::activation_checkpoint::{Operation, checkpoint, selective_checkpoint};
use fsdp_candle::{FullyShard, World, nn, shard};

use crate::common::{Gradients, alone, assert_close, gradients, input, mean_square, ranks, vars};

const WIDTH: usize = 6;

/// A layer, then a mixture of three experts, of which the last gets no token.
struct Net {
    dense: nn::SwiGlu,
    experts: Vec<nn::SwiGlu>,
}

impl Net {
    fn new(vb: VarBuilder) -> Result<Self> {
        let layer = |vb: VarBuilder| {
            let linear = |name: &str, inputs, outputs| nn::linear_no_bias(inputs, outputs, vb.pp(name));
            Ok(nn::SwiGlu::new(linear("gate", WIDTH, 10)?, linear("up", WIDTH, 10)?, linear("down", 10, WIDTH)?))
        };
        let experts = (0..3).map(|i| layer(vb.pp(format!("experts.{i}"))));
        Ok(Net { dense: layer(vb.pp("dense"))?, experts: experts.collect::<Result<_>>()? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = nn::add(x, &x.apply(&self.dense)?)?;
        let chosen = Tensor::new(&[[0u32, 1], [1, 0], [0, 1], [1, 0]], &Device::Cpu)?;
        let weights = Tensor::new(&[[0.7f32, 0.3], [0.6, 0.4], [0.9, 0.1], [0.5, 0.5]], x.device())?;
        nn::mixture_of_experts(&x, &self.experts, &chosen, &weights)
    }
}

#[derive(Clone, Copy, Debug)]
enum Again {
    No,
    All,
    Kept,
}

fn gradients_with(world: &World, units: &[&str], again: Again) -> Gradients {
    let vars = vars(world);
    let opts = FullyShard::new(&vars);
    let model =
        shard(&opts, units, vars.builder(DType::F32), |vb| Ok::<_, candle_core::Error>(Arc::new(Net::new(vb)?)))
            .unwrap();
    let y = model.call_with(input(1, &[4, WIDTH]), |net, x| {
        let net = net.clone();
        let forward = move |x: Tensor| net.forward(&x);
        match again {
            Again::No => forward(x),
            Again::All => checkpoint(forward, x),
            Again::Kept => selective_checkpoint(|call| call.operation == Operation::SwiGlu, forward, x),
        }
    });
    gradients(&vars, &model.backward(&mean_square(&y.unwrap())).unwrap())
}

#[test]
fn every_split_into_units_has_the_gradients_of_one_process() {
    let all: &[&str] = &["dense", "experts.*"];
    let expected = gradients_with(&alone(), all, Again::No);
    assert_eq!(expected.len(), 12);
    let is_zero = |(name, values): &(String, Vec<f32>)| {
        assert_eq!(values.iter().all(|value| *value == 0.), name.starts_with("experts.2."), "{name}");
    };
    expected.iter().for_each(is_zero);
    for size in 1..=3 {
        ranks(size, |world| {
            // Also with a unit for each weight: reading one frees the one before.
            for units in [all, &["dense.*", "experts.*.*"]] {
                for again in [Again::No, Again::All, Again::Kept] {
                    let mut found = gradients_with(&world, units, again);
                    let place = |name: &str| expected.iter().position(|(other, _)| other == name);
                    found.sort_by_key(|(name, _)| place(name));
                    assert_close(&found, &expected, 1e-5);
                }
            }
        });
    }
}
