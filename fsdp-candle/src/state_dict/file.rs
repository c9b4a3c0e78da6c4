//! The file of a map: `load` and `save` of `candle_nn::VarMap`.

use std::path::Path;

use fsdp_ckpt::{LoadOptions, MODEL, TensorShard, TensorSource, hf};
use fsdp_core::ProcessGroup;

use super::model::{load_model, model_tensors};
use crate::data_parallel::largest_over;
use crate::error::{Error, Result};
use crate::fsdp::ShardedVarMap;

impl ShardedVarMap {
    /// Writes every parameter and buffer to a safetensors file, as [`candle_nn::VarMap::save`] does: under its FQN, in
    /// its dtype. Plain Candle, and `VarMap::load`, read the file. Replaces an existing file. Collective: every rank
    /// passes the same path, on a file system that all ranks share.
    ///
    /// The ranks write their shards into one temporary file, without gathering the model, and rank 0 renames it. So the
    /// file is whole, or as it was. A parameter in blocks ([`FullyShard::store`](crate::FullyShard::store)) is saved as
    /// its bytes, `<fqn>.nf4` or `<fqn>.int8`, which [`ShardedVarMap::load`] loads.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear)?;
    /// # let dir = tempfile::tempdir()?;
    /// # let file = dir.path().join("model.safetensors");
    /// vars.save(&file)?;
    /// let mut plain = candle_nn::VarMap::new();
    /// # let vb = candle_nn::VarBuilder::from_varmap(&plain, DType::F32, world.device());
    /// # let plain_model = candle_nn::linear(4, 2, vb)?;
    /// plain.load(&file)?; // into plain Candle
    /// vars.load(&file)?; // at any number of ranks
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Checkpoint`] on every rank if any rank fails to write, and [`Error::Argument`] for a map
    /// without parameters.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        self.check_built("save", "call it after the model is built")?;
        let mut tensors = model_tensors(self)?;
        tensors.iter_mut().for_each(without_prefix);
        hf::export_file(path, &all_ranks(self)?, &tensors)?;
        Ok(())
    }

    /// Sets every parameter and buffer from a safetensors file, as [`candle_nn::VarMap::load`] does. Each rank reads
    /// only its shards. Converts floating point dtypes, where `VarMap` fails. Ignores tensors that the map lacks. Also
    /// takes the other formats of [`fsdp_ckpt::open`]. Call it after the model is built; to build a model from a file,
    /// [`Pretrained`](crate::initializer::Pretrained) allocates no values that are replaced. Collective.
    ///
    /// An average ([`crate::Ema`]) and an optimizer's state stay as they are.
    ///
    /// # Errors
    /// Fails on every rank if any rank fails. Names, shapes and dtypes are checked before anything changes:
    /// [`fsdp_ckpt::Error::NameMismatch`] names the parameters that the file lacks, and
    /// [`fsdp_ckpt::Error::TensorMismatch`] the shapes. Fails for a parameter in blocks that the file has as floats.
    /// After an error of reading, some parameters may have new values.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<()> {
        self.check_built("load", "call it after the model is built, or `init_with(Pretrained::open(path)?)` before")?;
        // All units are resharded first, also on a rank that fails to open the file: then all ranks gather them again.
        let outcome = self.reshard().and_then(|()| self.load_own(path.as_ref()));
        let own = if outcome.is_err() { self.mesh().rank() as f64 + 1. } else { 0. };
        let failed = largest_over(self.mesh(), vec![own], "load of a model's file")?[0];
        outcome?;
        if failed > 0. {
            return Err(Error::Argument(format!(
                "rank {} failed to load {}: see its error; some parameters may have new values",
                failed - 1.,
                path.as_ref().display()
            )));
        }
        Ok(())
    }

    /// Fails if the map has no parameter and no buffer.
    fn check_built(&self, call: &str, way_out: &str) -> Result<()> {
        if !(self.params().is_empty() && self.wholes().is_empty()) {
            return Ok(());
        }
        Err(Error::Argument(format!(
            "rank {}: ShardedVarMap::{call}: the map has no parameters: {way_out}",
            self.mesh().rank()
        )))
    }

    fn load_own(&self, path: &Path) -> Result<()> {
        let source = fsdp_ckpt::open(path)?;
        self.check_blocks(&*source)?;
        load_model(self, &*source, &LoadOptions::default())?;
        Ok(())
    }

    /// Fails for parameters in blocks whose floats the source has: blocks are encoded when a parameter is built.
    fn check_blocks(&self, source: &dyn TensorSource) -> Result<()> {
        let has = |name: &str| source.tensors().contains_key(name) || source.tensors().contains_key(&with_prefix(name));
        for param in self.params() {
            let stored = param.stored_name(param.name());
            if stored != param.name() && !has(&stored) && has(param.name()) {
                return Err(param.error(format!(
                    "{} has it as floats, and it is stored in blocks (FullyShard::store), which are encoded when it is \
                     built: call `vars.init_with(Pretrained::open(path)?)` before the model is built",
                    source.path().display()
                )));
            }
        }
        Ok(())
    }
}

fn with_prefix(name: &str) -> String {
    format!("{MODEL}{name}")
}

fn without_prefix(tensor: &mut TensorShard) {
    if let Some(name) = tensor.fqn.strip_prefix(MODEL) {
        tensor.fqn = name.into();
    }
}

/// Returns the group of all ranks of a map. Collective for a mesh of several dimensions.
fn all_ranks(vars: &ShardedVarMap) -> Result<ProcessGroup> {
    let mesh = vars.mesh();
    let names: Vec<&str> = mesh.layout().names().iter().map(String::as_str).collect();
    match names[..] {
        [_] => Ok(mesh.group(0)?.clone()),
        _ => Ok(mesh.flatten(&names, "all")?.group(0)?.clone()),
    }
}
