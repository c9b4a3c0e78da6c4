//! Parameters and buffers that the builders of a map have made, and the requests of layers.

use std::sync::Arc;

use candle_core::{DType, Shape, Tensor, Var};
use candle_nn::Init;
use indexmap::IndexMap;

use super::param::FsdpParam;
use super::unit_options::UnitOptions;
use crate::data_parallel::DataParallel;
use crate::error::{Error, Result};

/// Parameters and buffers that the builders of a map have made.
#[derive(Default)]
pub(super) struct Built {
    pub(super) params: IndexMap<String, Owned>,
    pub(super) ignored: IndexMap<String, Var>,
    pub(super) buffers: IndexMap<String, Var>,
    /// The `fully_shard` calls whose closures run, the outermost first.
    pub(super) open_units: Vec<OpenParams>,
    /// Name of the parameter that a builder was asked for last.
    pub(super) last_asked_for: Option<String>,
}

/// A parameter and its unit.
pub(super) struct Owned {
    pub(super) param: Arc<FsdpParam>,
    /// Name of the unit. Each `fully_shard` call has an [`Arc`] of its own, since names may repeat.
    unit: Arc<str>,
}

/// A `fully_shard` call whose closure runs, and the parameters that it has built.
pub(super) struct OpenParams {
    pub(super) unit: EnclosingUnit,
    pub(super) params: Vec<Arc<FsdpParam>>,
}

/// The unit that a layer is built in.
#[derive(Clone)]
pub(super) struct EnclosingUnit {
    pub(super) name: Arc<str>,
    pub(super) opts: UnitOptions,
    pub(super) ranks: Arc<DataParallel>,
}

impl Built {
    /// Returns the unit whose closure runs, and records that it asks for `name`.
    pub(super) fn enclosing_unit(&mut self, name: &str) -> Result<EnclosingUnit> {
        let Some(open) = self.open_units.last() else {
            return Err(Error::parameter(
                name,
                "it was asked for outside fully_shard: build the module inside the closure of a fully_shard call",
            ));
        };
        self.last_asked_for = Some(name.into());
        Ok(open.unit.clone())
    }

    /// Returns the parameter that is asked for, if the same unit has built it already.
    pub(super) fn shared(&self, asked: &Asked<'_>, unit: &Arc<str>) -> Result<Option<Arc<FsdpParam>>> {
        let Asked { name, shape, dtype, .. } = asked;
        let Some(owned) = self.params.get(*name) else { return Ok(None) };
        let message = if !Arc::ptr_eq(&owned.unit, unit) {
            format!(
                "it already belongs to FSDP unit `{}`, and unit `{unit}` asks for it again: apply fully_shard once to \
                 each module, bottom-up, and pass the built submodules on. To generate or evaluate with a second model of these \
                 parameters, use the first one, held by `unshard_all`",
                owned.unit
            )
        } else if owned.param.shape() != shape || owned.param.spec.dtype != *dtype {
            format!(
                "unit `{unit}` asks for it as {:?} {:?} and as {:?} {dtype:?}: shared parameters need one shape and \
                 dtype",
                owned.param.shape().dims(),
                owned.param.spec.dtype,
                shape.dims()
            )
        } else {
            return Ok(Some(owned.param.clone()));
        };
        Err(Error::parameter(name, message))
    }

    /// Adds a parameter of the innermost open unit, which has the name `unit`.
    pub(super) fn add(&mut self, param: Arc<FsdpParam>, unit: Arc<str>) {
        self.params.insert(param.name().into(), Owned { param: param.clone(), unit });
        if let Some(open) = self.open_units.last_mut() {
            open.params.push(param);
        }
    }
}

/// Request of a layer to its builder.
pub(super) struct Asked<'a> {
    pub(super) name: &'a str,
    pub(super) shape: Shape,
    pub(super) init: Init,
    pub(super) dtype: DType,
}

impl Asked<'_> {
    /// Fails for a dtype that is not a floating point one, and for a parameter that is larger than any memory.
    pub(super) fn check(&self) -> Result<()> {
        let (dims, dtype) = (self.shape.dims(), self.dtype);
        if !dtype.is_float() {
            return Err(self.error(format!("expected a floating point dtype, found {dtype:?}")));
        }
        let bytes = dims.iter().try_fold(dtype.size_in_bytes(), |bytes, &size| bytes.checked_mul(size.max(1)));
        if bytes.is_some_and(|bytes| bytes <= isize::MAX as usize) {
            return Ok(());
        }
        Err(self
            .error(format!("of shape {dims:?} and {dtype:?} it is larger than memory can be: check the model's sizes")))
    }

    /// Returns whether it is a buffer. PyTorch registers tensors of these names as buffers, and Candle's `BatchNorm`
    /// asks its builder for the first two. The last one is the bias by which routers such as DeepSeek-V3's choose experts.
    pub(super) fn is_buffer(&self) -> bool {
        matches!(self.name.rsplit('.').next(), Some("running_mean" | "running_var" | "e_score_correction_bias"))
    }

    /// Returns the tensor of a variable that was built under this name and is whole on every rank.
    pub(super) fn same_whole(&self, var: &Var) -> Result<Tensor> {
        let (dims, dtype) = (self.shape.dims(), self.dtype);
        if (var.dims(), var.dtype()) == (dims, dtype) {
            return Ok(var.as_tensor().clone());
        }
        Err(self.error(format!(
            "it is whole on every rank, and was asked for as {:?} {:?} and as {dims:?} {dtype:?}: shared tensors need \
             one shape and dtype",
            var.dims(),
            var.dtype()
        )))
    }

    fn error(&self, message: String) -> Error {
        Error::parameter(self.name, message)
    }
}
