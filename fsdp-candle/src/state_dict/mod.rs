//! The state of models and optimizers as named tensors, as checkpoints hold it. Names are those of PyTorch's flattened
//! state dicts (`torch.distributed.checkpoint.state_dict`).

mod file;
mod model;
mod optimizer;
mod transfer;

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use fsdp_ckpt::{LoadOptions, LoadReport, LoadTensor, TensorShard, TensorSource};
use fsdp_core::layout::Region;
use fsdp_core::{DeviceMesh, Placement};
use serde_json::{Map, Value};

use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::fsdp::ShardedVarMap;
use crate::optim::ShardedOptimizer;
use crate::storage::{Memory, TensorMemory, to_dtype};

pub(crate) use model::model_state;
pub use model::{
    get_ema_state_dict, get_model_state_dict, load_model, model_tensors, set_ema_state_dict, set_model_state_dict,
};
pub(crate) use optimizer::{GROUPS, OPTIM, OptimizerState, group_values, hyper_of_groups, saved_hyper, set_steps};
pub use optimizer::{
    get_optimizer_state_dict, load_optimizer, load_param_groups, optimizer_tensors, optimizer_values,
    set_optimizer_state_dict,
};

/// One rank's part of a global tensor, or the whole tensor.
#[derive(Clone, Debug)]
pub struct StateTensor {
    /// Elements of `region`.
    pub tensor: Tensor,
    /// Shape of the global tensor.
    pub shape: Vec<usize>,
    /// Box of the global tensor that `tensor` holds; the whole tensor in a full state dict.
    pub region: Region,
    /// Mesh and placements, one a mesh dimension; `None` for a plain tensor.
    pub layout: Option<(DeviceMesh, Vec<Placement>)>,
}

impl StateTensor {
    /// Makes an entry of a whole tensor.
    pub fn whole(tensor: Tensor) -> Self {
        StateTensor { shape: tensor.dims().to_vec(), region: Region::whole(tensor.dims()), layout: None, tensor }
    }

    /// Makes an entry of a DTensor, whose memory it shares if the elements are contiguous. Fails if the DTensor is
    /// partial or this rank holds several boxes of it: redistribute first.
    pub fn of(tensor: &DTensor) -> Result<Self> {
        let (spec, mesh) = (tensor.spec(), tensor.device_mesh());
        if spec.placements().iter().any(|placement| matches!(placement, Placement::Partial(_))) {
            return Err(Error::Argument(format!(
                "{spec} cannot be in a state dict: a term of a reduction is not a value; redistribute it first"
            )));
        }
        Ok(StateTensor {
            tensor: tensor.to_local().contiguous()?,
            shape: spec.shape().to_vec(),
            region: spec.local_region(mesh.rank())?,
            layout: Some((mesh.clone(), spec.placements().to_vec())),
        })
    }

