//! `fully_shard` makes one unit. `shard` makes all units of a model by the names of its modules.

use std::error::Error as StdError;
use std::sync::Arc;

use candle_nn::VarBuilder;
use fsdp_core::DeviceMesh;
use indexmap::{IndexMap, IndexSet};

use super::diagnostics::is_freed_storage_error;
use super::listed::listed;
use super::module::FsdpModule;
use super::param::FsdpParam;
use super::param_group::FsdpParamGroup;
use super::policy::{MixedPrecisionPolicy, OffloadPolicy, ReshardAfterForward};
use super::schedule::TAKES_NOTHING;
use super::settings::UnshardSettings;
use super::unit_options::{ShardPlacement, UnitOptions};
use super::unit_path::{ROOT, UnitId};
use super::var_map::{OpenUnit, ShardedVarMap};
use super::weight_format::WeightFormat;
use crate::data_parallel::{DataParallel, DataParallelMeshDims};
use crate::error::{Error, Result, to_candle};
use crate::extension::AllGatherExtension;
use crate::pattern::NamePattern;

/// Error for a builder of another kind.
const FOREIGN_BUILDER: &str = "it has no parameters: its VarBuilder is not of the ShardedVarMap of these options. \
     Pass `vars.builder(dtype)` instead of VarBuilder::from_varmap, from_mmaped_safetensors, from_tensors and the \
     like. To load weights, call `vars.init_with(initializer::Pretrained::open(dir)?)` before the model is built, or \
     `load_model` after";

/// Number of modules that an error lists.
const LISTED_MODULES: usize = 16;

/// The options of [`fully_shard`] and [`shard`], shared by the calls of one model.
#[derive(Clone)]
pub struct FullyShard {
    vars: ShardedVarMap,
    unit: UnitOptions,
}

impl FullyShard {
    /// Makes default options: the map's mesh, dimension 0, the parameters' own dtypes. Parameters are resharded after
    /// forward, except for the root's.
    pub fn new(vars: &ShardedVarMap) -> Self {
        FullyShard { vars: vars.clone(), unit: UnitOptions::default() }
    }

    /// Sets another mesh than the map's: 1-D, or 2-D as (replicate, shard). It must have all ranks that train copies of
    /// the model (the map's data-parallel dimensions), except for frozen parameters. Fails if the mesh has more
    /// dimensions.
    pub fn mesh(mut self, mesh: &DeviceMesh) -> Result<Self> {
        self.unit.ranks = Some(Arc::new(DataParallel::of(mesh)?));
        Ok(self)
    }

    /// Sets a mesh and the roles of its dimensions: PyTorch's `mesh` and `dp_mesh_dims`. Collective. Fails if the mesh
    /// lacks a dimension, one is named twice, or ranks pass different ones.
    pub fn dp_mesh_dims(mut self, mesh: &DeviceMesh, dims: &DataParallelMeshDims<'_>) -> Result<Self> {
        self.unit.ranks = Some(Arc::new(DataParallel::of_dims(mesh, dims)?));
        Ok(self)
    }

    /// Sets the dtypes of compute and communication.
    pub fn mp_policy(mut self, policy: MixedPrecisionPolicy) -> Self {
        self.unit.mp_policy = policy;
        self
    }

    /// Sets what a unit does with its unsharded parameters between forward and backward.
    pub fn reshard_after_forward(mut self, policy: ReshardAfterForward) -> Self {
        self.unit.reshard_after_forward = policy;
        self
    }

    /// Sets where shards, sharded gradients and optimizer state are stored. On a CPU device both policies are the same.
    pub fn offload_policy(mut self, policy: OffloadPolicy) -> Self {
        self.unit.offload_policy = policy;
        self
    }

    /// Sets the choice of the dimension, and optionally the mesh, that each parameter is sharded along.
    pub fn shard_placement_fn(
        mut self,
        choose: impl Fn(&str, &[usize]) -> Option<ShardPlacement> + Send + Sync + 'static,
    ) -> Self {
        self.unit.shard_placement_fn = Some(Arc::new(choose));
        self
    }

