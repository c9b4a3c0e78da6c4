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

/// The result of an issued collective. The device's later computations are ordered after the collective by
/// [`Pending::wait`], and those issued before it run beside it.
#[must_use]
pub(crate) struct Pending<T>(Box<dyn FnOnce() -> Result<T>>);

impl<T: 'static> Pending<T> {
    fn known(result: T) -> Self {
        Pending(Box::new(|| Ok(result)))
    }

    fn new(work: Work, result: impl FnOnce(Vec<Buffer>) -> Result<T> + 'static) -> Self {
        Pending(Box::new(|| result(work.wait().map_err(Error::from)?)))
    }

    /// Waits for the collective.
    pub(crate) fn wait(self) -> Result<T> {
        self.0()
    }

    /// Returns the result of `f`, which runs after the collective.
    pub(crate) fn then<U>(self, f: impl FnOnce(T) -> Result<U> + 'static) -> Pending<U> {
        Pending(Box::new(|| f(self.wait()?)))
    }
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
    start_gather(tensors, dim, &group.blocking())?.wait()
}

/// Issues [`gathered_together`].
pub(crate) fn start_gather(tensors: &[&Tensor], dim: usize, group: &ProcessGroup) -> Result<Pending<Vec<Tensor>>> {
    let size = group.size();
    if size == 1 {
        return Ok(Pending::known(tensors.iter().map(|x| x.detach()).collect()));
    }
    let tensors = tensors.iter().map(|x| x.detach().contiguous()).collect::<Result<Vec<_>>>()?;
    let Some(first) = tensors.first() else { return Ok(Pending::known(vec![])) };
    let part = |x: &Tensor| GatherPart { input: Arc::new(TensorMemory(x.clone())), counts: vec![x.elem_count(); size] };
    let work = group.all_gather(tensors.iter().map(part).collect(), fresh(first.device())?);
    Ok(Pending::new(work, move |all| tensors.iter().zip(all).map(|(x, all)| joined(x, all, dim, size)).collect()))
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
    match start_scatter(vec![x], dim, &group.blocking())?.wait()?.pop() {
        Some(own) => Ok(own),
        None => bail!("a collective of one part has no output"),
    }
}

/// Issues [`scattered`] for several tensors on one device, by one collective.
pub(super) fn start_scatter(tensors: Vec<Input<'_>>, dim: usize, group: &ProcessGroup) -> Result<Pending<Vec<Tensor>>> {
    let size = group.size();
    let Some(first) = tensors.first() else { return Ok(Pending::known(vec![])) };
    let device = first.tensor().device().clone();
    let memory = fresh(&device)?;
    let shapes = tensors.iter().map(|x| {
        let mut shape = x.tensor().dims().to_vec();
        shape[dim] /= size;
        shape
    });
    let shapes: Vec<_> = shapes.collect();
    let inputs = tensors.into_iter().map(|x| by_destination(x, dim, size)).collect::<Result<Vec<_>>>()?;
    let tensors = move |buffers: Vec<Buffer>| {
        buffers.into_iter().zip(shapes).map(|(buffer, shape)| to_tensor(buffer, &shape, &device)).collect()
    };
    if size == 1 {
        return Ok(Pending::known(tensors(inputs)?));
    }
    let part = |input: Buffer| ScatterPart { counts: vec![input.len() / size; size], input };
    let work = group.reduce_scatter(inputs.into_iter().map(part).collect(), ReduceOp::Sum, memory);
    Ok(Pending::new(work, tensors))
}

/// Returns the elements in the order of their destinations: the parts along `dim` for rank 0, for rank 1, and so on.
fn by_destination(x: Input<'_>, dim: usize, size: usize) -> Result<Buffer> {
    let shape = x.tensor().dims();
    let (outer, inner) = (shape[..dim].iter().product::<usize>(), shape[dim..].iter().product::<usize>() / size);
    if size == 1 || outer <= 1 {
        return x.buffer();
    }
    let parts = x.tensor().detach().reshape((outer, size, inner))?.transpose(0, 1)?;
    let copied = Input::Borrowed(&parts).buffer()?;
    // Its consumer keeps the tensor, but not its memory.
    drop(x.taken()?);
    Ok(copied)
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

/// Sends the first `send[0]` rows to rank 0, the next `send[1]` to rank 1, and so on. Returns the rows of rank 0, of rank
/// 1, and so on.
pub(crate) fn exchanged_rows(x: &Tensor, send: &[usize], recv: &[usize], group: &ProcessGroup) -> Result<Tensor> {
    if group.size() == 1 {
        return Ok(x.detach());
    }
    let mut shape = x.dims().to_vec();
    let row: usize = shape[1..].iter().product();
    shape[0] = recv.iter().sum();
    let counts = |rows: &[usize]| rows.iter().map(|rows| rows * row).collect();
    let input = Input::Borrowed(x).buffer()?;
    let part = ExchangePart { input, send_counts: counts(send), recv_counts: counts(recv) };
    to_tensor(output(group.blocking().all_to_all(vec![part], fresh(x.device())?))?, &shape, x.device())
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
