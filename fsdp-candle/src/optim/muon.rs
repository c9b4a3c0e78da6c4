//! Muon on shards: momentum, then the nearest orthogonal matrix, which needs the whole matrix.
//!
//! Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). The arithmetic is that of PyTorch's
//! `torch.optim.Muon`.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use fsdp_core::process_group::Subject;
use fsdp_core::{Buffer, DType as CoreDType, heartbeat};
use serde_json::{Map, Value, json};

use super::candle_loop::params_of;
use super::elementwise::{check_gradients, check_unique, next_gradient, param_groups, warn_of_half_masters};
use super::hyper_parameters::{self as hyper, HyperParameters, set_hyper, validate};
use super::muon_exchange::{Exchange, MatrixGroup, assign_owners};
use super::reach::{Reach, check_not_empty};
use super::sharded_optimizer::{ParamGroup, ShardedOptimizer, check_factor, scaled_copy};
use super::state::{Moment, ParamState};
use crate::error::Result;
use crate::fsdp::FsdpParam;
use crate::kernels;
use crate::storage::{Pool, share_memory, with_slice, with_slice_mut};

const MOMENTUM: &str = "momentum_buffer";

/// Muon over the shards of matrices. Use another optimizer for other parameters; [`crate::Optimizers`] combines both. A
/// step is collective.
///
/// Each matrix has one owner among the ranks that hold it. The momentum moves there in BF16, is orthogonalized as a
/// whole, and returns. A parameter of n elements costs 4 n bytes of traffic over all shards for each mesh dimension
/// that shards it, and 2 n for each further dimension that replicates it. Owners are chosen by size, so that ranks have
/// equal shares of the products. Products are accumulated in F32 and rounded to BF16, as PyTorch's are on CPUs. The
/// result does not depend on the number of ranks. Beyond its state, a step needs about three times a rank's shards in
/// BF16 and about twelve times one whole matrix in F32.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
/// use fsdp_candle::{AdjustLr, Muon, MuonConfig, ShardedOptimizer};
///
/// // Updates of AdamW's size: the learning rate is one for AdamW.
/// let config = MuonConfig { lr: 1e-3, adjust_lr: AdjustLr::MatchRmsAdamW, ..MuonConfig::default() };
/// let mut optim = Muon::new(vars.trainable(), config)?;
/// optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
/// assert_eq!(optim.states()[0].tensor("momentum_buffer")?.dims(), [2, 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Muon {
    groups: Vec<MuonConfig>,
    states: Vec<ParamState>,
    work: Vec<MatrixGroup>,
    reach: Reach,
}

impl Muon {
    /// Makes an optimizer of these matrices, with zero momentum. Fails if there are none, a parameter is not a matrix,
    /// a hyper-parameter is out of range, or there is not enough memory.
    pub fn new(params: Vec<Arc<FsdpParam>>, config: MuonConfig) -> Result<Self> {
        Self::with_groups(vec![(params, config)])
    }

    /// Makes an optimizer of several groups, each with its own hyper-parameters. Fails as [`Muon::new`] does, and if a
    /// parameter is in two groups.
    pub fn with_groups(groups: Vec<(Vec<Arc<FsdpParam>>, MuonConfig)>) -> Result<Self> {
        check_unique("Muon", &groups)?;
        warn_of_half_masters("Muon", &groups);
        let (mut configs, mut states) = (vec![], vec![]);
        for (group, (params, config)) in groups.into_iter().enumerate() {
            validate(&config)?;
            configs.push(config);
            for param in params {
                if param.shape().rank() != 2 {
                    return Err(param.error(format!(
                        "its shape is {:?}, expected a matrix: use another optimizer for it, such as AdamW",
                        param.shape().dims()
                    )));
                }
                let moments = vec![(MOMENTUM, Moment::zeros(&param)?)];
                states.push(ParamState::of(param, group, moments, true));
            }
        }
        check_not_empty("Muon", states.is_empty())?;
        let params: Vec<_> = states.iter().map(|state| state.param.clone()).collect();
        Ok(Muon { groups: configs, reach: Reach::of(&states), work: assign_owners(&params), states })
    }

    /// Returns the hyper-parameters of each group.
    pub fn groups(&self) -> &[MuonConfig] {
        &self.groups
    }