    /// Sets whether the replicas of a 2-D mesh (HSDP) divide each shard among them. Default: false. Each replica then
    /// holds and updates a part of the shard, with its gradient and optimizer state. The state is divided by all ranks,
    /// while units are still unsharded and reduced among the shard ranks.
    ///
    /// When a root's forward begins, the replicas gather the shards of the units inside it, in the compute dtype. They
    /// drop them when a backward has handed out gradients, or a forward without a graph ends. Micro-batches that hand
    /// out no gradients ([`set_requires_gradient_sync`](FsdpModule::set_requires_gradient_sync),
    /// [`set_requires_all_reduce`](FsdpModule::set_requires_all_reduce),
    /// [`set_is_last_backward`](FsdpModule::set_is_last_backward)) share one gather, and parameters must not be written
    /// between them. A reduce-scatter replaces the all-reduce over replicas, so the traffic is the same.
    /// Parameters that are frozen when they are built keep whole shards.
    ///
    /// Losses, gradients and checkpoints are the same as with HSDP. Dimensions other than 0 must divide evenly over all
    /// ranks. The mesh must replicate along one dimension, left of the dimension that shards. Without replicas, the
    /// option has no effect.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// use fsdp_core::process_group::local;
    ///
    /// local::try_run(4, |group| {
    ///     let world = World::of(group);
    ///     let mesh = world.mesh(&[("dp_replicate", 2), ("dp_shard", 2)])?;
    ///     let vars = ShardedVarMap::new(&mesh, world.device());
    ///     let opts = FullyShard::new(&vars).shard_optimizer_over_replicas(true);
    ///     let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 8, vb))?;
    ///     let weight = &model.params()[0];
    ///     assert_eq!(weight.var().dims(), [2, 4]); // a half of the 4 rows that two replicas share
    ///     assert_eq!(weight.placements()[0], Placement::StridedShard { dim: 0, split_factor: 2 });
    ///     let grads = model.backward(&model.forward(&Tensor::ones((3, 4), DType::F32, world.device())?)?.sum_all()?)?;
    ///     assert_eq!(grads.get(weight.var()).unwrap().dims(), [2, 4]);
    ///     Ok::<_, fsdp_candle::Error>(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn shard_optimizer_over_replicas(mut self, divide: bool) -> Self {
        self.unit.shard_optimizer_over_replicas = divide;
        self
    }

    /// Excludes the parameters whose FQN `ignored` accepts. They stay whole on every rank, as plain variables
    /// ([`ShardedVarMap::ignored`]), and their gradients are not reduced.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, opts, vb) = one_rank()?;
    /// let opts = FullyShard::new(&vars).ignored_params(|fqn| fqn.ends_with("bias"));
    /// let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear(4, 2, vb))?;
    /// assert_eq!(model.params().len(), 1);
    /// let (name, bias) = vars.ignored().remove(0);
    /// assert_eq!(name, "bias");
    /// let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// let grads = model.backward(&model.forward(&x)?.sum_all()?)?;
    /// assert_eq!(grads.get(&bias).unwrap().to_vec1::<f32>()?, [3.; 2]); // the gradient of this rank's batch only
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn ignored_params(mut self, ignored: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.unit.ignored_params = Some(Arc::new(ignored));
        self
    }

    /// Sets the extension of each parameter, which encodes the shards that the all-gather sends.
    pub fn all_gather_extension(
        mut self,
        choose: impl Fn(&str) -> Option<Arc<dyn AllGatherExtension>> + Send + Sync + 'static,
    ) -> Self {
        self.unit.extension = Some(Arc::new(choose));
        self
    }

    /// Sets how frozen parameters are stored, gathered and saved: see [`WeightFormat`]. Initial values are read and
    /// encoded piece by piece, so the parameter never exists in the builder's dtype.
    ///
    /// A parameter in blocks has at least two dimensions, and shards are cut between blocks. [`FsdpParam::var`] and the
    /// state dict have its bytes, under the name `<fqn>.nf4` or `<fqn>.int8`. `fsdp-ckpt convert` decodes them for
    /// other programs. Building fails for a parameter that is trained, that has an
    /// [extension](FullyShard::all_gather_extension), or whose last dimension is not whole blocks.
    pub fn store(mut self, choose: impl Fn(&str, &[usize]) -> Option<WeightFormat> + Send + Sync + 'static) -> Self {
        self.unit.store = Some(Arc::new(choose));
        self
    }
}

