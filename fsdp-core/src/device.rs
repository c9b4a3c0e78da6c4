//! Devices: where memory is, how it is looked at there, and what runs there in order.
//!
//! The host is the only device that something is implemented for. Another one is one more variant of [`View`] and of
//! [`Stream`], a variant of [`crate::Buffer`], and a [`Backend`](crate::process_group::Backend) that moves its memory.

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceId {
    /// In the host's memory.
    Host,
    /// On the CUDA device of this number. No backend of this build moves such memory: collectives refuse it by name.
    Cuda(usize),
}

impl std::fmt::Display for DeviceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DeviceId::Host => f.write_str("the host"),
            DeviceId::Cuda(number) => write!(f, "CUDA device {number}"),
        }
    }
}

/// Elements in the memory of a device, to be read.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum View<'a> {
    /// The bytes, in native order.
    Host(&'a [u8]),
}

/// What a device does one after the other, such as the kernels of a step.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Stream {
    /// What the calling thread does.
    Host,
}
