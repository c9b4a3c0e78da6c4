//! Norms of decoders.

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fsdp_candle::nn::RmsNorm;

use crate::models::config::decoder::Norms;

/// A norm over the last dimension.
pub(super) enum Norm {
    /// RMSNorm, as in Llama.
    Plain(RmsNorm),
    /// RMSNorm with `1 + weight`, computed in f32, as in Gemma.
    OnePlusWeight { weight: Tensor, eps: f64 },
}

impl Norm {
    pub(super) fn new(width: usize, norms: Norms, vb: VarBuilder) -> Result<Self> {
        let start = if norms.one_plus_weight { 0. } else { 1. };
        let weight = vb.get_with_hints(width, "weight", Init::Const(start))?;
        Ok(match norms.one_plus_weight {
            true => Norm::OnePlusWeight { weight, eps: norms.eps },
            false => Norm::Plain(RmsNorm::new(weight, norms.eps)),
        })
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Norm::Plain(norm) => norm.forward(x),
            Norm::OnePlusWeight { weight, eps } => {
                let weight = (weight.to_dtype(DType::F32)? + 1.)?;
                RmsNorm::new(weight, *eps).forward(&x.to_dtype(DType::F32)?)?.to_dtype(x.dtype())
            }
        }
    }
}
