//! What collectives make of tensors, outside of any graph.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor, bail};
use fsdp_core::process_group::ExchangePart;
use fsdp_core::{Allocator, Buffer, DType, DeviceId, GatherPart, ProcessGroup, ReduceOp, ScatterPart, Work};

use crate::error::Error;
use crate::kernels::{self, Kernels};
use crate::storage::{TensorMemory, copied_storage, take, to_buffer, to_core_dtype, to_tensor};

/// A tensor that a collective consumes.
pub(super) enum Input<'a> {
    /// Others hold it, too: it is copied where a collective would overwrite it.
    Lent(&'a Tensor),
    /// Nobody else reads its memory, which goes with it: what is left of it can't be used.
    Taken(&'a Tensor),
}

impl Input<'_> {
    pub(super) fn tensor(&self) -> &Tensor {
        match self {
            Input::Lent(tensor) | Input::Taken(tensor) => tensor,
        }
    }

    /// The elements, row-major, in memory of their own.
    fn buffer(self) -> Result<Buffer> {
        let storage = match self {
            Input::Taken(tensor) if tensor.is_contiguous() && tensor.layout().start_offset() == 0 => take(tensor)?,
            Input::Taken(tensor) | Input::Lent(tensor) => copied_storage(tensor)?,
        };
        match to_buffer(storage)? {
            Some(buffer) => Ok(buffer),
            None => bail!("a tensor whose memory is elsewhere can't go to other ranks"),
        }
    }
}

/// New memory of a device for each output.
struct Fresh(&'static dyn Kernels);

impl Allocator for Fresh {
    fn take(&self, dtype: DType, len: usize) -> fsdp_core::Result<Buffer> {
        self.0.zeros(dtype, len)
    }

    fn give(&self, buffer: Buffer) {
        drop(buffer);
    }
}

fn fresh(device: &Device) -> Result<Arc<dyn Allocator>> {
    Ok(Arc::new(Fresh(kernels::of_device(device)?)))
}

/// The output of a collective of one part.
fn output(work: Work) -> Result<Buffer> {
    match work.wait().map_err(Error::from)?.pop() {
        Some(output) => Ok(output),
        None => bail!("a collective of one part has no output"),
    }
}

/// An error unless the group can move the tensor, and `dim`, if any, divides by its ranks.
pub(crate) fn check(function: &str, x: &Tensor, dim: Option<usize>, group: &ProcessGroup) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    to_core_dtype(x.dtype()).map_err(|error| error.context(format!("{function} on rank {rank}")))?;
    let device = kernels::device_id(x.device())?;
    if device != DeviceId::Host && device != group.device() {
        bail!(
            "{function} on rank {rank}: the tensor {:?} is on {device}, but group \"{}\" moves the memory of {} alone: \
             take the group from a mesh of a `World` that is on that device (`init_on`, `World::on`), or move the \
             tensor to the CPU",
            x.dims(),
            group.name(),
            group.device()
        )
    }
    match dim {
        Some(dim) if !x.dims()[dim].is_multiple_of(size) => bail!(
            "{function} on rank {rank}: dimension {dim} of {:?} is to be cut into {size} parts, one for each rank of \
             group \"{}\", and {} does not divide by {size}: pad it (a sequence to the next multiple)",
            x.dims(),
            group.name(),
            x.dims()[dim]
        ),
        _ => Ok(()),
    }
}

/// The sum over ranks.
pub(super) fn summed(x: Input<'_>, group: &ProcessGroup) -> Result<Tensor> {
    let (shape, device) = (x.tensor().shape().clone(), x.tensor().device().clone());
    let mut buffer = x.buffer()?;
    if group.size() > 1 && !buffer.is_empty() {
        buffer = output(group.deferred().all_reduce(vec![buffer], ReduceOp::Sum))?;
    }
    to_tensor(buffer, shape.dims(), &device)
}

