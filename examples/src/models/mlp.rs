//! MLPs of decoders.

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::nn::{self, Linear, SwiGlu};

use crate::models::config::{Activation, DecoderConfig};
use crate::models::layers::{activate, linear};

pub(super) enum Mlp {
    SwiGlu(SwiGlu),
    Gated {
        gate: Linear,
        up: Linear,
        down: Linear,
        activation: Activation,
    },
    /// Gate and up are one projection, in this order, with the width of each.
    Fused {
        gate_up: Linear,
        inner: usize,
        down: Linear,
        activation: Activation,
    },
}

impl Mlp {
    /// Creates an MLP of this inner width.
    pub(super) fn new(config: &DecoderConfig, inner: usize, vb: VarBuilder) -> Result<Self> {
        let make = |name: &str, inputs, outputs| {
            linear(inputs, outputs, config.biases.mlp, config.initializer_range, vb.pp(name))
        };
        let (width, activation) = (config.width, config.activation);
        if config.fused {
            let (gate_up, down) = (make("gate_up_proj", width, 2 * inner)?, make("down_proj", inner, width)?);
            return Ok(Mlp::Fused { gate_up, inner, down, activation });
        }
        let (gate, up) = (make("gate_proj", width, inner)?, make("up_proj", width, inner)?);
        let down = make("down_proj", inner, width)?;
        Ok(match activation {
            Activation::Silu => Mlp::SwiGlu(SwiGlu::new(gate, up, down)),
            _ => Mlp::Gated { gate, up, down, activation },
        })
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (gate, up, down, activation) = match self {
            Mlp::SwiGlu(mlp) => return mlp.forward(x),
            Mlp::Gated { gate, up, down, activation } => (gate.forward(x)?, up.forward(x)?, down, *activation),
            Mlp::Fused { gate_up, inner, down, activation } => {
                let both = gate_up.forward(x)?;
                let last = both.rank() - 1;
                (both.narrow(last, 0, *inner)?, both.narrow(last, *inner, *inner)?, down, *activation)
            }
        };
        down.forward(&match activation {
            Activation::Silu => nn::silu_mul(&gate, &up)?,
            other => (activate(other, &gate)? * up)?,
        })
    }
}
