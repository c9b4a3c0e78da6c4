//! Which device something is on.

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceId {
    /// In the host's memory.
    Host,
    /// On the CUDA device of this number. Only builds with the feature `cuda` know such memory.
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
