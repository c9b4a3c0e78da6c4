//! Initial values read from a file, each rank reading the bytes of its own shards.

use std::path::Path;

use fsdp_ckpt::{TensorSource, hf::HfModel};

use super::request::{Initializer, ShardRequest};
use crate::error::{Error, Result};

/// The weights of a model directory: `model.safetensors`, or `model.safetensors.index.json` and the files that it
/// names; or of anything else that [`fsdp_ckpt`] reads. Floating point weights are converted to the parameter's dtype.
pub struct Pretrained {
    source: Box<dyn TensorSource>,
    names: Box<Names>,
}

type Names = dyn Fn(&str) -> String + Send + Sync;

impl Pretrained {
    /// Opens a directory; weights are read when parameters are built.
    ///
    /// # Errors
    /// When there are no weights, or a file is no safetensors file.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Ok(Pretrained::of(HfModel::open(dir.as_ref())?, |name| name.into()))
    }

    /// The tensors of a source, which calls a parameter what `names` says.
    pub fn of(source: impl TensorSource + 'static, names: impl Fn(&str) -> String + Send + Sync + 'static) -> Self {
        Pretrained { source: Box::new(source), names: Box::new(names) }
    }
}

/// The way out when weights do not fit.
const MISFIT: &str = "the weights do not belong to this config.json; use those that do, or start from random ones";

impl Initializer for Pretrained {
    fn check(&self, request: &ShardRequest<'_>) -> Result<()> {
        let fail = |message: String| Error::Parameter { name: request.name.into(), message };
        let name = (self.names)(request.name);
        let info = self.source.tensor(&name).map_err(|error| fail(format!("{error}: {MISFIT}")))?;
        if info.shape != request.shape {
            return Err(fail(format!(
                "the model asks for shape {:?}, but {} holds it with shape {:?}: {MISFIT}",
                request.shape,
                self.source.path().display(),
                info.shape
            )));
        }
        if !info.dtype.is_float() {
            return Err(fail(format!(
                "{} holds it as {}; weights are F32, F64, BF16 or F16",
                self.source.path().display(),
                info.dtype
            )));
        }
        Ok(())
    }

    fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> Result<()> {
        self.check(request)?;
        let dtype = crate::storage::to_core_dtype(request.dtype)?;
        Ok(fsdp_ckpt::read_as(&*self.source, &(self.names)(request.name), request.region, dtype, shard)?)
    }

    fn contains(&self, name: &str) -> bool {
        self.source.tensors().contains_key(&(self.names)(name))
    }
}
