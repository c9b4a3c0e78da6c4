//! `bench disk`: time of an AdamW step with moments on disk, beside its parts: the computation, with moments in memory,
//! and the transfers, by direct I/O without computation.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context;
use candle_core::{DType, Tensor};
use fsdp_candle::{AdamW, AdamWConfig, FullyShard, ReduceOp, ShardedVarMap, StateOnDisk, World, fully_shard, nn};
use memmap2::{Advice, MmapMut};
use rustix::fs::OFlags;
use serde::Serialize;

use crate::{count, print};

/// Measures state on disk.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory on the disk.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Parameters of all ranks, in millions.
    #[arg(long, default_value_t = 64, value_parser = count(1 << 20))]
    millions: usize,
    /// Memory for blocks of moments, in MiB.
    #[arg(long, default_value_t = 16, value_parser = count(1 << 10))]
    memory_mib: usize,
    /// Number of runs.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Median times of the slowest rank in seconds.
#[derive(Serialize)]
struct Report {
    world: usize,
    /// Bytes of a rank's moments. A step reads and writes them.
    state_bytes: u64,
    /// Step with moments in memory.
    memory_s: f64,
    /// Reading and writing the bytes of the moments, without a step.
    transfer_s: f64,
    /// Step with moments on disk.
    disk_s: f64,
}

/// Columns of the matrix.
const WIDTH: usize = 1000;

pub(crate) fn run(args: &Args, world: &World) -> anyhow::Result<()> {
    let vars = ShardedVarMap::of_world(world)?;
    let rows = 1000 * args.millions;
    let build = |vb| nn::linear_no_bias(WIDTH, rows, vb);
    let _model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), build)?;
    let params = vars.trainable();
    // Any gradients do. Those of a loss would take a pass over the model.
    let x = Tensor::zeros(1, DType::F32, world.device())?;
    let mut grads = candle_core::Var::from_tensor(&x)?.sum_all()?.backward()?;
    for param in &params {
        grads.insert(param.var(), Tensor::full(0.5f32, param.var().dims(), world.device())?);
    }
    let mut measured = [const { Vec::new() }; 3];
    let mut in_memory = AdamW::new(params.clone(), AdamWConfig::default())?;
    // The first step touches the moments' memory.
    in_memory.step(&grads)?;
    for _ in 0..args.runs {
        measured[0].push(seconds(world, || Ok(in_memory.step(&grads)?))?);
    }
    drop(in_memory);
    let disk = StateOnDisk::new(&args.dir).memory_bytes(args.memory_mib << 20);
    let mut on_disk = AdamW::on_disk(vec![(params, AdamWConfig::default())], &disk)?;
    let state_bytes: u64 = on_disk.states().iter().map(|state| state.bytes_on_disk()).sum();
    on_disk.step(&grads)?;
    let transfers = Transfers::new(&args.dir, state_bytes, (args.memory_mib << 20) / THREADS)?;
    transfers.run()?;
    for _ in 0..args.runs {
        measured[1].push(seconds(world, || transfers.run())?);
        measured[2].push(seconds(world, || Ok(on_disk.step(&grads)?))?);
    }
    let mut medians = [0.; 3];
    for (median, times) in medians.iter_mut().zip(&measured) {
        let mut times = world.all_reduce(times, ReduceOp::Max)?;
        times.sort_by(f64::total_cmp);
        *median = times[times.len() / 2];
    }
    let [memory_s, transfer_s, disk_s] = medians;
    if world.rank() == 0 {
        show(args, &Report { world: world.size(), state_bytes, memory_s, transfer_s, disk_s })?;
    }
    Ok(())
}

/// Measures `f` after all ranks are ready.
fn seconds(world: &World, f: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    world.group().barrier().wait()?;
    let start = Instant::now();
    f()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Alignment that direct I/O needs.
const ALIGN: usize = 4096;
/// Threads, as many as a step has.
const THREADS: usize = 4;

/// A file that is read and written in blocks.
struct Transfers {
    file: File,
    bytes: u64,
    block: usize,
}

impl Transfers {
    fn new(dir: &Path, bytes: u64, block: usize) -> anyhow::Result<Self> {
        let named =
            tempfile::NamedTempFile::new_in(dir).with_context(|| format!("can't write to {}", dir.display()))?;
        let mut options = File::options();
        let file = options.read(true).write(true).custom_flags(OFlags::DIRECT.bits() as i32).open(named.path());
        let file = file.with_context(|| format!("{} does not support direct I/O", dir.display()))?;
        let bytes = bytes.next_multiple_of(ALIGN as u64);
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes)?;
        Ok(Transfers { file, bytes, block })
    }

    /// Reads and writes each block once.
    fn run(&self) -> anyhow::Result<()> {
        let transfer = |first: usize| {
            let mut memory = MmapMut::map_anon(self.block)?;
            let _ = memory.advise(Advice::HugePage); // fails in a kernel without huge pages
            let mut at = (first * self.block) as u64;
            while at < self.bytes {
                let bytes = (self.bytes - at).min(self.block as u64) as usize;
                let block = &mut memory[..bytes];
                self.file.read_exact_at(block, at)?;
                self.file.write_all_at(block, at)?;
                at += (THREADS * self.block) as u64;
            }
            std::io::Result::Ok(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|first| scope.spawn(move || transfer(first))).collect();
            let done = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|e| std::panic::resume_unwind(e)));
            done.collect::<std::io::Result<()>>()
        })?;
        Ok(())
    }
}

fn show(args: &Args, report: &Report) -> anyhow::Result<()> {
    if args.json {
        return print(serde_json::to_string(report)?);
    }
    let Report { world, state_bytes, memory_s, transfer_s, disk_s } = report;
    let mib = *state_bytes as f64 / f64::from(1 << 20);
    print(format_args!("{world} ranks, {mib:.0} MiB of moments on each"))?;
    print(format_args!("step in memory  {:>8.1} ms", 1e3 * memory_s))?;
    print(format_args!("transfers       {:>8.1} ms ({:.0} MiB/s)", 1e3 * transfer_s, 2. * mib / transfer_s))?;
    let ratio = disk_s / memory_s.max(*transfer_s);
    print(format_args!("step on disk    {:>8.1} ms ({ratio:.2} times the longer of both)", 1e3 * disk_s))
}
