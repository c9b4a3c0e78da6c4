//! Mixtures of experts: the choice of experts, and rows that move between tokens and experts.

use std::ops::Range;

use candle_core::{Result, bail};
use cudarc::driver::LaunchConfig;
use fsdp_core::{Buffer, DType};

use super::super::Kernels;
use super::super::slice::{Slice, SliceMut, same_length};
use super::compiler::Module;
use super::device::{Arg, CudaKernels, THREADS, float_suffix, of_buffer, of_slice, same_dtype, wide};

/// Threads of a warp: `WARP` in the source.
const WARP: u32 = 32;
/// Elements of a row from which a block shares it: `LONG` in the source.
const LONG: usize = 1024;

/// Returns the blocks for rows that have this many threads each.
fn rows_of(rows: usize, threads: u32) -> LaunchConfig {
    let blocks = rows.div_ceil((THREADS / threads) as usize).min(1 << 16) as u32;
    LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 }
}

/// Returns the columns (U32) of each row's `count` largest values (F32), the largest first. Among equal values, the first
/// counts as the largest. A row has `width` elements, at least `count`.
pub(crate) fn largest_of_rows(values: Slice<'_>, width: usize, count: usize) -> Result<Buffer> {
    let (cuda, rows) = (of_slice(&values)?, values.len() / width.max(1));
    same_dtype(DType::F32, values.dtype())?;
    same_length(rows * width, values.len())?;
    let Some(word) = u32::try_from(width).ok().and_then(|width| u32::try_from(count).ok().filter(|&n| n <= width))
    else {
        bail!("the largest {count} of {width} values: a row has at least as many, and fewer than 2^32")
    };
    let mut found = cuda.uninit(DType::U32, rows * count)?;
    if !found.is_empty() {
        let to = cuda.view_mut(SliceMut::from(&mut found))?;
        let args = [cuda.view(values)?.into(), to.into(), rows.into(), width.into(), Arg::Word(word)];
        // SAFETY: the kernel's arguments: whole rows, and room for `count` columns of each.
        unsafe { cuda.launch(Module::Experts.kernel("largest_of_rows"), rows_of(rows, WARP), &args)? };
    }
    Ok(found)
}

/// Routes sorted by expert, those of one expert by number.
pub(crate) struct SortedRoutes {
    /// Routes of each token.
    per_token: u32,
    /// Numbers of the sorted routes.
    order: Buffer,
    /// Place of each route among the sorted ones.
    places: Buffer,
    /// Number of routes of each expert.
    counts: Buffer,
}

impl SortedRoutes {
    /// Sorts routes, given the expert of each (U8, U32 or I64). A route whose expert is not among `experts` has an
    /// unspecified place.
    pub(crate) fn new(chosen: Slice<'_>, experts: usize, per_token: usize) -> Result<Self> {
        let (cuda, routes) = (of_slice(&chosen)?, chosen.len());
        let suffix = match chosen.dtype() {
            DType::U8 => "u8",
            DType::U32 => "u32",
            DType::I64 => "i64",
            other => bail!("the numbers of experts are U8, U32 or I64, found {other}"),
        };
        let sizes = [routes, experts, per_token].map(u32::try_from);
        let [Ok(_), Ok(blocks), Ok(per_token)] = sizes else {
            bail!("{routes} routes to {experts} experts are too many: use a smaller batch")
        };
        let [mut order, mut places] = [cuda.uninit(DType::U32, routes)?, cuda.uninit(DType::U32, routes)?];
        let mut counts = cuda.uninit(DType::U32, experts)?;
        if blocks > 0 {
            let [to_counts, to_order, to_places] =
                [&mut counts, &mut order, &mut places].map(|to| cuda.view_mut(SliceMut::from(to)));
            let args =
                [cuda.view(chosen)?.into(), to_counts?.into(), to_order?.into(), to_places?.into(), routes.into()];
            let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
            let kernel = format!("sort_routes_{suffix}");
            // SAFETY: the kernel's arguments: a block and a count for each expert, and two numbers for each route.
            unsafe { cuda.launch(Module::Experts.kernel(&kernel), config, &args)? };
        }
        Ok(SortedRoutes { per_token, order, places, counts })
    }

