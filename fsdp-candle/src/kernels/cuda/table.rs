//! Rows of a table: the gradient of an embedding.

use candle_core::Result;
use cudarc::driver::LaunchConfig;
use fsdp_core::{Buffer, DType};

use super::super::slice::{Slice, SliceMut};
use super::device::{same_dtype, same_length};
use super::launch::{THREADS, of_float};
use super::memory::clear;
use super::registry::of_buffer;

/// Adds each row of `from` to the row of the table that its id (U32) names; ids beyond the table name none. A table
/// that is not to accumulate begins as zeros.
pub(crate) fn add_rows(
    ids: Slice<'_>,
    from: Slice<'_>,
    table: &mut Buffer,
    accumulate: bool,
    width: usize,
) -> Result<()> {
    let cuda = of_buffer(table)?;
    let kernel = format!("add_rows_{}", of_float(table.dtype())?);
    same_dtype(DType::U32, ids.dtype())?;
    same_dtype(table.dtype(), from.dtype())?;
    let (count, rows) = (ids.len(), table.len() / width.max(1));
    same_length(count * width, from.len())?;
    same_length(rows * width, table.len())?;
    let (ids, from, table) = (cuda.view(ids)?, cuda.view(from)?, cuda.view_mut(SliceMut::from(table))?);
    if !accumulate {
        clear(cuda, table)?;
    }
    if count == 0 || width == 0 {
        return Ok(());
    }
    let blocks = count.min(1 << 16) as u32;
    let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
    let args = [ids.into(), from.into(), table.into(), count.into(), width.into(), rows.into()];
    // SAFETY: the kernel's arguments; a row for each id, and rows of one width and dtype.
    unsafe { cuda.launch(&kernel, config, &args) }
}
