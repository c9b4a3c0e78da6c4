//! One parameter: the shard that an optimizer updates, the full tensor that layers hold, and the state of both. The
//! notes in `fsdp/mod.rs` explain a parameter's graph nodes and its life.
//!
//! A layer tells the parameter three things. When the layer is built, it registers ([`FsdpParam::register_layer`],
//! [`FsdpParam::register_tp_layer`]). Before it reads the values, it runs the pre-use hook ([`FsdpParam::pre_use`]). In
//! backward it leaves its gradient in [`FsdpParam::gradient`].

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, OnceLock, Weak};

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Shape, Tensor, TensorId, Var, bail};
use fsdp_core::layout::Region;
use fsdp_core::{Buffer, DeviceMesh, Placement, ProcessGroup};
use parking_lot::{Mutex, RwLock};

use super::full_values::FullValues;
use super::gradient::{Gradient, Stage};
use super::param_events::{ParamModel, ParamUnit};
use super::param_nodes::{NodeOwner, Owner, ParamNodes, pass_anchor};
use super::param_spec::ParamSpec;
use super::shard::Shard;
use super::unit_path::UnitId;
use super::unsharded_memory::ParamAllocator;
use crate::data_parallel::ReplicaLayout;
use crate::dtensor::DTensor;
use crate::error::Error;
use crate::storage::{Pool, to_dtype, to_tensor};
use crate::tensor_parallel::{Parallel, ParallelStyle};

/// A parameter sharded over the ranks of its unit.
///
/// Layers hold the full tensor, which has memory only while the unit is unsharded. Optimizers hold [`FsdpParam::var`],
/// this rank's shard.
///
/// ```
/// use fsdp_core::{Placement, process_group::local};
/// # use fsdp_candle::doc_example::*;
///
/// local::try_run(2, |group| {
///     let world = World::of(group);
///     let vars = ShardedVarMap::of_world(&world)?;
///     let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 3, vb))?;
///     let weight = &model.params()[0];
///     assert_eq!((weight.name(), weight.shape().dims()), ("weight", &[3, 4][..]));
///     assert_eq!(weight.placements(), [Placement::Shard(0)]);
///     // Rows 0 and 1 on rank 0, row 2 on rank 1, as `torch.chunk` cuts.
///     assert_eq!(weight.region().offsets, [2 * world.rank(), 0]);
///     assert_eq!(weight.var().dims(), [2 - world.rank(), 4]);
///     Ok::<_, fsdp_candle::Error>(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FsdpParam {
    pub(crate) spec: ParamSpec,
    pub(crate) shard: Shard,
    /// The variable that the parameter's graph starts from.
    pub(crate) leaf: TensorId,
    /// A scalar in the graph whose backward runs once, after every use of the parameter; see `fsdp/mod.rs`.
    pub(crate) anchor: Tensor,
    pub(crate) full: FullValues,
    /// The tensor that layers hold: the full tensor, or the same without a graph if it was frozen when it was built.
    pub(super) held: Tensor,
    allocator: Arc<ParamAllocator>,
    state: Mutex<State>,
    pub(crate) gradient: Gradient,
    requires_grad: AtomicBool,
    /// Whether an optimizer of this crate has the parameter, and so reports its steps.
    has_optimizer: AtomicBool,
    /// Whether a backward has handed out a gradient.
    has_handed_out: AtomicBool,
    /// The owner of the nodes: the parameter.
    owner: Owner,
    unit: OnceLock<UnitRef>,
    model: Weak<dyn ParamModel>,
}

/// State of one parameter.
#[derive(Default)]
struct State {
    layer: LayerSupport,
    pass: Option<RunningPass>,
}

/// Support of the layers that hold a parameter.
#[derive(Default)]
struct LayerSupport {
    /// A layer of `nn` holds the parameter, and looks at `requires_grad` whenever it computes.
    registered: bool,
    /// The layer runs the pre-use hook.
    runs_pre_use_hook: bool,
    /// The layer does the collectives of tensor parallelism.
    tp_aware: bool,
    /// An expert holds the parameter.
    is_of_expert: bool,
}

