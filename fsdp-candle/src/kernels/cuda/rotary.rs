//! Rotation of heads by position.

use candle_core::{Result, bail};
use cudarc::driver::LaunchConfig;
use fsdp_core::{Buffer, DType};

use super::super::layers::Rotation;
use super::super::slice::{Slice, SliceMut, same_length};
use super::compiler::Module;
use super::device::{Arg, THREADS, float_suffix, of_slice, same_dtype};

/// Rotates by the angles with these cosines and sines, or rotates back. `positions` are the groups' rows of the tables
/// (U32); the caller has compared them with the number of rows.
pub(crate) fn rotate(
    x: Slice<'_>,
    [cos, sin]: [Slice<'_>; 2],
    positions: Option<Slice<'_>>,
    rotation: Rotation,
    is_backward: bool,
) -> Result<Buffer> {
    let (cuda, dtype) = (of_slice(&x)?, x.dtype());
    let Rotation { heads, dim, half, offset, steps, tables, interleaved } = rotation;
    let kernel = format!("rotate_{}_{}", float_suffix(dtype)?, float_suffix(cos.dtype())?);
    same_dtype(cos.dtype(), sin.dtype())?;
    same_length(cos.len(), sin.len())?;
    let width = heads * dim;
    let groups = x.len() / width.max(1);
    same_length(groups * width, x.len())?;
    let mut y = cuda.uninit(dtype, x.len())?;
    if x.len() == 0 {
        return Ok(y);
    }
    let last = match &positions {
        Some(positions) => {
            same_dtype(DType::U32, positions.dtype())?;
            same_length(groups, positions.len())?;
            0
        }
        None => offset.saturating_add(groups.min(steps)).saturating_sub(1),
    };
    let (groups_of_table, rows_of_table) = tables.unwrap_or((groups, 0));
    let last_row = ((groups - 1) / groups_of_table.max(1)).saturating_mul(rows_of_table).saturating_add(last);
    if 2 * half > dim
        || steps == 0
        || groups_of_table == 0
        || last_row.saturating_add(1).saturating_mul(half) > cos.len()
    {
        bail!("{half} pairs of {dim} elements up to row {last_row} do not fit tables of {} elements", cos.len())
    }
    let to = cuda.view_mut(SliceMut::from(&mut y))?;
    let positions = positions.map_or(Ok(Arg::NULL), |positions| cuda.view(positions).map(Arg::from))?;
    let mut args = vec![cuda.view(x)?.into(), to.into(), cuda.view(cos)?.into(), cuda.view(sin)?.into(), positions];
    args.extend([groups, heads, dim, half, offset, steps, groups_of_table, rows_of_table].map(Arg::from));
    args.extend([interleaved, is_backward].map(|flag| Arg::Word(flag.into())));
    // Small groups share a block.
    let across = (heads * (dim - half)).next_power_of_two().min(THREADS as usize) as u32;
    let together = THREADS / across;
    let blocks = groups.div_ceil(together as usize).min(1 << 16) as u32;
    let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (across, together, 1), shared_mem_bytes: 0 };
    // SAFETY: the kernel's arguments, of the dtypes in its name: whole groups, whose rows the tables have.
    unsafe { cuda.launch(Module::Rotary.kernel(&kernel), config, &args)? };
    Ok(y)
}