    /// Returns the number of routes of each expert. Waits for the device.
    pub(crate) fn read_counts(&self) -> Result<Vec<usize>> {
        let mut counts = vec![];
        of_buffer(&self.counts)?.read((&self.counts).into(), &mut |bytes| {
            counts =
                bytes.chunks_exact(4).map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]])).collect();
        })?;
        Ok(counts.into_iter().map(|count| count as usize).collect())
    }

    fn routes(&self) -> usize {
        self.order.len()
    }

    /// Returns the row of each sorted route's token.
    pub(crate) fn gather(&self, from: Slice<'_>, width: usize) -> Result<Buffer> {
        let (cuda, dtype, routes) = (self.cuda()?, from.dtype(), self.routes());
        same_length(routes * width, from.len() * self.per_token as usize)?;
        let kernel = format!("gather_rows_{}", float_suffix(dtype)?);
        let mut rows = cuda.uninit(dtype, routes * width)?;
        if !rows.is_empty() {
            let to = cuda.view_mut(SliceMut::from(&mut rows))?;
            let from = [cuda.view(from)?, cuda.view((&self.order).into())?, to].map(Arg::from);
            let args = [&from[..], &[routes.into(), width.into(), self.per_token.into()]].concat();
            // SAFETY: the kernel's arguments: a row for each token, and room for one for each route.
            unsafe { cuda.launch(Module::Experts.kernel(&kernel), rows_of(routes, WARP), &args)? };
        }
        Ok(rows)
    }

    /// Returns for each token the sum of its routes' rows, each times its weight if there are weights (F64 for rows of
    /// F64, else F32). Sums are in the order of the routes, and rounded once.
    pub(crate) fn combine(&self, rows: Slice<'_>, weights: Option<Slice<'_>>, width: usize) -> Result<Buffer> {
        let (cuda, dtype, routes) = (self.cuda()?, rows.dtype(), self.routes());
        same_length(routes * width, rows.len())?;
        if let Some(weights) = &weights {
            same_dtype(wide(dtype), weights.dtype())?;
            same_length(routes, weights.len())?;
        }
        let kernel = format!("combine_rows_{}", float_suffix(dtype)?);
        let tokens = routes / self.per_token.max(1) as usize;
        let mut sums = cuda.uninit(dtype, tokens * width)?;
        if !sums.is_empty() {
            let weights = weights.map_or(Ok(Arg::NULL), |weights| cuda.view(weights).map(Arg::from))?;
            let to = cuda.view_mut(SliceMut::from(&mut sums))?.into();
            let from = [cuda.view(rows)?, cuda.view((&self.places).into())?].map(Arg::from);
            let args = [&from[..], &[weights, to, tokens.into(), width.into(), self.per_token.into()]].concat();
            // SAFETY: the kernel's arguments: a row and a weight for each route, and room for a row for each token.
            unsafe { cuda.launch(Module::Experts.kernel(&kernel), rows_of(tokens, WARP), &args)? };
        }
        Ok(sums)
    }

    /// Returns the gradients of the sorted routes' SwiGLU.
    pub(crate) fn swiglu_back(
        &self,
        [gates, ups, d_hidden]: [Slice<'_>; 3],
        weights: Slice<'_>,
        width: usize,
    ) -> Result<SwiGluGrads> {
        let (cuda, dtype, routes) = (self.cuda()?, gates.dtype(), self.routes());
        for from in [&gates, &ups, &d_hidden] {
            same_dtype(dtype, from.dtype())?;
            same_length(routes * width, from.len())?;
        }
        same_dtype(wide(dtype), weights.dtype())?;
        same_length(routes, weights.len())?;
        let kernel = format!("weighted_swiglu_back_{}", float_suffix(dtype)?);
        let rows = || cuda.uninit(dtype, routes * width);
        let [mut gates_grad, mut ups_grad, mut hidden] = [rows()?, rows()?, rows()?];
        let mut of_weights = cuda.uninit(wide(dtype), routes)?;
        if routes > 0 {
            let from = [gates, ups, d_hidden, (&self.order).into(), weights].map(|from| cuda.view(from));
            let to = [&mut gates_grad, &mut ups_grad, &mut hidden, &mut of_weights]
                .map(|to| cuda.view_mut(SliceMut::from(to)));
            let mut args = vec![];
            for view in from.into_iter().chain(to) {
                args.push(view?.into());
            }
            args.extend([Arg::from(routes), width.into()]);
            let threads = if width < LONG || !width.is_multiple_of(4) { WARP } else { THREADS };
            // SAFETY: the kernel's arguments: rows of one width and dtype, and two numbers for each route.
            unsafe { cuda.launch(Module::Experts.kernel(&kernel), rows_of(routes, threads), &args)? };
        }
        Ok(SwiGluGrads { gates: gates_grad, ups: ups_grad, hidden, weights: of_weights })
    }

    fn cuda(&self) -> Result<&'static CudaKernels> {
        Ok(of_buffer(&self.order)?)
    }
}

/// The gradients of the sorted routes' SwiGLU.
pub(crate) struct SwiGluGrads {
    pub(crate) gates: Buffer,
    pub(crate) ups: Buffer,
    /// The outputs, times their weights.
    pub(crate) hidden: Buffer,
    /// The gradient of each route's weight, by the routes' numbers: F64 for rows of F64, else F32.
    pub(crate) weights: Buffer,
}

/// Returns the places of each expert's routes among the sorted ones.
pub(crate) fn stretches(counts: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    counts
        .iter()
        .map(|count| {
            end += count;
            end - count..end
        })
        .collect()
}
