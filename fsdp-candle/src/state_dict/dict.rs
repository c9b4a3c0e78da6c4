//! A state dict: named tensors, each a part or all of a global one, and values beside them.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use fsdp_ckpt::{LoadOptions, LoadReport, LoadTensor, TensorShard, TensorSource};
use fsdp_core::layout::Region;
use fsdp_core::{DeviceMesh, Placement};
use serde_json::{Map, Value};

use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::storage::{TensorMemory, to_dtype};

/// One rank's part of a global tensor, or all of it.
#[derive(Clone, Debug)]
pub struct StateTensor {
    /// The elements of `region`.
    pub tensor: Tensor,
    /// The shape of the global tensor.
    pub shape: Vec<usize>,
    /// The box of the global tensor that `tensor` is; of a full state dict, all of it.
    pub region: Region,
    /// The mesh that it lies on and its placements there, one a mesh dimension; `None` for a plain tensor.
    pub layout: Option<(DeviceMesh, Vec<Placement>)>,
}

impl StateTensor {
    /// A whole tensor.
    pub fn whole(tensor: Tensor) -> Self {
        StateTensor { shape: tensor.dims().to_vec(), region: Region::whole(tensor.dims()), layout: None, tensor }
    }

    /// A rank's part of a DTensor, whose memory it shares where its elements lie in order.
    ///
    /// # Errors
    /// When the DTensor is partial, or this rank holds several boxes of it: it is to be redistributed first.
    pub fn of(tensor: &DTensor) -> Result<Self> {
        let (spec, mesh) = (tensor.spec(), tensor.device_mesh());
        if spec.placements().iter().any(|placement| matches!(placement, Placement::Partial(_))) {
            return Err(Error::Argument(format!(
                "{spec} is no entry of a state dict: a term of a reduction is no value; redistribute it first"
            )));
        }
        Ok(StateTensor {
            tensor: tensor.to_local().contiguous()?,
            shape: spec.shape().to_vec(),
            region: spec.local_region(mesh.rank())?,
            layout: Some((mesh.clone(), spec.placements().to_vec())),
        })
    }

    /// The entry as a DTensor, in the same memory: what PyTorch's state dicts hold. Of a plain tensor there is none.
    ///
    /// ```
    /// # use candle_core::{DType, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
    /// use fsdp_candle::{distribute_tensor, get_model_state_dict, StateDict, StateDictOptions, StateTensor};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
    /// # let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
    /// # let model = fully_shard(&opts, vb, |vb| nn::linear_no_bias(4, 2, vb))?;
    /// let entries = get_model_state_dict(&vars, &StateDictOptions::default())?.tensors;
    /// let weight = entries["weight"].dtensor()?.expect("parameters are sharded");
    /// let full = Tensor::zeros(weight.shape(), DType::F32, world.device())?;
    /// let zeros = distribute_tensor(&full, weight.device_mesh(), weight.placements())?;
    /// let entry = StateTensor::of(&zeros)?;
    /// assert_eq!(entry.region, entries["weight"].region);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`DTensor::from_local`].
    pub fn dtensor(&self) -> Result<Option<DTensor>> {
        let Some((mesh, placements)) = &self.layout else { return Ok(None) };
        DTensor::from_local(&self.tensor, &*self.shape, mesh, placements).map(Some)
    }

    /// The box `region` of the global tensor, as a tensor of this dtype with memory of its own.
    pub(super) fn cut(&self, name: &str, shape: &[usize], region: &Region, dtype: DType) -> Result<Tensor> {
        let fail = |message: String| Err(Error::Parameter { name: name.into(), message });
        if self.shape != shape {
            return fail(format!(
                "the state dict has it with shape {:?}, the model with {shape:?}: set the state of the same model",
                self.shape
            ));
        }
        if !self.tensor.dtype().is_float() || !dtype.is_float() {
            return fail(format!("the state dict has it as {:?}, the model as {dtype:?}", self.tensor.dtype()));
        }
        if self.tensor.dims() != self.region.sizes {
            return fail(format!(
                "the state dict has a tensor of shape {:?} for a part of shape {:?}",
                self.tensor.dims(),
                self.region.sizes
            ));
        }
        let mut part = self.tensor.clone();
        if !region.is_empty() && self.region.intersect(region).as_ref() != Some(region) {
            return fail(format!(
                "the state dict has the part {:?} of it and this rank holds {region:?}: set the state dict of the same \
                 mesh, or a full one",
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

/// Named tensors and values: the state of a model or an optimizer.
#[derive(Clone, Debug, Default)]
pub struct StateDict {
    /// Tensors by name. Of a sharded state dict they share their memory with the model: loading into them is loading
    /// into the model.
    pub tensors: BTreeMap<String, StateTensor>,
    /// What is no tensor: an optimizer's `param_groups`.
    pub values: Map<String, Value>,
}

impl StateDict {
    /// What [`fsdp_ckpt::save`] takes, names beginning with `prefix`: `model.` or `optim.`.
    pub fn shards(&self, prefix: &str) -> Vec<TensorShard> {
        let shard = |(name, state): (&String, &StateTensor)| TensorShard {
            fqn: format!("{prefix}{name}"),
            shape: state.shape.clone(),
            region: state.region.clone(),
            data: Arc::new(TensorMemory(state.tensor.clone())),
        };
        self.tensors.iter().map(shard).collect()
    }

    /// Fills the tensors in place from a checkpoint or model of any format, whatever mesh wrote it: PyTorch's
    /// `dcp.load`. Names in the checkpoint begin with `prefix`. No communication.
    ///
    /// # Errors
    /// Those of [`fsdp_ckpt::load`].
    pub fn load(&self, prefix: &str, source: &dyn TensorSource, options: &LoadOptions) -> Result<LoadReport> {
        let target = |(name, state): (&String, &StateTensor)| LoadTensor {
            fqn: format!("{prefix}{name}"),
            shape: state.shape.clone(),
            region: state.region.clone(),
            data: Arc::new(TensorMemory(state.tensor.clone())),
        };
        let targets: Vec<LoadTensor> = self.tensors.iter().map(target).collect();
        Ok(fsdp_ckpt::load(source, &targets, options)?)
    }
}

/// Names that a state dict and what it was set to did not both have, as PyTorch's `load_state_dict` returns them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IncompatibleKeys {
    /// Names that the state dict lacks.
    pub missing: Vec<String>,
    /// Names that it has too many.
    pub unexpected: Vec<String>,
}