/// The running pass of a unit that runs several times, and its anchor once a layer has asked for it.
struct RunningPass {
    pass: usize,
    anchor: Option<Tensor>,
}

/// Reference from a parameter to its unit.
struct UnitRef {
    id: UnitId,
    /// Index in the unit's parameters.
    position: usize,
    group: Weak<dyn ParamUnit>,
    /// Whether the pre-use hook unshards the unit: it was made by name, so nobody calls it.
    has_pre_use_hook: bool,
}

type Lookup = RwLock<HashMap<TensorId, Weak<FsdpParam>>>;

/// Parameters by the tensor that layers hold, by the full tensor, and by the anchor.
static BY_TENSOR: LazyLock<Lookup> = LazyLock::new(Default::default);

/// Parameters by their shard.
static BY_SHARD: LazyLock<Lookup> = LazyLock::new(Default::default);

/// Identity and properties.
impl FsdpParam {
    pub(crate) fn new<M: ParamModel + 'static>(
        spec: ParamSpec,
        shard: Shard,
        nodes: ParamNodes,
        pool: &Arc<Pool>,
        model: &Arc<M>,
    ) -> Result<Arc<Self>> {
        let ParamNodes { leaf, anchor, full, owner } = nodes;
        spec.make_room(pool);
        let allocator = Arc::new(ParamAllocator {
            name: spec.name.clone(),
            elements: full.elem_count(),
            dtype: spec.compute_dtype,
            pool: pool.clone(),
        });
        // Kernels compute gradients in f32. Rounded to bf16, they would be widened again to be reduced. Those of f16
        // overflow, as in PyTorch, so that a loss scale skips the same steps.
        let has_kernels = full.device().is_cpu() || full.device().is_cuda();
        let is_wide = has_kernels && (spec.compute_dtype, spec.reduce_dtype) == (DType::BF16, DType::F32);
        let grad_dtype = if is_wide { DType::F32 } else { spec.compute_dtype };
        // Layers of other crates would keep a graph for a frozen parameter.
        let held = if spec.trainable { full.clone() } else { full.detach() };
        let model: Weak<dyn ParamModel> = Arc::downgrade(model) as _;
        let param = Arc::new(FsdpParam {
            requires_grad: AtomicBool::new(spec.trainable),
            has_optimizer: AtomicBool::new(false),
            has_handed_out: AtomicBool::new(false),
            spec,
            shard,
            leaf,
            anchor,
            full: FullValues::new(full, allocator.clone())?,
            held,
            gradient: Gradient::new(allocator.clone(), grad_dtype),
            allocator,
            state: Mutex::default(),
            owner: owner.clone(),
            unit: OnceLock::new(),
            model,
        });
        owner.set(Arc::downgrade(&param) as _);
        let mut by_tensor = BY_TENSOR.write();
        for tensor in [&param.anchor, &param.held, &param.full.tensor] {
            by_tensor.insert(tensor.id(), Arc::downgrade(&param));
        }
        drop(by_tensor);
        BY_SHARD.write().insert(param.shard.var().id(), Arc::downgrade(&param));
        Ok(param)
    }

    /// Returns the parameter of a tensor that a layer holds, or of an anchor.
    pub(crate) fn of(tensor: &Tensor) -> Option<Arc<Self>> {
        BY_TENSOR.read().get(&tensor.id())?.upgrade()
    }

    /// Returns the parameter of a shard.
    pub(crate) fn of_shard(var: &Var) -> Option<Arc<Self>> {
        BY_SHARD.read().get(&var.id())?.upgrade()
    }

    /// Returns the fully qualified name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Returns the global shape.
    pub fn shape(&self) -> &Shape {
        &self.spec.shape
    }

    /// Returns the shape that layers hold on this rank: the global shape, or a part of it where
    /// [`parallelize`](crate::parallelize) divides a dimension.
    pub fn unsharded_shape(&self) -> &Shape {
        self.full.tensor.shape()
    }

    /// Returns the dtype of the shard, of its gradient and of the optimizer's state. A parameter that is stored in
    /// blocks ([`FullyShard::store`](crate::FullyShard::store)) has U8.
    pub fn dtype(&self) -> DType {
        self.shard.var().dtype()
    }

    /// Returns the dtype of the full tensor that layers compute with.
    pub fn compute_dtype(&self) -> DType {
        self.spec.compute_dtype
    }

    /// Returns the box of the global shape that this rank holds. The box may be empty.
    pub fn region(&self) -> &Region {
        &self.spec.region
    }

    /// Returns the global shape of the tensor that [`FsdpParam::var`] is a shard of: bytes, if it is stored in blocks.
    pub(crate) fn stored_shape(&self) -> &[usize] {
        self.spec.encoding.blocks().map_or(self.shape().dims(), |blocks| &blocks.shape)
    }

    /// Returns the box of [`FsdpParam::stored_shape`] that this rank holds.
    pub(crate) fn stored_region(&self) -> &Region {
        self.spec.encoding.blocks().map_or(&self.spec.region, |blocks| &blocks.region)
    }

    /// Returns the name in a state dict of a parameter called `fqn` there.
    pub(crate) fn stored_name(&self, fqn: &str) -> String {
        self.spec.encoding.blocks().map_or(fqn.into(), |blocks| blocks.format.encoded_name(fqn))
    }

    /// Returns the dimension that FSDP shards.
    pub fn shard_dim(&self) -> usize {
        self.spec.shard_dim
    }

    /// Returns the mesh of all ranks that hold shards. Dimensions that shard together are one dimension of it.
    pub fn device_mesh(&self) -> &DeviceMesh {
        &self.spec.ranks.mesh
    }

    /// Returns one placement for each dimension of [`FsdpParam::device_mesh`].
    pub fn placements(&self) -> Vec<Placement> {
        self.spec.ranks.placements(self.spec.shard_dim, self.parallel(), self.spec.owner)
    }

    /// Returns how the parameter's module is parallel; `None` if no plan names the module.
    pub(crate) fn parallel(&self) -> Option<&Parallel> {
        self.spec.parallel.as_deref()
    }

    /// Returns the tensor-parallel ranks, if each of them holds a part of the parameter.
    pub(crate) fn split_over(&self) -> Option<&ProcessGroup> {
        self.parallel().filter(|parallel| parallel.shard_dim.is_some()).map(|parallel| &parallel.group)
    }

    /// Returns the ranks that own different experts, and the rank among them that has this parameter's expert; `None` if
    /// no plan makes the expert parallel.
    pub(crate) fn owner(&self) -> Option<(&ProcessGroup, usize)> {
        Some((self.spec.ranks.experts()?, self.spec.owner?))
    }

    /// Returns the number of elements of the shard before replicas divide it.
    pub(super) fn shard_len(&self) -> usize {
        self.spec.over_replicas.as_ref().map_or(self.spec.region.elements(), |whole| whole.shape.iter().product())
    }

    /// Returns how replicas divide the shard. Fails if they do not.
    pub(super) fn divided_over_replicas(&self) -> Result<&ReplicaLayout> {
        match &self.spec.over_replicas {
            Some(layout) => Ok(layout),
            None => bail!("parameter `{}` is not sharded over replicas", self.name()),
        }
    }

    /// Returns this rank's shard, of shape `region().sizes`, or its blocks ([`WeightFormat`](crate::WeightFormat)). An
    /// optimizer updates it, and `backward` stores the sharded gradient under its id. It is on the host with
    /// [`OffloadPolicy::Cpu`](crate::OffloadPolicy), else on the device that computes.
    ///
    /// An empty shard gets no gradient: Candle's optimizers skip variables without a gradient, and fail on tensors
    /// without elements.
    ///
    /// The variable of a shard on disk ([`ShardedVarMap::store_on_disk`](crate::ShardedVarMap::store_on_disk)) has no
    /// memory, and to use its values is an error. Optimizers of this crate step it, [`FsdpParam::dtensor`] copies it,
    /// and [`FsdpParam::set_local`] sets it.
    ///
    /// Set values by [`FsdpParam::set_full`], which takes the whole parameter; `var().set` takes this rank's shard. Call
    /// `var` before writing: it waits for pending device copies that read an offloaded shard, and lets the next forward
    /// gather the values again. A variable that was returned earlier may be written between `backward` and the next
    /// forward.
    pub fn var(&self) -> &Var {
        if self.is_unsharded()
            && let Some(group) = self.group()
        {
            group.note_write();
        }
        self.shard.settled()
    }

    /// Returns the device that layers compute on.
    pub(crate) fn device(&self) -> &Device {
        self.full.tensor.device()
    }

    /// Returns whether the parameter gets a gradient: PyTorch's `requires_grad`.
    /// [`ShardedVarMap::set_requires_grad`](crate::ShardedVarMap::set_requires_grad) changes it.
    pub fn trainable(&self) -> bool {
        self.requires_grad.load(Ordering::Relaxed)
    }

    /// Freezes the parameter and drops its pending gradients, or trains it.
    pub(crate) fn set_requires_grad(&self, requires_grad: bool) {
        self.requires_grad.store(requires_grad, Ordering::Relaxed);
        if !requires_grad {
            self.drop_gradients();
        }
    }

    /// Returns whether a gradient can reach the parameter: a layer of `nn` holds it, or layers hold a tensor that has a
    /// graph.
    pub(crate) fn can_be_trained(&self) -> bool {
        self.held.track_op() || self.state.lock().layer.registered
    }
}

