//! Identifiers of devices.

/// A device that has memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceId {
    /// The host.
    Host,
    /// The CUDA device with this number. Only builds with the feature `cuda` use its memory.
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
