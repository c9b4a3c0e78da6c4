//! The two ways into Candle: a tensor's memory in place, and nodes of its graph. Both serve every device.

use std::cell::Cell;
use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, CudaStorage, MetalStorage};
use candle_core::{CustomOp1, InplaceOp1, Layout, Result, Shape, Storage, Tensor, bail};

/// A tensor's memory that nobody else sees meanwhile.
pub(crate) enum StorageMut<'a> {
    Cpu(&'a mut CpuStorage),
    Cuda(&'a mut CudaStorage),
    Metal(&'a mut MetalStorage),
}

impl<'a> StorageMut<'a> {
    /// Puts another memory of the same device in place of this, which it returns.
    pub(crate) fn replace(self, new: Storage) -> Result<Storage> {
        Ok(match (self, new) {
            (StorageMut::Cpu(at), Storage::Cpu(new)) => Storage::Cpu(std::mem::replace(at, new)),
            (StorageMut::Cuda(at), Storage::Cuda(new)) => Storage::Cuda(std::mem::replace(at, new)),
            (StorageMut::Metal(at), Storage::Metal(new)) => Storage::Metal(std::mem::replace(at, new)),
            _ => bail!("a tensor's memory can't move to another device"),
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

/// Calls `f` with the memory under a tensor and all of its views, locked against everybody else.
pub(crate) fn in_place<R>(tensor: &Tensor, f: impl FnOnce(StorageMut<'_>, &Layout) -> Result<R>) -> Result<R> {
    let mut result = None;
    let call = |storage: StorageMut<'_>, layout: &Layout| {
        result = Some(f(storage, layout)?);
        Ok(())
    };
    tensor.inplace_op1(&InPlace(Cell::new(Some(call))))?;
    match result {
        Some(result) => Ok(result),
        None => bail!("Candle did not run an operation in place"),
    }
}

/// The operation wants a function that can be called from anywhere; it is called once, here.
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

/// What a node of the graph does in backward.
pub(crate) trait Backward: Send + Sync + 'static {
    /// Its name in Candle's messages.
    fn name(&self) -> &'static str;

    /// The gradient of `source`, from that of the node.
    fn backward(&self, source: &Tensor, node: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>>;
}

/// A node that comes after `source` in the graph and has this memory, of the same device.
pub(crate) fn node(source: &Tensor, memory: Storage, shape: Shape, backward: impl Backward) -> Result<Tensor> {
    source.apply_op1(Node { value: Mutex::new(Some((memory, shape))), backward })
}

struct Node<B> {
    value: Mutex<Option<(Storage, Shape)>>,
    backward: B,
}

macro_rules! forward {
    ($self:ident, $device:ident) => {
        match $self.value.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some((Storage::$device(storage), shape)) => Ok((storage, shape)),
            Some(_) => bail!("{}: a node's memory is on the device of what comes before it", $self.backward.name()),
            None => bail!("{} ran twice", $self.backward.name()),
        }
    };
}

impl<B: Backward> CustomOp1 for Node<B> {
    fn name(&self) -> &'static str {
        self.backward.name()
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        forward!(self, Cpu)
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        forward!(self, Cuda)
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        forward!(self, Metal)
    }

    fn bwd(&self, source: &Tensor, node: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.backward.backward(source, node, gradient)
    }
}
