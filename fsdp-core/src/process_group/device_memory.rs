//! Inputs and outputs in the memory of a CUDA device.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::{fence::Running, landing::CollectiveOutput, parts::GatherPart};
use crate::{
    Allocator, Buffer, DType, Error, Readable, Result, View,
    device::cuda::{CudaMemory, CudaView, failed},
};

/// Calls `f` with an input of the device. The memory stays as long as somebody holds the input.
pub(super) fn read<T>(input: &dyn Readable, rank: usize, f: impl FnOnce(CudaView<'_>) -> Result<T>) -> Result<T> {
    let refuse = |why: String| Error::Argument { rank, message: format!("an input can't be read: {why}") };
    let (mut f, mut outcome) = (Some(f), None);
    let view = &mut |view: View<'_>| {
        if let (View::Cuda(view), Some(f)) = (view, f.take()) {
            outcome = Some(f(view));
        }
    };
    input.view(view).map_err(refuse)?;
    outcome.unwrap_or_else(|| Err(refuse(format!("it is in the memory of {}", input.device()))))
}

/// Takes an output and checks that it is what was asked for.
pub(super) fn take(memory: &dyn Allocator, dtype: DType, len: usize, rank: usize) -> Result<CudaMemory> {
    let buffer = memory.take(dtype, len)?;
    let (got, device) = (format!("a buffer of {} {}", buffer.len(), buffer.dtype()), buffer.device());
    match buffer {
        Buffer::Cuda(memory) if (memory.dtype(), memory.len()) == (dtype, len) => Ok(memory),
        _ => Err(Error::Argument {
            rank,
            message: format!(
                "the allocator gave {got} where {len} {dtype} on a CUDA device were asked for (it is in the memory of \
                 {device})"
            ),
        }),
    }
}

/// Where a buffer of the device is in its memory. The group has checked that it is there.
#[cfg(feature = "nccl")]
pub(super) fn address(buffer: &Buffer, rank: usize) -> Result<cudarc::driver::sys::CUdeviceptr> {
    match buffer {
        Buffer::Cuda(memory) => Ok(memory.view().address()),
        other => Err(Error::Internal {
            rank,
            what: format!("a buffer in the memory of {} came to an engine for a CUDA device", other.device()),
        }),
    }
}

/// Copies of inputs, in order of the compute stream. What another stream brings to the device is copied there, so that
/// the device computes meanwhile.
pub(super) fn copies_of(inputs: Vec<GatherPart>, memory: &dyn Allocator, rank: usize) -> Result<CollectiveOutput> {
    let inputs: Vec<_> = inputs.into_iter().map(|part| part.input).collect();
    // All of them before the first copy, which needs its output to the end.
    let take = |input: &Arc<dyn Readable>| take(memory, input.dtype(), input.len(), rank);
    let outputs = inputs.iter().map(take).collect::<Result<Vec<_>>>()?;
    let mut brings: Option<(Arc<CudaStream>, Arc<CudaStream>)> = None;
    let copied = inputs.iter().zip(&outputs).try_for_each(|(input, to)| {
        read(&**input, rank, |from| {
            let Some(stream) = from.arrives_on() else { return from.copy_to(to.view(), to.stream()) };
            if brings.is_none() {
                let joined = stream.join(to.stream());
                joined.map_err(|error| failed(stream, "waiting for the compute stream", &error))?;
                brings = Some((stream.clone(), to.stream().clone()));
            }
            from.copy_to(to.view(), stream)
        })
    });
    let end = brings.map(|(stream, compute)| Running::on(&stream, &compute)).transpose()?;
    copied?;
    let outputs = outputs.into_iter().map(Buffer::Cuda).collect::<Vec<_>>();
    Ok(match end {
        None => outputs.into(),
        Some(end) => CollectiveOutput::behind(outputs, Box::new(end.keeping(inputs))),
    })
}
