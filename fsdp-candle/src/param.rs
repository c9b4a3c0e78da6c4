//! One parameter's life: a shard that the optimizer owns, a full tensor that layers hold and whose memory comes and goes, and the gradient that collects
//! in backward.

use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, Weak};

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Shape, Tensor, Var, WithDType, bail};
use fsdp_core::layout::Region;
use fsdp_core::{Allocator, Buffer, Placement};

use crate::Error;
use crate::data_parallel::{DataParallel, ShardLayout};
use crate::extension::AllGatherExtension;
use crate::group::ParamGroup;
use crate::hooks;
use crate::lookup::Lookup;
use crate::storage::{self, Pool, add, poison, swap, to_buffer, to_core_dtype, to_storage};

/// A parameter sharded over the ranks of its unit.
///
/// Layers hold its full tensor, whose memory is there only while the unit is unsharded. Optimizers hold [`FsdpParam::var`], this rank's shard.
///
/// ```
/// use fsdp_core::{Placement, process_group::local};
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
///
/// local::run(2, |group| {
///     let world = World::of(group);
///     let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 2)])?, world.device());
///     let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 3, vb))?;
///     let weight = &model.params()[0];
///     assert_eq!((weight.name(), weight.shape().dims(), weight.placements()), ("weight", &[3, 4][..], vec![Placement::Shard(0)]));
///     // Rows 0 and 1 on rank 0, row 2 on rank 1, as `torch.chunk` cuts.
///     assert_eq!(weight.region().offsets, [2 * world.rank(), 0]);
///     assert_eq!(weight.var().dims(), [2 - world.rank(), 4]);
///     Ok::<_, fsdp_candle::Error>(())
/// })
/// .into_iter()
/// .collect::<Result<Vec<_>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FsdpParam {
    name: String,
    shape: Shape,
    region: Region,
    shard_dim: usize,
    layout: ShardLayout,
    ranks: Arc<DataParallel>,
    compute_dtype: DType,
    trainable: bool,
    extension: Option<Arc<dyn AllGatherExtension>>,
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
    /// Whether the backward that runs has processed every use.
    complete: bool,
    /// The unsharded gradient, in the compute dtype, of the backward that is running.
    grad: Option<Buffer>,
    /// The unsharded gradient, in the reduce dtype, of earlier backwards that did not communicate.
    unreduced: Option<Buffer>,
    /// This rank's shard of the gradient, reduced over the shard ranks but not yet over the replicas.
    partly_reduced: Option<Buffer>,
    /// This rank's shard of the reduced gradient, until a backward hands it out.
    reduced: Option<Buffer>,
    /// Whether some rank used the parameter in what was reduced since then.
    used: bool,
    /// Part of the full parameter, kept between forward and backward to gather over fewer ranks.
    post_forward: Option<Buffer>,
    /// The parameter's own buffer, while it is sharded and keeps one: always the same memory.
    kept: Option<Buffer>,
    /// Whether the buffer that is installed is the parameter's own.
    owns_installed: bool,
}

/// What a parameter is made of.
pub(crate) struct ParamSpec {
    pub(crate) name: String,
    pub(crate) shape: Shape,
    /// The box of the global shape that this rank holds.
    pub(crate) region: Region,
    pub(crate) shard_dim: usize,
    pub(crate) layout: ShardLayout,
    pub(crate) ranks: Arc<DataParallel>,
    pub(crate) compute_dtype: DType,
    pub(crate) trainable: bool,
    pub(crate) extension: Option<Arc<dyn AllGatherExtension>>,
}

/// By the tensor that a layer holds, and by the anchor.
static BY_TENSOR: LazyLock<Lookup> = LazyLock::new(Default::default);

/// By the shard.
static BY_SHARD: LazyLock<Lookup> = LazyLock::new(Default::default);

impl FsdpParam {
    pub(crate) fn new(spec: ParamSpec, shard: Var, pool: Arc<Pool>) -> Result<Arc<Self>> {
        let param = Arc::new(FsdpParam {
            name: spec.name,
            shape: spec.shape,
            region: spec.region,
            shard_dim: spec.shard_dim,
            layout: spec.layout,
            ranks: spec.ranks,
            compute_dtype: spec.compute_dtype,
            trainable: spec.trainable,
            extension: spec.extension,
            shard,
            tensors: OnceLock::new(),
            group: OnceLock::new(),
            pool,
            state: Mutex::default(),
        });
        let (anchor, full) = hooks::graph_of(&param)?;
        swap(&full, poison())?;
        BY_TENSOR.insert(&anchor, &param);
        BY_TENSOR.insert(&full, &param);
        BY_SHARD.insert(&param.shard, &param);
        if param.tensors.set(Unsharded { anchor, full }).is_err() {
            bail!("parameter `{}` was built twice", param.name)
        }
        Ok(param)
    }

