//! The keys that a query of attention sees, and the softmax for a block of queries.

use candle_core::{Result, bail};
use cudarc::driver::LaunchConfig;
use fsdp_core::{Buffer, DType};

use super::super::layers::Draw;
use super::super::slice::{Slice, SliceMut, same_length};
use super::compiler::Module;
use super::device::{Arg, CudaKernels, THREADS, float_suffix, of_buffer, same_dtype, wide};

/// Keys that a thread computes, unless a query sees more than `THREADS` times as many.
const KEYS_PER_THREAD: usize = 4;

/// Threads of a warp.
const WARP: u32 = 32;

/// The keys that the queries of a row of the batch see: `Visibility` in `visible_keys.cuh`.
#[derive(Clone, Copy)]
pub(crate) struct Visibility<'a> {
    /// Queries and keys of the row.
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    /// Position of the first query, the first query after a gap, and the positions that the gap skips.
    pub(crate) first: usize,
    pub(crate) gap_at: usize,
    pub(crate) gap: usize,
    pub(crate) is_causal: bool,
    pub(crate) window: Option<usize>,
    /// Bounds of the row's documents, U32: 0, ..., `keys`.
    pub(crate) bounds: Option<Slice<'a>>,
}

impl Visibility<'_> {
    /// Returns `VISIBILITY_PARAMETERS` of the source.
    pub(super) fn arguments(&self, cuda: &CudaKernels) -> Result<[Arg; 9]> {
        let (bounds, documents) = match self.bounds {
            Some(bounds) => {
                same_dtype(DType::U32, bounds.dtype())?;
                (cuda.view(bounds)?.into(), bounds.len().saturating_sub(1))
            }
            None => (Arg::NULL, 0),
        };
        let window = self.window.map_or(u64::MAX, |window| window as u64);
        let [queries, keys, first, gap_at, gap] =
            [self.queries, self.keys, self.first, self.gap_at, self.gap].map(Arg::from);
        let is_causal = u32::from(self.is_causal).into();
        Ok([bounds, documents.into(), queries, keys, first, gap_at, gap, is_causal, Arg::Long(window)])
    }
}

/// A block of scores `[heads, rows, block_keys]` of one row of the batch: queries that follow each other, and the keys
/// that any of them sees.
#[derive(Clone, Copy)]
pub(crate) struct ScoreBlock<'a> {
    pub(crate) heads: usize,
    pub(crate) visible: Visibility<'a>,
    /// First query of the block, and its number of queries.
    pub(crate) first: usize,
    pub(crate) rows: usize,
    /// First key of the block, and its number of keys.
    pub(crate) first_key: usize,
    pub(crate) block_keys: usize,
    pub(crate) scale: f64,
    pub(crate) softcap: Option<f64>,
    /// Dropout of the probabilities, and the row of the batch.
    pub(crate) dropout: Option<(Draw, usize)>,
}