/// Builds a module with `build`, and makes a unit of the parameters that it asks `vb` for, except for parameters of
/// units inside it. Apply it bottom-up, as PyTorch's `fully_shard`. To make one unit of several modules, build a tuple
/// of them and split it with [`FsdpModule::into_parts`].
///
/// As on PyTorch's meta device, each rank allocates its shards only. The tensors that layers hold have no memory until
/// the unit runs.
///
/// # Errors
/// Errors of `build`, which maps errors of other types: `|vb| Model::new(vb).map_err(candle_core::Error::wrap)`.
/// [`shard`] takes any type. Here most closures end in `Ok(..)`, and each would have to name its type. Fails if `vb` is
/// not a builder of the options' map ([`ShardedVarMap::builder`]). Fails if `build` asks for a parameter that another
/// unit owns, that is too large for memory, or that is trained on a mesh without some ranks of the map's. All errors
/// name the unit.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
///
/// let world = World::single().unwrap();
/// let vars = ShardedVarMap::of_world(&world).unwrap();
/// let opts = FullyShard::new(&vars);
/// let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear(4, 2, vb)).unwrap();
/// let loss = model.forward(&Tensor::ones((3, 4), DType::F32, &Device::Cpu).unwrap()).unwrap().mean_all().unwrap();
/// let grads = model.backward(&loss).unwrap();
/// assert_eq!(grads.get(vars.trainable()[0].var()).unwrap().dims(), [2, 4]);
/// ```
pub fn fully_shard<M>(
    opts: &FullyShard,
    vb: VarBuilder<'static>,
    build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
) -> Result<FsdpModule<M>> {
    make(None, opts, vb, build)
}

/// Builds a model that does not know of FSDP, and makes units of its modules by their names. The rest of the model is a
/// unit of its own, as [`fully_shard`] makes it.
///
/// `units` are patterns of module FQNs: `model.layers.*` makes a unit of each layer. A `*` matches any characters
/// between two dots, `**` any number of names (`**.blocks.*`), `?` and `[0-9]` one character. A parameter belongs to
/// the innermost module that a pattern matches.
///
/// The model uses the layers of [`nn`](crate::nn): `use fsdp_candle::nn as candle_nn;` in the model's file is the
/// only change. Nobody calls the units. The first use of a unit's parameters unshards it, in forward and in backward,
/// and prefetches the next unit of the last iteration. After forward, a unit is resharded when a layer of a unit beside
/// it computes, or the forward ends. In backward, each parameter is freed when its gradient is complete.
///
/// A parameter that no layer of `nn` holds is *unmanaged*: the model multiplies it by hand, or a layer of another crate
/// holds it. Nothing reports its uses, so it stays in the enclosing unit, whatever the patterns say.
/// [`FsdpModule::unmanaged_parameters`] lists them, and a warning appears above 1 % of the model. A parameter that a
/// layer of `nn` holds and the model also uses by hand is unsharded only in the layer's forward: exclude its module
/// from the patterns, or wrap it in [`fully_shard`].
///
/// Modules that `build` passes to [`fully_shard`] become called units, beside units by name. Checkpoint
/// ([`activation_checkpoint`](crate::activation_checkpoint)) one layer at a time: all units that a closure uses are
/// unsharded while it runs again. The mixed precision policy casts inputs where a module is called, so not at units by
/// name. Fails as [`fully_shard`] does, for an invalid pattern, and for a pattern that matches no module.
///
/// The error of `build` may be of any type, such as `anyhow::Error`: it becomes Candle's, with the text of its causes.
/// A closure that ends in `Ok(..)` names the type: `Ok::<_, candle_core::Error>(..)`.
///
/// ```
/// use candle_core::{DType, Module, Tensor};
/// use fsdp_candle::{shard, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::of_world(&world)?;
///
/// mod model {
/// #   use ::candle_nn::VarBuilder;
/// #   use candle_core::{Module, Result, Tensor};
///     use fsdp_candle::nn as candle_nn; // the only line that differs
///
///     pub struct Model {
///         embed: candle_nn::Embedding,
///         layers: Vec<candle_nn::Linear>,
///         head: candle_nn::Linear,
///     }
///
///     impl Model {
///         pub fn new(layers: usize, vb: VarBuilder) -> Result<Self> {
///             let layer = |i| candle_nn::linear(8, 8, vb.pp(format!("model.layers.{i}")));
///             Ok(Model {
///                 embed: candle_nn::embedding(10, 8, vb.pp("model.embed"))?,
///                 layers: (0..layers).map(layer).collect::<Result<_>>()?,
///                 head: candle_nn::linear(8, 10, vb.pp("head"))?,
///             })
///         }
///     }
///
///     impl Module for Model {
///         fn forward(&self, ids: &Tensor) -> Result<Tensor> {
///             let x = self.layers.iter().try_fold(self.embed.forward(ids)?, |x, layer| layer.forward(&x))?;
///             self.head.forward(&x)
///         }
///     }
/// }
///
/// let opts = FullyShard::new(&vars);
/// let model = shard(&opts, &["model.layers.*"], vars.builder(DType::F32), |vb| model::Model::new(3, vb))?;
/// assert_eq!(model.units().len(), 4); // three layers, and the root
/// assert!(model.unmanaged_parameters().is_empty());
/// let logits = model.forward(&Tensor::new(&[1u32, 2, 3], world.device())?)?;
/// model.backward(&logits.sqr()?.mean_all()?)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn shard<M, E: Into<Box<dyn StdError + Send + Sync>>>(
    opts: &FullyShard,
    units: &[&str],
    vb: VarBuilder<'static>,
    build: impl FnOnce(VarBuilder<'static>) -> std::result::Result<M, E>,
) -> Result<FsdpModule<M>> {
    make(Some(units), opts, vb, build)
}

