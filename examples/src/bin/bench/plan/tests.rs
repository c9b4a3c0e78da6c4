//! Plans against figures that torchtitan has published: the errors that docs/planning.md states.

use super::*;
use clap::Parser;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
}

const CONFIG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/configs/llama-3.1-8b/config.json");

fn planned(flags: &str) -> anyhow::Result<Report> {
    planned_with(CONFIG, flags)
}

fn planned_with(config: &str, flags: &str) -> anyhow::Result<Report> {
    let words = ["plan", "--model", config].into_iter().chain(flags.split_whitespace());
    let Cli { args } = Cli::try_parse_from(words)?;
    let (model, seq) = model(&args)?;
    Ok(report(&setup(&args, &model, seq)?, args.top))
}

fn gib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 30)
}

#[test]
fn print_torchtitan() {
    let titan = "--device h100-sxm --flops 912 --memory 96 --memory-bandwidth 2400 --batch 2 --seq 8192 \
                 --activation-checkpoint selective --framework pytorch --hosts";
    for hosts in [1, 16] {
        let report = planned(&format!("{titan} {hosts}")).unwrap();
        eprintln!("{hosts}: {} tokens/s, {} GiB", report.time.tokens_per_s_per_rank, gib(report.memory.total));
    }
}
