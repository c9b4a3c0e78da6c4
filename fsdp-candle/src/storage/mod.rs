//! The memory under a tensor: moved in and out whole, lent to collectives, and pooled.

mod access;
mod arithmetic;
mod convert;
mod pool;
mod swap;

pub(crate) use access::{
    TensorMemory, copied, copy_in, copy_out, copy_range_out, copy_tensor, numbers_of, share_memory, to_host,
    with_slice, with_slice_mut,
};
pub(crate) use arithmetic::{add, cast, copy, from_numbers, scale, to_numbers};
pub(crate) use convert::{to_buffer, to_core_dtype, to_dtype, to_storage, to_tensor, to_var};
pub(crate) use pool::Pool;
pub(crate) use swap::{copied_storage, empty, scalar, swap, take};
