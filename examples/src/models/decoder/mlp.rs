//! Gated MLPs: `down(activation(gate(x)) * up(x))`.

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::nn::{self, Linear};

use crate::models::config::DecoderConfig;
use crate::models::config::activation::Activation;
use crate::models::layer::activate;
use crate::models::linear::linear;

pub(super) struct Mlp {
    input: Input,
    down: Linear,
    activation: Activation,
}

enum Input {
    Apart {
        gate: Linear,
        up: Linear,
    },
    /// Gate, then up.
    One(Linear, usize),
}

impl Mlp {
    pub(super) fn new(config: &DecoderConfig, vb: VarBuilder) -> Result<Self> {
        let make = |name: &str, inputs, outputs| {
            linear(inputs, outputs, config.biases.mlp, config.initializer_range, vb.pp(name))
        };
        let (width, inner) = (config.width, config.inner);
        let input = match config.fused {
            true => Input::One(make("gate_up_proj", width, 2 * inner)?, inner),
            false => Input::Apart { gate: make("gate_proj", width, inner)?, up: make("up_proj", width, inner)? },
        };
        Ok(Mlp { input, down: make("down_proj", inner, width)?, activation: config.activation })
    }

    /// An expert of `inner` elements, whose projections have these names.
    pub(super) fn expert(
        config: &DecoderConfig,
        inner: usize,
        [gate, up, down]: [&str; 3],
        vb: VarBuilder,
    ) -> Result<Self> {
        let make = |name: &str, inputs, outputs| linear(inputs, outputs, false, config.initializer_range, vb.pp(name));
        let input = Input::Apart { gate: make(gate, config.width, inner)?, up: make(up, config.width, inner)? };
        Ok(Mlp { input, down: make(down, inner, config.width)?, activation: config.activation })
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (gate, up) = match &self.input {
            Input::Apart { gate, up } => (gate.forward(x)?, up.forward(x)?),
            Input::One(both, inner) => {
                let both = both.forward(x)?;
                let last = both.rank() - 1;
                (both.narrow(last, 0, *inner)?, both.narrow(last, *inner, *inner)?)
            }
        };
        let x = match self.activation {
            Activation::Silu => nn::silu_mul(&gate, &up)?,
            other => (activate(other, &gate)? * up)?,
        };
        self.down.forward(&x)
    }
}
