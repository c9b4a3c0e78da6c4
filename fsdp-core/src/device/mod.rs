//! Devices: where memory is, how it is looked at there, and what runs there in order.
//!
//! A device is a variant of [`View`] and of [`crate::Buffer`], and what moves its memory
//! ([`DeviceEngine`](crate::process_group::DeviceEngine), or a whole [`Backend`](crate::process_group::Backend)).

#[cfg(feature = "cuda")]
pub mod cuda;

/// Elements in the memory of a device, to be read.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum View<'a> {
    /// The bytes, in native order.
    Host(&'a [u8]),
    /// Bytes on a CUDA device. What reads them is ordered by a stream.
    #[cfg(feature = "cuda")]
    Cuda(cuda::CudaView<'a>),
}

/// What comes after a collective: see [`crate::Work::then`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stream {
    /// What the calling thread does.
    Host,
    /// What the device of the outputs computes: kernels that are issued from here on. For memory of the host it is the
    /// calling thread.
    Compute,
}