/// The unit of a parameter.
impl FsdpParam {
    /// Sets the unit. Called once, when the unit is made.
    pub(super) fn set_unit(&self, id: &UnitId, group: Weak<dyn ParamUnit>, position: usize, has_pre_use_hook: bool) {
        let unit = UnitRef { id: id.clone(), position, group, has_pre_use_hook };
        let _ = self.unit.set(unit);
    }

    fn group(&self) -> Option<Arc<dyn ParamUnit>> {
        self.unit.get().and_then(|unit| unit.group.upgrade())
    }

    /// Returns whether both parameters are of one map.
    pub(crate) fn is_of_same_map(&self, other: &FsdpParam) -> bool {
        std::ptr::addr_eq(self.model.as_ptr(), other.model.as_ptr())
    }

    /// Records that an optimizer of this crate has the parameter.
    pub(crate) fn set_has_optimizer(&self) {
        self.has_optimizer.store(true, Ordering::Relaxed);
    }

    /// Returns whether an optimizer of this crate has the parameter.
    pub(crate) fn has_optimizer(&self) -> bool {
        self.has_optimizer.load(Ordering::Relaxed)
    }

    /// Returns whether another optimizer may step the parameter, which does not report its steps.
    pub(super) fn may_be_stepped_unseen(&self) -> bool {
        self.has_handed_out.load(Ordering::Relaxed) && !self.has_optimizer()
    }

