//! Muon on shards: momentum, and then the nearest orthogonal matrix, which takes a whole matrix to find.
//!
//! Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). The arithmetic is that of PyTorch's
//! `torch.optim.Muon`.

mod config;
mod exchange;
mod newton_schulz;
mod work;

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor};
use fsdp_core::process_group::Subject;
use fsdp_core::{Buffer, DType, heartbeat};
use serde_json::{Map, Value};

use super::group::ParamGroup;
use super::moment::Moment;
use super::per_shard::{check_gradients, checked, next_gradient, param_groups, set_hyper, unique};
use super::sharded::ShardedOptimizer;
use super::state::ParamState;
use crate::error::{Error, Result};
use crate::fsdp::FsdpParam;
use crate::kernels;
use crate::storage::{Pool, share_memory, with_slice, with_slice_mut};
use exchange::Exchange;
use newton_schulz::NewtonSchulz;
use work::Class;

pub use config::{AdjustLr, MuonConfig};

const MOMENTUM: &str = "momentum_buffer";

/// Muon over the shards of matrices; other parameters belong into another optimizer ([`crate::Optimizers`] makes one of
/// both). A step is collective.
///
/// Each matrix has one owner among the ranks that hold parts of it or copies: its momentum travels there in BF16, is
/// made orthogonal as a whole, and comes back, so a parameter of n elements costs 4 n bytes of traffic over all shards
/// for each dimension of the mesh that cuts it, and over replicas that hold the same 2 n for each further one. Matrices
/// are shared out by size, so each rank does its share of the products, which are added up in F32 and rounded to BF16
/// as PyTorch's on CPUs are. The result does not depend on how many ranks there are. The memory that a step needs
/// beyond its state is about three times a rank's shards in BF16, and about a dozen times one whole matrix in F32.
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
/// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
/// use fsdp_candle::{AdjustLr, Muon, MuonConfig};
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
    work: Vec<Class>,
}

impl Muon {
    /// An optimizer of these matrices, with momentum of zero.
    ///
    /// # Errors
    /// When a parameter is no matrix, a hyper-parameter is out of range, or there is no memory for the momentum.
    pub fn new(params: Vec<Arc<FsdpParam>>, config: MuonConfig) -> Result<Self> {
        Self::with_groups(vec![(params, config)])
    }

    /// The same of several groups, each with hyper-parameters of its own.
    ///
    /// # Errors
    /// Those of [`Muon::new`], and when a parameter is in two groups.
    pub fn with_groups(groups: Vec<(Vec<Arc<FsdpParam>>, MuonConfig)>) -> Result<Self> {
        unique("Muon", &groups)?;
        let mut optim = Muon { groups: vec![], states: vec![], work: vec![] };
        for (group, (params, config)) in groups.into_iter().enumerate() {
            checked(&config)?;
            optim.groups.push(config);
            for param in params {
                if param.shape().rank() != 2 {
                    let message = format!(
                        "its shape is {:?}, and Muon is for matrices of hidden layers: leave it to another optimizer, \
                         such as AdamW",
                        param.shape().dims()
                    );
                    return Err(Error::Parameter { name: param.name().into(), message });
                }
                let moments = vec![(MOMENTUM, Moment::zeros(&param)?)];
                optim.states.push(ParamState::of(param, group, moments, true));
            }
        }
        let params: Vec<_> = optim.states.iter().map(|state| state.param.clone()).collect();
        optim.work = work::shared_out(&params);
        Ok(optim)
    }

    /// The hyper-parameters of each group.
    pub fn groups(&self) -> &[MuonConfig] {
        &self.groups
    }

    /// Changes the learning rate of the steps to come, of all groups.
    pub fn set_learning_rate(&mut self, lr: f64) {
        self.groups.iter_mut().for_each(|config| config.lr = lr);
    }

    /// The state of every parameter, in the order in which they were given.
    pub fn states(&self) -> &[ParamState] {
        &self.states
    }

    /// Forgets all steps that were taken.
    ///
    /// # Errors
    /// When there is no memory for other momentum.
    pub fn reset(&mut self) -> Result<()> {
        for state in &mut self.states {
            let zeros = Moment::zeros(&state.param)?;
            state.set_moments(vec![(MOMENTUM, zeros)]);
            state.step = 0;
        }
        Ok(())
    }

