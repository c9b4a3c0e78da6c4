//! Balance of experts: how many tokens each has, and `--router-bias-rate`.
//!
//! The rate moves the biases by which DeepSeek-V3's routers choose (Wang et al., 2024, arXiv:2408.15664): after a step, an
//! expert with more tokens than the mean gets a lower bias, one with fewer a higher one. No loss is added.

use anyhow::{Context, ensure};
use candle_core::{Device, Tensor, Var};
use fsdp_candle::{ReduceOp, ShardedVarMap, World, upload};
use fsdp_train::metrics::ExpertBalance;
use fsdp_train::models::{LanguageModel, is_router_bias};

/// Counts of a run's experts, and the biases that follow from them.
pub(crate) struct Balance {
    rate: Option<f64>,
    /// In the order of layers.
    biases: Vec<Var>,
}

impl Balance {
    /// Finds the biases of a model that is built on `vars`.
    pub(crate) fn new(rate: Option<f64>, vars: &ShardedVarMap) -> anyhow::Result<Self> {
        let Some(rate) = rate else { return Ok(Balance { rate: None, biases: vec![] }) };
        let biases = vars.buffers().into_iter().filter(|(name, _)| is_router_bias(name)).map(|(_, bias)| bias);
        let biases: Vec<Var> = biases.collect();
        ensure!(
            !biases.is_empty(),
            "--router-bias-rate {rate} is for models whose routers choose by a bias, such as deepseek_v3: leave it out"
        );
        Ok(Balance { rate: Some(rate), biases })
    }

    /// Returns the balance of the step whose forwards were the last, and moves the biases unless the optimizer skipped the
    /// step. `None` for a model that counts none. Collective.
    pub(crate) fn step(
        &self,
        model: &LanguageModel,
        is_skipped: bool,
        world: &World,
    ) -> anyhow::Result<Option<ExpertBalance>> {
        let Some(tokens) = model.take_expert_tokens() else { return Ok(None) };
        let (_, experts) = tokens.dims2()?;
        let own: Vec<f64> = tokens.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f64::from).collect();
        let all = world.all_reduce(&own, ReduceOp::Sum)?;
        let layers = || all.chunks_exact(experts);
        if let Some(rate) = self.rate.filter(|_| !is_skipped) {
            for (tokens, bias) in layers().zip(&self.biases) {
                move_bias(bias, tokens, rate).context("can't move the biases of a router")?;
            }
        }
        Ok(Some(ExpertBalance::of(layers())))
    }
}

/// Lowers the biases of experts with more tokens than the mean, and raises those of experts with fewer.
fn move_bias(bias: &Var, tokens: &[f64], rate: f64) -> candle_core::Result<()> {
    let mean = tokens.iter().sum::<f64>() / tokens.len() as f64;
    let sign = |tokens: f64| if tokens == mean { 0. } else { (mean - tokens).signum() };
    let moves: Vec<f32> = tokens.iter().map(|&tokens| (rate * sign(tokens)) as f32).collect();
    let moves = upload(&Tensor::from_vec(moves, tokens.len(), &Device::Cpu)?, bias.device())?;
    bias.set(&(bias.as_tensor() + moves)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases_move_against_the_load() {
        let bias = Var::new(&[0.5f32, 0., -0.5, 0.], &Device::Cpu).unwrap();
        move_bias(&bias, &[9., 1., 6., 8.], 0.25).unwrap();
        assert_eq!(bias.to_vec1::<f32>().unwrap(), [0.25, 0.25, -0.5, -0.25]);
    }
}
