//! Bytes in use on a rank's device: those of the process's allocator, or of a CUDA memory pool.

use candle_core::{Device, Result};

/// Counts every allocation of the process.
#[global_allocator]
static ALLOCATOR: peak_alloc::PeakAlloc = peak_alloc::PeakAlloc;

/// Counter of the bytes in use on a device.
pub(crate) enum Meter {
    Host,
    #[cfg(feature = "cuda")]
    Cuda(cuda::Pool),
}

impl Meter {
    pub(crate) fn of(device: &Device) -> Result<Self> {
        match device {
            Device::Cpu => Ok(Meter::Host),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Ok(Meter::Cuda(cuda::Pool::of(device)?)),
            other => candle_core::bail!("the memory of {other:?} can't be counted"),
        }
    }

    /// Returns the bytes in use.
    pub(crate) fn current(&self) -> Result<usize> {
        match self {
            Meter::Host => Ok(ALLOCATOR.current_usage()),
            #[cfg(feature = "cuda")]
            Meter::Cuda(pool) => pool.current(),
        }
    }

    /// Returns the peak since [`Meter::reset`].
    pub(crate) fn peak(&self) -> Result<usize> {
        match self {
            Meter::Host => Ok(ALLOCATOR.peak_usage()),
            #[cfg(feature = "cuda")]
            Meter::Cuda(pool) => pool.peak(),
        }
    }

    /// Sets the peak to the bytes in use.
    pub(crate) fn reset(&self) -> Result<()> {
        match self {
            Meter::Host => ALLOCATOR.reset_peak_usage(),
            #[cfg(feature = "cuda")]
            Meter::Cuda(pool) => pool.reset()?,
        }
        Ok(())
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use candle_core::cuda_backend::cudarc::driver::{result, sys};
    use candle_core::cuda_backend::{CudaDevice, WrapErr};
    use candle_core::{Device, Result};
    use sys::CUmemPool_attribute as Attribute;

    /// Default memory pool of a device.
    pub(crate) struct Pool(CudaDevice);

    impl Pool {
        pub(super) fn of(device: &CudaDevice) -> Result<Self> {
            let pool = Pool(device.clone());
            pool.handle()?;
            Ok(pool)
        }

        pub(super) fn current(&self) -> Result<usize> {
            self.read(Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
        }

        pub(super) fn peak(&self) -> Result<usize> {
            self.read(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)
        }

        pub(super) fn reset(&self) -> Result<()> {
            let (pool, attribute) = (self.handle()?, Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH);
            // Only zero can be set. It resets the peak to the bytes in use.
            let mut zero = 0_u64;
            // SAFETY: the pool is the device's own, and the attribute is a u64.
            unsafe { result::mem_pool::set_attribute(pool, attribute, (&raw mut zero).cast()) }.w()
        }

        fn handle(&self) -> Result<sys::CUmemoryPool> {
            let stream = self.0.cuda_stream();
            stream.context().bind_to_thread().w()?;
            // SAFETY: the context belongs to an existing device.
            unsafe { result::device::get_default_mem_pool(stream.context().cu_device()) }.w()
        }

        fn read(&self, attribute: Attribute) -> Result<usize> {
            // Freed memory counts until the device reaches the free.
            Device::Cuda(self.0.clone()).synchronize()?;
            let pool = self.handle()?;
            let mut bytes = 0_u64;
            // SAFETY: as above.
            unsafe { result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast()) }.w()?;
            Ok(bytes as usize)
        }
    }
}
