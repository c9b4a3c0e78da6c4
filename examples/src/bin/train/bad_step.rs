//! A step whose numbers are infinite or not a number, told so that a person knows what to do.

use std::fmt::Write;

use candle_core::backprop::GradStore;
use fsdp_candle::{ShardedOptimizer, ShardedVarMap, ValuesOf, World};

use crate::checkpoint::Checkpoints;
use crate::health::{ADVICE, look};

/// What helps when nothing has been learnt yet.
const ADVICE_BEFORE_STEPS: &str = "No step has been taken yet, so it is no matter of --lr: the model's weights are too \
                                   large for its dtype, or the data is to blame";

/// What helps against numbers that are too large for f16 alone.
const ADVICE_F16: &str = "f16 ends at 65504: pass --param-dtype bf16, which has the range of f32. ";

/// A step that is not taken, because its loss or the norm of its gradients is not finite.
pub(crate) struct BadStep<'a> {
    pub(crate) step: usize,
    /// The mean over all ranks.
    pub(crate) loss: f64,
    /// This rank's.
    pub(crate) own_loss: f64,
    pub(crate) norm: f64,
    pub(crate) grads: &'a GradStore,
    /// Of a run in f16.
    pub(crate) loss_scale: Option<f64>,
}

impl BadStep<'_> {
    /// What is wrong, where, since when, and what to do, in the same words on every rank. Collective.
    pub(crate) fn explain(
        &self,
        world: &World,
        vars: &ShardedVarMap,
        optim: &dyn ShardedOptimizer,
        checkpoints: &mut Checkpoints<'_>,
    ) -> anyhow::Result<String> {
        let BadStep { step, loss, own_loss, norm, grads, loss_scale } = *self;
        let is_bad = world.group().gather_values(vec![u8::from(!own_loss.is_finite())])?;
        let ranks: Vec<String> =
            (0..is_bad.len()).filter(|&rank| is_bad[rank] > 0).map(|rank| rank.to_string()).collect();

        let at_scale = loss_scale.map_or(String::new(), |scale| format!(" at a loss scale of {scale}"));
        let mut text = format!("step {step} was not taken: ");
        if ranks.is_empty() {
            let found = look(vars, &[ValuesOf::Gradients(grads)])?;
            let found = found.map_or_else(|| "each value is finite".into(), |found| found.to_string());
            write!(text, "the loss is {loss}, and the gradients' norm is {norm}{at_scale}: {found}")?;
        } else {
            let on =
                if ranks.len() == world.size() { "every rank".into() } else { format!("rank {}", ranks.join(", ")) };
            write!(text, "the loss is {loss} (on {on}), and the gradients' norm is {norm}{at_scale}")?;
        }
        match look(vars, &[ValuesOf::Parameters, ValuesOf::Moments(optim)])? {
            Some(found) => {
                let since = checkpoints.finite_after();
                write!(text, ". Before that, the weights had become so in a step after step {since}: {found}")?;
            }
            None => write!(text, ". The weights are those of step {} and finite", step - 1)?,
        }
        let advice = if step == 1 { ADVICE_BEFORE_STEPS } else { ADVICE };
        let of_f16 = loss_scale.map_or("", |_| ADVICE_F16);
        write!(text, ". {}. {of_f16}{advice}", checkpoints.healthy())?;
        Ok(text)
    }
}
