//! Shares that NCCL gathers and reduces with padding, in memory with room for it, without room, and registered with NCCL.

use std::{path::Path, sync::Arc};

use cudarc::driver::CudaStream;
use fsdp_core::{
    Allocator, Buffer, DType, GatherPart, ProcessGroup, ReduceOp, Result, ScatterPart, Stream,
    device::cuda::CudaMemory, process_group::Options,
};

use crate::{
    ranks::{host, nccl, own, seconds, start},
    values::{down, up},
};

/// Allocates memory with room for this many further elements.
struct Roomy(Arc<CudaStream>, usize);

impl Allocator for Roomy {
    fn take(&self, dtype: DType, len: usize) -> Result<Buffer> {
        CudaMemory::zeros_with_room(&self.0, dtype, len, len + self.1).map(Buffer::Cuda)
    }

    fn give(&self, _: Buffer) {}
}

pub(crate) fn run(role: &str, compute: &Arc<CudaStream>) -> Option<String> {
    let timeout = |limit: f64| Options::default().with_timeout(seconds(limit));
    match role {
        "pads" => pads(&nccl(timeout(60.), compute).unwrap(), compute),
        "misses one with registered memory" => {
            return Some(misses_one(nccl(timeout(1.), compute).unwrap(), &host(timeout(60.)).unwrap(), compute));
        }
        _ => return None,
    }
    Some("done".into())
}

/// Numbers of a rank that differ between ranks, parts and elements.
fn values(rank: usize, part: usize, len: usize) -> Vec<f32> {
    (0..len).map(|at| (1000 * rank + 100 * part + at) as f32).collect()
}

/// Rank 0 has room where it can, rank 1 never has, the others alternate.
fn pads(group: &ProcessGroup, compute: &Arc<CudaStream>) {
    let (rank, size) = (group.rank(), group.size());
    let registered = group.with_registered_memory().unwrap();
    let chunks = |share: usize, len: usize| -> Vec<usize> {
        (0..size).map(|rank| share.min(len.saturating_sub(rank * share))).collect()
    };
    for round in 1..5 {
        // The last rank has fewer elements, the last ranks have none, equal shares, the first has none.
        let mut shares = vec![chunks(7 * round, 7 * round * size - 3), chunks(5, 6), chunks(4, 4 * size)];
        shares.push((0..size).map(|rank| 3 * rank).collect());
        let room = [1000, 0, 1000 * (round % 2)][rank.min(2)];
        for group in [group, &registered] {
            let memory: Arc<dyn Allocator> = Arc::new(Roomy(compute.clone(), room));
            let parts = shares.iter().enumerate().map(|(part, counts)| GatherPart {
                input: Arc::new(up(compute, &values(rank, part, counts[rank]))),
                counts: counts.clone(),
            });
            let gathered = group.all_gather(parts.collect(), memory.clone()).wait().unwrap();
            for (part, (counts, gathered)) in shares.iter().zip(&gathered).enumerate() {
                let all: Vec<f32> = (0..size).flat_map(|rank| values(rank, part, counts[rank])).collect();
                assert_eq!(down(gathered), all, "gathered part {part} of rank {rank}, round {round}");
            }
            let parts = shares.iter().enumerate().map(|(part, counts)| {
                let all = values(rank, part, counts.iter().sum());
                let Ok(Buffer::Cuda(input)) = memory.take(DType::F32, all.len()) else { panic!("no memory") };
                let Buffer::Cuda(from) = up(compute, &all) else { panic!("not on the device") };
                from.view().copy_to(input.view(), compute).unwrap();
                ScatterPart { input: Buffer::Cuda(input), counts: counts.clone() }
            });
            let scattered = group.reduce_scatter(parts.collect(), ReduceOp::Sum, memory.clone()).wait().unwrap();
            for (part, (counts, scattered)) in shares.iter().zip(&scattered).enumerate() {
                let start: usize = counts[..rank].iter().sum();
                let sum = |at: usize| (0..size).map(|rank| values(rank, part, start + at + 1)[start + at]).sum::<f32>();
                let expected: Vec<f32> = (0..counts[rank]).map(sum).collect();
                assert_eq!(down(scattered), expected, "reduced part {part} of rank {rank}, round {round}");
            }
        }
    }
}

/// The last rank does not join an all-gather.
fn misses_one(group: ProcessGroup, others: &ProcessGroup, compute: &Arc<CudaStream>) -> String {
    let registered = group.with_registered_memory().unwrap();
    let gather = || {
        let input = Arc::new(up(compute, &[1.; 8]));
        let part = GatherPart { input, counts: vec![8; group.size()] };
        registered.all_gather(vec![part], Arc::new(Roomy(compute.clone(), 0)))
    };
    gather().then(Stream::Host).unwrap();
    if group.rank() + 1 == group.size() {
        others.barrier().wait().unwrap();
        return gather().then(Stream::Host).unwrap_err().to_string();
    }
    let error = gather().then(Stream::Host).unwrap_err();
    others.barrier().wait().unwrap();
    error.to_string()
}

/// Returns how often each rank allocated and freed memory of NCCL, as the double reports.
fn allocated_and_freed(dir: &Path, ranks: usize) -> Vec<[u64; 2]> {
    let of_rank = |rank: usize| {
        let text = std::fs::read_to_string(dir.join(format!("rank-{rank}.json"))).unwrap();
        let report: serde_json::Value = serde_json::from_str(&text).unwrap();
        let count = |category: &str, name: &str| report["counts"][category][name].as_u64().unwrap_or(0);
        [count("allocation", "ncclMemAlloc"), count("free", "ncclMemFree")]
    };
    (0..ranks).map(of_rank).collect()
}

#[test]
fn padded_shares_do_not_depend_on_room() {
    for seed in ["0", "1", "2"] {
        for ranks in [2, 3, 4] {
            let outcomes = start("pads", &own(ranks), &[("GPU_DOUBLE_SEED", seed)]).outcomes();
            assert_eq!(outcomes, vec!["done"; ranks], "seed {seed}");
        }
    }
}

/// Only the double counts.
#[test]
fn an_abort_frees_registered_memory() {
    let dir = tempfile::tempdir().unwrap();
    let report = dir.path().to_str().unwrap();
    let outcomes = start("misses one with registered memory", &own(3), &[("GPU_DOUBLE_REPORT", report)]).outcomes();
    for outcome in &outcomes[..2] {
        let parts = ["all_gather (collective 1) in group \"world\" timed out after ", "waited for rank(s) [2]. "];
        assert!(parts.iter().all(|part| outcome.contains(part)), "{outcomes:?}");
    }
    for [allocated, freed] in allocated_and_freed(dir.path(), 3) {
        assert_eq!([allocated, freed], [1, 1]);
    }
}
