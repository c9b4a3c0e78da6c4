//! The gradient of a table's rows.

use candle_core::{Result, bail};
use cudarc::driver::LaunchConfig;
use fsdp_core::{Buffer, DType};

use super::super::slice::{Slice, SliceMut, same_length};
use super::clear;
use super::compiler::Module;
use super::device::{CudaKernels, THREADS, elementwise, float_suffix, of_buffer, same_dtype};

/// Adds each row of `from` to the table's row for its id (U32), in the order of the ids. Ids beyond the table stand for
/// no row. Unless `accumulate`, the table starts as zeros. The table may be F32 for rows of BF16.
pub(crate) fn add_rows(
    ids: Slice<'_>,
    from: Slice<'_>,
    table: &mut Buffer,
    accumulate: bool,
    width: usize,
) -> Result<()> {
    let cuda = of_buffer(table)?;
    let kernel = format!("add_rows_{}_{}", float_suffix(from.dtype())?, float_suffix(table.dtype())?);
    same_dtype(DType::U32, ids.dtype())?;
    if (from.dtype(), table.dtype()) != (DType::BF16, DType::F32) {
        same_dtype(table.dtype(), from.dtype())?;
    }
    let (count, rows) = (ids.len(), table.len() / width.max(1));
    same_length(count * width, from.len())?;
    same_length(rows * width, table.len())?;
    let to = cuda.view_mut(SliceMut::from(table))?;
    if !accumulate {
        clear(cuda, to)?;
    }
    if count == 0 || width == 0 {
        return Ok(());
    }
    let keys = sorted_keys(cuda, ids)?;
    let (blocks, tiles) = (count.min(1 << 16) as u32, width.div_ceil(THREADS as usize).min(1 << 8) as u32);
    let config = LaunchConfig { grid_dim: (blocks, tiles, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
    let keys = cuda.view((&keys).into())?.into();
    let args = [keys, cuda.view(from)?.into(), to.into(), count.into(), width.into(), rows.into()];
    // SAFETY: the kernel's arguments; a row for each key's index, and rows of one width and dtype.
    unsafe { cuda.launch(Module::Embedding.kernel(&kernel), config, &args) }
}

/// Returns a key for each id, sorted: the id in the upper half, and its index in the lower half.
fn sorted_keys(cuda: &CudaKernels, ids: Slice<'_>) -> Result<Buffer> {
    let count = ids.len();
    if u32::try_from(count).is_err() {
        bail!("the gradient of a table takes fewer than 2^32 ids at a time, found {count}. Use a smaller batch")
    }
    let (mut keys, mut merged) = (cuda.uninit(DType::I64, count)?, cuda.uninit(DType::I64, count)?);
    let args = [cuda.view(ids)?.into(), cuda.view_mut(SliceMut::from(&mut keys))?.into(), count.into()];
    // SAFETY: the kernel's arguments; a key of eight bytes for each id.
    unsafe { cuda.launch(Module::Embedding.kernel("sort_stretches"), elementwise(count), &args)? };
    let mut run = THREADS as usize;
    while run < count {
        let to = cuda.view_mut(SliceMut::from(&mut merged))?;
        let args = [cuda.view((&keys).into())?.into(), to.into(), count.into(), run.into()];
        // SAFETY: the kernel's arguments, of one length.
        unsafe { cuda.launch(Module::Embedding.kernel("merge_runs"), elementwise(count), &args)? };
        std::mem::swap(&mut keys, &mut merged);
        run *= 2;
    }
    Ok(keys)
}