    /// Frees the unsharded values of these parameters' units, since an optimizer steps them. In a backward, the units
    /// that are stepped are freed by backward itself.
    pub(crate) fn free_stale<'a>(params: impl Iterator<Item = &'a Arc<FsdpParam>>) -> crate::error::Result<()> {
        for param in params {
            let Some(unit) = param.group().filter(|unit| unit.is_unsharded()) else { continue };
            if !param.model.upgrade().is_some_and(|model| model.is_running()) {
                unit.reshard_stale()?;
            }
        }
        Ok(())
    }

    /// Returns the unit of the parameter, and the parameter's index in it. Fails while the unit is being built.
    pub(crate) fn unit(&self) -> Result<(&UnitId, usize)> {
        match self.unit.get() {
            Some(UnitRef { id, position, .. }) => Ok((id, *position)),
            None => bail!("parameter `{}` is still being built", self.name()),
        }
    }

    /// Returns the model.
    pub(crate) fn model(&self) -> Result<Arc<dyn ParamModel>> {
        match self.model.upgrade() {
            Some(model) => Ok(model),
            None => bail!(
                "the FSDP unit of parameter `{}` is gone: keep the FsdpModule alive until after backward",
                self.name()
            ),
        }
    }

    /// Returns the unit and the model, if the unit is unsharded by pre-use hooks.
    fn pre_use_model(&self) -> Option<(&UnitRef, Arc<dyn ParamModel>)> {
        let unit = self.unit.get().filter(|unit| unit.has_pre_use_hook)?;
        Some((unit, self.model.upgrade()?))
    }

    /// Records that a layer of `nn` holds the parameter, and whether the layer runs the pre-use hook.
    pub(crate) fn register_layer(&self, runs_pre_use_hook: bool) {
        let layer = &mut self.state.lock().layer;
        layer.registered = true;
        layer.runs_pre_use_hook |= runs_pre_use_hook;
    }

    /// Returns whether a layer that runs the pre-use hook holds the parameter.
    pub(crate) fn runs_pre_use_hook(&self) -> bool {
        self.state.lock().layer.runs_pre_use_hook
    }

    /// Runs the pre-use hook and checks that the values are there: a layer is about to read them. Fails if the unit
    /// cannot be unsharded, or is sharded outside of its forward.
    pub(crate) fn pre_use(&self) -> Result<()> {
        self.run_pre_use_hook()?;
        if self.is_unsharded() { Ok(()) } else { Err(self.not_unsharded().into()) }
    }

    /// Runs the pre-use hook: a layer is about to read the values.
    pub(crate) fn run_pre_use_hook(&self) -> Result<()> {
        let Some((unit, model)) = self.pre_use_model() else { return Ok(()) };
        model.pre_use(&unit.id, !self.is_unsharded())
    }

    /// Runs the pre-use hook for a layer that is about to write a gradient. The layer does not need the values.
    pub(crate) fn run_pre_gradient_hook(&self) -> Result<()> {
        let Some((unit, model)) = self.pre_use_model() else { return Ok(()) };
        model.pre_use(&unit.id, false)
    }

    /// Records that a checkpointed closure uses the parameter and runs again in backward; see
    /// [`ParamModel::add_recomputation`]. Returns whether the parameter has a pre-use hook.
    pub(crate) fn register_recomputation(&self, made: Range<usize>, node: usize) -> bool {
        self.pre_use_model().map(|(_, model)| model.add_recomputation(made, node)).is_some()
    }

    fn not_unsharded(&self) -> Error {
        let Some(unit) = self.unit.get() else {
            return self.error(
                "a layer computed with it while the model is built, when parameters have no values: call the layer in \
                 forward",
            );
        };
        let way_out = match unit.has_pre_use_hook {
            true => {
                "is gathered inside a forward of the model alone. Call the model through its FsdpModule (`forward`, \
                 `call` or `call_mut`), or hold it by `unshard_all()`"
            }
            false => {
                "is not inside a forward of its own. Call the unit through its FsdpModule (`forward` or `call`), or \
                 `unshard()` it first"
            }
        };
        self.error(format!("its values are sharded here: unit `{}` {way_out}", unit.id.name))
    }

    /// Returns how the module of `weight` is parallel and its ranks, for a layer of your own that holds `weight`;
    /// `None` if no plan of [`parallelize`](crate::parallelize) names the module. A layer that calls this must do the
    /// collectives. Building fails if no layer calls it. Layers of [`nn`](crate::nn) do both.
    ///
    /// ```
    /// use candle_core::{DType, Module, Result, Tensor};
    /// use fsdp_candle::{ColwiseParallel, DataParallelMeshDims, FsdpParam, FullyShard, ParallelPlan, ProcessGroup};
    /// use fsdp_candle::{ShardedVarMap, World, collectives, fully_shard, parallelize};
    /// use fsdp_core::process_group::local;
    ///
    /// /// `x W^T` of a weight whose rows may be divided over ranks.
    /// struct Columns(Tensor, Option<ProcessGroup>);
    ///
    /// impl Module for Columns {
    ///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
    ///         let x = self.1.as_ref().map_or(Ok(x.clone()), |ranks| collectives::copy(x, ranks))?;
    ///         x.matmul(&self.0.t()?)
    ///     }
    /// }
    ///
    /// local::try_run(2, |group| {
    ///     let world = World::of(group);
    ///     let mesh = world.mesh(&[("tp", 2)])?;
    ///     let vars = ShardedVarMap::with_dp_mesh_dims(&mesh, &DataParallelMeshDims::default(), world.device())?;
    ///     parallelize(&vars, &mesh, &ParallelPlan::new().module("up", ColwiseParallel::default()))?;
    ///     let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
    ///         let weight = vb.pp("up").get((6, 4), "weight")?;
    ///         let ranks = FsdpParam::register_tp_layer(&weight).map(|(_, ranks)| ranks);
    ///         Ok(Columns(weight, ranks))
    ///     })?;
    ///     let y = model.forward(&Tensor::ones((5, 4), DType::F32, world.device())?)?;
    ///     assert_eq!(y.dims(), [5, 3]); // this rank's half of 6 features
    ///     Ok::<_, fsdp_candle::Error>(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn register_tp_layer(weight: &Tensor) -> Option<(ParallelStyle, ProcessGroup)> {
        let param = FsdpParam::of(weight)?;
        param.set_tp_aware();
        param.parallel().map(|parallel| (parallel.style, parallel.group.clone()))
    }

    /// Records that a layer holds the parameter and does the collectives of tensor parallelism.
    pub(crate) fn set_tp_aware(&self) {
        self.state.lock().layer.tp_aware = true;
    }

    /// Records that an expert of a mixture holds the parameter.
    pub(crate) fn set_of_expert(&self) {
        self.state.lock().layer.is_of_expert = true;
    }

    /// Returns whether a plan gives the parameter's expert to a rank, and no expert of a mixture holds it.
    pub(crate) fn lacks_expert(&self) -> bool {
        self.spec.owner.is_some() && !self.state.lock().layer.is_of_expert
    }

    /// Returns whether a plan names the parameter's module and no layer does the collectives.
    pub(crate) fn lacks_tp_layer(&self) -> bool {
        self.parallel().is_some_and(Parallel::needs_layer) && !self.state.lock().layer.tp_aware
    }
}