    fn step_group(&self, group: &MatrixGroup, updates: &mut [Option<Buffer>]) -> Result<()> {
        let stepped = (0..group.matrices.len()).filter(|&at| updates[group.matrices[at].state].is_some());
        let matrices: Vec<usize> = stepped.collect();
        let Some(first) = group.matrices.first().filter(|_| !matrices.is_empty()) else { return Ok(()) };
        let device: Device = first.param.var().device().clone();
        let kernels = kernels::of_device(&device)?;
        let names = group.matrices.iter().map(|matrix| matrix.param.name().to_string());
        let subject = Subject::new("Muon's matrices", names);
        let memory = Arc::new(Pool::new(kernels));
        let exchange = Exchange { group, matrices: &matrices, subject: &subject, device: &device, kernels, memory };
        let own = &mut |matrix: usize| match updates[group.matrices[matrix].state].take() {
            Some(update) => Ok(update),
            None => Ok(kernels.zeros(CoreDType::BF16, 0)?),
        };
        let orthogonalize =
            &mut |matrix: usize, whole: &Tensor| Ok(self.config(group.matrices[matrix].state).orthogonalize(whole)?);
        for (matrix, update) in exchange.run(own, orthogonalize)? {
            let state = &self.states[group.matrices[matrix].state];
            if state.param.region().is_empty() {
                continue;
            }
            let config = self.config(group.matrices[matrix].state);
            let shape = state.param.shape().dims();
            let lr = config.lr * config.adjust_lr.ratio(shape[0], shape[1]);
            let kept = 1. - config.lr * config.weight_decay;
            state.param.shard.update(|shard| {
                with_slice_mut(shard, |kernels, param| kernels.mix(param, kept, (&update).into(), -lr))
            })?;
        }
        Ok(())
    }

    fn config(&self, state: usize) -> &MuonConfig {
        &self.groups[self.states[state].group]
    }
}

/// Updates the momentum by a gradient times a factor. Returns the update before orthogonalization.
fn momentum(config: &MuonConfig, state: &ParamState, grad: &Tensor, factor: f64) -> Result<Tensor> {
    let buffer = state.tensor(MOMENTUM)?;
    let is_copied = config.nesterov || factor != 1. || share_memory(grad, &buffer);
    let grad = if is_copied { scaled_copy(grad, factor)? } else { grad.clone() };
    let (momentum, rest) = (config.momentum, 1. - config.momentum);
    with_slice_mut(&buffer, |kernels, buffer| with_slice(&grad, |_, grad| kernels.mix(buffer, momentum, grad, rest)))?;
    if !config.nesterov {
        return Ok(buffer);
    }
    // The copy of the gradient becomes the update.
    with_slice_mut(&grad, |kernels, update| {
        with_slice(&buffer, |_, buffer| kernels.mix(update, rest, buffer, momentum))
    })?;
    Ok(grad)
}

fn to_bf16(tensor: &Tensor) -> Result<Buffer> {
    let kernels = kernels::of_device(tensor.device())?;
    let mut buffer = kernels.zeros(CoreDType::BF16, tensor.elem_count())?;
    with_slice(tensor, |kernels, values| kernels.cast(values, (&mut buffer).into()))?;
    Ok(buffer)
}

impl Muon {
    /// Updates every matrix that has a gradient. Collective: all ranks have gradients of the same matrices. Fails if
    /// the shape or dtype of a gradient is not that of its parameter's shard.
    pub fn step(&mut self, grads: &GradStore) -> Result<()> {
        self.step_by(grads, 1.)
    }

    fn step_by(&mut self, grads: &GradStore, factor: f64) -> Result<()> {
        check_factor(factor)?;
        let _span = tracing::debug_span!("optimizer").entered();
        let _reported = heartbeat::span("optimizer", "");
        check_gradients(self.states.iter(), grads)?;
        self.reach.begin_step(&self.states, grads)?;
        // The updates to orthogonalize, of each matrix that takes a step, in BF16 as they are sent.
        let mut updates: Vec<Option<Buffer>> = Vec::with_capacity(self.states.len());
        for state in &mut self.states {
            let before = state.step;
            let grad = next_gradient(state, grads)?;
            updates.push(match (grad, state.step > before) {
                (Some(grad), _) => Some(to_bf16(&momentum(&self.groups[state.group], state, &grad, factor)?)?),
                // An empty shard.
                (None, true) => Some(kernels::of_device(state.param.var().device())?.zeros(CoreDType::BF16, 0)?),
                (None, false) => None,
            });
        }
        for group in &self.work {
            self.step_group(group, &mut updates)?;
        }
        heartbeat::step(self.states.iter().map(|state| state.step).max().unwrap_or(0));
        Ok(())
    }

    /// Runs the model's backward, which reduces the gradients, and a step: see
    /// [`ShardedOptimizer::backward_step`]. Collective.
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<()> {
        ShardedOptimizer::backward_step(self, loss)
    }

    /// Changes the learning rate of all groups.
    pub fn set_learning_rate(&mut self, lr: f64) {
        self.groups.iter_mut().for_each(|config| config.lr = lr);
    }
}

/// A loop over Candle's trait, for the variables of matrices ([`FsdpParam::var`]).
impl candle_nn::Optimizer for Muon {
    type Config = MuonConfig;

