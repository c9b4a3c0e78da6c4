//! Norms, and what is no number: in two kernels, so that a sum's order follows from its length.

use std::sync::PoisonError;

use candle_core::Result;
use cudarc::driver::LaunchConfig;
use fsdp_core::DType;

use super::super::norm::NormType;
use super::super::slice::{Slice, SliceMut};
use super::device::{Cuda, MOST_SHARES, same_dtype, same_length};
use super::launch::{THREADS, of_float};
use super::memory::clear;

/// Elements that are worth a block.
const EACH: usize = 4096;

/// What is added up: the numbers of the source's `SQUARES` and so on.
#[derive(Clone, Copy)]
struct Of(u32, f64);

const NON_FINITE: Of = Of(4, 0.);

impl From<NormType> for Of {
    fn from(norm: NormType) -> Self {
        match norm {
            NormType::Two => Of(0, 0.),
            NormType::P(1.) => Of(1, 0.),
            NormType::Infinity => Of(2, 0.),
            NormType::P(p) => Of(3, p),
        }
    }
}

pub(super) fn powers(cuda: &Cuda, values: Slice<'_>, norm: NormType, sum: SliceMut<'_>) -> Result<()> {
    let float = of_float(values.dtype())?;
    add_up(cuda, float, values, norm.into(), sum)
}

pub(super) fn count_non_finite(cuda: &Cuda, values: Slice<'_>, count: SliceMut<'_>) -> Result<()> {
    match of_float(values.dtype()) {
        Ok(float) => add_up(cuda, float, values, NON_FINITE, count),
        // Whole numbers are finite.
        Err(_) => clear(cuda, cuda.view_mut(count)?),
    }
}

fn add_up(cuda: &Cuda, float: &str, values: Slice<'_>, Of(of, p): Of, sum: SliceMut<'_>) -> Result<()> {
    same_dtype(DType::F64, sum.dtype())?;
    same_length(1, sum.len())?;
    let len = values.len();
    let (values, sum) = (cuda.view(values)?, cuda.view_mut(sum)?);
    if len == 0 {
        return clear(cuda, sum);
    }
    let blocks = len.div_ceil(EACH).min(MOST_SHARES);
    let config = |blocks| LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
    let shares = cuda.shares.lock().unwrap_or_else(PoisonError::into_inner);
    let to = shares.view();
    let args = [values.into(), len.into(), of.into(), p.into(), to.into()];
    // SAFETY: the kernel's arguments; there is room for a share of each block.
    unsafe { cuda.launch(&format!("powers_{float}"), config(blocks as u32), &args)? };
    // SAFETY: the same. Nobody else's sum comes between the two, for the shares are locked.
    unsafe { cuda.launch("total", config(1), &[to.into(), blocks.into(), of.into(), sum.into()]) }
}