/// Values.
impl FsdpParam {
    /// Returns whether the full tensor has memory.
    pub fn is_unsharded(&self) -> bool {
        self.full.is_unsharded()
    }

    /// Returns a tensor that is not finite where the shard is not: the shard, or the scales of its blocks.
    pub(crate) fn overflow_witness(&self) -> Result<Tensor> {
        let shard = self.shard.values()?;
        match self.spec.encoding.blocks() {
            Some(blocks) => blocks.scales(&shard),
            None => Ok(shard),
        }
    }
}

/// Graph and gradient.
impl FsdpParam {
    /// Returns the anchor of the running pass.
    pub(crate) fn anchor_of_pass(&self) -> Result<Tensor> {
        match &mut self.state.lock().pass {
            None => Ok(self.anchor.clone()),
            Some(RunningPass { anchor: Some(anchor), .. }) => Ok(anchor.clone()),
            Some(RunningPass { pass, anchor }) => {
                Ok(anchor.insert(pass_anchor(&self.anchor, &self.owner, *pass)?).clone())
            }
        }
    }

    /// Begins a further pass of the unit, or returns to the first pass.
    pub(super) fn begin_pass(&self, pass: Option<usize>) {
        self.state.lock().pass = pass.map(|pass| RunningPass { pass, anchor: None });
    }

