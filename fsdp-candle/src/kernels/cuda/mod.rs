//! The kernels of CUDA devices: sources of CUDA C that are compiled when a device is first used.

mod arithmetic;
mod device;
mod eight_bits;
mod host_copies;
mod launch;
mod memory;
mod norm;
mod optimizers;
mod product;
mod registry;
mod set;
mod table;

pub(crate) use product::{Matrix, add_product};
pub(crate) use registry::{candle_device, compute_stream, device_count};
pub(super) use registry::{of_candle, of_ordinal};
pub(crate) use table::add_rows;