fn name_of(vb: &VarBuilder<'_>) -> String {
    let prefix = vb.prefix();
    if prefix.is_empty() { ROOT.to_string() } else { prefix }
}

/// Makes a unit, and the units by name inside it, which `patterns` select.
fn make<M, E: Into<Box<dyn StdError + Send + Sync>>>(
    patterns: Option<&[&str]>,
    opts: &FullyShard,
    vb: VarBuilder<'static>,
    build: impl FnOnce(VarBuilder<'static>) -> std::result::Result<M, E>,
) -> Result<FsdpModule<M>> {
    let FullyShard { vars, unit: opts } = opts;
    let name = name_of(&vb);
    let ranks = match &opts.ranks {
        Some(ranks) => vars.on_whole_mesh(ranks.clone()),
        None => vars.ranks()?,
    };
    if let ReshardAfterForward::To(size) = opts.reshard_after_forward {
        ranks.post_forward_group(size)?;
    }
    let schedule = vars.schedule();
    let unit = OpenUnit::begin(vars, &name, opts, &ranks);
    let inner = build(vb.clone()).map_err(|cause| {
        let cause = to_candle(cause);
        let cause = match is_freed_storage_error(&cause) {
            true => cause.context(reads_values(vars.last_asked_for())),
            false => cause,
        };
        Error::Build { unit: name.clone(), cause: Box::new(cause.into()) }
    })?;
    let is_hollow = unit.is_empty();
    if is_hollow && !vars.is_behind(&vb) {
        return Err(Error::unit(&name, FOREIGN_BUILDER));
    }
    // `shard` makes whole models. A unit without parameters may be a part of a model, such as an activation.
    if is_hollow && patterns.is_some() && name == ROOT && schedule.units().iter().all(|unit| unit.is_hollow) {
        return Err(Error::unit(&name, TAKES_NOTHING));
    }
    let params = unit.params();
    if let Some(param) = params.iter().find(|param| param.lacks_tp_layer()) {
        return Err(param.error(lacks_tp_layer(param)));
    }
    let UnitsByName { units, own, unmanaged } = UnitsByName::of(&params, &vb.prefix(), patterns.unwrap_or_default())?;
    unit.close();
    let add = |name: String, params, by_name_in: Option<usize>| {
        let id = UnitId { index: schedule.next_index(), name: name.into() };
        let (mp_policy, pool) = (opts.mp_policy.clone(), schedule.pool.clone());
        let group = FsdpParamGroup::new(id, params, mp_policy, pool, schedule.map, by_name_in.is_some(), is_hollow);
        tracing::debug!(unit = group.name(), parameters = group.params().len(), "fully_shard");
        schedule.add(group.clone(), UnshardSettings::new(opts.reshard_after_forward), by_name_in);
        group
    };
    let called = schedule.next_index() + units.len();
    for (name, params) in units {
        add(name, params, Some(called));
    }
    let group = add(name, own, None);
    if let Some(message) = warning_of_unmanaged(group.name(), &unmanaged, &vars.params()) {
        schedule.diagnostics.warn(&message);
    }
    Ok(FsdpModule::new(inner, group, schedule.clone(), unmanaged))
}

/// Explains an error of Candle about a parameter whose values were read while its unit is built. Candle does not tell
/// which tensor an operation read.
fn reads_values(last_asked_for: Option<String>) -> String {
    let place = last_asked_for.map_or_else(String::new, |name| format!(" after `{name}` was asked for"));
    format!(
        "a parameter was read{place}. Parameters have no values while a model is built: compute on them in forward (see \
         docs/from-candle.md)"
    )
}

fn lacks_tp_layer(param: &FsdpParam) -> String {
    let style = param.parallel().map_or("parallel", |parallel| parallel.style.name());
    format!(
        "the plan makes its module {style}, and its layer does not support tensor parallelism: build the module from \
         `linear`, `embedding` and the like of fsdp_candle::nn, or remove it from the plan"
    )
}

/// Returns the warning of unmanaged parameters, if they are more than 1 % of the model.
fn warning_of_unmanaged(unit: &str, unmanaged: &[Arc<FsdpParam>], all: &[Arc<FsdpParam>]) -> Option<String> {
    let bytes = |params: &[Arc<FsdpParam>]| -> usize {
        params.iter().map(|param| param.unsharded_shape().elem_count() * param.compute_dtype().size_in_bytes()).sum()
    };
    let (unmanaged_bytes, all_bytes) = (bytes(unmanaged), bytes(all));
    (unmanaged_bytes > all_bytes / 100).then(|| {
        let names: Vec<String> = unmanaged.iter().map(|param| param.name().to_string()).collect();
        format!(
            "unit `{unit}`: no layer of fsdp_candle::nn holds {} parameters ({unmanaged_bytes} of {all_bytes} bytes), so \
             they stay gathered from the beginning of forward to the end of backward: {}. Build the model from the \
             layers of fsdp_candle::nn (`use fsdp_candle::nn as candle_nn;`). Wrap modules that multiply weights by hand \
             in fully_shard",
            names.len(),
            listed(&names)
        )
    })
}

/// The parameters of one `shard` call, by unit.
struct UnitsByName {
    /// Units by module path, in the order in which they were built. A unit comes before the units inside it.
    units: IndexMap<String, Vec<Arc<FsdpParam>>>,
    /// All other parameters, in the order in which they were built.
    own: Vec<Arc<FsdpParam>>,
    /// The parameters of `own` that a pattern matches and no layer of `nn` holds.
    unmanaged: Vec<Arc<FsdpParam>>,
}

impl UnitsByName {
    /// Divides the parameters of the module at `path`, which is empty for the root.
    fn of(params: &[Arc<FsdpParam>], path: &str, patterns: &[&str]) -> Result<Self> {
        let names: Vec<&str> = params.iter().map(|param| param.name()).collect();
        let patterns = compiled(patterns)?;
        check_matches(&patterns, &names, path)?;
        let mut all = UnitsByName { units: IndexMap::new(), own: vec![], unmanaged: vec![] };
        for param in params {
            let mut innermost = None;
            for module in matched(param.name(), path, &patterns) {
                // The first parameter that is built in a unit, or inside it, gives the unit its place.
                innermost = Some(all.units.entry(module.to_string()).or_default());
            }
            match innermost {
                Some(unit) if param.runs_pre_use_hook() => unit.push(param.clone()),
                Some(_) => {
                    all.unmanaged.push(param.clone());
                    all.own.push(param.clone());
                }
                None => all.own.push(param.clone()),
            }
        }
        all.units.retain(|_, params| !params.is_empty());
        Ok(all)
    }
}

fn compiled(patterns: &[&str]) -> Result<Vec<NamePattern>> {
    patterns.iter().map(|text| NamePattern::new(text)).collect()
}

/// Returns the paths of the modules inside `path` that a parameter belongs to, the outermost first.
fn modules<'a>(name: &'a str, path: &str) -> impl Iterator<Item = &'a str> {
    let outside = path.len();
    name.match_indices('.').map(|(at, _)| at).filter(move |&at| at > outside).map(|end| &name[..end])
}