    /// Adds to the reduced gradient, which is stored beside the shard.
    pub(super) fn add_reduced(&self, gradient: Buffer) -> Result<()> {
        self.gradient.set_reduced();
        match self.shard.offload() {
            Some(offload) => offload.download(gradient),
            None => self.gradient.accumulate(Stage::Reduced, gradient),
        }
    }

    /// Takes the reduced gradient. Its memory leaves the pool.
    pub(super) fn take_reduced(&self) -> Result<Option<Tensor>> {
        let gradient = match self.shard.offload() {
            Some(offload) => offload.take_gradient()?,
            None => self.gradient.take(Stage::Reduced).inspect(|buffer| self.allocator.pool.leave(buffer)),
        };
        let tensor = |buffer| to_tensor(buffer, &self.spec.region.sizes, self.shard.var().device());
        gradient.map(tensor).transpose()
    }

    /// Stores the sharded gradient in `grads`. A rank with an empty shard stores a mark under the anchor: other
    /// ranks have a gradient.
    pub(super) fn store_gradient(&self, grad: Tensor, grads: &mut GradStore) -> Result<()> {
        self.has_handed_out.store(true, Ordering::Relaxed);
        match self.spec.region.is_empty() {
            true => grads.insert(&self.anchor, self.anchor.detach()),
            false => grads.insert(self.shard.var().as_tensor(), grad),
        };
        Ok(())
    }

