//! `bench collectives`: the median time of each collective at several sizes.

use std::sync::Arc;
use std::time::Instant;

use fsdp_candle::World;
use fsdp_core::{Allocator, Buffer, DType, GatherPart, ReduceOp, ScatterPart};
use serde::Serialize;

use crate::{count, print};

/// Measures collectives.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Sizes in MiB of the gathered or reduced f32 tensor.
    #[arg(long, value_delimiter = ',', default_value = "1,16,64,256", value_parser = count(1 << 20))]
    mib: Vec<usize>,
    /// Sizes in KiB instead.
    #[arg(long, value_delimiter = ',', value_parser = count(1 << 30), conflicts_with = "mib")]
    kib: Vec<usize>,
    /// Collectives to measure.
    #[arg(long, value_delimiter = ',', default_values = COLLECTIVES, value_parser = COLLECTIVES)]
    only: Vec<String>,
    /// Number of runs, after a warm-up run.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

const COLLECTIVES: [&str; 3] = ["all_gather", "reduce_scatter", "all_reduce"];

#[derive(Serialize)]
struct Row<'a> {
    collective: &'a str,
    kib: usize,
    world: usize,
    /// Median time of the slowest rank.
    median_ms: f64,
    /// Best time of the slowest rank, without load from other programs.
    best_ms: f64,
    /// Rate of the median.
    gib_per_s: f64,
}

/// A pool of one buffer, as in a training step. No page is touched for the first time during a measurement.
#[derive(Default)]
struct Reuse(std::sync::Mutex<Vec<Buffer>>);

impl Allocator for Reuse {
    fn take(&self, dtype: DType, len: usize) -> fsdp_core::Result<Buffer> {
        let mut kept = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match kept.iter().position(|buffer| buffer.dtype() == dtype && buffer.len() == len) {
            Some(at) => Ok(kept.swap_remove(at)),
            None => Buffer::try_zeros(dtype, len),
        }
    }
    fn give(&self, buffer: Buffer) {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(buffer);
    }
}

pub(crate) fn run(args: &Args, world: &World) -> anyhow::Result<()> {
    // Each call waits at once, as MPI's blocking calls do.
    let group = world.group().blocking();
    let memory = Arc::new(Reuse::default());
    let mut rows = vec![];
    let sizes = if args.kib.is_empty() { args.mib.iter().map(|mib| mib << 10).collect() } else { args.kib.clone() };
    for kib in sizes {
        let counts = vec![(kib << 8) / world.size(); world.size()];
        let total = counts.iter().sum();
        let mut shard = Buffer::try_zeros(DType::F32, counts[world.rank()])?;
        // Pages that were never written share one physical page.
        shard.bytes_mut().fill(0);
        let shard = Arc::new(shard);
        for collective in args.only.iter().map(String::as_str) {
            let mut times = vec![];
            for _ in 0..=args.runs {
                let full = (collective != "all_gather").then(|| memory.take(DType::F32, total)).transpose()?;
                group.barrier().wait()?;
                let start = Instant::now();
                let work = match full {
                    None => group
                        .all_gather(vec![GatherPart { input: shard.clone(), counts: counts.clone() }], memory.clone()),
                    Some(full) if collective == "reduce_scatter" => group.reduce_scatter(
                        vec![ScatterPart { input: full, counts: counts.clone() }],
                        ReduceOp::Sum,
                        memory.clone(),
                    ),
                    Some(full) => group.all_reduce(vec![full], ReduceOp::Sum),
                };
                let outputs = work.wait()?;
                times.push(start.elapsed().as_secs_f64());
                outputs.into_iter().for_each(|buffer| memory.give(buffer));
            }
            let mut times = world.all_reduce(&times[1..], ReduceOp::Max)?;
            times.sort_by(f64::total_cmp);
            let median = times[times.len() / 2];
            rows.push(Row {
                collective,
                kib,
                world: world.size(),
                median_ms: median * 1e3,
                best_ms: times[0] * 1e3,
                gib_per_s: kib as f64 / 1024. / 1024. / median,
            });
        }
    }
    if world.rank() != 0 {
        return Ok(());
    }
    if args.json {
        print(serde_json::json!({ "collectives": rows }))?;
    } else {
        for row in rows {
            let Row { collective, kib, median_ms, best_ms, gib_per_s, .. } = row;
            print(format_args!(
                "{collective:<15} {kib:>7} KiB {median_ms:>10.4} ms, at best {best_ms:>10.4} {gib_per_s:>8.2} GiB/s"
            ))?;
        }
    }
    Ok(())
}
