//! Starting a measurement's ranks where no launcher has.

use std::process::{Child, Command, ExitCode};

use anyhow::Context;

/// Starts this program, with the arguments that it has, once for each of `ranks` ranks, and waits for all.
pub(crate) fn start(ranks: usize) -> anyhow::Result<ExitCode> {
    let program = std::env::current_exe().context("can't tell which program this is")?;
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let start = |rank: usize| {
        Command::new(&program)
            .args(std::env::args_os().skip(1))
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("LOCAL_WORLD_SIZE", ranks.to_string())
            .env("TORCHELASTIC_RUN_ID", format!("bench-{}", std::process::id()))
            .env("RAYON_NUM_THREADS", (cores / ranks).max(1).to_string())
            .spawn()
            .with_context(|| format!("can't start rank {rank}"))
    };
    let mut started = (0..ranks).map(start).collect::<anyhow::Result<Vec<Child>>>()?;
    let mut all_well = true;
    for rank in &mut started {
        all_well &= rank.wait()?.success();
    }
    Ok(if all_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