    /// Updates every matrix that has a gradient. Collective: all ranks have gradients of the same matrices.
    ///
    /// # Errors
    /// When a gradient has another shape or dtype than its parameter's shard; those of the exchange.
    pub fn step(&mut self, grads: &GradStore) -> Result<()> {
        let _span = tracing::debug_span!("optimizer").entered();
        let _told = heartbeat::span("optimizer", "");
        check_gradients(self.states.iter(), grads)?;
        // What becomes orthogonal, of each matrix that takes a step: as it travels, which is half of F32.
        let mut along: Vec<Option<Buffer>> = Vec::with_capacity(self.states.len());
        for state in &mut self.states {
            let before = state.step;
            let grad = next_gradient(state, grads)?;
            along.push(match (grad, state.step > before) {
                (Some(grad), _) => Some(in_bf16(&momentum(&self.groups[state.group], state, &grad)?)?),
                // An empty shard's.
                (None, true) => Some(kernels::of_device(state.param.var().device())?.zeros(DType::BF16, 0)?),
                (None, false) => None,
            });
        }
        for class in &self.work {
            self.step_class(class, &mut along)?;
        }
        heartbeat::step(self.states.iter().map(|state| state.step).max().unwrap_or(0));
        Ok(())
    }

    fn step_class(&self, class: &Class, along: &mut [Option<Buffer>]) -> Result<()> {
        let stepped = (0..class.matrices.len()).filter(|&at| along[class.matrices[at].state].is_some());
        let matrices: Vec<usize> = stepped.collect();
        let Some(first) = class.matrices.first().filter(|_| !matrices.is_empty()) else { return Ok(()) };
        let device: Device = first.param.var().device().clone();
        let kernels = kernels::of_device(&device)?;
        let names = class.matrices.iter().map(|matrix| matrix.param.name().to_string());
        let subject = Subject::new("Muon's matrices", names);
        let memory = Arc::new(Pool::new(kernels));
        let exchange = Exchange { class, matrices: &matrices, subject: &subject, device: &device, kernels, memory };
        let own = &mut |matrix: usize| match along[class.matrices[matrix].state].take() {
            Some(along) => Ok(along),
            None => Ok(kernels.zeros(DType::BF16, 0)?),
        };
        let update = &mut |matrix: usize, whole: &Tensor| {
            let config = self.config(class.matrices[matrix].state);
            let (a, b, c) = config.ns_coefficients;
            let iteration = NewtonSchulz { coefficients: [a, b, c], steps: config.ns_steps, eps: config.eps };
            Ok(iteration.orthogonal(whole)?)
        };
        for (matrix, update) in exchange.through(own, update)? {
            let state = &self.states[class.matrices[matrix].state];
            if state.param.region().is_empty() {
                continue;
            }
            let config = self.config(class.matrices[matrix].state);
            let shape = state.param.shape().dims();
            let lr = config.lr * config.adjust_lr.ratio(shape[0], shape[1]);
            let kept = 1. - config.lr * config.weight_decay;
            with_slice_mut(state.param.var(), |kernels, param| kernels.mix(param, kept, (&update).into(), -lr))?;
        }
        Ok(())
    }

    fn config(&self, state: usize) -> &MuonConfig {
        &self.groups[self.states[state].group]
    }
}

/// Moves the momentum along a gradient, and returns what a step goes along.
fn momentum(config: &MuonConfig, state: &ParamState, grad: &Tensor) -> Result<Tensor> {
    let buffer = state.tensor(MOMENTUM)?;
    let grad = &if share_memory(grad, &buffer) { grad.copy()? } else { grad.clone() };
    let (momentum, rest) = (config.momentum, 1. - config.momentum);
    with_slice_mut(&buffer, |kernels, buffer| with_slice(grad, |_, grad| kernels.mix(buffer, momentum, grad, rest)))?;
    if !config.nesterov {
        return Ok(buffer);
    }
    let along = grad.copy()?;
    with_slice_mut(&along, |kernels, along| {
        with_slice(&buffer, |_, buffer| kernels.mix(along, rest, buffer, momentum))
    })?;
    Ok(along)
}

fn in_bf16(tensor: &Tensor) -> Result<Buffer> {
    let kernels = kernels::of_device(tensor.device())?;
    let mut buffer = kernels.zeros(DType::BF16, tensor.elem_count())?;
    with_slice(tensor, |kernels, values| kernels.cast(values, (&mut buffer).into()))?;
    Ok(buffer)
}

impl ShardedOptimizer for Muon {
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        Muon::step(self, grads)
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
        Muon::reset(self)
    }

    fn set_group_learning_rate(&mut self, group: usize, lr: f64) {
        self.groups.get_mut(group).into_iter().for_each(|config| config.lr = lr);
    }
}
