//! What this library itself computes on memory: one small set of kernels, chosen by device. The layers of `nn` have
//! their own.
//!
//! A device is one folder beside [`cpu`] that implements [`Kernels`], and its lines in [`choice`].

mod choice;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod doors;
mod eight_bits;
mod host_copies;
mod norm;
mod set;
mod slice;
#[cfg(test)]
mod tests;
mod update;

pub(crate) use choice::{device_id, of_buffer, of_device, or_host};
pub(crate) use cpu::host_elements;
#[cfg(feature = "cuda")]
pub(crate) use cuda::{Matrix, add_product, add_rows, candle_device, compute_stream, device_count};
pub(crate) use doors::{Backward, in_place, node};
pub(crate) use eight_bits::{EightBits, STATE_BLOCK};
pub(crate) use host_copies::{Copying, HostSink, HostSource};
pub use norm::NormType;
pub(crate) use set::{Kernels, Rows};
pub(crate) use slice::{Slice, SliceMut};
pub(crate) use update::{AdamUpdate, SgdUpdate};
