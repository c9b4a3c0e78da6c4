//! One parameter's life: a shard that the optimizer owns, a full tensor that layers hold and whose memory comes and goes, and the gradient that collects
//! in backward.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, RwLock, Weak};

use candle_core::{DType, Result, Shape, Tensor, TensorId, Var, WithDType, bail};
use fsdp_core::layout::Region;
use fsdp_core::{Allocator, Buffer};

use crate::Error;
use crate::group::ParamGroup;
use crate::hooks;
use crate::storage::{self, Pool, TensorMemory, poison, swap, to_buffer, to_storage};

/// A parameter sharded over the ranks of its unit.
///
/// Layers hold its full tensor, whose memory is there only while the unit is unsharded. Optimizers hold [`FsdpParam::var`], this rank's shard.
pub struct FsdpParam {
    name: String,
    shape: Shape,
    region: Region,
    counts: Vec<usize>,
    compute_dtype: DType,
    trainable: bool,
    shard: Var,
    tensors: OnceLock<Unsharded>,
    group: OnceLock<Weak<ParamGroup>>,
    pool: Arc<Pool>,
    state: Mutex<State>,
}

/// The graph's view of a parameter: `shard -> anchor -> full`.
struct Unsharded {
    /// A scalar that stands for the parameter in the graph. Its backward runs once, when every use of the parameter has been processed.
    anchor: Tensor,
    /// What layers hold: the full shape, with memory only while unsharded.
    full: Tensor,
}

#[derive(Default)]
struct State {
    unsharded: bool,
    /// The unsharded gradient, in the compute dtype, of the backward that is running.
    grad: Option<Buffer>,
}

/// What a parameter is made of.
pub(crate) struct ParamSpec {
    pub(crate) name: String,
    pub(crate) shape: Shape,
    /// The box of the global shape that this rank holds.
    pub(crate) region: Region,
    /// How many elements each rank of the shard dimension holds.
    pub(crate) counts: Vec<usize>,
    pub(crate) compute_dtype: DType,
    pub(crate) trainable: bool,
}

/// Finds a parameter by the tensor that a layer holds.
static BY_TENSOR: LazyLock<RwLock<HashMap<TensorId, Weak<FsdpParam>>>> = LazyLock::new(Default::default);

impl FsdpParam {
    pub(crate) fn new(spec: ParamSpec, shard: Var, pool: Arc<Pool>) -> Result<Arc<Self>> {
        let param = Arc::new(FsdpParam {
            name: spec.name,
            shape: spec.shape,
            region: spec.region,
            counts: spec.counts,
            compute_dtype: spec.compute_dtype,
            trainable: spec.trainable,
            shard,
            tensors: OnceLock::new(),
            group: OnceLock::new(),
            pool,
            state: Mutex::default(),
        });
        let (anchor, full) = hooks::graph_of(&param)?;
        swap(&full, poison())?;
        BY_TENSOR.write().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(full.id(), Arc::downgrade(&param));
        if param.tensors.set(Unsharded { anchor, full }).is_err() {
            bail!("parameter `{}` was built twice", param.name)
        }
        Ok(param)
    }

    /// The parameter behind a tensor that a layer holds.
    pub(crate) fn of(tensor: &Tensor) -> Option<Arc<Self>> {
        BY_TENSOR.read().unwrap_or_else(|poisoned| poisoned.into_inner()).get(&tensor.id())?.upgrade()
    }

    /// The fully qualified name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The global shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The dtype of the shard, of its sharded gradient and of the optimizer's state.
    pub fn dtype(&self) -> DType {
        self.shard.dtype()
    }

    /// The dtype of the unsharded parameter that layers compute with.
    pub fn compute_dtype(&self) -> DType {
        self.compute_dtype
    }

    /// The box of the global shape that this rank holds; it may be empty.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// How many elements each rank of the shard dimension holds.
    pub(crate) fn counts(&self) -> &[usize] {
        &self.counts
    }

    /// This rank's shard, of shape `region().sizes`: what an optimizer updates, and under whose id `backward` leaves the sharded gradient.
    pub fn var(&self) -> &Var {
        &self.shard
    }

    /// Whether a gradient is computed for it.
    pub fn trainable(&self) -> bool {
        self.trainable
    }