    /// Returns the entry as a DTensor in the same memory, as in PyTorch's state dicts. `None` for a plain tensor.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
    /// use fsdp_candle::{distribute_tensor, get_model_state_dict, StateDict, StateDictOptions, StateTensor};
    /// let entries = get_model_state_dict(&vars, &StateDictOptions::default())?.tensors;
    /// let weight = entries["weight"].dtensor()?.expect("parameters are sharded");
    /// let full = Tensor::zeros(weight.shape(), DType::F32, world.device())?;
    /// let zeros = distribute_tensor(&full, weight.device_mesh(), weight.placements())?;
    /// let entry = StateTensor::of(&zeros)?;
    /// assert_eq!(entry.region, entries["weight"].region);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn dtensor(&self) -> Result<Option<DTensor>> {
        let Some((mesh, placements)) = &self.layout else { return Ok(None) };
        DTensor::from_local(&self.tensor, &*self.shape, mesh, placements).map(Some)
    }

    /// Copies the box `region` of the global tensor to a tensor of this dtype.
    fn copy_region(&self, name: &str, shape: &[usize], region: &Region, dtype: DType) -> Result<Tensor> {
        let fail = |message: String| Err(Error::parameter(name, message));
        if self.shape != shape {
            return fail(format!(
                "the state dict has shape {:?}, the model {shape:?}: use the state of the same model",
                self.shape
            ));
        }
        if self.tensor.dtype() != dtype && !(self.tensor.dtype().is_float() && dtype.is_float()) {
            return fail(format!("the state dict has {:?}, the model {dtype:?}", self.tensor.dtype()));
        }
        if self.tensor.dims() != self.region.sizes {
            return fail(format!(
                "the state dict has a tensor of shape {:?}, expected {:?} for its region",
                self.tensor.dims(),
                self.region.sizes
            ));
        }
        let mut part = self.tensor.clone();
        if !region.is_empty() && self.region.intersect(region).as_ref() != Some(region) {
            return fail(format!(
                "the state dict has the part {:?}, this rank holds {region:?}: use the state dict of the same mesh, \
                 or a full one",
                self.region
            ));
        }
        for dim in 0..shape.len() {
            let start = region.offsets[dim].saturating_sub(self.region.offsets[dim]);
            let start = start.min(self.region.sizes[dim].saturating_sub(region.sizes[dim]));
            part = part.narrow(dim, start, region.sizes[dim])?;
        }
        Ok(to_dtype(&part, dtype)?.force_contiguous()?)
    }
}

/// The state of a model or an optimizer: named tensors and values.
#[derive(Clone, Debug, Default)]
pub struct StateDict {
    /// Tensors by name. In a sharded state dict they share the model's memory, so loading into them loads the model.
    pub tensors: BTreeMap<String, StateTensor>,
    /// Values other than tensors: an optimizer's `param_groups`.
    pub values: Map<String, Value>,
}

impl StateDict {
    /// Returns the input of [`fsdp_ckpt::save`]. Names begin with `prefix`: `model.` or `optim.`.
    pub fn shards(&self, prefix: &str) -> Vec<TensorShard> {
        self.saved(prefix).into_iter().map(SavedTensor::shard).collect()
    }

    /// Fills the tensors in place from a checkpoint or model of any format, saved on any mesh: PyTorch's `dcp.load`.
    /// Names in the checkpoint begin with `prefix`. Does not communicate.
    pub fn load(&self, prefix: &str, source: &dyn TensorSource, options: &LoadOptions) -> Result<LoadReport> {
        let targets: Vec<LoadTensor> = self.saved(prefix).into_iter().map(SavedTensor::target).collect();
        Ok(fsdp_ckpt::load(source, &targets, options)?)
    }

    /// Returns the tensors by their names in a checkpoint.
    pub(crate) fn saved(&self, prefix: &str) -> Vec<SavedTensor> {
        let saved = |(name, state): (&String, &StateTensor)| SavedTensor {
            fqn: format!("{prefix}{name}"),
            shape: state.shape.clone(),
            region: state.region.clone(),
            memory: Arc::new(TensorMemory(state.tensor.clone())),
            required: true,
        };
        self.tensors.iter().map(saved).collect()
    }
}

/// A tensor of a checkpoint, and the memory or file of this rank's part.
pub(crate) struct SavedTensor {
    /// Name in the checkpoint.
    pub(crate) fqn: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) region: Region,
    pub(crate) memory: Arc<dyn Memory>,
    /// Whether a checkpoint without it is incomplete.
    pub(crate) required: bool,
}

impl SavedTensor {
    /// Returns the tensor to save.
    pub(crate) fn shard(self) -> TensorShard {
        TensorShard { fqn: self.fqn, shape: self.shape, region: self.region, data: self.memory }
    }

    /// Returns the tensor to load.
    pub(crate) fn target(self) -> LoadTensor {
        LoadTensor { fqn: self.fqn, shape: self.shape, region: self.region, data: self.memory }
    }
}

