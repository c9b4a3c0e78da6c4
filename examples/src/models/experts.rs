//! Mixture of experts (Shazeer et al., 2017, arXiv:1701.06538; Fedus et al., 2021, arXiv:2101.03961), as in Mixtral,
//! Qwen 3, DeepSeek and gpt-oss.
//!
//! Shapes: N tokens, width C of the residual stream, E experts, K experts per token.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::nn::{self, SwiGlu, mixture_of_experts};
use fsdp_candle::upload;

use crate::models::config::DecoderConfig;
use crate::models::config::experts::ExpertsConfig;
use crate::models::layers::linear;
use crate::models::mlp::Mlp;
use crate::models::parallel::TensorParallel;
use crate::models::router::{Choice, Router};
use crate::models::rows::Rows;

/// Use of the experts' load.
enum LoadUse {
    /// A loss, whose gradient reaches the scores.
    Loss,
    /// Counts only.
    Counts,
}

pub(super) struct Experts {
    router: Router,
    experts: Vec<SwiGlu>,
    /// The MLP that all tokens use.
    shared: Option<Mlp>,
    /// The use of the experts' load, if it is counted.
    load: Option<LoadUse>,
    parallel: Option<TensorParallel>,
}

impl Experts {
    pub(super) fn new(
        config: &DecoderConfig,
        experts: &ExpertsConfig,
        parallel: Option<&TensorParallel>,
        vb: VarBuilder,
    ) -> Result<Self> {
        let (width, inner, stdev) = (config.width, experts.inner, config.initializer_range);
        let expert = |i| {
            let vb = vb.pp(format!("experts.{i}"));
            let make = |name: &str, inputs, outputs| linear(inputs, outputs, experts.biases, stdev, vb.pp(name));
            let [gate, up, down] = experts.names.projections;
            let layer = SwiGlu::new(make(gate, width, inner)?, make(up, width, inner)?, make(down, inner, width)?);
            Ok(match experts.clamp {
                Some(clamp) => layer.with_clamp(clamp),
                None => layer,
            })
        };
        Ok(Experts {
            router: Router::new(config, experts, vb.pp(experts.names.router))?,
            experts: (0..experts.count).map(expert).collect::<Result<_>>()?,
            shared: experts.shared.map(|inner| Mlp::new(config, inner, vb.pp("shared_experts"))).transpose()?,
            load: match experts.auxiliary {
                Some(_) => Some(LoadUse::Loss),
                None => experts.counted.then_some(LoadUse::Counts),
            },
            parallel: parallel.cloned(),
        })
    }

    /// Returns the output `[B, T, C]`, and the load `[2, E]` if it is used: tokens and summed score of each expert, without
    /// padding.
    pub(super) fn forward(&self, x_btc: &Tensor, rows: &Rows) -> Result<(Tensor, Option<Tensor>)> {
        let (y_btc, load) = match &self.parallel {
            None => self.chosen(x_btc, rows)?,
            Some(parallel) => {
                // With split sequences, all ranks choose for the whole sequence.
                let (y_btc, load) = self.chosen(&parallel.whole_sequence(x_btc)?, rows)?;
                (parallel.own_sequence(&y_btc)?, load)
            }
        };
        match &self.shared {
            Some(shared) => Ok((nn::add(&y_btc, &shared.forward(x_btc)?)?, load)),
            None => Ok((y_btc, load)),
        }
    }

    /// Returns the output of the chosen experts, and the load.
    fn chosen(&self, x_btc: &Tensor, rows: &Rows) -> Result<(Tensor, Option<Tensor>)> {
        let (batch, steps, width) = x_btc.dims3()?;
        let x_nc = x_btc.reshape((batch * steps, width))?;
        let Choice { scores_ne, chosen_nk, weights_nk } = self.router.choose(&x_nc)?;
        let y_nc = mixture_of_experts(&x_nc, &self.experts, &chosen_nk, &weights_nk)?;
        let y = y_nc.reshape((batch, steps, width))?;

        let scores_ne = match self.load {
            None => return Ok((y, None)),
            Some(LoadUse::Counts) => scores_ne.detach(),
            Some(LoadUse::Loss) => scores_ne,
        };
        let load = Some(load(&chosen_nk, &scores_ne, is_data(rows, steps)?.as_deref())?);
        Ok((y, load))
    }
}

