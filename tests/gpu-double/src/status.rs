//! The results of the driver's functions.

/// A `CUresult`.
pub(crate) type CuResult = i32;

pub(crate) const SUCCESS: CuResult = 0;
pub(crate) const INVALID_VALUE: CuResult = 1;
pub(crate) const OUT_OF_MEMORY: CuResult = 2;
pub(crate) const INVALID_DEVICE: CuResult = 101;
pub(crate) const INVALID_CONTEXT: CuResult = 201;
pub(crate) const INVALID_HANDLE: CuResult = 400;
pub(crate) const NOT_READY: CuResult = 600;
pub(crate) const ALREADY_REGISTERED: CuResult = 712;
pub(crate) const NOT_REGISTERED: CuResult = 713;
pub(crate) const NOT_SUPPORTED: CuResult = 801;

/// A program error that the double detects: a race, a use after free, a wait that never ends.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fault(pub(crate) String);

/// The failure of a call: an error status as from a driver, or a fault.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Status(CuResult),
    Fault(Fault),
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}