    fn new(vars: Vec<Var>, config: MuonConfig) -> candle_core::Result<Self> {
        Ok(Muon::new(params_of("Muon", &vars)?, config)?)
    }

    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        Ok(Muon::step(self, grads)?)
    }

    /// Returns the learning rate of the first group.
    fn learning_rate(&self) -> f64 {
        self.groups.first().map_or(0., |config| config.lr)
    }

    fn set_learning_rate(&mut self, lr: f64) {
        Muon::set_learning_rate(self, lr);
    }

    fn backward_step(&mut self, loss: &Tensor) -> candle_core::Result<()> {
        Ok(Muon::backward_step(self, loss)?)
    }
}

impl ShardedOptimizer for Muon {
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        Muon::step(self, grads)
    }

    fn step_scaled(&mut self, grads: &GradStore, factor: f64) -> Result<()> {
        self.step_by(grads, factor)
    }

    fn param_groups(&self) -> Vec<ParamGroup> {
        param_groups(&self.groups, &self.states)
    }

    fn set_hyper(&mut self, groups: &[Map<String, Value>]) -> Result<()> {
        self.groups = set_hyper(&self.groups, groups)?;
        Ok(())
    }

    fn states(&self) -> Vec<&ParamState> {
        self.states.iter().collect()
    }

    fn states_mut(&mut self) -> Vec<&mut ParamState> {
        self.states.iter_mut().collect()
    }

    fn reset(&mut self) -> Result<()> {
        for state in &mut self.states {
            state.moments = vec![(MOMENTUM, Moment::zeros(&state.param)?)];
            state.step = 0;
        }
        Ok(())
    }

    fn set_group_learning_rate(&mut self, group: usize, lr: f64) {
        self.groups.get_mut(group).into_iter().for_each(|config| config.lr = lr);
    }
}

/// The adjustment of the learning rate to the shape `[a, b]` of a matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdjustLr {
    /// Multiplies by `sqrt(max(1, a / b))` (Keller Jordan).
    #[default]
    Original,
    /// Multiplies by `0.2 sqrt(max(a, b))` (Moonshot). Updates are as large as AdamW's, so a learning rate for AdamW
    /// suits.
    MatchRmsAdamW,
    /// Multiplies by `sqrt(a / b)` (Jeremy Bernstein).
    SpectralUnclamped,
}

impl AdjustLr {
    const NAMES: [(AdjustLr, &'static str); 3] = [
        (AdjustLr::Original, "original"),
        (AdjustLr::MatchRmsAdamW, "match_rms_adamw"),
        (AdjustLr::SpectralUnclamped, "spectral_unclamped"),
    ];

    fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(own, _)| *own == self).map_or("original", |(_, name)| name)
    }

    fn ratio(self, rows: usize, columns: usize) -> f64 {
        let (a, b) = (rows as f64, columns as f64);
        match self {
            AdjustLr::Original => (a / b).max(1.).sqrt(),
            AdjustLr::MatchRmsAdamW => 0.2 * a.max(b).sqrt(),
            AdjustLr::SpectralUnclamped => (a / b).sqrt(),
        }
    }
}

/// The hyper-parameters of [`crate::Muon`], with PyTorch's defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MuonConfig {
    /// Learning rate, at least 0, before `adjust_lr`.
    pub lr: f64,
    /// Decoupled weight decay: a step subtracts `lr * weight_decay` times the parameter.
    pub weight_decay: f64,
    /// Momentum factor.
    pub momentum: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
    /// Coefficients `a`, `b` and `c` of the Newton-Schulz iteration `a x + (b x x' + c (x x')^2) x`.
    pub ns_coefficients: (f64, f64, f64),
    /// Number of iterations, below 100.
    pub ns_steps: usize,
    /// Lower bound of the norm that a matrix is divided by.
    pub eps: f64,
    /// Adjustment of the learning rate to a matrix's shape.
    pub adjust_lr: AdjustLr,
}

impl Default for MuonConfig {
    fn default() -> Self {
        MuonConfig {
            lr: 1e-3,
            weight_decay: 0.1,
            momentum: 0.95,
            nesterov: true,
            ns_coefficients: (3.4445, -4.7750, 2.0315),
            ns_steps: 5,
            eps: 1e-7,
            adjust_lr: AdjustLr::Original,
        }
    }
}

impl HyperParameters for MuonConfig {
    const NAME: &'static str = "Muon";

    fn hyper(&self) -> Map<String, Value> {
        hyper::map([
            ("lr", self.lr.into()),
            ("weight_decay", self.weight_decay.into()),
            ("momentum", self.momentum.into()),
            ("nesterov", self.nesterov.into()),
            ("ns_coefficients", json!(self.ns_coefficients)),
            ("ns_steps", self.ns_steps.into()),
            ("eps", self.eps.into()),
            ("adjust_lr_fn", self.adjust_lr.name().into()),
        ])
    }

