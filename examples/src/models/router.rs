//! Routers, which choose the experts of each token.
//!
//! Shapes: N tokens, width C of the residual stream, E experts, K experts per token, G groups of experts.

use candle_core::{D, DType, Module, Result, Tensor};
use candle_nn::ops::{sigmoid, softmax};
use candle_nn::{Init, VarBuilder};
use fsdp_candle::nn::{Linear, choose_experts};

use crate::models::config::DecoderConfig;
use crate::models::config::experts::{ExpertGroups, ExpertsConfig, RouterConfig, Scores};
use crate::models::layers::linear;

/// Added to the sum of scores that other scores are divided by.
const SMALLEST_SUM: f64 = 1e-20;

pub(super) struct Router {
    gate: Linear,
    /// The bias of each expert's score in the choice, `[E]` in f32.
    bias: Option<Tensor>,
    config: RouterConfig,
    per_token: usize,
}

/// The experts of some tokens.
pub(super) struct Choice {
    /// Score of each expert, `[N, E]`.
    pub(super) scores_ne: Tensor,
    /// Numbers of the chosen experts, `[N, K]`.
    pub(super) chosen_nk: Tensor,
    /// Their weights, `[N, K]`.
    pub(super) weights_nk: Tensor,
}

impl Router {
    pub(super) fn new(config: &DecoderConfig, experts: &ExpertsConfig, vb: VarBuilder) -> Result<Self> {
        let (width, stdev, router) = (config.width, config.initializer_range, experts.router);
        let gate = match router.in_f32 {
            true => {
                let normal = Init::Randn { mean: 0., stdev };
                Linear::new(vb.get_with_hints((experts.count, width), "weight", normal)?, None)
            }
            false => linear(width, experts.count, router.has_bias, stdev, vb.clone())?,
        };
        // Half precision would round away the small steps of a bias.
        let bias = || vb.get_with_hints_dtype(experts.count, "e_score_correction_bias", Init::Const(0.), DType::F32);
        let bias = router.has_choice_bias.then(bias).transpose()?;
        Ok(Router { gate, bias, config: router, per_token: experts.per_token })
    }

    /// Chooses the experts of tokens `[N, C]`.
    pub(super) fn choose(&self, x_nc: &Tensor) -> Result<Choice> {
        let outputs_ne = match self.config.in_f32 {
            true => Linear::new(self.gate.weight().to_dtype(DType::F32)?, None).forward(&x_nc.to_dtype(DType::F32)?)?,
            false => self.gate.forward(x_nc)?.to_dtype(DType::F32)?,
        };
        let scores_ne = match self.config.scores {
            Scores::Softmax => softmax(&outputs_ne, D::Minus1)?,
            Scores::Sigmoid => sigmoid(&outputs_ne)?,
        };
        let chosen_nk = self.chosen(&scores_ne.detach())?;
        let mut weights_nk = scores_ne.gather(&chosen_nk, 1)?;
        if self.config.renormalized {
            let mut sums_n1 = weights_nk.sum_keepdim(1)?;
            if self.config.scores == Scores::Sigmoid {
                sums_n1 = (sums_n1 + SMALLEST_SUM)?;
            }
            weights_nk = weights_nk.broadcast_div(&sums_n1)?;
        }
        if self.config.scale != 1. {
            weights_nk = (weights_nk * self.config.scale)?;
        }
        Ok(Choice { scores_ne, chosen_nk, weights_nk })
    }

    /// Returns the chosen experts, given scores outside of the graph.
    fn chosen(&self, scores_ne: &Tensor) -> Result<Tensor> {
        let mut scores_ne = match &self.bias {
            Some(bias) => scores_ne.broadcast_add(bias)?,
            None => scores_ne.clone(),
        };
        if let Some(groups) = &self.config.groups {
            scores_ne = within_groups(&scores_ne, groups)?;
        }
        choose_experts(&scores_ne, self.per_token)
    }
}

/// Returns the scores, with the lowest number for experts outside of a token's best groups.
fn within_groups(scores_ne: &Tensor, groups: &ExpertGroups) -> Result<Tensor> {
    let (tokens, experts) = scores_ne.dims2()?;
    let &ExpertGroups { count, per_token, best } = groups;
    let scores = scores_ne.reshape((tokens * count, experts / count))?;
    let best = scores.gather(&choose_experts(&scores, best)?, 1)?.sum(1)?;
    let chosen = choose_experts(&best.reshape((tokens, count))?, per_token)?;
    let ones = Tensor::ones(chosen.shape(), DType::F32, scores_ne.device())?;
    let is_chosen = Tensor::zeros((tokens, count), DType::F32, scores_ne.device())?.scatter_add(&chosen, &ones, 1)?;
    let is_chosen = is_chosen.unsqueeze(2)?.broadcast_as((tokens, count, experts / count))?.gt(0f64)?;
    let lowest = Tensor::full(f32::MIN, (tokens, experts), scores_ne.device())?;
    is_chosen.contiguous()?.reshape((tokens, experts))?.where_cond(scores_ne, &lowest)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn experts_are_chosen_within_the_best_groups() {
        let groups = ExpertGroups { count: 3, per_token: 2, best: 2 };
        // The best expert is in the worst group.
        let scores = Tensor::new(&[[0.9f32, 0.0, 0.5, 0.45, 0.4, 0.6]], &Device::Cpu).unwrap();
        let within = within_groups(&scores, &groups).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(within, [[f32::MIN, f32::MIN, 0.5, 0.45, 0.4, 0.6]]);
        let within = within_groups(&scores, &ExpertGroups { best: 1, ..groups }).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(within, [[0.9, 0.0, f32::MIN, f32::MIN, 0.4, 0.6]]);
    }
}
