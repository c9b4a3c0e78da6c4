//! `--gradcheck`: the gradients are those of the loss, or the run ends before its first step.

use anyhow::{Context, ensure};
use candle_core::{DType, Module};
use fsdp_candle::{FsdpModule, GradcheckOptions, World, gradcheck};
use fsdp_examples::console::Console;
use fsdp_examples::models::{self, LanguageModel};

use crate::args::Args;
use crate::feed::Feed;

/// Checks the model on the batch that comes next. Collective.
///
/// # Errors
/// When a unit's gradient is wrong, or can't be checked.
pub(crate) fn check(
    args: &Args,
    model: &FsdpModule<LanguageModel>,
    feed: &Feed,
    sequences: u64,
    world: &World,
) -> anyhow::Result<()> {
    ensure!(
        args.param_dtype.dtype() == DType::F32,
        "--gradcheck compares small differences of the loss, which bf16 rounds away: use it with --param-dtype f32"
    );
    let (inputs_bt, targets_bt) = feed.micro_batch(sequences, 0, world)?;
    let counted = feed.counted(sequences, world)?;
    let checked = gradcheck(model, &GradcheckOptions::default(), |model| {
        models::predictions(&model.forward(&inputs_bt)?, &targets_bt, counted)
    });
    let checked = checked.context("--gradcheck")?;
    if world.rank() == 0 {
        Console::Stderr.line(format_args!("gradcheck: the gradients of {} units are right", checked.len()));
    }
    Ok(())
}
