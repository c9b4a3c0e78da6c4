//! Pre-trains or fine-tunes a language model, a classifier or an embedding model with its parameters sharded over the
//! ranks:
//! `fsdp-launch --nproc-per-node 2 train --help`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod adapters;
mod agreement;
mod args;
mod balance;
mod checkpoint;
mod directories;
mod evaluate;
mod export;
mod flag_types;
mod inputs;
mod memory_check;
mod nvtx;
mod objective;
mod optimizer;
mod prepare;
mod report;
mod rules;
mod run_record;
mod setup;
mod step_in_backward;
mod task;
mod texts;
mod trace;
mod trainer;

use std::process::ExitCode;

use fsdp_candle::World;
use fsdp_train::job;

use args::{Action, Args};
use directories::Hosts;
use export::GgufExport;
use trainer::Trainer;

fn main() -> ExitCode {
    let args = rules::parse();
    if let Some(Action::Prepare(args)) = &args.action {
        return job::exit_code(prepare::run(args));
    }
    job::run(args.device, |world| {
        // Later collectives rely on equal settings.
        agreement::check_settings(&args, world)?;
        args.batch_shape(world)?;
        let hosts = Hosts::of(&args, world)?;
        directories::check_writable(&args, &hosts, world)?;
        let trace = trace::init(args.trace.as_deref(), args.nvtx, world)?;
        let gguf = train(&args, hosts, world)?;
        trace.map_or(Ok(()), |trace| trace.finish(world))?;
        gguf.map_or(Ok(()), |gguf| gguf.write())
    })
}

/// Trains, and returns what this rank still has to write.
fn train(args: &Args, hosts: Hosts, world: &World) -> anyhow::Result<Option<GgufExport>> {
    let args = &inputs::fetch(args, world)?;
    export::check_gguf(args, world)?;
    let mut trainer = Trainer::new(args, hosts, world)?;
    trainer.begin()?;
    while let Some(step) = trainer.next_step() {
        let _span = tracing::debug_span!("step", number = step).entered();
        trainer.step()?;
        trainer.evaluate()?;
        trainer.save_if_due()?;
    }
    trainer.finish()
}
