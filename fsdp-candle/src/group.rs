//! The communication unit: the parameters of one `fully_shard` call, gathered, freed and reduced together.

use std::sync::{Arc, Mutex, MutexGuard, Weak};

use candle_core::{DType, Result, Tensor, bail};
use fsdp_core::{Allocator, Buffer, GatherPart, ProcessGroup, ReduceOp, ScatterPart, Work};
use half::{bf16, f16};

use crate::Error;
use crate::context::Context;
use crate::param::FsdpParam;
use crate::policy::{MixedPrecisionPolicy, ReshardAfterForward};
use crate::storage::{Pool, to_core_dtype};

/// The parameters that move together.
pub(crate) struct ParamGroup {
    name: String,
    /// The position in the order of `fully_shard` calls.
    index: usize,
    params: Vec<Arc<FsdpParam>>,
    pub(crate) mp_policy: MixedPrecisionPolicy,
    pub(crate) reshard_after_forward: ReshardAfterForward,
    ranks: Arc<dyn ProcessGroup>,
    pool: Arc<Pool>,
    context: Weak<Context>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    unsharded: bool,
    gathering: Option<Work>,
    /// Trainable parameters whose gradient is complete in the backward that is running.
    reported: usize,
    reductions: Vec<Reduction>,
    ran_forward: bool,
}

/// A reduce-scatter in flight, and the parameters (by position) whose gradients it carries.
struct Reduction {
    params: Vec<usize>,
    work: Work,
}

