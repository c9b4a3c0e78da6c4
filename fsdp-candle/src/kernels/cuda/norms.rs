//! Normalization of rows.

use candle_core::Result;
use cudarc::driver::LaunchConfig;
use fsdp_core::{Buffer, DType};

use super::super::layers::Normalization;
use super::super::slice::{Slice, SliceMut, same_length};
use super::compiler::Module;
use super::device::{Arg, CudaKernels, THREADS, float_suffix, of_buffer, of_slice, same_dtype, wide};

/// Threads of a warp: `WARP` in the source.
const WARP: u32 = 32;
/// Elements of a row from which a block shares it, if they are a multiple of four: `LONG` in the source.
const LONG: usize = 1024;
/// Blocks that sum a weight's gradient, if there are enough rows.
const BLOCKS: usize = 1024;
/// Fewest rows that a block sums.
const LEAST_ROWS: usize = 32;

impl Normalization {
    /// Returns the number of rows. Fails if the elements are not whole rows.
    fn rows(&self, x: &Slice<'_>) -> Result<usize> {
        let rows = x.len() / self.width.max(1);
        same_length(rows * self.width, x.len())?;
        Ok(rows)
    }

    fn config(&self, rows: usize) -> LaunchConfig {
        let threads = if self.width < LONG || !self.width.is_multiple_of(4) { WARP } else { THREADS };
        let blocks = rows.div_ceil((THREADS / threads) as usize).min(1 << 16) as u32;
        LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 }
    }

    fn args(&self, rows: usize) -> [Arg; 4] {
        [rows.into(), self.width.into(), self.eps.into(), u32::from(self.centered).into()]
    }
}

/// Returns the normalized rows, multiplied by the weight and with the bias added.
pub(crate) fn normalize(
    x: Slice<'_>,
    weight: Slice<'_>,
    bias: Option<Slice<'_>>,
    norm: Normalization,
) -> Result<Buffer> {
    let (cuda, dtype, rows) = (of_slice(&x)?, x.dtype(), norm.rows(&x)?);
    for weight in [Some(&weight), bias.as_ref()].into_iter().flatten() {
        same_dtype(dtype, weight.dtype())?;
        same_length(norm.width, weight.len())?;
    }
    let kernel = format!("normalize_{}", float_suffix(dtype)?);
    let mut y = cuda.uninit(dtype, x.len())?;
    if rows == 0 {
        return Ok(y);
    }
    let bias = bias.map_or(Ok(Arg::NULL), |bias| cuda.view(bias).map(Arg::from))?;
    let to = cuda.view_mut(SliceMut::from(&mut y))?;
    let mut args = vec![cuda.view(x)?.into(), cuda.view(weight)?.into(), bias, to.into()];
    args.extend(norm.args(rows));
    // SAFETY: the kernel's arguments, of one dtype: whole rows, and a weight for each element of a row.
    unsafe { cuda.launch(Module::Norms.kernel(&kernel), norm.config(rows), &args)? };
    Ok(y)
}

/// The gradients of a normalization.
pub(crate) struct NormGrads {
    /// Gradient of the input.
    pub(crate) dx: Buffer,
    norm: Normalization,
    dtype: DType,
    rows: usize,
    /// Mean and scale of each row.
    kept: Buffer,
}

/// Sums of the weight's and the bias's gradients over stretches of rows.
pub(crate) struct WeightSums {
    parts: Buffer,
    stretches: usize,
    norm: Normalization,
    dtype: DType,
}

