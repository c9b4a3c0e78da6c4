//! Attention on tensor cores: by cuDNN where it has a plan, else by `flash_attention.cuh`.

use candle_core::{Result, bail};
use cudarc::driver::LaunchConfig;
use fsdp_core::device::cuda::{CudaView, failed};
use fsdp_core::{Buffer, DType};

use super::super::slice::{Slice, SliceMut, same_length};
use super::attention::Visibility;
use super::compiler::Module;
#[cfg(feature = "cudnn")]
use super::cudnn::Attention;
use super::device::{Arg, CudaKernels, float_suffix, of_slice, same_dtype};
use crate::error::Error;

/// Rows of a tile for each warp of a block: `ROWS` in the source.
const ROWS: usize = 64;
/// Keys of a step in the first kernel of backward, and queries of a step in the second: `KEYS` and `QUERIES` in the
/// source.
const KEYS: usize = 64;
const QUERIES: usize = 32;
/// Elements between the rows of shared memory.
const ROW_GAP: usize = 8;
/// Threads of a block: four warps.
const THREADS: u32 = 128;
/// The lowest major version of a compute capability that has the instructions, and the shared memory.
pub(super) const FEWEST_CAPABILITY: i32 = 8;
/// Bytes of a copy to shared memory. Tensors must begin at a multiple of it, and so do then all rows of their heads.
const ALIGNMENT: u64 = 16;
/// Most blocks of a launch along its second and third dimension.
const MOST_BLOCKS: usize = u16::MAX as usize;

/// A kernel of attention.
#[derive(Clone, Copy, Debug)]
enum Pass {
    Forward,
    BackwardQueries,
    BackwardKeys,
}

impl Pass {
    const ALL: [Self; 3] = [Pass::Forward, Pass::BackwardQueries, Pass::BackwardKeys];

    /// Returns the beginning of the kernels' names.
    fn name(self) -> &'static str {
        match self {
            Pass::Forward => "flash_forward",
            Pass::BackwardQueries => "flash_backward_queries",
            Pass::BackwardKeys => "flash_backward_keys",
        }
    }

    /// Returns the queries, or in the last kernel the keys, of a block.
    fn rows(self) -> usize {
        match self {
            Pass::Forward => 2 * ROWS,
            Pass::BackwardQueries | Pass::BackwardKeys => ROWS,
        }
    }

    /// Returns the bytes of a block's rows in shared memory, for heads of `dim` elements of 16 bits.
    fn shared_bytes(self, dim: usize) -> usize {
        let rows = match self {
            // `STEP` in the source.
            Pass::Forward => self.rows() + 2 * if dim > 64 { 32 } else { 64 },
            Pass::BackwardQueries => 4 * KEYS,
            Pass::BackwardKeys => self.rows() + 4 * QUERIES,
        };
        rows * (dim + ROW_GAP) * 2
    }
}

/// Returns the bytes of shared memory that a launch of a kernel of this name asks for. 0 for other kernels.
pub(super) fn shared_bytes(name: &str) -> usize {
    let of = |pass: &Pass| {
        name.strip_prefix(pass.name())?.rsplit('_').next()?.parse().ok().map(|dim| pass.shared_bytes(dim))
    };
    Pass::ALL.iter().find_map(of).unwrap_or(0)
}

/// Where the heads of an operand or of its gradient are, in a range of elements: heads of a position follow each other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Heads {
    /// Index of the first element.
    pub(crate) first: usize,
    /// Elements from one row of the batch to the next.
    pub(crate) batch_stride: usize,
    /// Elements from one position to the next.
    pub(crate) row_stride: usize,
}

/// An attention whose operands have [a dtype and dimensions that the kernels support](FlashAttention::supports).
#[derive(Clone, Copy)]
pub(crate) struct FlashAttention<'a> {
    pub(crate) batch: usize,
    /// The keys that the queries of each row see. A batch with documents has one row.
    pub(crate) visible: Visibility<'a>,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    /// Elements of a head.
    pub(crate) dim: usize,
    pub(crate) scale: f64,
    pub(crate) softcap: Option<f64>,
    /// The places of q, k and v, and of their gradients.
    pub(crate) places: [Heads; 3],
}

