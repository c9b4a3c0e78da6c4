//! Mixtures of experts whose weights are separate parameters, as in Mixtral and Qwen 3 (Shazeer et al., 2017,
//! arXiv:1701.06538). A *route* is one token's way to one of its experts.

use candle_core::{DType, Result, Tensor, bail};

use super::cuda::Cuda;
use super::expert_parallel::ExpertRanks;
use super::local_experts::{FUNCTION, local_mixture};
use super::swiglu::SwiGlu;

/// Returns the experts of each token, which are those of its largest probabilities. `probabilities` is `[tokens, E]`,
/// F32. The output is `[tokens, per_token]`, U32, on the same device and outside of the graph: the largest first, and of
/// equal ones the first. The host does not wait.
///
/// Fails for another dtype, and if there are fewer than `per_token` experts.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_candle::nn::choose_experts;
///
/// let probabilities = Tensor::new(&[[0.1f32, 0.6, 0.0, 0.3], [0.5, 0.5, 0.0, 0.0]], &Device::Cpu)?;
/// assert_eq!(choose_experts(&probabilities, 2)?.to_vec2::<u32>()?, [[1, 3], [0, 1]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn choose_experts(probabilities: &Tensor, per_token: usize) -> Result<Tensor> {
    let function = "choose_experts";
    let (tokens, experts) = probabilities.dims2()?;
    if probabilities.dtype() != DType::F32 || per_token > experts {
        bail!(
            "{function}: {per_token} experts of {experts} by probabilities of {:?}: the dtype must be F32, and there \
             must be at least {per_token} experts",
            probabilities.dtype()
        );
    }
    if let Some(cuda) = Cuda::of(probabilities) {
        return cuda.choose_experts(probabilities, per_token);
    }
    let mut chosen = Vec::with_capacity(tokens * per_token);
    for row in probabilities.to_vec2::<f32>()? {
        let mut order: Vec<u32> = (0..experts as u32).collect();
        order.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]));
        chosen.extend_from_slice(&order[..per_token]);
    }
    Tensor::from_vec(chosen, (tokens, per_token), probabilities.device())
}

/// Returns for each token the sum of its experts' outputs, each times its weight: input `[tokens, in]`, output
/// `[tokens, out]`. `chosen` (u8, u32 or i64) and `weights` (float) are `[tokens, K]`: the numbers of each token's
/// experts, and their weights.
///
/// Each expert computes all of its tokens at once. Where [`SwiGlu`] is one operation, the mixture is one, too: no row is
/// copied in the graph, and the sums are rounded once. The gradients of all experts are then complete at once, when its
/// backward ends. An expert without tokens gets gradients of zeros, so that ranks agree on which parameters have some.
///
/// On CUDA devices, the mixture is one operation for f64 as well, if in addition its experts have the same shapes and
/// are not units of their own. The device sorts the routes. The host waits once, for the number of tokens of each expert,
/// or not at all if `chosen` is on the CPU. Elsewhere the host reads `chosen`. [`choose_experts`] chooses on the device.
///
/// Where a plan has made the experts [`ExpertParallel`](crate::ExpertParallel), tokens are sent to the ranks of their
/// experts and back. Every rank of the plan's mesh calls the function as often, with any number of tokens above 0. The
/// host reads `chosen`. An output is rounded to the tokens' dtype before it is weighted.
///
/// Fails without experts, and for wrong shapes or numbers of experts.
///
/// ```
/// use candle_core::{Device, Result, Tensor};
/// use fsdp_candle::nn::{Linear, SwiGlu, mixture_of_experts};
///
/// fn linear(value: f32, shape: (usize, usize)) -> Result<Linear> {
///     Ok(Linear::new(Tensor::full(value, shape, &Device::Cpu)?, None))
/// }
/// fn expert(value: f32) -> Result<SwiGlu> {
///     Ok(SwiGlu::new(linear(value, (3, 2))?, linear(1., (3, 2))?, linear(1., (2, 3))?))
/// }
/// let experts = [expert(0.1)?, expert(0.2)?, expert(0.3)?];
/// let x = Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?;
/// let chosen = Tensor::new(&[[2u32, 0], [1, 2]], &Device::Cpu)?;
/// let weights = Tensor::new(&[[0.75f32, 0.25], [0.5, 0.5]], &Device::Cpu)?;
/// assert_eq!(mixture_of_experts(&x, &experts, &chosen, &weights)?.dims(), [2, 2]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn mixture_of_experts(x: &Tensor, experts: &[SwiGlu], chosen: &Tensor, weights: &Tensor) -> Result<Tensor> {
    let ((tokens, _), (rows, per_token)) = (x.dims2()?, chosen.dims2()?);
    if experts.is_empty() || per_token == 0 || rows != tokens || weights.dims() != chosen.dims() {
        bail!(
            "{FUNCTION}: {} experts, chosen {:?} and weights {:?} do not fit the input {:?}: both must be [{tokens}, K] \
             with K of at least 1",
            experts.len(),
            chosen.dims(),
            weights.dims(),
            x.dims()
        );
    }
    match ExpertRanks::of(experts)? {
        Some(ranks) => ranks.mixture(x, experts, chosen, weights),
        None => local_mixture(x, experts, chosen, weights),
    }
}