    /// The parameter behind a tensor that a layer holds, or behind an anchor.
    pub(crate) fn of(tensor: &Tensor) -> Option<Arc<Self>> {
        BY_TENSOR.find(tensor)
    }

    /// The parameter whose shard this is.
    pub(crate) fn of_shard(var: &Var) -> Option<Arc<Self>> {
        BY_SHARD.find(var)
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

    /// The tensor dimension that is cut.
    pub fn shard_dim(&self) -> usize {
        self.shard_dim
    }

    /// One placement for each dimension of the mesh.
    pub fn placements(&self) -> Vec<Placement> {
        self.ranks.placements(self.shard_dim)
    }

    pub(crate) fn layout(&self) -> &ShardLayout {
        &self.layout
    }

    pub(crate) fn ranks(&self) -> &Arc<DataParallel> {
        &self.ranks
    }

    pub(crate) fn extension(&self) -> Option<&Arc<dyn AllGatherExtension>> {
        self.extension.as_ref()
    }

    /// This rank's shard, of shape `region().sizes`: what an optimizer updates, and under whose id `backward` leaves the sharded gradient.
    ///
    /// A rank whose shard is empty gets no gradient of it: Candle's optimizers, which skip what has none, fail on
    /// tensors without elements.
    pub fn var(&self) -> &Var {
        &self.shard
    }

    /// Files the sharded gradient. Of an empty shard there is none: what tells that the parameter has one elsewhere is
    /// filed under the anchor.
    pub(crate) fn file_gradient(&self, grad: Tensor, grads: &mut GradStore) -> Result<()> {
        match self.region.is_empty() {
            true => grads.insert(self.anchor()?, self.anchor()?.zeros_like()?),
            false => grads.insert(self.shard.as_tensor(), grad),
        };
        Ok(())
    }

    /// Whether this rank's shard is empty and the others' have gradients.
    pub(crate) fn is_empty_with_gradient(&self, grads: &GradStore) -> Result<bool> {
        Ok(self.region.is_empty() && grads.get(self.anchor()?).is_some())
    }

    /// Whether a gradient is computed for it.
    pub fn trainable(&self) -> bool {
        self.trainable
    }

    /// Whether the full tensor has its memory now.
    pub fn is_unsharded(&self) -> bool {
        self.state().unsharded
    }

    /// Whether the backward that runs needs its values no more.
    pub(crate) fn is_complete(&self) -> bool {
        self.state().complete
    }

    pub(crate) fn set_complete(&self, complete: bool) {
        self.state().complete = complete;
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

    /// The shard in the dtype that travels.
    pub(crate) fn shard_in_compute_dtype(&self) -> Result<Tensor> {
        let shard = self.shard.as_tensor();
        if shard.dtype() == self.compute_dtype {
            Ok(shard.clone())
        } else {
            shard.detach().to_dtype(self.compute_dtype)
        }
    }

    /// Gives the full tensor its memory.
    pub(crate) fn install(&self, full: Full) -> Result<()> {
        swap(self.full()?, to_storage(full.buffer)?)?;
        let mut state = self.state();
        state.unsharded = true;
        state.owns_installed = full.own;
        Ok(())
    }

    /// Takes the full tensor's memory away, if it has any.
    pub(crate) fn reshard(&self, memory: &Memory) -> Result<()> {
        if std::mem::take(&mut self.state().unsharded)
            && let Some(buffer) = to_buffer(swap(self.full()?, poison())?)
        {
            let own = std::mem::take(&mut self.state().owns_installed);
            self.put_away(Full { buffer, own }, memory);
        }
        Ok(())
    }

    /// Stores the memory of a full parameter where it belongs.
    pub(crate) fn put_away(&self, full: Full, memory: &Memory) {
        match full {
            Full { buffer, own: false } => memory.allocator.give(buffer),
            Full { buffer, own: true } if memory.keep => self.state().kept = Some(buffer),
            // The setting was taken back meanwhile.
            Full { buffer, own: true } => drop(buffer),
        }
    }

    /// The parameter's own buffer, for a gather to fill. The first call makes it.
    pub(crate) fn take_kept(&self) -> Result<Buffer> {
        match self.state().kept.take() {
            Some(buffer) => Ok(buffer),
            None => self.have(self.pool.take_for_good(to_core_dtype(self.compute_dtype)?, self.shape.elem_count())),
        }
    }

    /// A gradient of zeros of the whole parameter.
    pub(crate) fn zeros(&self, dtype: fsdp_core::DType) -> Result<Buffer> {
        self.have(Buffer::try_zeros(dtype, self.shape.elem_count()))
    }

    /// Memory for the parameter, whose error names it.
    fn have(&self, memory: fsdp_core::Result<Buffer>) -> Result<Buffer> {
        Ok(memory.map_err(|error| Error::Parameter { name: self.name.clone(), message: error.to_string() })?)
    }

    /// Frees the parameter's own buffer, unless it is in use.
    pub(crate) fn release_kept(&self) {
        self.state().kept = None;
    }

    /// Takes the full tensor's memory away but for the elements of a chunk, which wait for backward.
    pub(crate) fn reshard_to(&self, chunk: std::ops::Range<usize>, memory: &Memory) -> Result<()> {
        if !self.is_unsharded() {
            return Ok(());
        }
        let mut kept = self.have(self.pool.take(to_core_dtype(self.compute_dtype)?, chunk.len()))?;
        let size = self.compute_dtype.size_in_bytes();
        let full = self.full()?.clone();
        storage::TensorMemory(full)
            .read_with(|bytes| kept.bytes_mut().copy_from_slice(&bytes[chunk.start * size..chunk.end * size]))?;
        self.state().post_forward = Some(kept);
        self.reshard(memory)
    }

    /// The chunk that forward kept, if it did.
    pub(crate) fn take_post_forward(&self) -> Option<Buffer> {
        self.state().post_forward.take()
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
            let mut more = self.have(self.pool.take(buffer.dtype(), buffer.len()))?;
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
            None => {
                let dtype = storage::to_core_dtype(self.compute_dtype)?;
                (self.have(self.pool.take(dtype, self.shape.elem_count()))?, false)
            }
        })
    }

