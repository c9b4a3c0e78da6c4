//! Collectives of tensors outside of any graph.

use std::sync::Arc;

use candle_core::{Device, Result, Storage, Tensor, bail};
use fsdp_core::process_group::ExchangePart;
use fsdp_core::{Allocator, Buffer, DeviceId, GatherPart, ProcessGroup, ReduceOp, ScatterPart, Work};

use crate::error::Error;
use crate::kernels;
use crate::storage::{DeviceMemory, TensorMemory, copied_storage, take, to_buffer, to_core_dtype, to_tensor};

/// The input of a collective.
pub(super) enum Input<'a> {
    /// A tensor with other users: copied if the collective overwrites its input.
    Borrowed(&'a Tensor),
    /// A tensor without other readers: the collective consumes its memory, and later uses fail.
    Owned(&'a Tensor),
}

impl Input<'_> {
    pub(super) fn tensor(&self) -> &Tensor {
        match self {
            Input::Borrowed(tensor) | Input::Owned(tensor) => tensor,
        }
    }

    /// Takes the memory of an owned tensor that has all of it.
    fn taken(&self) -> Result<Option<Storage>> {
        match self {
            Input::Owned(tensor) if tensor.is_contiguous() && tensor.layout().start_offset() == 0 => {
                take(tensor).map(Some)
            }
            Input::Owned(_) | Input::Borrowed(_) => Ok(None),
        }
    }

    /// Returns the elements, row-major, in separate memory.
    fn buffer(self) -> Result<Buffer> {
        let storage = match self.taken()? {
            Some(storage) => storage,
            None => copied_storage(self.tensor())?,
        };
        match to_buffer(storage)? {
            Some(buffer) => Ok(buffer),
            None => bail!("the storage of a tensor was freed, so it cannot be sent to other ranks"),
        }
    }
}

fn fresh(device: &Device) -> Result<Arc<dyn Allocator>> {
    Ok(Arc::new(DeviceMemory(kernels::of_device(device)?)))
}

/// Returns the output of a collective of one part.
fn output(work: Work) -> Result<Buffer> {
    match work.wait().map_err(Error::from)?.pop() {
        Some(output) => Ok(output),
        None => bail!("a collective of one part has no output"),
    }
}

/// Checks that the group can move the tensor, and that its ranks divide dimension `dim`, if any.
pub(crate) fn check(function: &str, x: &Tensor, dim: Option<usize>, group: &ProcessGroup) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    to_core_dtype(x.dtype()).map_err(|error| error.context(format!("{function} on rank {rank}")))?;
    let device = kernels::device_id(x.device())?;
    if device != DeviceId::Host && device != group.device() {
        bail!(
            "{function} on rank {rank}: the tensor {:?} is on {device}, but group \"{}\" moves memory of {} only: take \
             the group from a `World` on that device (`init_on`, `World::on`), or move the tensor to the CPU",
            x.dims(),
            group.name(),
            group.device()
        )
    }
    match dim {
        Some(dim) if !x.dims()[dim].is_multiple_of(size) => bail!(
            "{function} on rank {rank}: dimension {dim} of {:?} is split over the {size} ranks of group \"{}\", and \
             {size} does not divide {}: pad it to the next multiple",
            x.dims(),
            group.name(),
            x.dims()[dim]
        ),
        _ => Ok(()),
    }
}

/// Sums over ranks.
pub(super) fn summed(x: Input<'_>, group: &ProcessGroup) -> Result<Tensor> {
    let (shape, device) = (x.tensor().shape().clone(), x.tensor().device().clone());
    let mut buffer = x.buffer()?;
    if group.size() > 1 && !buffer.is_empty() {
        buffer = output(group.blocking().all_reduce(vec![buffer], ReduceOp::Sum))?;
    }
    to_tensor(buffer, shape.dims(), &device)
}

/// Concatenates the ranks' tensors, of one shape, along `dim`.
pub(super) fn gathered(x: &Tensor, dim: usize, group: &ProcessGroup) -> Result<Tensor> {
    match gathered_together(&[x], dim, group)?.pop() {
        Some(all) => Ok(all),
        None => bail!("a collective of one part has no output"),
    }
}

