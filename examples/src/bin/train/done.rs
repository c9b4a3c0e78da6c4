//! How far a run has come, as its checkpoints say.

use anyhow::{Context, ensure};
use fsdp_ckpt::TensorSource;
use fsdp_core::DType;
use fsdp_core::layout::Region;
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
    /// What a checkpoint or model says. Of another program's, the step is that of the optimizer, 0 if it has none, and
    /// each step is taken to have seen as many sequences as one of this run does.
    pub(crate) fn of(source: &dyn TensorSource, sequences_per_step: u64) -> anyhow::Result<Self> {
        let number = |key: &str| source.values().get(key).and_then(Value::as_u64);
        if let (Some(step), Some(sequences)) = (number("step"), number("sequences")) {
            return Ok(Done { step: step as usize, sequences });
        }
        let step = optimizer_step(source)?;
        let sequences = step.checked_mul(sequences_per_step).with_context(|| {
            format!("{}: {step} steps of {sequences_per_step} sequences are beyond any count", source.path().display())
        })?;
        Ok(Done { step: step as usize, sequences })
    }

    /// What a checkpoint is to say.
    pub(crate) fn values(&self) -> Map<String, Value> {
        Map::from_iter([
            ("step".to_string(), Value::from(self.step)),
            ("sequences".to_string(), Value::from(self.sequences)),
        ])
    }
}

/// Beyond that not every number is a number of steps that was counted.
const MOST_STEPS: f32 = (1_u64 << 53) as f32;

/// The most steps that any parameter has taken.
fn optimizer_step(source: &dyn TensorSource) -> anyhow::Result<u64> {
    let is_step = |name: &str| name.starts_with("optim.state.") && name.ends_with(".step");
    let mut most = 0;
    for (name, tensor) in source.tensors().iter().filter(|(name, _)| is_step(name)) {
        let what = || format!("{} holds {name} as {} {:?}", source.path().display(), tensor.dtype, tensor.shape);
        ensure!(tensor.dtype == DType::F32 && tensor.shape.iter().product::<usize>() == 1, "{}: no step count", what());
        let mut step = [0; 4];
        source.read(name, &Region::whole(&tensor.shape), &mut step)?;
        let step = f32::from_ne_bytes(step);
        ensure!((0. ..=MOST_STEPS).contains(&step) && step.fract() == 0., "{}: {step} is no step count", what());
        most = most.max(step as u64);
    }
    Ok(most)
}

/// Whether there is an optimizer's state in it.
pub(crate) fn has_optimizer(source: &dyn TensorSource) -> bool {
    source.tensors().keys().any(|name| name.starts_with("optim.state."))
}