/// Names that only one side has, as PyTorch's `load_state_dict` returns them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IncompatibleKeys {
    /// Names that the state dict lacks.
    pub missing: Vec<String>,
    /// Names that only the state dict has.
    pub unexpected: Vec<String>,
}

/// Options of state dicts, as PyTorch's `StateDictOptions`.
///
/// There is no `flatten_optimizer_state_dict`: names are always flat (`state.<fqn>.exp_avg`), as in checkpoints.
#[derive(Clone, Debug)]
pub struct StateDictOptions {
    /// Whether to get whole tensors instead of shards. Collective, one tensor at a time.
    pub full_state_dict: bool,
    /// Whether to copy to host memory. Only rank 0 gets a full state dict; other ranks get an empty one.
    pub cpu_offload: bool,
    /// Whether to set rank 0's full state dict on all ranks. Collective; needs `full_state_dict`.
    pub broadcast_from_rank0: bool,
    /// Whether to leave out frozen parameters.
    pub ignore_frozen_params: bool,
    /// Module to which the state dict is limited, such as `layers.0`.
    pub submodule: Option<String>,
    /// Whether the names of a submodule's tensors begin with the submodule's name.
    pub keep_submodule_prefixes: bool,
    /// Whether both sides must have the same names.
    pub strict: bool,
}

impl Default for StateDictOptions {
    /// Returns the options of a strict, sharded state dict of everything.
    fn default() -> Self {
        StateDictOptions {
            full_state_dict: false,
            cpu_offload: false,
            broadcast_from_rank0: false,
            ignore_frozen_params: false,
            submodule: None,
            keep_submodule_prefixes: true,
            strict: true,
        }
    }
}

impl StateDictOptions {
    /// Returns the name of the parameter `fqn` in the state dict, or `None` if it is left out.
    fn name<'a>(&self, fqn: &'a str) -> Option<&'a str> {
        let Some(module) = &self.submodule else { return Some(fqn) };
        let inside = fqn.strip_prefix(module.as_str())?.strip_prefix('.')?;
        Some(if self.keep_submodule_prefixes { fqn } else { inside })
    }
}

/// Returns the state of a model and of its optimizer, as [`get_model_state_dict`] and [`get_optimizer_state_dict`] do.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
/// use fsdp_candle::{get_state_dict, set_state_dict, StateDictOptions};
/// # let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default())?;
///
/// // Whole tensors on every rank.
/// let full = StateDictOptions { full_state_dict: true, ..StateDictOptions::default() };
/// let (before, moments) = get_state_dict(&vars, &optim, &full)?;
/// assert_eq!(before.tensors["weight"].tensor.dims(), [2, 4]);
///
/// optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
/// assert_eq!(optim.states()[0].step, 1);
///
/// // Restores the state from rank 0's copy.
/// let from_rank_0 = StateDictOptions { broadcast_from_rank0: true, ..full };
/// set_state_dict(&vars, &mut optim, &before, &moments, &from_rank_0)?;
/// assert_eq!(optim.states()[0].step, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn get_state_dict(
    vars: &ShardedVarMap,
    optim: &dyn ShardedOptimizer,
    options: &StateDictOptions,
) -> Result<(StateDict, StateDict)> {
    Ok((get_model_state_dict(vars, options)?, get_optimizer_state_dict(vars, optim, options)?))
}

/// Sets the state of a model and of its optimizer, as [`set_model_state_dict`] and [`set_optimizer_state_dict`] do.
pub fn set_state_dict(
    vars: &ShardedVarMap,
    optim: &mut dyn ShardedOptimizer,
    model: &StateDict,
    optimizer: &StateDict,
    options: &StateDictOptions,
) -> Result<IncompatibleKeys> {
    let mut keys = set_model_state_dict(vars, model, options)?;
    let more = set_optimizer_state_dict(vars, optim, optimizer, options)?;
    keys.missing.extend(more.missing);
    keys.unexpected.extend(more.unexpected);
    Ok(keys)
}
