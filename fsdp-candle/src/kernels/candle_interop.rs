//! Access to a tensor's memory in place, on every device.

use std::cell::Cell;

use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, MetalStorage, Result, Storage, Tensor, bail};

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