impl ScoreBlock<'_> {
    /// Returns the number of scores.
    fn len(&self) -> usize {
        self.heads * self.rows * self.block_keys
    }

    fn arguments(&self, cuda: &CudaKernels) -> Result<Vec<Arg>> {
        let mut arguments = self.visible.arguments(cuda)?.to_vec();
        arguments.extend([self.first, self.rows, self.first_key, self.block_keys].map(Arg::from));
        arguments.extend([self.scale, self.softcap.unwrap_or(0.)].map(Arg::from));
        let (draw, row) = self.dropout.unwrap_or_default();
        arguments.extend(draw.args());
        arguments.extend([row.into(), Arg::Float(draw.scale)]);
        Ok(arguments)
    }

    /// A block of threads computes one query of one head.
    fn config(&self) -> Result<LaunchConfig> {
        // A launch has fewer than 2^31 blocks.
        let Ok(blocks) = i32::try_from(self.heads * self.rows) else {
            bail!("attention: {} heads of {} queries exceed the limit of a launch", self.heads, self.rows)
        };
        let threads = self.block_keys.div_ceil(KEYS_PER_THREAD).next_power_of_two();
        let threads = threads.clamp(WARP as usize, THREADS as usize) as u32;
        Ok(LaunchConfig { grid_dim: (blocks as u32, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 })
    }

    /// Writes the block's probabilities, and the logarithms of the sums `[heads, queries]`, given the products of queries
    /// and keys. Products and logarithms are F64 for F64, else F32. Buffers may be larger than the block.
    pub(crate) fn softmax(&self, products: &Buffer, probabilities: &mut Buffer, log_sums: SliceMut<'_>) -> Result<()> {
        let cuda = of_buffer(probabilities)?;
        let (dtype, sums) = (probabilities.dtype(), wide(probabilities.dtype()));
        let products = self.scores(sums, products)?;
        let probabilities = SliceMut::from(probabilities).range(0..self.len())?;
        same_dtype(sums, log_sums.dtype())?;
        same_length(self.heads * self.visible.queries, log_sums.len())?;
        if self.len() == 0 {
            return Ok(());
        }
        let mut arguments: Vec<Arg> =
            vec![cuda.view(products)?.into(), cuda.view_mut(probabilities)?.into(), cuda.view_mut(log_sums)?.into()];
        arguments.extend(self.arguments(cuda)?);
        let kernel = format!("softmax_scores_{}", float_suffix(dtype)?);
        // SAFETY: the kernel's arguments, of the dtype in its name and of the block's lengths.
        unsafe { cuda.launch(Module::Attention.kernel(&kernel), self.config()?, &arguments) }
    }

    /// Writes the block's probabilities once more, and the gradients of the products of queries and keys. `gradients`
    /// are those of the probabilities. `out` and `d_out` are the attention's output for the row of the batch,
    /// `[queries, heads, dim]`, and its gradient. Buffers may be larger than the block.
    pub(crate) fn softmax_back(
        &self,
        [products, gradients]: [&Buffer; 2],
        [out, d_out]: [Slice<'_>; 2],
        log_sums: Slice<'_>,
        [probabilities, d_products]: [&mut Buffer; 2],
    ) -> Result<()> {
        let cuda = of_buffer(probabilities)?;
        let (dtype, sums) = (probabilities.dtype(), wide(probabilities.dtype()));
        let dim = out.len().checked_div(self.visible.queries * self.heads).unwrap_or(0);
        same_dtype(sums, log_sums.dtype())?;
        same_length(self.heads * self.visible.queries, log_sums.len())?;
        for slice in [&out, &d_out] {
            same_dtype(dtype, slice.dtype())?;
            same_length(self.visible.queries * self.heads * dim, slice.len())?;
        }
        same_dtype(dtype, d_products.dtype())?;
        if self.len() == 0 {
            return Ok(());
        }
        let read = [self.scores(sums, products)?, self.scores(sums, gradients)?, out, d_out, log_sums];
        let mut arguments = read.into_iter().map(|slice| Ok(cuda.view(slice)?.into())).collect::<Result<Vec<Arg>>>()?;
        for to in [probabilities, d_products] {
            arguments.push(cuda.view_mut(SliceMut::from(to).range(0..self.len())?)?.into());
        }
        arguments.extend([self.heads, dim].map(Arg::from));
        arguments.extend(self.arguments(cuda)?);
        let kernel = format!("softmax_scores_back_{}", float_suffix(dtype)?);
        // SAFETY: the kernel's arguments, of the dtype in its name and of the block's lengths.
        unsafe { cuda.launch(Module::Attention.kernel(&kernel), self.config()?, &arguments) }
    }

    /// Returns the block's scores at the start of a buffer.
    fn scores<'b>(&self, dtype: DType, buffer: &'b Buffer) -> Result<Slice<'b>> {
        same_dtype(dtype, buffer.dtype())?;
        Slice::from(buffer).range(0..self.len())
    }
}