    fn with(&self, values: &Map<String, Value>) -> Result<Self, String> {
        let (a, b, c) = self.ns_coefficients;
        let [a, b, c] = hyper::numbers(values, "ns_coefficients", [a, b, c])?;
        let ns_steps = match values.get("ns_steps") {
            None | Some(Value::Null) => self.ns_steps,
            Some(steps) => {
                steps.as_u64().ok_or_else(|| format!("hold `ns_steps` as {steps}, expected a count"))? as usize
            }
        };
        let adjust_lr = match values.get("adjust_lr_fn") {
            None => self.adjust_lr,
            Some(Value::Null) => AdjustLr::Original,
            Some(name) => {
                let found = AdjustLr::NAMES.iter().find(|(_, own)| name == own);
                found
                    .map(|(adjust, _)| *adjust)
                    .ok_or_else(|| format!("hold `adjust_lr_fn` as {name}, which is unknown"))?
            }
        };
        Ok(MuonConfig {
            lr: hyper::number(values, "lr", self.lr)?,
            weight_decay: hyper::number(values, "weight_decay", self.weight_decay)?,
            momentum: hyper::number(values, "momentum", self.momentum)?,
            nesterov: hyper::flag(values, "nesterov", self.nesterov)?,
            ns_coefficients: (a, b, c),
            ns_steps,
            eps: hyper::number(values, "eps", self.eps)?,
            adjust_lr,
        })
    }

    fn check(&self) -> Result<(), String> {
        let MuonConfig { lr, weight_decay, momentum, eps, ns_steps, .. } = *self;
        hyper::at_least_zero(&[("lr", lr), ("weight_decay", weight_decay), ("momentum", momentum), ("eps", eps)])?;
        hyper::check_range("ns_steps", ns_steps as f64, ns_steps < 100, "below 100")
    }

    fn lr(&mut self) -> &mut f64 {
        &mut self.lr
    }
}

impl MuonConfig {
    /// Orthogonalizes a matrix of BF16 by the Newton-Schulz iteration, which approximates the nearest orthogonal
    /// matrix. Input and output are contiguous. As PyTorch does on CPUs, accumulates products in f32 together with
    /// their addend and rounds to bf16 once.
    fn orthogonalize(&self, matrix: &Tensor) -> candle_core::Result<Tensor> {
        let (rows, columns) = matrix.dims2()?;
        let matrix = matrix.to_dtype(DType::F32)?;
        let matrix = if rows > columns { matrix.t()?.contiguous()? } else { matrix };
        let norm = rounded(&matrix.sqr()?.sum_all()?.sqrt()?)?;
        let least = rounded(&Tensor::new(self.eps as f32, norm.device())?)?;
        let norm = norm.maximum(&least)?;
        let mut x = rounded(&matrix.broadcast_div(&norm)?)?;
        let (a, b, c) = self.ns_coefficients;
        for _ in 0..self.ns_steps {
            let gram = rounded(&x.matmul(&x.t()?)?)?;
            let update = rounded(&((gram.matmul(&gram)? * c)? + (&gram * b)?)?)?;
            x = rounded(&(update.matmul(&x)? + (&x * a)?)?)?;
        }
        let x = if rows > columns { x.t()? } else { x };
        x.contiguous()?.to_dtype(DType::BF16)
    }
}

fn rounded(x: &Tensor) -> candle_core::Result<Tensor> {
    x.to_dtype(DType::BF16)?.to_dtype(DType::F32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn matrix(rows: usize, columns: usize) -> Tensor {
        let values: Vec<f32> =
            (0..rows * columns).map(|at| ((at * 7919 + at * at * 31) % 1009) as f32 / 1009. - 0.5).collect();
        let matrix = Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap();
        matrix.to_dtype(DType::BF16).unwrap()
    }

    #[test]
    fn singular_values_are_near_one() {
        for (rows, columns) in [(3, 3), (8, 5), (5, 8), (1, 6), (6, 1)] {
            let x = MuonConfig::default().orthogonalize(&matrix(rows, columns)).unwrap();
            assert_eq!((x.dims2().unwrap(), x.dtype()), ((rows, columns), DType::BF16));
            // The trace of x x' is the sum of squares of the singular values, which are between 0.5 and 1.5.
            let square = x.to_dtype(DType::F32).unwrap().sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
            let rank = rows.min(columns) as f32;
            assert!((0.25 * rank..2.25 * rank).contains(&square), "{rows} x {columns}: {square}");
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        let zeros = Tensor::zeros((4, 3), DType::BF16, &Device::Cpu).unwrap();
        let x = MuonConfig::default().orthogonalize(&zeros).unwrap().to_dtype(DType::F32).unwrap();
        assert!(x.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|&x| x == 0.));
    }
}