impl ParamGroup {
    pub(crate) fn new(
        name: String,
        index: usize,
        params: Vec<Arc<FsdpParam>>,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: ReshardAfterForward,
        ranks: Arc<dyn ProcessGroup>,
        context: &Arc<Context>,
    ) -> Arc<Self> {
        let group = Arc::new(ParamGroup {
            name,
            index,
            params,
            mp_policy,
            reshard_after_forward,
            ranks,
            pool: context.pool().clone(),
            context: Arc::downgrade(context),
            state: Mutex::default(),
        });
        for param in &group.params {
            param.set_group(&group);
        }
        group
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn index(&self) -> usize {
        self.index
    }

    pub(crate) fn params(&self) -> &[Arc<FsdpParam>] {
        &self.params
    }

    pub(crate) fn is_unsharded(&self) -> bool {
        self.state().unsharded
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn context(&self) -> Result<Arc<Context>> {
        match self.context.upgrade() {
            Some(context) => Ok(context),
            None => bail!("the ShardedVarMap of FSDP unit `{}` was dropped; keep it as long as the model", self.name),
        }
    }

    fn memory(&self) -> Arc<dyn Allocator> {
        self.pool.clone()
    }

    /// Issues the all-gather, unless the parameters are there or on their way.
    pub(crate) fn start_unshard(&self) -> Result<()> {
        let mut state = self.state();
        if state.unsharded || state.gathering.is_some() || self.params.is_empty() {
            return Ok(());
        }
        tracing::debug!(unit = self.name, "unshard");
        let parts = self
            .params
            .iter()
            .map(|param| Ok(GatherPart { input: Arc::new(param.gather_input()?), counts: param.counts().to_vec() }))
            .collect::<Result<Vec<_>>>()?;
        state.gathering = Some(self.ranks.all_gather(parts, self.memory()));
        Ok(())
    }

    /// Makes the full parameters available.
    pub(crate) fn unshard(&self) -> Result<()> {
        self.start_unshard()?;
        let mut state = self.state();
        let Some(work) = state.gathering.take() else { return Ok(()) };
        let buffers = work.wait().map_err(|source| self.communication_failed("all-gather", source))?;
        for (param, buffer) in self.params.iter().zip(buffers) {
            param.install(buffer)?;
        }
        state.unsharded = true;
        Ok(())
    }

    /// Frees the full parameters.
    pub(crate) fn reshard(&self) -> Result<()> {
        let mut state = self.state();
        if let Some(work) = state.gathering.take() {
            for buffer in work.wait().map_err(|source| self.communication_failed("all-gather", source))? {
                self.pool.give(buffer);
            }
        }
        if std::mem::take(&mut state.unsharded) {
            tracing::debug!(unit = self.name, "reshard");
        }
        self.params.iter().try_for_each(|param| param.reshard())
    }

    pub(crate) fn mark_forward(&self) {
        self.state().ran_forward = true;
    }

    /// Runs before the backward of anything inside the unit.
    pub(crate) fn pre_backward(&self) -> Result<()> {
        self.context()?.pre_backward(self)
    }

    /// Every use of `param` in the graph has been processed: nobody needs its values any more, and its gradient is whole.
    pub(crate) fn on_gradient_complete(&self, param: &FsdpParam) -> Result<()> {
        self.context()?.check_in_backward()?;
        param.reshard()?;
        let complete = {
            let mut state = self.state();
            state.reported += 1;
            state.reported == self.params.iter().filter(|param| param.trainable()).count()
        };
        if complete { self.reduce_gradients() } else { Ok(()) }
    }

    /// Issues the reduce-scatter of the gradients that are there.
    fn reduce_gradients(&self) -> Result<()> {
        let (mut members, mut parts) = (vec![], vec![]);
        for (position, param) in self.params.iter().enumerate() {
            let Some(grad) = param.take_grad() else { continue };
            let dtype = to_core_dtype(self.mp_policy.reduce_dtype.unwrap_or(param.dtype()))?;
            parts.push(ScatterPart { input: cast(grad, dtype, &self.pool)?, counts: param.counts().to_vec() });
            members.push(position);
        }
        if members.is_empty() {
            return Ok(());
        }
        tracing::debug!(unit = self.name, gradients = members.len(), "reduce-scatter");
        let work = self.ranks.reduce_scatter(parts, ReduceOp::Avg, self.memory());
        self.state().reductions.push(Reduction { params: members, work });
        Ok(())
    }

    /// Ends a backward: reduces what never reported, waits, and hands out each parameter's sharded gradient.
    pub(crate) fn finish_backward(&self) -> Result<Vec<(Arc<FsdpParam>, Tensor)>> {
        self.reduce_gradients()?;
        self.reshard()?;
        let reductions = {
            let mut state = self.state();
            state.reported = 0;
            std::mem::take(&mut state.reductions)
        };
        let mut grads = vec![];
        for Reduction { params, work } in reductions {
            let buffers = work.wait().map_err(|source| self.communication_failed("reduce-scatter", source))?;
            for (position, buffer) in params.into_iter().zip(buffers) {
                let param = &self.params[position];
                let buffer = cast(buffer, to_core_dtype(param.dtype())?, &self.pool)?;
                grads.push((param.clone(), tensor_of(buffer, param)?));
            }
        }
        Ok(grads)
    }

    /// Whether the unit ran in forward since the last call.
    pub(crate) fn take_ran_forward(&self) -> bool {
        std::mem::take(&mut self.state().ran_forward)
    }

    /// Forgets a forward or backward that failed half-way: waits for what is in flight, drops gradients, frees parameters.
    pub(crate) fn reset(&self) {
        let (gathering, reductions) = {
            let mut state = self.state();
            state.reported = 0;
            state.ran_forward = false;
            (state.gathering.take(), std::mem::take(&mut state.reductions))
        };
        // What came of them no longer matters; that they are over does.
        for work in gathering.into_iter().chain(reductions.into_iter().map(|reduction| reduction.work)) {
            for buffer in work.wait().unwrap_or_default() {
                self.pool.give(buffer);
            }
        }
        for param in &self.params {
            if let Some(grad) = param.take_grad() {
                self.pool.give(grad);
            }
        }
        if let Err(error) = self.reshard() {
            tracing::warn!(unit = self.name, %error, "reshard after a failed step");
        }
    }

    fn communication_failed(&self, what: &str, source: fsdp_core::Error) -> Error {
        Error::Unit {
            unit: self.name.clone(),
            message: format!("{what} of {} parameters: {source}", self.params.len()),
        }
    }
}

/// A sharded gradient as a tensor of the shard's shape.
fn tensor_of(buffer: Buffer, param: &FsdpParam) -> Result<Tensor> {
    let shape = param.region().sizes.as_slice();
    let device = param.var().device();
    match buffer {
        Buffer::F32(v) => Tensor::from_vec(v, shape, device),
        Buffer::F64(v) => Tensor::from_vec(v, shape, device),
        Buffer::BF16(v) => Tensor::from_vec(v, shape, device),
        Buffer::F16(v) => Tensor::from_vec(v, shape, device),
        other => bail!("parameter `{}`: a gradient of {}", param.name(), other.dtype()),
    }
}

/// The same values in another dtype; the old buffer goes back to the pool.
fn cast(from: Buffer, dtype: fsdp_core::DType, pool: &Pool) -> Result<Buffer> {
    if from.dtype() == dtype {
        return Ok(from);
    }
    let mut to = pool.take(dtype, from.len());
    match (&from, &mut to) {
        (Buffer::BF16(from), Buffer::F32(to)) => to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f32()),
        (Buffer::F16(from), Buffer::F32(to)) => to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f32()),
        (Buffer::F64(from), Buffer::F32(to)) => to.iter_mut().zip(from).for_each(|(to, from)| *to = *from as f32),
        (Buffer::F32(from), Buffer::BF16(to)) => {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = bf16::from_f32(*from))
        }
        (Buffer::F32(from), Buffer::F16(to)) => {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = f16::from_f32(*from))
        }
        (Buffer::F32(from), Buffer::F64(to)) => to.iter_mut().zip(from).for_each(|(to, from)| *to = f64::from(*from)),
        (Buffer::BF16(from), Buffer::F64(to)) => to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f64()),
        (Buffer::F16(from), Buffer::F64(to)) => to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f64()),
        (Buffer::BF16(from), Buffer::F16(to)) => {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = f16::from_f32(from.to_f32()))
        }
        (Buffer::F16(from), Buffer::BF16(to)) => {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = bf16::from_f32(from.to_f32()))
        }
        (Buffer::F64(from), Buffer::BF16(to)) => {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = bf16::from_f64(*from))
        }
        (Buffer::F64(from), Buffer::F16(to)) => {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = f16::from_f64(*from))
        }
        (from, to) => bail!("gradients can't be cast from {} to {}", from.dtype(), to.dtype()),
    }
    pool.give(from);
    Ok(to)
}

/// The dtype that a unit computes in, for a parameter built as `dtype`.
pub(crate) fn compute_dtype(policy: &MixedPrecisionPolicy, dtype: DType) -> DType {
    policy.param_dtype.unwrap_or(dtype)
}
