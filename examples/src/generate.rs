//! Text generation from a model under training.

use candle_core::{Device, IndexOp, Module, Result, Tensor};
use rand_philox::{Philox, u32_to_unit_f64};

/// Options of [`sample`].
#[derive(Clone, Copy, Debug)]
pub struct SampleOptions<'a> {
    /// Maximal number of generated ids.
    pub tokens: usize,
    /// Number of ids that the model sees.
    pub context: usize,
    /// Divisor of the logits. 0 always takes the most likely id.
    pub temperature: f64,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Ids that end the text, and are not part of it.
    pub stops: &'a [u32],
}

/// Continues `prompt`. Every rank calls it and gets the same ids.
///
/// The model runs on the whole context again for every token. That is simple, and fast enough for a sample.
pub fn sample(model: &impl Module, prompt: &[u32], options: &SampleOptions<'_>, device: &Device) -> Result<Vec<u32>> {
    let &SampleOptions { tokens, context, temperature, seed, stops } = options;
    if prompt.is_empty() {
        candle_core::bail!("a prompt needs at least one token");
    }
    let mut ids = prompt.to_vec();
    let mut random = Philox::from_u64_seed(seed);
    for _ in 0..tokens {
        let window = &ids[ids.len().saturating_sub(context)..];
        let logits = model.forward(&Tensor::new(window, device)?.unsqueeze(0)?)?;
        let last: Vec<f32> = logits.i((0, window.len() - 1))?.to_dtype(candle_core::DType::F32)?.to_vec1()?;
        let id = draw(&last, temperature, u32_to_unit_f64(random.next_u32()));
        if stops.contains(&id) {
            break;
        }
        ids.push(id);
    }
    Ok(ids.split_off(prompt.len()))
}

/// Replaces the ids at `hidden` by the model's predictions, for which it sees `mask_token` there. Every rank calls it
/// and gets the same ids.
pub fn fill(model: &impl Module, ids: &[u32], hidden: &[usize], mask_token: u32, device: &Device) -> Result<Vec<u32>> {
    let mut ids = ids.to_vec();
    hidden.iter().for_each(|&at| ids[at] = mask_token);
    let logits = model.forward(&Tensor::new(&ids[..], device)?.unsqueeze(0)?)?;
    for &at in hidden {
        let logits: Vec<f32> = logits.i((0, at))?.to_dtype(candle_core::DType::F32)?.to_vec1()?;
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        ids[at] = best.map_or(mask_token, |(id, _)| id as u32);
    }
    Ok(ids)
}

/// Returns the id at quantile `u` of softmax(logits / temperature), or the first largest logit at temperature 0.
fn draw(logits: &[f32], temperature: f64, u: f64) -> u32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if temperature == 0. {
        return logits.iter().position(|&logit| logit == max).unwrap_or(0) as u32;
    }
    let weights: Vec<f64> = logits.iter().map(|&logit| (f64::from(logit - max) / temperature).exp()).collect();
    let mut rest = u * weights.iter().sum::<f64>();
    for (id, weight) in weights.iter().enumerate() {
        rest -= weight;
        if rest < 0. {
            return id as u32;
        }
    }
    weights.len().saturating_sub(1) as u32
}

#[cfg(test)]
mod tests {
    use super::draw;

    #[test]
    fn draws_follow_the_logits() {
        let logits = [0f32, 2f32.ln(), f32::NEG_INFINITY];
        assert_eq!(draw(&logits, 1., 0.3), 0);
        assert_eq!(draw(&logits, 1., 0.34), 1);
        assert_eq!(draw(&logits, 1., 0.9999), 1);
        assert_eq!(draw(&logits, 0.01, 0.3), 1);
        assert_eq!((draw(&logits, 0., 0.3), draw(&[1., 1.], 0., 0.9)), (1, 0));
    }
}
