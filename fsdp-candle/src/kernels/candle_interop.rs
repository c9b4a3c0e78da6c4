//! Access to Candle's internals: a tensor's memory in place, and nodes of its graph. Both support every device.

use std::cell::Cell;

use candle_core::{CpuStorage, CudaStorage, MetalStorage};
use candle_core::{CustomOp1, CustomOp2, CustomOp3, InplaceOp1, Layout, Result, Shape, Storage, Tensor, bail};
use parking_lot::Mutex;

/// Exclusive access to a tensor's storage.
pub(crate) enum StorageMut<'a> {
    Cpu(&'a mut CpuStorage),
    Cuda(&'a mut CudaStorage),
    Metal(&'a mut MetalStorage),
}

impl<'a> StorageMut<'a> {
    /// Replaces the storage by another one on the same device, and returns the old one.
    pub(crate) fn replace(self, new: Storage) -> Result<Storage> {
        Ok(match (self, new) {
            (StorageMut::Cpu(at), Storage::Cpu(new)) => Storage::Cpu(std::mem::replace(at, new)),
            (StorageMut::Cuda(at), Storage::Cuda(new)) => Storage::Cuda(std::mem::replace(at, new)),
            (StorageMut::Metal(at), Storage::Metal(new)) => Storage::Metal(std::mem::replace(at, new)),
            _ => bail!("a tensor's storage cannot be replaced by one on another device"),
        })
    }
}

impl<'a> From<&'a mut Storage> for StorageMut<'a> {
    fn from(storage: &'a mut Storage) -> Self {
        match storage {
            Storage::Cpu(storage) => StorageMut::Cpu(storage),
            Storage::Cuda(storage) => StorageMut::Cuda(storage),
            Storage::Metal(storage) => StorageMut::Metal(storage),
        }
    }
}

/// Calls `f` with the storage of a tensor and all of its views, under the storage's write lock.
pub(crate) fn in_place<R>(tensor: &Tensor, f: impl FnOnce(StorageMut<'_>, &Layout) -> Result<R>) -> Result<R> {
    let mut result = None;
    let call = |storage: StorageMut<'_>, layout: &Layout| {
        result = Some(f(storage, layout)?);
        Ok(())
    };
    tensor.inplace_op1(&InPlace(Cell::new(Some(call))))?;
    match result {
        Some(result) => Ok(result),
        None => bail!("Candle did not run an in-place operation"),
    }
}

/// Candle's operation needs a shared function, but calls it once, here.
struct InPlace<F>(Cell<Option<F>>);

impl<F: FnOnce(StorageMut<'_>, &Layout) -> Result<()>> InPlace<F> {
    fn call(&self, storage: StorageMut<'_>, layout: &Layout) -> Result<()> {
        self.0.take().map_or(Ok(()), |f| f(storage, layout))
    }
}

impl<F: FnOnce(StorageMut<'_>, &Layout) -> Result<()>> InplaceOp1 for InPlace<F> {
    fn name(&self) -> &'static str {
        "fsdp-in-place"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        self.call(StorageMut::Cpu(storage), layout)
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        self.call(StorageMut::Cuda(storage), layout)
    }

    fn metal_fwd(&self, storage: &mut MetalStorage, layout: &Layout) -> Result<()> {
        self.call(StorageMut::Metal(storage), layout)
    }
}

/// The backward of a node with one source.
pub(crate) trait Backward: Send + Sync + 'static {
    /// Returns the node's name in Candle's messages.
    fn name(&self) -> &'static str;

    /// Returns the gradient of `source`, given the gradient of the node.
    fn backward(&self, source: &Tensor, node: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>>;
}

/// Returns a node with this storage that follows `source` in the graph. Both are on one device.
pub(crate) fn node(source: &Tensor, memory: Storage, shape: Shape, backward: impl Backward) -> Result<Tensor> {
    graph_op(backward.name(), &[source], memory, shape, move |sources, node, gradient| {
        Ok([backward.backward(sources[0], node, gradient)?])
    })
}

/// Returns an operation's result as a node that follows its sources in the graph. There are one to three sources, on
/// one device. `backward(sources, node, gradient)` returns the gradients of the sources, in order.
pub(crate) fn graph_op<G: IntoIterator<Item = Option<Tensor>>>(
    name: &'static str,
    sources: &[impl AsRef<Tensor>],
    memory: Storage,
    shape: impl Into<Shape>,
    backward: impl Fn(&[&Tensor], &Tensor, &Tensor) -> Result<G> + Send + Sync + 'static,
) -> Result<Tensor> {
    let gradients = move |sources: &[&Tensor], node: &Tensor, gradient: &Tensor| {
        let mut gradients = backward(sources, node, gradient)?.into_iter();
        Ok(std::array::from_fn(|_| gradients.next().flatten()))
    };
    let op = GraphOp { name, result: Mutex::new(Some((memory, shape.into()))), gradients: Box::new(gradients) };
    match sources {
        [a] => a.as_ref().apply_op1(op),
        [a, b] => a.as_ref().apply_op2(b.as_ref(), op),
        [a, b, c] => a.as_ref().apply_op3(b.as_ref(), c.as_ref(), op),
        _ => bail!("{name}: expected 1 to 3 sources, found {}", sources.len()),
    }
}

type Gradients = dyn Fn(&[&Tensor], &Tensor, &Tensor) -> Result<[Option<Tensor>; 3]> + Send + Sync;

/// An operation whose result is already computed.
struct GraphOp {
    name: &'static str,
    result: Mutex<Option<(Storage, Shape)>>,
    gradients: Box<Gradients>,
}

macro_rules! forward {
    ($self:ident, $device:ident) => {
        match $self.result.lock().take() {
            Some((Storage::$device(storage), shape)) => Ok((storage, shape)),
            Some(_) => bail!("{}: a node must be on the device of its source", $self.name),
            None => bail!("{} ran twice", $self.name),
        }
    };
}

/// Implements Candle's trait for operations with these sources.
macro_rules! custom_op {
    ($trait:ident($($source:ident),*), $gradients:pat => $found:expr, $returned:ty) => {
        #[allow(unused_variables)]
        impl $trait for GraphOp {
            fn name(&self) -> &'static str {
                self.name
            }

            fn cpu_fwd(&self, $($source: &CpuStorage, _: &Layout),*) -> Result<(CpuStorage, Shape)> {
                forward!(self, Cpu)
            }

            fn cuda_fwd(&self, $($source: &CudaStorage, _: &Layout),*) -> Result<(CudaStorage, Shape)> {
                forward!(self, Cuda)
            }

            fn metal_fwd(&self, $($source: &MetalStorage, _: &Layout),*) -> Result<(MetalStorage, Shape)> {
                forward!(self, Metal)
            }

            fn bwd(&self, $($source: &Tensor,)* node: &Tensor, gradient: &Tensor) -> Result<$returned> {
                let $gradients = (self.gradients)(&[$($source),*], node, gradient)?;
                Ok($found)
            }
        }
    };
}
custom_op!(CustomOp1(a), [da, ..] => da, Option<Tensor>);
custom_op!(CustomOp2(a, b), [da, db, _] => (da, db), (Option<Tensor>, Option<Tensor>));
custom_op!(CustomOp3(a, b, c), [da, db, dc] => (da, db, dc), (Option<Tensor>, Option<Tensor>, Option<Tensor>));
