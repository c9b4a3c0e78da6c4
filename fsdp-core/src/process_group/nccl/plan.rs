//! A collective as calls of NCCL, and the memory that they use.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;

use super::{
    super::{
        device_memory::{address, read, take},
        parts::{ExchangePart, GatherPart, Op, ScatterPart},
    },
    transfer::{Kind, Transfer},
};
use crate::{Allocator, Buffer, DType, Error, Readable, ReduceOp, Result};

/// What is asked of NCCL, and what must stay meanwhile.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) transfers: Vec<Transfer>,
    pub(super) outputs: Vec<Buffer>,
    /// Inputs that somebody else holds as well.
    pub(super) inputs: Vec<Arc<dyn Readable>>,
    /// Inputs that go back, and where to.
    pub(super) consumed: Option<(Vec<Buffer>, Arc<dyn Allocator>)>,
}

/// Where a rank's share begins in memory that all ranks' shares lie in one behind the other.
fn starts(at: CUdeviceptr, dtype: DType, counts: &[usize]) -> impl Iterator<Item = (usize, CUdeviceptr, usize)> {
    let mut next = at;
    counts.iter().enumerate().map(move |(rank, &count)| {
        let start = next;
        next += (count * dtype.size()) as CUdeviceptr;
        (rank, start, count)
    })
}

/// Whether all ranks have as much.
fn is_even(counts: &[usize]) -> bool {
    counts.windows(2).all(|pair| pair[0] == pair[1])
}

impl Plan {
    /// How to run a collective. Outputs are taken from its allocator.
    pub(super) fn of(op: Op, rank: usize) -> Result<Self> {
        let mut plan = Plan::default();
        match op {
            Op::AllGather { parts, memory } => {
                for part in parts {
                    plan.gather(part, &*memory, rank)?;
                }
            }
            Op::ReduceScatter { parts, op, memory } => {
                let mut inputs = vec![];
                for part in parts {
                    inputs.push(plan.scatter(part, op, &*memory, rank)?);
                }
                plan.consumed = Some((inputs, memory));
            }
            Op::AllToAll { parts, memory } => {
                let mut inputs = vec![];
                for part in parts {
                    inputs.push(plan.exchange(part, &*memory, rank)?);
                }
                plan.consumed = Some((inputs, memory));
            }
            Op::AllReduce { buffers, op } => {
                for buffer in &buffers {
                    let at = address(buffer, rank)?;
                    plan.ask(buffer.dtype(), buffer.len(), Kind::AllReduce { at, op });
                }
                plan.outputs = buffers;
            }
            Op::Broadcast { buffers, root } => {
                for buffer in &buffers {
                    let at = address(buffer, rank)?;
                    plan.ask(buffer.dtype(), buffer.len(), Kind::Broadcast { from: at, to: at, root });
                }
                plan.outputs = buffers;
            }
            Op::Barrier => {}
        }
        Ok(plan)
    }

    fn ask(&mut self, dtype: DType, count: usize, kind: Kind) {
        if count > 0 {
            self.transfers.push(Transfer { dtype, count, kind });
        }
    }

    /// Even shares go as NCCL's all-gather, uneven ones each by a broadcast into its place: no padding, so no copies
    /// and no memory for them.
    fn gather(&mut self, part: GatherPart, memory: &dyn Allocator, rank: usize) -> Result<()> {
        let GatherPart { input, counts } = part;
        let dtype = input.dtype();
        let own = counts[rank];
        let from = read(&*input, rank, |view| match own * dtype.size() {
            bytes if view.bytes() == bytes => Ok(view.address()),
            bytes => Err(Error::Argument {
                rank,
                message: format!("an input of {bytes} bytes shows {} of them", view.bytes()),
            }),
        })?;
        let output = Buffer::Cuda(take(memory, dtype, counts.iter().sum(), rank)?);
        let to = address(&output, rank)?;
        if is_even(&counts) {
            self.ask(dtype, own, Kind::AllGather { from, to });
        } else {
            for (root, to, count) in starts(to, dtype, &counts) {
                let from = if root == rank { from } else { to };
                self.ask(dtype, count, Kind::Broadcast { from, to, root });
            }
        }
        self.outputs.push(output);
        self.inputs.push(input);
        Ok(())
    }

    /// Even shares go as NCCL's reduce-scatter, uneven ones each by a reduction to its rank.
    fn scatter(&mut self, part: ScatterPart, op: ReduceOp, memory: &dyn Allocator, rank: usize) -> Result<Buffer> {
        let ScatterPart { input, counts } = part;
        let dtype = input.dtype();
        let from = address(&input, rank)?;
        let output = Buffer::Cuda(take(memory, dtype, counts[rank], rank)?);
        let own = address(&output, rank)?;
        if is_even(&counts) {
            self.ask(dtype, counts[rank], Kind::ReduceScatter { from, to: own, op });
        } else {
            for (root, from, count) in starts(from, dtype, &counts) {
                let to = if root == rank { own } else { 0 };
                self.ask(dtype, count, Kind::Reduce { from, to, op, root });
            }
        }
        self.outputs.push(output);
        Ok(input)
    }

    /// What stays here is sent as well, to itself.
    fn exchange(&mut self, part: ExchangePart, memory: &dyn Allocator, rank: usize) -> Result<Buffer> {
        let ExchangePart { input, send_counts, recv_counts } = part;
        let dtype = input.dtype();
        let from = address(&input, rank)?;
        let output = Buffer::Cuda(take(memory, dtype, recv_counts.iter().sum(), rank)?);
        let to = address(&output, rank)?;
        for (peer, from, count) in starts(from, dtype, &send_counts) {
            self.ask(dtype, count, Kind::Send { from, peer });
        }
        for (peer, to, count) in starts(to, dtype, &recv_counts) {
            self.ask(dtype, count, Kind::Receive { to, peer });
        }
        self.outputs.push(output);
        Ok(input)
    }
}