    /// Returns the parameter that [`FsdpParam::store_gradient`] stored a gradient of under an id.
    pub(crate) fn of_gradient(id: &TensorId) -> Option<Arc<Self>> {
        let of_shard = BY_SHARD.read().get(id).and_then(Weak::upgrade);
        of_shard.or_else(|| BY_TENSOR.read().get(id).and_then(Weak::upgrade))
    }

    /// Returns whether this rank's shard is empty and other ranks have a gradient.
    pub(crate) fn is_empty_with_gradient(&self, grads: &GradStore) -> bool {
        self.spec.region.is_empty() && grads.get(&self.anchor).is_some()
    }

    /// Drops all gradients, also of offloaded shards.
    pub(super) fn drop_gradients(&self) {
        self.gradient.clear();
        if let Some(offload) = self.shard.offload() {
            offload.clear();
        }
    }
}

/// A parameter as a DTensor, whose values users read and set.
impl FsdpParam {
    /// Returns the sharded parameter as a DTensor that shares the memory of [`FsdpParam::var`]: it shows what an
    /// optimizer changes. The DTensor of a parameter in blocks has its bytes, and that of a shard on disk has a copy.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
    /// for param in model.params() {
    ///     let dtensor = param.dtensor()?;
    ///     assert_eq!(dtensor.placements(), [Placement::Shard(0)]);
    ///     println!("{}: {:?} of {:?}", param.name(), dtensor.to_local().dims(), dtensor.shape());
    ///     // Every rank passes the whole tensor, and stores its own part.
    ///     param.set_full(&dtensor.mul(2.)?.full_tensor()?)?;
    /// }
    /// let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// let grads = model.backward(&model.forward(&x)?.sum_all()?)?;
    /// for param in model.params() {
    ///     let grad = param.grad(&grads)?.expect("it was used");
    ///     assert_eq!(grad.max_all()?.full_tensor()?.to_scalar::<f32>()?, 3.);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn dtensor(&self) -> crate::error::Result<DTensor> {
        self.with_own_layout(&self.shard.values()?)
    }

    /// Returns the sharded gradient of a backward as a DTensor with the parameter's layout, or `None`. It shares the
    /// gradient's memory. A rank with an empty shard has an empty part.
    pub fn grad(&self, grads: &GradStore) -> crate::error::Result<Option<DTensor>> {
        let grad = match grads.get(self.shard.var().as_tensor()) {
            Some(grad) => grad,
            None if self.is_empty_with_gradient(grads) => self.shard.var().as_tensor(),
            None => return Ok(None),
        };
        self.with_own_layout(grad).map(Some)
    }

    fn with_own_layout(&self, local: &Tensor) -> crate::error::Result<DTensor> {
        let dtensor = DTensor::from_local(local, self.stored_shape(), self.device_mesh(), &self.placements())?;
        Ok(dtensor.named(self.name()))
    }

    /// Copies values into this rank's shard, as an assignment to PyTorch's `param.to_local()` does. Converts floating
    /// point dtypes. Does not communicate. Frees the unit's full values, which are stale. Fails if the tensor does not
    /// have the shape of [`FsdpParam::region`], or is not floating point. The shard is unchanged then.
    pub fn set_local(&self, local: &Tensor) -> crate::error::Result<()> {
        if let Some(blocks) = self.spec.encoding.blocks() {
            let format = blocks.format.name();
            return Err(
                self.error(format!("it is stored as {format} (FullyShard::store), and can't be set from floats"))
            );
        }
        let region = self.region();
        if local.dims() != region.sizes {
            return Err(self.error(format!(
                "its shard on rank {} has shape {:?}, found {:?}. Pass a part with the parameter's placements, or the \
                 full tensor to `set_full`",
                self.device_mesh().rank(),
                region.sizes,
                local.dims()
            )));
        }
        if !local.dtype().is_float() {
            return Err(self.error(format!("expected a floating point tensor, found {:?}", local.dtype())));
        }
        // Candle copies all of a view's storage to another device, so the view gets its own memory first.
        let is_here = local.device().same_device(self.shard.var().device());
        let local = if is_here { local.contiguous()? } else { local.force_contiguous()? };
        let local = to_dtype(&local.detach(), self.dtype())?;
        if let Some(group) = self.group() {
            group.reshard_stale()?;
        }
        self.shard.set(&local)
    }

    /// Copies this rank's part of a full tensor into its shard. Does not communicate: every rank passes the full
    /// tensor. If only rank 0 has it, send the parts with [`distribute_tensor`](crate::distribute_tensor), and pass
    /// each to [`FsdpParam::set_local`]. Fails if the tensor does not have the parameter's shape, or is not floating
    /// point. The shard is unchanged then.
    pub fn set_full(&self, full: &Tensor) -> crate::error::Result<()> {
        if full.dims() != self.shape().dims() {
            return Err(self.error(format!("expected shape {:?}, found {:?}", self.shape(), full.shape())));
        }
        let region = self.region();
        let part = (0..full.rank())
            .try_fold(full.clone(), |part, dim| part.narrow(dim, region.offsets[dim], region.sizes[dim]))?;
        self.set_local(&part)
    }

    /// Makes an error that names the parameter.
    pub(crate) fn error(&self, message: impl Into<String>) -> Error {
        Error::parameter(self.name(), message)
    }
}

impl NodeOwner for FsdpParam {
    fn is_trained(&self) -> bool {
        self.trainable()
    }

    fn add_gradient(&self, gradient: &Tensor) -> Result<()> {
        self.gradient.add(gradient)
    }

    fn post_accumulate_grad(&self) -> Result<()> {
        let (unit, position) = self.unit()?;
        self.model()?.post_accumulate_grad(unit, position, &self.gradient)
    }

    fn post_pass(&self, pass: usize) -> Result<()> {
        let (unit, position) = self.unit()?;
        self.model()?.post_pass(unit, position, pass)
    }
}

impl Drop for FsdpParam {
    fn drop(&mut self) {
        let mut by_tensor = BY_TENSOR.write();
        for tensor in [&self.anchor, &self.held, &self.full.tensor] {
            by_tensor.remove(&tensor.id());
        }
        drop(by_tensor);
        BY_SHARD.write().remove(&self.shard.var().id());
    }
}

impl std::fmt::Debug for FsdpParam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FsdpParam({} {:?} {:?})", self.name(), self.shape(), self.dtype())
    }
}