impl FlashAttention<'_> {
    /// Returns whether the device has kernels for tensors: the operands, and in backward the output's gradient.
    pub(crate) fn supports(&self, tensors: &[Slice<'_>]) -> Result<bool> {
        let Some(operand) = tensors.first() else { return Ok(false) };
        let cuda = of_slice(operand)?;
        let capability = cuda.stream.context().compute_capability();
        let refused = |error| Error::Core(failed(&cuda.stream, "asking for its capability", &error));
        let (major, _) = capability.map_err(refused)?;
        for tensor in tensors {
            if !cuda.view(*tensor)?.address().is_multiple_of(ALIGNMENT) {
                return Ok(false);
            }
        }
        let has_kernels = self.module(operand.dtype()).is_some()
            && major >= FEWEST_CAPABILITY
            && self.batch.max(self.heads) <= MOST_BLOCKS;
        let is_empty = self.batch * self.visible.queries * self.visible.keys == 0;
        Ok(!is_empty && (has_kernels || self.has_cudnn(cuda, operand.dtype())?))
    }

    /// Returns whether cuDNN computes both directions.
    #[cfg(feature = "cudnn")]
    fn has_cudnn(&self, cuda: &CudaKernels, dtype: DType) -> Result<bool> {
        cuda.cudnn()?.map_or(Ok(false), |cudnn| cudnn.covers(cuda, self, dtype))
    }

    #[cfg(not(feature = "cudnn"))]
    fn has_cudnn(&self, _cuda: &CudaKernels, _dtype: DType) -> Result<bool> {
        Ok(false)
    }

    /// Returns the file of the kernels for a dtype, if there is one.
    fn module(&self, dtype: DType) -> Option<Module> {
        match (dtype, self.dim) {
            (DType::BF16, 64) => Some(Module::FlashBf16Of64),
            (DType::BF16, 128) => Some(Module::FlashBf16Of128),
            (DType::F16, 64) => Some(Module::FlashF16Of64),
            (DType::F16, 128) => Some(Module::FlashF16Of128),
            _ => None,
        }
    }

    /// Writes the output `[batch, queries, heads, dim]`, and the logarithms of the sums `[batch, heads, queries]`, F32.
    pub(crate) fn forward(&self, operands: [Slice<'_>; 3], out: SliceMut<'_>, log_sums: SliceMut<'_>) -> Result<()> {
        let cuda = of_slice(&operands[0])?;
        let dtype = operands[0].dtype();
        let out = self.outputs(cuda, dtype, out)?;
        let log_sums = self.sums(cuda, log_sums)?;
        let operands = self.operands(cuda, operands)?;
        #[cfg(feature = "cudnn")]
        if let Some(cudnn) = cuda.cudnn()?
            && cudnn.forward(cuda, Attention { flash: self, dtype, operands }, [out, log_sums])?
        {
            return Ok(());
        }
        let arguments: Vec<Arg> = operands.into_iter().chain([out, log_sums]).map(Arg::from).collect();
        self.launch(cuda, dtype, Pass::Forward, arguments)
    }

    /// Writes the gradients of q, k and v, given the output and its gradient. They have the places of the operands, in
    /// three buffers or in one. `deltas` is memory for `[batch, heads, queries]`, F32.
    pub(crate) fn backward(
        &self,
        operands: [Slice<'_>; 3],
        [out, d_out]: [Slice<'_>; 2],
        log_sums: Slice<'_>,
        deltas: SliceMut<'_>,
        gradients: &mut [Buffer],
    ) -> Result<()> {
        let cuda = of_slice(&operands[0])?;
        let dtype = operands[0].dtype();
        for slice in [&out, &d_out] {
            same_dtype(dtype, slice.dtype())?;
            same_length(self.batch * self.visible.queries * self.heads * self.dim, slice.len())?;
        }
        same_dtype(DType::F32, log_sums.dtype())?;
        same_length(self.batch * self.heads * self.visible.queries, log_sums.len())?;
        let operands = self.operands(cuda, operands)?;
        let [log_sums, out, d_out] = [cuda.view(log_sums)?, cuda.view(out)?, cuda.view(d_out)?];
        let deltas = self.sums(cuda, deltas)?;
        let views = gradients.iter_mut().map(|gradient| {
            same_dtype(dtype, gradient.dtype())?;
            cuda.view_mut(gradient.into())
        });
        let views = views.collect::<Result<Vec<_>>>()?;
        let of_operand = |at: usize| match views.get(at).or(views.first()) {
            Some(view) => self.range(dtype, at, *view),
            None => bail!("attention: no memory for gradients"),
        };
        let (d_q, d_k, d_v) = (of_operand(0)?, of_operand(1)?, of_operand(2)?);
        #[cfg(feature = "cudnn")]
        if let Some(cudnn) = cuda.cudnn()?
            && cudnn.backward(
                cuda,
                Attention { flash: self, dtype, operands },
                [out, d_out, log_sums],
                [d_q, d_k, d_v],
                deltas,
            )?
        {
            return Ok(());
        }
        // In one buffer, the values' gradients are named by their distance.
        let (d_v, v_after_k) = match views.len() {
            1 => (Arg::NULL, self.places[2].first.saturating_sub(self.places[1].first)),
            _ => (d_v.into(), 0),
        };
        let [log_sums, deltas, d_out] = [log_sums, deltas, d_out].map(Arg::from);
        let mut arguments: Vec<Arg> = operands.into_iter().map(Arg::from).collect();
        let mut of_queries = arguments.clone();
        of_queries.extend([out.into(), d_out, log_sums, deltas, d_q.into()]);
        self.launch(cuda, dtype, Pass::BackwardQueries, of_queries)?;
        arguments.extend([d_out, log_sums, deltas, d_k.into(), d_v, v_after_k.into()]);
        self.launch(cuda, dtype, Pass::BackwardKeys, arguments)
    }

    /// Returns the elements of an operand, or of its gradient, from its first one to its last one.
    fn range<'b>(&self, dtype: DType, at: usize, memory: CudaView<'b>) -> Result<CudaView<'b>> {
        let Heads { first, batch_stride, row_stride } = self.places[at];
        let (positions, heads) =
            if at == 0 { (self.visible.queries, self.heads) } else { (self.visible.keys, self.kv_heads) };
        let end = first + (self.batch - 1) * batch_stride + (positions - 1) * row_stride + heads * self.dim;
        match memory.range(first * dtype.size()..end * dtype.size()) {
            Some(memory) => Ok(memory),
            None => bail!("attention: the memory of an operand is too short"),
        }
    }

    fn operands<'b>(&self, cuda: &CudaKernels, [q, k, v]: [Slice<'b>; 3]) -> Result<[CudaView<'b>; 3]> {
        let dtype = q.dtype();
        let view = |at: usize, operand: Slice<'b>| {
            same_dtype(dtype, operand.dtype())?;
            self.range(dtype, at, cuda.view(operand)?)
        };
        Ok([view(0, q)?, view(1, k)?, view(2, v)?])
    }

    fn outputs<'b>(&self, cuda: &CudaKernels, dtype: DType, out: SliceMut<'b>) -> Result<CudaView<'b>> {
        same_dtype(dtype, out.dtype())?;
        same_length(self.batch * self.visible.queries * self.heads * self.dim, out.len())?;
        cuda.view_mut(out)
    }

    fn sums<'b>(&self, cuda: &CudaKernels, sums: SliceMut<'b>) -> Result<CudaView<'b>> {
        same_dtype(DType::F32, sums.dtype())?;
        same_length(self.batch * self.heads * self.visible.queries, sums.len())?;
        cuda.view_mut(sums)
    }

    /// Runs a kernel, after adding the sizes to `arguments`.
    fn launch(&self, cuda: &CudaKernels, dtype: DType, pass: Pass, mut arguments: Vec<Arg>) -> Result<()> {
        let Some(module) = self.module(dtype) else { bail!("attention: no kernels for tensor cores") };
        let strides = self.places.iter().flat_map(|heads| [heads.batch_stride, heads.row_stride]);
        arguments.extend(strides.map(Arg::from));
        arguments.extend(self.visible.arguments(cuda)?);
        arguments.extend([self.heads, self.heads / self.kv_heads].map(Arg::from));
        arguments.extend([Arg::Float(self.scale as f32), Arg::Float(self.softcap.unwrap_or(0.) as f32)]);
        let (positions, heads) = match pass {
            Pass::Forward | Pass::BackwardQueries => (self.visible.queries, self.heads),
            Pass::BackwardKeys => (self.visible.keys, self.kv_heads),
        };
        let kernel = format!("{}_{}_{}", pass.name(), float_suffix(dtype)?, self.dim);
        let config = LaunchConfig {
            grid_dim: (positions.div_ceil(pass.rows()) as u32, heads as u32, self.batch as u32),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: pass.shared_bytes(self.dim) as u32,
        };
        // SAFETY: the kernel's arguments, of the dtype in its name, and of the lengths and strides in them.
        unsafe { cuda.launch(module.kernel(&kernel), config, &arguments) }
    }
}