    /// The unsharded gradient that has collected, if any use of the parameter left one.
    pub(crate) fn take_grad(&self) -> Option<Buffer> {
        self.state().grad.take()
    }

    /// Where gradients wait between backwards that do not end in a whole reduction.
    pub(crate) fn accumulate(&self, stage: Stage, more: Buffer) -> Result<()> {
        let mut state = self.state();
        let slot = state.slot(stage);
        match slot {
            Some(sum) => {
                add(sum, &more)?;
                self.pool.give(more);
            }
            None => *slot = Some(more),
        }
        Ok(())
    }

    /// What has accumulated.
    pub(crate) fn take(&self, stage: Stage) -> Option<Buffer> {
        self.state().slot(stage).take()
    }

    /// Notes whether some rank used the parameter in what was reduced.
    pub(crate) fn note_used(&self, used: bool) {
        self.state().used |= used;
    }

    /// Whether some rank has used it since a gradient was handed out.
    pub(crate) fn is_used(&self) -> bool {
        self.state().used
    }

    pub(crate) fn take_used(&self) -> bool {
        std::mem::take(&mut self.state().used)
    }

    /// Drops everything that belongs to a step that failed.
    pub(crate) fn forget_step(&self) {
        let mut state = self.state();
        state.used = false;
        state.complete = false;
        let State { grad, unreduced, partly_reduced, reduced, post_forward, .. } = &mut *state;
        for buffer in [grad, unreduced, partly_reduced, reduced, post_forward] {
            if let Some(buffer) = buffer.take() {
                self.pool.give(buffer);
            }
        }
    }
}

/// The memory of a full parameter.
pub(crate) struct Full {
    pub(crate) buffer: Buffer,
    /// Whether it is the parameter's own, rather than an allocator's.
    pub(crate) own: bool,
}

/// Where the memory of a unit's full parameters comes from and goes to.
pub(crate) struct Memory {
    pub(crate) allocator: Arc<dyn Allocator>,
    /// Whether parameters have buffers of their own, whose addresses never change.
    pub(crate) keep: bool,
}

/// How far the reduction of a gradient has come.
#[derive(Clone, Copy)]
pub(crate) enum Stage {
    /// Unsharded, in the reduce dtype.
    Unreduced,
    /// A shard, reduced over the shard ranks only.
    PartlyReduced,
    /// A shard, reduced over all.
    Reduced,
}

impl State {
    fn slot(&mut self, stage: Stage) -> &mut Option<Buffer> {
        match stage {
            Stage::Unreduced => &mut self.unreduced,
            Stage::PartlyReduced => &mut self.partly_reduced,
            Stage::Reduced => &mut self.reduced,
        }
    }
}

impl Drop for FsdpParam {
    fn drop(&mut self) {
        if let Some(Unsharded { anchor, full }) = self.tensors.get() {
            BY_TENSOR.remove(anchor);
            BY_TENSOR.remove(full);
        }
        BY_SHARD.remove(&self.shard);
    }
}

impl std::fmt::Debug for FsdpParam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FsdpParam({} {:?} {:?})", self.name, self.shape, self.dtype())
    }
}
