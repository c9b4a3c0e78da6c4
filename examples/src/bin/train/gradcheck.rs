//! `--gradcheck`: the gradients are those of the loss, or the run ends before its first step.

use anyhow::{Context, ensure};
use candle_core::DType;
use fsdp_candle::{FsdpModule, GradcheckOptions, World, gradcheck};
use fsdp_examples::console::Console;
use fsdp_examples::data::Batches;
use fsdp_examples::models::{self, Batch, LanguageModel};

use crate::args::{AllGather, Args};

/// Fails where gradients can't be compared with differences of the loss.
pub(crate) fn check_flags(args: &Args) -> anyhow::Result<()> {
    ensure!(
        !args.gradcheck || args.param_dtype.dtype() == DType::F32,
        "--gradcheck compares small differences of the loss, which bf16 and f16 round away: use it with --param-dtype \
         f32"
    );
    ensure!(
        !args.gradcheck || args.all_gather == AllGather::Full,
        "--gradcheck compares small differences of the loss, which 8-bit weights round away: use it with --all-gather \
         full"
    );
    Ok(())
}

/// Checks the model on the batch that comes next. Collective.
///
/// # Errors
/// When a unit's gradient is wrong, or can't be checked.
pub(crate) fn check(
    args: &Args,
    model: &FsdpModule<LanguageModel>,
    batches: &Batches,
    sequences: u64,
    world: &World,
) -> anyhow::Result<()> {
    let batch = Batch::new(batches.micro_batch(sequences, 0)?, args.seq_len, world.device())?;
    let checked = gradcheck(model, &GradcheckOptions::default(), |model| models::cross_entropy(model, &batch));
    let checked = checked.context("--gradcheck")?;
    if world.rank() == 0 {
        Console::Stderr.line(format_args!("gradcheck: the gradients of {} units are right", checked.len()));
    }
    Ok(())
}
