//! Fully connected layers that start as transformers' do.

use candle_core::Result;
use candle_nn::{Init, VarBuilder};
use fsdp_candle::nn::Linear;

/// Asks `vb` for a weight, which starts from a normal distribution, and maybe a bias, which starts as zero.
pub(super) fn linear(inputs: usize, outputs: usize, bias: bool, stdev: f64, vb: VarBuilder) -> Result<Linear> {
    let weight = vb.get_with_hints((outputs, inputs), "weight", Init::Randn { mean: 0., stdev })?;
    let bias = bias.then(|| vb.get_with_hints(outputs, "bias", Init::Const(0.))).transpose()?;
    Linear::new(weight, bias).with_adapter(vb)
}
