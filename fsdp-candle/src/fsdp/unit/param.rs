//! One parameter: a shard that an optimizer owns, a full tensor that layers hold, and the gradient that collects in
//! backward.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Shape, Tensor, TensorId, Var, bail};
use fsdp_core::layout::Region;
use fsdp_core::{Buffer, DeviceMesh, Placement};

use super::gradient::{Gradient, Stage};
use super::holder::HeldBy;
use super::lookup::Lookup;
use super::memory::Values;
use super::offload::Offload;
use super::parts::Parts;
use super::passes::{OfPass, Passes};
use super::path::UnitId;
use super::room::Room;
use super::uses::Told;
use crate::adapter::LoraConfig;
use crate::data_parallel::{DataParallel, ShardLayout};
use crate::extension::AllGatherExtension;
use crate::storage::{Pool, to_core_dtype, to_dtype, to_tensor};
use crate::tensor_parallel::Parallel;

/// A parameter sharded over the ranks of its unit.
///
/// Layers hold its full tensor, whose memory is there only while the unit is unsharded. Optimizers hold
/// [`FsdpParam::var`], this rank's shard.
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
///     assert_eq!((weight.name(), weight.shape().dims()), ("weight", &[3, 4][..]));
///     assert_eq!(weight.placements(), [Placement::Shard(0)]);
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
    shape: Shape,
    region: Region,
    shard_dim: usize,
    layout: ShardLayout,
    parts: Option<Parts>,
    ranks: Arc<DataParallel>,
    pub(super) parallel: Option<Arc<Parallel>>,
    requires_grad: AtomicBool,
    extension: Option<Arc<dyn AllGatherExtension>>,
    adapter: Option<LoraConfig>,
    shard: Var,
    offload: Option<Offload>,
    leaf: TensorId,
    anchor: Tensor,
    passes: Passes,
    /// What layers hold: the full tensor, or the same without a graph where it was frozen when they were built.
    held: Tensor,
    room: Arc<Room>,
    values: Values,
    gradient: Gradient,
    pub(super) unit: OnceLock<Place>,
    holder: HeldBy,
    pub(super) uses: Told,
    /// Whether a layer of `nn` holds it.
    pub(super) has_layer: AtomicBool,
    /// Whether a layer that tells of its uses holds it.
    pub(super) claimed: AtomicBool,
    /// Whether a layer that knows of tensor parallelism holds it.
    pub(super) served: AtomicBool,
}

/// The unit of a parameter, and its position there.
pub(super) struct Place {
    pub(super) unit: UnitId,
    position: usize,
}

/// What a parameter is made of.
pub(crate) struct ParamSpec {
    pub(crate) name: String,
    pub(crate) shape: Shape,
    /// The box of the global shape that this rank holds.
    pub(crate) region: Region,
    pub(crate) shard_dim: usize,
    pub(crate) layout: ShardLayout,
    /// Of a shard that replicas hold parts of.
    pub(crate) parts: Option<Parts>,
    pub(crate) ranks: Arc<DataParallel>,
    pub(crate) parallel: Option<Arc<Parallel>>,
    pub(crate) compute_dtype: DType,
    pub(crate) trainable: bool,
    pub(crate) extension: Option<Arc<dyn AllGatherExtension>>,
    /// Of the layer whose weight it is.
    pub(crate) adapter: Option<LoraConfig>,
    /// Of a shard on the host that is computed with elsewhere.
    pub(crate) offload: Option<Offload>,
}

/// The graph's view of a parameter: `leaf -> anchor -> full`, on the device that computes.
pub(crate) struct Nodes {
    /// The variable that the parameter's graph starts from.
    pub(crate) leaf: TensorId,
    /// A scalar that stands for the parameter in the graph. Its backward runs once, when every use of the parameter has
    /// been processed.
    pub(crate) anchor: Tensor,
    /// The unsharded shape, with memory only while unsharded.
    pub(crate) full: Tensor,
    /// Makes the anchor of a further pass, on top of the first.
    pub(crate) of_pass: Box<OfPass>,
}

/// By the tensor that a layer holds, and by the anchor.
static BY_TENSOR: LazyLock<Lookup<FsdpParam>> = LazyLock::new(Default::default);

/// By the shard.
static BY_SHARD: LazyLock<Lookup<FsdpParam>> = LazyLock::new(Default::default);

