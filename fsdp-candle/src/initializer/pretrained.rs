//! Initial values read from a Hugging Face model directory, each rank reading the bytes of its own shards.

use std::path::Path;

use fsdp_ckpt::{TensorSource, hf::HfModel};
use half::{bf16, f16};

use super::{Initializer, ShardRequest, write_floats};
use crate::{Error, Result};

/// The weights of a model directory: `model.safetensors`, or `model.safetensors.index.json` and the files that it names. Floating point weights are
/// converted to the parameter's dtype.
pub struct Pretrained {
    model: HfModel,
}

impl Pretrained {
    /// Opens a directory; weights are read when parameters are built.
    ///
    /// # Errors
    /// When there are no weights, or a file is no safetensors file.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Ok(Pretrained { model: HfModel::open(dir.as_ref())? })
    }
}

/// The way out when weights do not fit.
const MISFIT: &str = "the weights do not belong to this config.json; use those that do, or start from random ones";

impl Initializer for Pretrained {
    fn check(&self, request: &ShardRequest<'_>) -> Result<()> {
        let fail = |message: String| Error::Parameter { name: request.name.into(), message };
        let info = self.model.tensor(request.name).map_err(|error| fail(format!("{error}: {MISFIT}")))?;
        if info.shape != request.shape {
            return Err(fail(format!(
                "the model asks for shape {:?}, but {} holds it with shape {:?}: {MISFIT}",
                request.shape,
                self.model.path().display(),
                info.shape
            )));
        }
        if !info.dtype.is_float() {
            return Err(fail(format!(
                "{} holds it as {}; weights are F32, F64, BF16 or F16",
                self.model.path().display(),
                info.dtype
            )));
        }
        Ok(())
    }

    fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> Result<()> {
        self.check(request)?;
        let info = self.model.tensor(request.name)?;
        let wanted = crate::storage::to_core_dtype(request.dtype)?;
        if wanted == info.dtype {
            return Ok(self.model.read(request.name, request.region, shard)?);
        }
        let mut raw = vec![0; request.region.elements() * info.dtype.size()];
        self.model.read(request.name, request.region, &mut raw)?;
        let values = floats(info.dtype, &raw);
        write_floats(request, values, shard)
    }

    fn contains(&self, name: &str) -> bool {
        self.model.tensors().contains_key(name)
    }
}

fn floats(dtype: fsdp_core::DType, raw: &[u8]) -> Box<dyn Iterator<Item = f64> + '_> {
    match dtype {
        fsdp_core::DType::F32 => Box::new(raw.as_chunks().0.iter().map(|b| f64::from(f32::from_ne_bytes(*b)))),
        fsdp_core::DType::BF16 => Box::new(raw.as_chunks().0.iter().map(|b| bf16::from_ne_bytes(*b).to_f64())),
        fsdp_core::DType::F16 => Box::new(raw.as_chunks().0.iter().map(|b| f16::from_ne_bytes(*b).to_f64())),
        _ => Box::new(raw.as_chunks().0.iter().map(|b| f64::from_ne_bytes(*b))),
    }
}