/// Returns the modules of a parameter that a pattern matches.
fn matched<'a>(name: &'a str, path: &str, patterns: &[NamePattern]) -> impl Iterator<Item = &'a str> {
    modules(name, path).filter(|module| patterns.iter().any(|pattern| pattern.matches(module)))
}

/// Fails for a pattern that matches no module.
fn check_matches(patterns: &[NamePattern], names: &[&str], path: &str) -> Result<()> {
    let matches = |pattern: &NamePattern| names.iter().any(|name| modules(name, path).any(|at| pattern.matches(at)));
    let Some(idle) = patterns.iter().find(|pattern| !matches(pattern)) else { return Ok(()) };
    let listed = match list_modules(names.iter().flat_map(|name| modules(name, path))) {
        Some(listed) => format!("the modules are {listed}"),
        None => "no module inside it has parameters outside of other units".into(),
    };
    Err(Error::Argument(format!("units: the pattern `{idle}` matches no module's name; {listed}")))
}

/// Lists names of modules. Names that differ by a number are one entry.
pub(super) fn list_modules<'a>(modules: impl Iterator<Item = &'a str>) -> Option<String> {
    let numberless = |module: &str| {
        let parts = module.split('.').map(|part| if part.parse::<u64>().is_ok() { "*" } else { part });
        parts.collect::<Vec<_>>().join(".")
    };
    let names: IndexSet<String> = modules.map(numberless).collect();
    let mut listed: Vec<String> = names.iter().take(LISTED_MODULES).map(|name| format!("`{name}`")).collect();
    if names.len() > LISTED_MODULES {
        listed.push(format!("{} more", names.len() - LISTED_MODULES));
    }
    (!listed.is_empty()).then(|| listed.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit_of<'a>(name: &'a str, path: &str, patterns: &[&str]) -> Option<&'a str> {
        matched(name, path, &compiled(patterns).unwrap()).last()
    }

    #[test]
    fn a_parameter_belongs_to_the_innermost_match() {
        let layers = ["model.layers.*"];
        let nested = ["model.layers.*", "model.layers.*.experts.*"];
        for (name, path, patterns, unit) in [
            ("model.layers.3.mlp.up.weight", "", &layers[..], Some("model.layers.3")),
            ("model.layers.13.norm", "", &layers, Some("model.layers.13")),
            ("model.norm.weight", "", &layers, None),
            ("model.layers.scale", "", &layers, None), // a parameter is not a module
            ("lm_head.weight", "", &layers, None),
            ("model.layers.3.experts.1.up.weight", "", &nested, Some("model.layers.3.experts.1")),
            ("model.layers.3.gate.weight", "", &nested, Some("model.layers.3")),
            ("vision.blocks.0.up.weight", "", &["**.blocks.*"], Some("vision.blocks.0")),
            ("h.1.up.weight", "", &["h.[0-1]"], Some("h.1")),
            // Only modules inside `path` become units.
            ("encoder.0.up.weight", "encoder.0", &["encoder.*"], None),
            ("encoder.0.up.weight", "encoder", &["encoder.*"], Some("encoder.0")),
        ] {
            assert_eq!(unit_of(name, path, patterns), unit, "{name}");
        }
    }

    #[test]
    fn a_pattern_without_a_match_lists_the_modules() {
        let names = ["model.embed.weight", "model.layers.0.up.weight", "model.layers.1.up.weight", "head"];
        let check = |pattern: &str| check_matches(&compiled(&["model.*", pattern])?, &names, "");
        assert_eq!(
            check("layers.*").unwrap_err().to_string(),
            "units: the pattern `layers.*` matches no module's name; the modules are `model`, `model.embed`, \
             `model.layers`, `model.layers.*`, `model.layers.*.up`"
        );
        assert!(check("model.layers.*").is_ok());
        let message = check("model.[layers").unwrap_err().to_string();
        assert!(message.contains("`model.[layers` is not a valid pattern of names"), "{message}");
    }
}
