//! The memory under a tensor: moved in and out whole, lent to collectives, and pooled.

mod access;
mod arithmetic;
mod convert;
mod pool;
mod swap;

pub(crate) use access::{TensorMemory, copy_out, with_bytes_mut};
pub(crate) use arithmetic::{add, cast, scale};
pub(crate) use convert::{to_buffer, to_core_dtype, to_storage, to_tensor, to_var, typed};
pub(crate) use pool::Pool;
pub(crate) use swap::{empty, poison, swap};