/// Returns the input's gradient, and what the weights' gradients need.
pub(crate) fn normalize_back(x: Slice<'_>, dy: Slice<'_>, weight: Slice<'_>, norm: Normalization) -> Result<NormGrads> {
    let (cuda, dtype, rows) = (of_slice(&x)?, x.dtype(), norm.rows(&x)?);
    same_dtype(dtype, dy.dtype())?;
    same_dtype(dtype, weight.dtype())?;
    same_length(x.len(), dy.len())?;
    same_length(norm.width, weight.len())?;
    let kernel = format!("normalize_back_{}", float_suffix(dtype)?);
    let (mut dx, mut kept) = (cuda.uninit(dtype, x.len())?, cuda.uninit(wide(dtype), 2 * rows)?);
    if rows > 0 {
        let [to, to_kept] = [&mut dx, &mut kept].map(|to| cuda.view_mut(SliceMut::from(to)));
        let mut args = vec![cuda.view(x)?.into(), cuda.view(dy)?.into(), cuda.view(weight)?.into()];
        args.extend([Arg::from(to?), to_kept?.into()]);
        args.extend(norm.args(rows));
        // SAFETY: the kernel's arguments, of one dtype: whole rows, a weight for each element of a row, and two numbers
        // of the arithmetic's dtype for each row.
        unsafe { cuda.launch(Module::Norms.kernel(&kernel), norm.config(rows), &args)? };
    }
    Ok(NormGrads { dx, norm, dtype, rows, kept })
}

impl NormGrads {
    /// Sums the weights' gradients for the same input and gradient.
    pub(crate) fn weight_sums(&self, x: Slice<'_>, dy: Slice<'_>) -> Result<WeightSums> {
        let NormGrads { norm, dtype, rows, ref kept, .. } = *self;
        let cuda = of_buffer(kept)?;
        for from in [&x, &dy] {
            same_dtype(dtype, from.dtype())?;
            same_length(rows * norm.width, from.len())?;
        }
        let kernel = format!("weight_sums_{}", float_suffix(dtype)?);
        let tiles = norm.width.div_ceil(WARP as usize * 4);
        let most = (BLOCKS / tiles).clamp(1, BLOCKS);
        let stretch = rows.div_ceil(most).max(LEAST_ROWS);
        let stretches = rows.div_ceil(stretch);
        let mut parts = cuda.uninit(wide(dtype), stretches * 2 * norm.width)?;
        if rows > 0 {
            let to = cuda.view_mut(SliceMut::from(&mut parts))?;
            let from = [cuda.view(x)?, cuda.view(dy)?, cuda.view(kept.into())?];
            let sizes = [rows, norm.width, stretch].map(Arg::from);
            let args = [&from.map(Arg::from)[..], &[to.into()], &sizes].concat();
            let config = LaunchConfig {
                grid_dim: (tiles.min(1 << 16) as u32, stretches as u32, 1),
                block_dim: (WARP, THREADS / WARP, 1),
                shared_mem_bytes: 0,
            };
            // SAFETY: the kernel's arguments: rows of one dtype, two numbers for each row, and room for two sums for
            // each stretch and each element of a row.
            unsafe { cuda.launch(Module::Norms.kernel(&kernel), config, &args)? };
        }
        Ok(WeightSums { parts, stretches, norm, dtype })
    }
}

impl WeightSums {
    /// Adds the weight's gradient, or the bias's, to a buffer, or overwrites it unless `accumulate`. The buffer has the
    /// dtype of the rows, or of the sums.
    pub(crate) fn add_to(&self, grad: &mut Buffer, accumulate: bool, of_bias: bool) -> Result<()> {
        let cuda: &CudaKernels = of_buffer(&self.parts)?;
        if grad.dtype() != self.parts.dtype() {
            same_dtype(self.dtype, grad.dtype())?;
        }
        same_length(self.norm.width, grad.len())?;
        let kernel = format!("weight_totals_{}", float_suffix(grad.dtype())?);
        let to = cuda.view_mut(SliceMut::from(grad))?;
        let flags = [of_bias, accumulate].map(|flag| Arg::Word(flag.into()));
        let args = [cuda.view((&self.parts).into())?.into(), to.into(), self.stretches.into(), self.norm.width.into()];
        let args = [&args[..], &flags].concat();
        // SAFETY: the kernel's arguments: two sums for each stretch and each element of a row, and a gradient for each
        // element.
        unsafe { cuda.run_elementwise(Module::Norms.kernel(&kernel), self.norm.width, &args) }
    }
}