/// Returns for each of this rank's tokens whether it is data rather than padding, or `None` if all are. A rank has `steps`
/// tokens of a row.
fn is_data(rows: &Rows, steps: usize) -> Result<Option<Vec<bool>>> {
    let Some(filled) = &rows.filled else { return Ok(None) };
    let positions = match &rows.context {
        Some(context) => context.positions(steps * rows.ranks())?,
        None => (0..steps as u32).collect(),
    };
    Ok(Some(filled.iter().flat_map(|&filled| positions.iter().map(move |&at| (at as usize) < filled)).collect()))
}

/// Returns the number of tokens of each expert, and its summed probability `[N, E]`, over the data tokens.
fn load(chosen_nk: &Tensor, probabilities_ne: &Tensor, is_data: Option<&[bool]>) -> Result<Tensor> {
    let probabilities = probabilities_ne.detach();
    let ones = Tensor::ones(chosen_nk.shape(), DType::F32, chosen_nk.device())?;
    let mut chosen_ne = probabilities.zeros_like()?.scatter_add(chosen_nk, &ones, 1)?;
    let mut counted_ne = probabilities_ne.clone();
    if let Some(is_data) = is_data.filter(|is_data| is_data.contains(&false)) {
        let weights: Vec<f32> = is_data.iter().map(|&is_data| f32::from(u8::from(is_data))).collect();
        let weights = Tensor::from_vec(weights, (is_data.len(), 1), &Device::Cpu)?;
        let weights_n1 = upload(&weights, probabilities_ne.device())?;
        chosen_ne = chosen_ne.broadcast_mul(&weights_n1)?;
        counted_ne = counted_ne.broadcast_mul(&weights_n1)?;
    }
    Tensor::stack(&[chosen_ne.sum(0)?, counted_ne.sum(0)?], 0)
}

/// Returns the load-balancing loss without its coefficient, as transformers' `load_balancing_loss_func`: `E sum_e f_e
/// p_e` over all layers, with the share `f_e` of tokens that chose an expert and its mean probability `p_e`. `loads`
/// holds `[2, E]` of each layer, over this rank's part of `tokens` data tokens.
pub(super) fn balance(loads: &[Tensor], tokens: usize, rows: &Rows) -> Result<Option<Tensor>> {
    let Some((first, rest)) = loads.split_first() else { return Ok(None) };
    let sum = rest.iter().try_fold(first.clone(), |sum, load| sum + load)?;
    let shares = (rows.sum(sum)? / (loads.len() * tokens).max(1) as f64)?;
    let product = (shares.get(0)? * shares.get(1)?)?.sum_all()?;
    Ok(Some((product * first.dim(1)? as f64)?))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn even_load_has_the_lowest_loss() {
        let load = |counts: [f32; 2], sums: [f32; 2]| Tensor::new(&[counts, sums], &Device::Cpu).unwrap();
        let loss = |load: &[Tensor]| balance(load, 4, &Rows::default()).unwrap().unwrap().to_scalar::<f32>().unwrap();
        assert_eq!(loss(&[load([2., 2.], [2., 2.])]), 1.);
        assert_eq!(loss(&[load([4., 0.], [3., 1.])]), 1.5);
        // Layers balance each other.
        assert_eq!(loss(&[load([4., 0.], [3., 1.]), load([0., 4.], [1., 3.])]), 1.);
        assert!(balance(&[], 4, &Rows::default()).unwrap().is_none());
    }
}
