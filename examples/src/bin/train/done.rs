//! How far a run has come, as its checkpoints say.

use std::path::Path;

use anyhow::Context;
use fsdp_ckpt::TensorSource;
use serde_json::{Map, Value};

/// How far a run has come.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Done {
    /// Steps taken.
    pub(crate) step: usize,
    /// Sequences consumed, over all ranks: the position in the data, whatever the world size.
    pub(crate) sequences: u64,
}

impl Done {
    /// What the checkpoint in `path` says.
    pub(crate) fn of(checkpoint: &dyn TensorSource, path: &Path) -> anyhow::Result<Self> {
        let number = |key: &str| {
            checkpoint.values().get(key).and_then(Value::as_u64).with_context(|| {
                format!("{} does not say at which {key} it was saved; train saves that", path.display())
            })
        };
        Ok(Done { step: number("step")? as usize, sequences: number("sequences")? })
    }

    /// What a checkpoint is to say.
    pub(crate) fn values(&self) -> Map<String, Value> {
        Map::from_iter([
            ("step".to_string(), Value::from(self.step)),
            ("sequences".to_string(), Value::from(self.sequences)),
        ])
    }
}