impl FsdpParam {
    pub(crate) fn new(spec: ParamSpec, shard: Var, nodes: Nodes, pool: Arc<Pool>) -> Result<Arc<Self>> {
        let elements = nodes.full.elem_count();
        let room = Arc::new(Room { name: spec.name, elements, dtype: spec.compute_dtype, pool });
        // Layers of other crates would keep a graph for what is frozen.
        let held = if spec.trainable { nodes.full.clone() } else { nodes.full.detach() };
        let param = Arc::new(FsdpParam {
            shape: spec.shape,
            region: spec.region,
            shard_dim: spec.shard_dim,
            layout: spec.layout,
            parts: spec.parts,
            ranks: spec.ranks,
            parallel: spec.parallel,
            requires_grad: AtomicBool::new(spec.trainable),
            extension: spec.extension,
            adapter: spec.adapter,
            shard,
            offload: spec.offload,
            leaf: nodes.leaf,
            anchor: nodes.anchor,
            passes: Passes::new(nodes.of_pass),
            held,
            values: Values::new(nodes.full, room.clone())?,
            gradient: Gradient::new(room.clone()),
            room,
            unit: OnceLock::new(),
            holder: HeldBy::nobody(),
            uses: Told::new(),
            has_layer: AtomicBool::new(false),
            claimed: AtomicBool::new(false),
            served: AtomicBool::new(false),
        });
        BY_TENSOR.insert(&param.anchor, &param);
        BY_TENSOR.insert(&param.held, &param);
        BY_TENSOR.insert(param.full(), &param);
        BY_SHARD.insert(&param.shard, &param);
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

    /// The adapter that its layer is to have.
    pub(crate) fn adapter(&self) -> Option<LoraConfig> {
        self.adapter
    }

    /// The fully qualified name.
    pub fn name(&self) -> &str {
        &self.room.name
    }

    /// The global shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The shape of what layers hold on this rank: the global shape, or a part of it where
    /// [`parallelize`](crate::parallelize) has cut a dimension.
    pub fn unsharded_shape(&self) -> &Shape {
        self.full().shape()
    }

    /// The dtype of the shard, of its sharded gradient and of the optimizer's state.
    pub fn dtype(&self) -> DType {
        self.shard.dtype()
    }

    /// The dtype of the unsharded parameter that layers compute with.
    pub fn compute_dtype(&self) -> DType {
        self.room.dtype
    }

    /// The box of the global shape that this rank holds; it may be empty.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The tensor dimension that FSDP shards.
    pub fn shard_dim(&self) -> usize {
        self.shard_dim
    }

    /// The mesh that the shards of all ranks lie on. Dimensions that shard together are one.
    pub fn device_mesh(&self) -> &DeviceMesh {
        self.ranks.mesh()
    }

    /// One placement for each dimension of [`FsdpParam::device_mesh`].
    pub fn placements(&self) -> Vec<Placement> {
        self.ranks.placements(self.shard_dim, self.parallel())
    }

    /// What it is under tensor parallelism; none where no plan names its module.
    pub(crate) fn parallel(&self) -> Option<&Parallel> {
        self.parallel.as_deref()
    }

    pub(crate) fn layout(&self) -> &ShardLayout {
        &self.layout
    }

    /// The parts of its shard that replicas hold, where it is divided over them.
    pub(super) fn parts(&self) -> Option<&Parts> {
        self.parts.as_ref()
    }

    /// Elements of the shard that this rank and its replicas have.
    pub(super) fn shard_len(&self) -> usize {
        self.parts.as_ref().map_or(self.region.elements(), Parts::shard_len)
    }

    pub(crate) fn ranks(&self) -> &Arc<DataParallel> {
        &self.ranks
    }

    pub(crate) fn extension(&self) -> Option<&Arc<dyn AllGatherExtension>> {
        self.extension.as_ref()
    }

    /// This rank's shard, of shape `region().sizes`: what an optimizer updates, and under whose id `backward` leaves
    /// the sharded gradient. It is on the host where [`OffloadPolicy::Cpu`](crate::OffloadPolicy) says so, and on the
    /// device that computes else.
    ///
    /// A rank whose shard is empty gets no gradient of it: Candle's optimizers, which skip what has none, fail on
    /// tensors without elements.
    ///
    /// Who writes to it calls this first: it waits for copies to the device that still read an offloaded shard. A
    /// variable that was kept may be written between `backward` and the next forward.
    pub fn var(&self) -> &Var {
        if let Some(offload) = &self.offload
            && let Err(error) = offload.settle()
        {
            // The device is lost: nothing reads there any more.
            tracing::warn!(parameter = self.name(), %error, "waiting for copies of a shard");
        }
        &self.shard
    }

    /// The device that layers compute on.
    pub(crate) fn device(&self) -> &Device {
        self.full().device()
    }

    pub(super) fn offload(&self) -> Option<&Offload> {
        self.offload.as_ref()
    }

    /// Adds to the reduced gradient, which waits for an optimizer where the shard is.
    pub(super) fn keep_reduced(&self, gradient: Buffer) -> Result<()> {
        match &self.offload {
            Some(offload) => offload.download(gradient),
            None => self.gradient.accumulate(Stage::Reduced, gradient),
        }
    }

    /// The reduced gradient, which is the pool's no more.
    pub(super) fn take_reduced(&self) -> Result<Option<Tensor>> {
        let gradient = match &self.offload {
            Some(offload) => offload.take_gradient()?,
            None => self.gradient.take(Stage::Reduced).inspect(|buffer| self.room.pool.leave(buffer)),
        };
        let tensor = |buffer| to_tensor(buffer, &self.region.sizes, self.shard.device());
        gradient.map(tensor).transpose()
    }

    /// Files the sharded gradient. Of an empty shard there is none: what tells that the parameter has one elsewhere is
    /// filed under the anchor.
    pub(crate) fn file_gradient(&self, grad: Tensor, grads: &mut GradStore) -> Result<()> {
        match self.region.is_empty() {
            true => grads.insert(&self.anchor, self.anchor.zeros_like()?),
            false => grads.insert(self.shard.as_tensor(), grad),
        };
        Ok(())
    }

    /// Whether this rank's shard is empty and the others' have gradients.
    pub(crate) fn is_empty_with_gradient(&self, grads: &GradStore) -> bool {
        self.region.is_empty() && grads.get(&self.anchor).is_some()
    }

    /// Whether a gradient is computed for it: PyTorch's `requires_grad`, which
    /// [`ShardedVarMap::set_requires_grad`](crate::ShardedVarMap::set_requires_grad) changes.
    pub fn trainable(&self) -> bool {
        self.requires_grad.load(Ordering::Relaxed)
    }

    /// Freezes it, with the gradients that wait for a reduction, or trains it.
    pub(crate) fn set_requires_grad(&self, requires_grad: bool) {
        self.requires_grad.store(requires_grad, Ordering::Relaxed);
        if !requires_grad {
            self.gradient.forget();
            if let Some(offload) = &self.offload {
                offload.forget();
            }
        }
    }

    /// Whether a gradient would reach it: a layer of `nn` holds it, which asks each time, or a tensor with a graph is
    /// what others hold.
    pub(crate) fn can_be_trained(&self) -> bool {
        self.held.track_op() || self.has_layer.load(Ordering::Relaxed)
    }

    /// Whether the full tensor has its memory now.
    pub fn is_unsharded(&self) -> bool {
        self.values.are_there()
    }

    /// What layers hold.
    pub(crate) fn held(&self) -> &Tensor {
        &self.held
    }

    /// The full tensor, with its graph.
    pub(crate) fn full(&self) -> &Tensor {
        self.values.tensor()
    }

    /// The variable that its graph starts from.
    pub(crate) fn leaf(&self) -> TensorId {
        self.leaf
    }

    /// Returns the parameter's anchor, whose backward runs once, when every use has been processed.
    pub(crate) fn anchor(&self) -> &Tensor {
        &self.anchor
    }

    /// Returns the parameter's anchor in the pass that runs.
    pub(crate) fn anchor_of_pass(&self) -> Result<Tensor> {
        self.passes.anchor(&self.anchor)
    }

    /// Begins a further pass of the unit, or goes back to the first.
    pub(super) fn next_pass(&self, pass: Option<usize>) {
        self.passes.begin(pass);
    }

    /// The full values, which come and go.
    pub(super) fn values(&self) -> &Values {
        &self.values
    }

    pub(crate) fn gradient(&self) -> &Gradient {
        &self.gradient
    }

    pub(super) fn set_unit(&self, unit: &UnitId, position: usize) {
        // Set once, by the unit that built the parameter.
        let _ = self.unit.set(Place { unit: unit.clone(), position });
    }

    pub(super) fn holder(&self) -> &HeldBy {
        &self.holder
    }

    /// The unit that it belongs to, and its position there.
    ///
    /// # Errors
    /// While the unit is being built.
    pub(crate) fn unit(&self) -> Result<(&UnitId, usize)> {
        match self.unit.get() {
            Some(Place { unit, position }) => Ok((unit, *position)),
            None => bail!("parameter `{}` is still being built", self.name()),
        }
    }

    /// The shard in the dtype that travels, on the device that computes.
    pub(super) fn shard_in_compute_dtype(&self) -> Result<Tensor> {
        match &self.parts {
            Some(parts) => parts.shard(self.name()),
            None => self.own_in_compute_dtype(),
        }
    }

    /// What this rank holds in the dtype that travels, on the device that computes.
    pub(super) fn own_in_compute_dtype(&self) -> Result<Tensor> {
        if let Some(offload) = &self.offload {
            let uploaded = offload.upload(to_core_dtype(self.compute_dtype())?)?;
            return uploaded.into_tensor(&self.region.sizes, self.device());
        }
        let shard = self.shard.as_tensor();
        if shard.dtype() == self.compute_dtype() {
            Ok(shard.clone())
        } else {
            to_dtype(&shard.detach(), self.compute_dtype())
        }
    }
}

impl Drop for FsdpParam {
    fn drop(&mut self) {
        BY_TENSOR.remove(&self.anchor);
        BY_TENSOR.remove(&self.held);
        BY_TENSOR.remove(self.full());
        BY_SHARD.remove(&self.shard);
    }
}

impl std::fmt::Debug for FsdpParam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FsdpParam({} {:?} {:?})", self.name(), self.shape, self.dtype())
    }
}
