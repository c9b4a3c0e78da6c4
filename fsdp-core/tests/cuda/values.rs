//! Collectives of a device's memory, in flight beside what the device computes.

use std::sync::{Arc, Mutex};

use cudarc::driver::CudaStream;
use fsdp_core::{
    Allocator, Buffer, DType, GatherPart, ProcessGroup, ReduceOp, Result, ScatterPart, Stream,
    device::cuda::CudaMemory,
    process_group::{HostStaging, Options},
};

use crate::ranks::{host, nccl, own, start};

/// Memory of a device that is used again, as FSDP's pool does.
pub(crate) struct Pool {
    compute: Arc<CudaStream>,
    kept: Mutex<Vec<Buffer>>,
}

impl Pool {
    pub(crate) fn new(compute: &Arc<CudaStream>) -> Arc<Self> {
        Arc::new(Pool { compute: compute.clone(), kept: Mutex::default() })
    }
}

impl Allocator for Pool {
    fn take(&self, dtype: DType, len: usize) -> Result<Buffer> {
        let mut kept = self.kept.lock().unwrap();
        match kept.iter().position(|buffer| (buffer.dtype(), buffer.len()) == (dtype, len)) {
            Some(at) => Ok(kept.swap_remove(at)),
            None => CudaMemory::uninit(&self.compute, dtype, len).map(Buffer::Cuda),
        }
    }

    fn give(&self, buffer: Buffer) {
        self.kept.lock().unwrap().push(buffer);
    }
}

/// Numbers on the device.
pub(crate) fn up(compute: &Arc<CudaStream>, values: &[f32]) -> Buffer {
    Buffer::Cuda(CudaMemory::from_slice(compute.clone_htod(values).unwrap()))
}

pub(crate) fn down(buffer: &Buffer) -> Vec<f32> {
    let Buffer::Cuda(memory) = buffer else { panic!("{buffer:?} is not on a device") };
    bytemuck::pod_collect_to_vec(&memory.to_host().unwrap())
}

pub(crate) fn run(role: &str, compute: &Arc<CudaStream>) -> Option<String> {
    let group = match role {
        "computes by nccl" => nccl(Options::default(), compute).unwrap(),
        "computes through the host" => {
            let engine = HostStaging::new(compute).unwrap();
            host(Options::default()).unwrap().on_device(Box::new(engine)).unwrap()
        }
        _ => return None,
    };
    steps(&group, compute);
    let half = group.split(group.rank() % 2, 0).unwrap();
    steps(&half, compute);
    drop(group);
    steps(&half, compute);
    Some("done".into())
}

/// Repeats the collectives of a sharded step: early gathers, late reductions, and no wait on the host.
fn steps(group: &ProcessGroup, compute: &Arc<CudaStream>) {
    let (rank, size, pool) = (group.rank(), group.size(), Pool::new(compute));
    // Uneven, and nothing on the last rank but the first.
    let uneven: Vec<usize> =
        (0..size).map(|rank| if rank + 1 == size && size > 1 { 0 } else { 30 + 7 * rank }).collect();
    let even = vec![50; size];
    let mut results = vec![];
    for round in 0..6 {
        let value = |rank: usize, part: usize| (100 * round + 10 * rank + part) as f32;
        let gather = |part: usize, counts: &Vec<usize>| GatherPart {
            input: Arc::new(up(compute, &vec![value(rank, part); counts[rank]])),
            counts: counts.clone(),
        };
        let gathered = group.all_gather(vec![gather(0, &even), gather(1, &uneven)], pool.clone());
        let scatter = |part: usize, counts: &Vec<usize>| {
            let values: Vec<f32> =
                counts.iter().enumerate().flat_map(|(to, &count)| vec![value(rank, part) + to as f32; count]).collect();
            ScatterPart { input: up(compute, &values), counts: counts.clone() }
        };
        let scattered = group.reduce_scatter(vec![scatter(0, &even), scatter(1, &uneven)], ReduceOp::Sum, pool.clone());
        let reduced = group.all_reduce(vec![up(compute, &[value(rank, 0); 9])], ReduceOp::Max);
        // One that nobody waits for.
        drop(group.all_reduce(vec![up(compute, &[1.; 300])], ReduceOp::Sum));
        let spread = group.broadcast(vec![up(compute, &[value(rank, 2); 11])], round % size);

        let gathered = gathered.wait().unwrap();
        for (part, counts) in [&even, &uneven].into_iter().enumerate() {
            let expected: Vec<f32> = (0..size).flat_map(|from| vec![value(from, part); counts[from]]).collect();
            // A copy, for the pool has the memory again before anybody looks.
            results.push((gathered[part].clone(), expected));
        }
        gathered.into_iter().for_each(|buffer| pool.give(buffer));
        let scattered = scattered.wait().unwrap();
        for (part, counts) in [&even, &uneven].into_iter().enumerate() {
            let sum: f32 = (0..size).map(|from| value(from, part) + rank as f32).sum();
            results.push((scattered[part].clone(), vec![sum; counts[rank]]));
        }
        scattered.into_iter().for_each(|buffer| pool.give(buffer));
        results.push((reduced.wait().unwrap().remove(0), vec![value(size - 1, 0); 9]));
        results.push((spread.then(Stream::Host).unwrap().remove(0), vec![value(round % size, 2); 11]));
    }
    for (number, (got, expected)) in results.iter().enumerate() {
        assert_eq!(down(got), *expected, "result {number} of rank {rank} in {group:?}");
    }
}

#[test]
fn gathers_and_reductions_overlap_what_is_computed() {
    for seed in ["0", "1", "2", "3"] {
        for ranks in [1, 2, 3, 4] {
            let outcomes = start("computes by nccl", &own(ranks), &[("GPU_DOUBLE_SEED", seed)]).outcomes();
            assert_eq!(outcomes, vec!["done"; ranks], "seed {seed}");
        }
        let outcomes = start("computes through the host", &[0, 0], &[("GPU_DOUBLE_SEED", seed)]).outcomes();
        assert_eq!(outcomes, vec!["done"; 2], "seed {seed}");
    }
}
