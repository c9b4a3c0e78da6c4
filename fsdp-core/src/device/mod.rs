//! Devices: memory on them, views of it, and streams.
//!
//! A device is a variant of [`View`] and [`crate::Buffer`], and something that moves its memory: a
//! [`DeviceEngine`](crate::process_group::DeviceEngine) or a [`Backend`](crate::process_group::Backend).

#[cfg(feature = "cuda")]
pub mod cuda;

/// Read access to elements in the memory of a device.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum View<'a> {
    /// The bytes in native order.
    Host(&'a [u8]),
    /// Bytes on a CUDA device. Reads are ordered by a stream.
    #[cfg(feature = "cuda")]
    Cuda(cuda::CudaView<'a>),
}

/// A stream that waits for a collective: see [`crate::Work::then`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stream {
    /// The calling thread.
    Host,
    /// The compute stream of the outputs' device: kernels issued from here on. For host memory, the calling thread.
    Compute,
}
