//! The methods of an FSDP module that steer it: unsharding by hand, prefetch, gradient synchronisation, and the rest of
//! PyTorch's `FSDPModule`.

mod by_hand;
mod handles;
mod settings;

pub use handles::{FinalizeHandle, Unit, UnshardHandle};