    /// Whether the full tensor has its memory now.
    pub fn is_unsharded(&self) -> bool {
        self.state().unsharded
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn tensors(&self) -> Result<&Unsharded> {
        match self.tensors.get() {
            Some(tensors) => Ok(tensors),
            None => bail!("parameter `{}` is still being built", self.name),
        }
    }

    pub(crate) fn full(&self) -> Result<&Tensor> {
        Ok(&self.tensors()?.full)
    }

    pub(crate) fn anchor(&self) -> Result<&Tensor> {
        Ok(&self.tensors()?.anchor)
    }

    pub(crate) fn set_group(&self, group: &Arc<ParamGroup>) {
        // Set once, by the unit that built the parameter.
        let _ = self.group.set(Arc::downgrade(group));
    }

    pub(crate) fn group(&self) -> Result<Arc<ParamGroup>> {
        match self.group.get().and_then(Weak::upgrade) {
            Some(group) => Ok(group),
            None => bail!(
                "the FSDP unit of parameter `{}` is gone: keep the FsdpModule alive until after backward",
                self.name
            ),
        }
    }

    /// An error that says why the full tensor can't be used now, unless it can.
    pub(crate) fn check_unsharded(&self) -> Result<()> {
        if self.is_unsharded() {
            return Ok(());
        }
        let unit = self.group().map_or_else(|_| "(being built)".into(), |group| group.name().to_string());
        Err(Error::Parameter {
            name: self.name.clone(),
            message: format!(
                "its values are sharded and not gathered here: unit `{unit}` is not inside a forward of its own. Call the unit through its FsdpModule \
                 (`forward` or `call`), which runs the hooks, or `unshard()` it first"
            ),
        }
        .into())
    }

    /// What this rank contributes to an all-gather: the shard in place, or a copy in the compute dtype.
    pub(crate) fn gather_input(&self) -> Result<TensorMemory> {
        let shard = self.shard.as_tensor();
        Ok(TensorMemory(if shard.dtype() == self.compute_dtype {
            shard.clone()
        } else {
            shard.detach().to_dtype(self.compute_dtype)?
        }))
    }

    /// Gives the full tensor its memory.
    pub(crate) fn install(&self, buffer: Buffer) -> Result<()> {
        swap(self.full()?, to_storage(buffer)?)?;
        self.state().unsharded = true;
        Ok(())
    }

    /// Takes the full tensor's memory away, if it has any.
    pub(crate) fn reshard(&self) -> Result<()> {
        if std::mem::take(&mut self.state().unsharded)
            && let Some(buffer) = to_buffer(swap(self.full()?, poison())?)
        {
            self.pool.give(buffer);
        }
        Ok(())
    }

    /// Lets `write(buffer, accumulate)` leave a use's gradient of the whole parameter. The first use of a backward overwrites, later ones add.
    pub(crate) fn write_grad<T: WithDType>(&self, write: impl FnOnce(&mut [T], bool) -> Result<()>) -> Result<()> {
        let (mut buffer, accumulate) = self.take_or_allocate_grad()?;
        let outcome = if T::DTYPE != self.compute_dtype {
            Err(candle_core::Error::msg(format!(
                "parameter `{}` computes in {:?}; its gradient came in {:?}",
                self.name,
                self.compute_dtype,
                T::DTYPE
            )))
        } else {
            storage::typed!(&mut buffer, v => match (v as &mut dyn std::any::Any).downcast_mut::<Vec<T>>() {
                Some(v) => write(v, accumulate),
                None => Err(candle_core::Error::msg("gradient buffer of another dtype")),
            })
        };
        self.state().grad = Some(buffer);
        outcome
    }

    /// Adds a gradient that came as a tensor, through Candle's own layers.
    pub(crate) fn add_grad(&self, grad: &Tensor) -> Result<()> {
        let (mut buffer, accumulate) = self.take_or_allocate_grad()?;
        let outcome = if accumulate {
            let mut more = self.pool.take(buffer.dtype(), buffer.len());
            let added = storage::copy_out(grad, &mut more).and_then(|()| add(&mut buffer, &more));
            self.pool.give(more);
            added
        } else {
            storage::copy_out(grad, &mut buffer)
        };
        self.state().grad = Some(buffer);
        outcome
    }

    fn take_or_allocate_grad(&self) -> Result<(Buffer, bool)> {
        Ok(match self.state().grad.take() {
            Some(buffer) => (buffer, true),
            None => (self.pool.take(storage::to_core_dtype(self.compute_dtype)?, self.shape.elem_count()), false),
        })
    }

    /// The unsharded gradient that has collected, if any use of the parameter left one.
    pub(crate) fn take_grad(&self) -> Option<Buffer> {
        self.state().grad.take()
    }
}

impl Drop for FsdpParam {
    fn drop(&mut self) {
        if let Some(tensors) = self.tensors.get() {
            BY_TENSOR.write().unwrap_or_else(|poisoned| poisoned.into_inner()).remove(&tensors.full.id());
        }
    }
}

impl std::fmt::Debug for FsdpParam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FsdpParam({} {:?} {:?})", self.name, self.shape, self.dtype())
    }
}

fn add(sum: &mut Buffer, more: &Buffer) -> Result<()> {
    match (sum, more) {
        (Buffer::F32(a), Buffer::F32(b)) => a.iter_mut().zip(b).for_each(|(a, b)| *a += b),
        (Buffer::F64(a), Buffer::F64(b)) => a.iter_mut().zip(b).for_each(|(a, b)| *a += b),
        (Buffer::BF16(a), Buffer::BF16(b)) => a.iter_mut().zip(b).for_each(|(a, b)| *a += *b),
        (Buffer::F16(a), Buffer::F16(b)) => a.iter_mut().zip(b).for_each(|(a, b)| *a += *b),
        (sum, more) => bail!("gradients of {} and {} can't be added", sum.dtype(), more.dtype()),
    }
    Ok(())
}