/// The ranks' tensors, of one shape, one behind the other along `dim`.
pub(super) fn gathered(x: &Tensor, dim: usize, group: &ProcessGroup) -> Result<Tensor> {
    let size = group.size();
    let x = x.detach();
    if size == 1 {
        return Ok(x);
    }
    let (x, mut shape) = (x.contiguous()?, x.dims().to_vec());
    let part = GatherPart { input: Arc::new(TensorMemory(x.clone())), counts: vec![x.elem_count(); size] };
    let all = output(group.deferred().all_gather(vec![part], fresh(x.device())?))?;
    let (outer, inner) = (shape[..dim].iter().product::<usize>(), shape[dim..].iter().product::<usize>());
    shape[dim] *= size;
    if outer <= 1 {
        return to_tensor(all, &shape, x.device());
    }
    to_tensor(all, &[size, outer, inner], x.device())?.transpose(0, 1)?.contiguous()?.reshape(shape)
}

/// This rank's part along `dim` of the sum over ranks.
pub(super) fn scattered(x: Input<'_>, dim: usize, group: &ProcessGroup) -> Result<Tensor> {
    let size = group.size();
    let (mut shape, device) = (x.tensor().dims().to_vec(), x.tensor().device().clone());
    shape[dim] /= size;
    let (outer, inner) = (shape[..dim].iter().product::<usize>(), shape[dim..].iter().product::<usize>());
    let input = if size == 1 || outer <= 1 {
        x.buffer()?
    } else {
        let parts = x.tensor().detach().reshape((outer, size, inner))?.transpose(0, 1)?;
        Input::Lent(&parts).buffer()?
    };
    if size == 1 {
        return to_tensor(input, &shape, &device);
    }
    let part = ScatterPart { input, counts: vec![outer * inner; size] };
    let own = output(group.deferred().reduce_scatter(vec![part], ReduceOp::Sum, fresh(&device)?))?;
    to_tensor(own, &shape, &device)
}

/// This rank's part along `dim`: a view.
pub(super) fn own_part(x: &Tensor, dim: usize, group: &ProcessGroup) -> Result<Tensor> {
    let part = x.dims()[dim] / group.size();
    x.narrow(dim, group.rank() * part, part)
}

/// From parts along `from` to parts along `to`.
pub(super) fn exchanged(x: &Tensor, from: usize, to: usize, group: &ProcessGroup) -> Result<Tensor> {
    let size = group.size();
    let x = x.detach();
    if size == 1 || from == to {
        return Ok(x);
    }
    // What goes to each rank comes first, and is contiguous.
    let parts = Tensor::stack(&x.chunk(size, to)?, 0)?;
    let shape = parts.dims().to_vec();
    let counts = vec![parts.elem_count() / size; size];
    let input = Input::Taken(&parts).buffer()?;
    let part = ExchangePart { input, send_counts: counts.clone(), recv_counts: counts };
    let all = output(group.deferred().all_to_all(vec![part], fresh(x.device())?))?;
    let all = to_tensor(all, &shape, x.device())?;
    let ranks = (0..size).map(|rank| all.get(rank)).collect::<Result<Vec<_>>>()?;
    Tensor::cat(&ranks, from)
}

/// The reduction over ranks of a few values of f32.
pub(crate) fn reduced_values(values: Vec<f32>, op: ReduceOp, group: &ProcessGroup) -> Result<Vec<f32>> {
    match group.size() {
        1 => Ok(values),
        _ => Ok(group.all_reduce_values(values, op).map_err(Error::from)?),
    }
}

/// The largest of the ranks' values, element by element.
pub(crate) fn largest(x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    let (shape, device) = (x.shape().clone(), x.device().clone());
    let mut buffer = Input::Lent(x).buffer()?;
    if group.size() > 1 {
        buffer = output(group.deferred().all_reduce(vec![buffer], ReduceOp::Max))?;
    }
    to_tensor(buffer, shape.dims(), &device)
}
