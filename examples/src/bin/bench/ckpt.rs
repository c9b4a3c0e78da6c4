//! `bench ckpt`: the speed of saving and loading, the pause of an asynchronous save, and the limits of memory and disk.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, ensure};
use fsdp_candle::World;
use fsdp_ckpt::{AsyncSaver, Checkpoint, SaveState, TensorShard, TensorSource, WhenBusy, save};
use fsdp_core::layout::{Region, chunk_range};
use fsdp_core::{Buffer, MeshLayout, ReduceOp};
use serde::Serialize;

use crate::print;

/// Measures saving and loading.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Size of the whole state in MiB: 64 f32 tensors, sharded along their first dimension.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    mib: u32,
    /// Number of runs.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Parent of a temporary directory for the files.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Number of ranks to start. Under a launcher, the number that it has started.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) world: Option<u16>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Measured operations, in their order.
const KINDS: [&str; 6] = ["save", "load", "async_blocking", "async_save", "memcpy", "o_direct"];

/// Times of the slowest rank in seconds.
#[derive(Serialize)]
struct Row {
    what: &'static str,
    world: usize,
    bytes: usize,
    first_s: f64,
    median_s: f64,
    /// Rate of the median.
    gib_per_s: f64,
}

const TENSORS: usize = 64;
const COLUMNS: usize = 1024;
/// Size of one direct write.
const BLOCK: usize = 4 << 20;
/// Alignment of direct writes in memory and on disk.
const ALIGN: usize = 4096;

pub(crate) fn run(args: &Args, world: &World) -> anyhow::Result<()> {
    let size = world.size();
    ensure!(
        args.world.is_none_or(|wanted| usize::from(wanted) == size),
        "there are {size} ranks, not {}: start them with fsdp-launch --nproc-per-node {0}",
        args.world.unwrap_or_default()
    );
    let group = world.group();
    let rows = (args.mib as usize * (1 << 20) / 4 / TENSORS / COLUMNS).max(size);
    let bytes = TENSORS * rows * COLUMNS * 4;
    let range = chunk_range(rows, size, world.rank());
    let region = Region { offsets: vec![range.start, 0], sizes: vec![range.len(), COLUMNS] };
    // All blocks differ, on all ranks.
    let part = |i: usize| -> Vec<f32> {
        (0..region.elements())
            .map(|j| ((i * region.elements() + j) as f32).mul_add(1e-3, world.rank() as f32))
            .collect()
    };
    let tensors: Vec<TensorShard> = (0..TENSORS)
        .map(|i| TensorShard {
            fqn: format!("layers.{i}.weight"),
            shape: vec![rows, COLUMNS],
            region: region.clone(),
            data: Arc::new(Buffer::F32(part(i))),
        })
        .collect();
    let mesh = MeshLayout::new(&[("dp_shard", size)])?;
    let state = SaveState { mesh, tensors, values: Default::default() };
    let mut loaded: Vec<Vec<u8>> = (0..TENSORS).map(|_| vec![1; region.elements() * 4]).collect();
    let mut saver = AsyncSaver::new(group.clone(), WhenBusy::Wait)?;
    saver.reserve(&state.tensors);

    let root = Scratch::new(&args.dir, world)?;
    let mut times = [const { Vec::new() }; KINDS.len()];
    for run in 0..args.runs {
        let dir = root.0.join(format!("step-{run}"));
        group.barrier().wait()?;
        let start = Instant::now();
        save(&dir, group, &state)?;
        group.barrier().wait()?;
        times[0].push(start.elapsed().as_secs_f64());

        let start = Instant::now();
        let checkpoint = Checkpoint::open(&dir)?;
        for (shard, into) in state.tensors.iter().zip(&mut loaded) {
            checkpoint.read(&shard.fqn, &shard.region, into)?;
        }
        group.barrier().wait()?;
        times[1].push(start.elapsed().as_secs_f64());
        root.remove(&dir, world)?;

        let start = Instant::now();
        saver.save(&dir, &state)?;
        times[2].push(start.elapsed().as_secs_f64());
        saver.wait()?;
        times[3].push(start.elapsed().as_secs_f64());
        root.remove(&dir, world)?;

        let start = Instant::now();
        for (shard, into) in state.tensors.iter().zip(&mut loaded) {
            shard.data.read(&mut |bytes| into.copy_from_slice(bytes)).map_err(anyhow::Error::msg)?;
        }
        times[4].push(start.elapsed().as_secs_f64());

        let path = root.0.join(format!("direct-{}", world.rank()));
        group.barrier().wait()?;
        let start = Instant::now();
        write_direct(&path, region.elements() * 4 * TENSORS)
            .with_context(|| format!("can't write {} with O_DIRECT", path.display()))?;
        group.barrier().wait()?;
        times[5].push(start.elapsed().as_secs_f64());
        std::fs::remove_file(&path)?;
    }
    saver.finish()?;
    report(args, world, bytes, &times)
}

/// Writes `bytes`, rounded up to whole blocks, without the page cache.
fn write_direct(path: &Path, bytes: usize) -> std::io::Result<()> {
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let mut file = File::options().write(true).create_new(true).custom_flags(direct).open(path)?;
    let memory = vec![7u8; BLOCK + ALIGN];
    let start = memory.as_ptr().align_offset(ALIGN);
    for _ in 0..bytes.div_ceil(BLOCK) {
        file.write_all(&memory[start..start + BLOCK])?;
    }
    file.sync_all()
}

fn report(args: &Args, world: &World, bytes: usize, times: &[Vec<f64>; KINDS.len()]) -> anyhow::Result<()> {
    let mut rows = vec![];
    for (what, times) in KINDS.into_iter().zip(times) {
        let mut times = world.all_reduce(times, ReduceOp::Max)?;
        let first_s = times[0];
        times.sort_by(f64::total_cmp);
        let median_s = times[times.len() / 2];
        let gib_per_s = bytes as f64 / f64::from(1 << 30) / median_s;
        rows.push(Row { what, world: world.size(), bytes, first_s, median_s, gib_per_s });
    }
    if world.rank() != 0 {
        return Ok(());
    }
    if args.json {
        return print(serde_json::json!({ "ckpt": rows }));
    }
    for row in rows {
        let Row { what, median_s, first_s, gib_per_s, .. } = row;
        print(format_args!("{what:<15} {median_s:>8.3} s, first {first_s:>8.3} s {gib_per_s:>8.2} GiB/s"))?;
    }
    Ok(())
}

/// A temporary directory of one run.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new(parent: &Path, world: &World) -> anyhow::Result<Self> {
        // The job's port is unique among running jobs.
        let dir = parent.join(format!("bench-{}", world.env().master_port));
        if world.rank() == 0 {
            std::fs::create_dir_all(&dir).with_context(|| format!("can't create {}", dir.display()))?;
        }
        world.group().barrier().wait()?;
        Ok(Scratch(dir))
    }

    /// Removes a directory. Collective.
    pub(crate) fn remove(&self, dir: &Path, world: &World) -> anyhow::Result<()> {
        if world.rank() == 0 {
            std::fs::remove_dir_all(dir).with_context(|| format!("can't remove {}", dir.display()))?;
        }
        Ok(world.group().barrier().wait().map(drop)?)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Succeeds on the last rank.
        let _ = std::fs::remove_dir(&self.0);
    }
}