/// [`gathered`] for several tensors on one device, by one collective.
pub(crate) fn gathered_together(tensors: &[&Tensor], dim: usize, group: &ProcessGroup) -> Result<Vec<Tensor>> {
    let size = group.size();
    if size == 1 {
        return Ok(tensors.iter().map(|x| x.detach()).collect());
    }
    let tensors = tensors.iter().map(|x| x.detach().contiguous()).collect::<Result<Vec<_>>>()?;
    let Some(first) = tensors.first() else { return Ok(vec![]) };
    let part = |x: &Tensor| GatherPart { input: Arc::new(TensorMemory(x.clone())), counts: vec![x.elem_count(); size] };
    let all = group.blocking().all_gather(tensors.iter().map(part).collect(), fresh(first.device())?);
    let all = all.wait().map_err(Error::from)?;
    tensors.iter().zip(all).map(|(x, all)| joined(x, all, dim, size)).collect()
}

/// Returns the tensors of `size` ranks, each like `x` and one after another in `all`, along `dim`.
fn joined(x: &Tensor, all: Buffer, dim: usize, size: usize) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    let (outer, inner) = (shape[..dim].iter().product::<usize>(), shape[dim..].iter().product::<usize>());
    shape[dim] *= size;
    if outer <= 1 {
        return to_tensor(all, &shape, x.device());
    }
    to_tensor(all, &[size, outer, inner], x.device())?.transpose(0, 1)?.contiguous()?.reshape(shape)
}

/// Returns this rank's part along `dim` of the sum over ranks.
pub(super) fn scattered(x: Input<'_>, dim: usize, group: &ProcessGroup) -> Result<Tensor> {
    let size = group.size();
    let (mut shape, device) = (x.tensor().dims().to_vec(), x.tensor().device().clone());
    shape[dim] /= size;
    let (outer, inner) = (shape[..dim].iter().product::<usize>(), shape[dim..].iter().product::<usize>());
    let input = if size == 1 || outer <= 1 {
        x.buffer()?
    } else {
        let parts = x.tensor().detach().reshape((outer, size, inner))?.transpose(0, 1)?;
        let copied = Input::Borrowed(&parts).buffer()?;
        // Its consumer keeps the tensor, but not its memory.
        drop(x.taken()?);
        copied
    };
    if size == 1 {
        return to_tensor(input, &shape, &device);
    }
    let part = ScatterPart { input, counts: vec![outer * inner; size] };
    let own = output(group.blocking().reduce_scatter(vec![part], ReduceOp::Sum, fresh(&device)?))?;
    to_tensor(own, &shape, &device)
}

/// Returns this rank's part along `dim`, a view.
pub(super) fn own_part(x: &Tensor, dim: usize, group: &ProcessGroup) -> Result<Tensor> {
    let part = x.dims()[dim] / group.size();
    x.narrow(dim, group.rank() * part, part)
}

/// Exchanges parts along `from` for parts along `to`.
pub(super) fn exchanged(x: &Tensor, from: usize, to: usize, group: &ProcessGroup) -> Result<Tensor> {
    let size = group.size();
    let x = x.detach();
    if size == 1 || from == to {
        return Ok(x);
    }
    // The elements for each rank come first and are contiguous.
    let parts = Tensor::stack(&x.chunk(size, to)?, 0)?;
    let shape = parts.dims().to_vec();
    let counts = vec![parts.elem_count() / size; size];
    let input = Input::Owned(&parts).buffer()?;
    let part = ExchangePart { input, send_counts: counts.clone(), recv_counts: counts };
    let all = output(group.blocking().all_to_all(vec![part], fresh(x.device())?))?;
    let all = to_tensor(all, &shape, x.device())?;
    let ranks = (0..size).map(|rank| all.get(rank)).collect::<Result<Vec<_>>>()?;
    Tensor::cat(&ranks, from)
}

/// Reduces a few f32 values over ranks.
pub(crate) fn reduced_values(values: Vec<f32>, op: ReduceOp, group: &ProcessGroup) -> Result<Vec<f32>> {
    match group.size() {
        1 => Ok(values),
        _ => Ok(group.all_reduce_values(values, op).map_err(Error::from)?),
    }
}

/// Returns the elementwise maximum over ranks.
pub(crate) fn largest(x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    let (shape, device) = (x.shape().clone(), x.device().clone());
    let mut buffer = Input::Borrowed(x).buffer()?;
    if group.size() > 1 {
        buffer = output(group.blocking().all_reduce(vec![buffer], ReduceOp::Max))?;
    }
    to_tensor(buffer, shape.dims(), &device)
}
