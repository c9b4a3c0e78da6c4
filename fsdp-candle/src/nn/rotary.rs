//! Rotary position embedding (Su et al., 2021, arXiv:2104.09864) in the convention of Hugging Face's Llama: a head's
//! first half is paired with its second half.
//!
//! At position `p` the pair `(a, b)` number `i` of a head of `d` elements is rotated by `p theta^(-2i/d)`:
//! `(a cos - b sin, b cos + a sin)`. Backward rotates by the negative angle.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor, bail};

use super::attention::Documents;
use super::cpu::simd::kernel;
use super::cpu::{map_rows, read, storage, tensor_like};
use super::cuda::Cuda;
use super::empty::if_empty;
use super::last_upload::LastUpload;
use super::weight::has_cpu_kernels;
use crate::context_parallel::{ContextParallel, current};
use crate::graph::{Reads, graph_op};
use crate::kernels::Rotation;

/// The sines and cosines of the positions `0..max_positions`, shared by all layers of a model.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::nn::Rotary;
///
/// let rotary = Rotary::new(10_000.0, 64, 128, &Device::Cpu)?;
/// let q = Tensor::ones((2, 16, 4, 64), DType::F32, &Device::Cpu)?; // batch, position, head, element
/// let rotated = rotary.apply(&q, 0)?;
/// assert_eq!(rotated.dims(), q.dims());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Rotary {
    /// `[max_positions, head_dim / 2]`, f32. The rows for longer documents follow.
    cos: Tensor,
    sin: Tensor,
    host: Arc<Tables>,
    /// Rows of the tables for the tokens of a packed batch.
    last_rows: LastUpload,
}

#[derive(Debug)]
struct Tables {
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Number of rotated pairs.
    half: usize,
    head_dim: usize,
    positions: usize,
    /// Documents of more tokens use the second half of the tables, if there is one.
    above: usize,
}

/// Options of a [`Rotary`] besides its frequencies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryOptions {
    /// Elements of a head. The first `2 * frequencies` are rotated, the rest stays. `None`: all are rotated.
    pub head_dim: Option<usize>,
    /// Factor of the rotated elements, as in YaRN and LongRoPE.
    pub factor: f64,
}

impl Default for RotaryOptions {
    fn default() -> Self {
        RotaryOptions { head_dim: None, factor: 1.0 }
    }
}

/// Reserves the memory of a table.
fn reserve(positions: usize, half: usize) -> Result<Vec<f32>> {
    let mut table = Vec::new();
    let count = positions.checked_mul(half);
    match count.map(|count| table.try_reserve_exact(count)) {
        Some(Ok(())) => Ok(table),
        _ => {
            let what = format!("the rotary table of {positions} positions and heads of {} elements", 2 * half);
            let bytes = positions as u128 * half as u128 * 4;
            Err(crate::error::Error::from(fsdp_core::Error::Memory { what, bytes }).into())
        }
    }
}

impl Rotary {
    /// Returns tables for heads of `head_dim` elements with the frequencies `theta^(-2i/head_dim)`. Fails if `head_dim`
    /// is odd or zero, or memory is short.
    pub fn new(theta: f64, head_dim: usize, max_positions: usize, device: &Device) -> Result<Self> {
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            bail!("Rotary: the head dimension must be even and not zero, found {head_dim}");
        }
        // Checked first, because both numbers come from a model's configuration.
        reserve(max_positions, head_dim / 2)?;
        let frequencies: Vec<f32> =
            (0..head_dim / 2).map(|i| 1.0 / theta.powf(2.0 * i as f64 / head_dim as f64) as f32).collect();
        Self::from_frequencies(&frequencies, max_positions, device)
    }

    /// Returns tables for heads of `2 * frequencies.len()` elements. Pair `i` is rotated by `frequencies[i]` radians at
    /// each position. Use it for scaled variants such as Llama 3's.
    pub fn from_frequencies(frequencies: &[f32], max_positions: usize, device: &Device) -> Result<Self> {
        Self::with_options(frequencies, RotaryOptions::default(), max_positions, device)
    }

    /// [`Rotary::from_frequencies`] for heads that are rotated in part, or scaled. Fails if more elements are rotated
    /// than a head has.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use fsdp_candle::nn::{Rotary, RotaryOptions};
    ///
    /// let options = RotaryOptions { head_dim: Some(3), factor: 10.0 };
    /// let rotary = Rotary::with_options(&[0.5], options, 8, &Device::Cpu)?;
    /// let y = rotary.apply(&Tensor::ones((1, 1, 3), DType::F32, &Device::Cpu)?, 0)?;
    /// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [10.0, 10.0, 1.0]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn with_options(
        frequencies: &[f32],
        options: RotaryOptions,
        max_positions: usize,
        device: &Device,
    ) -> Result<Self> {
        let half = frequencies.len();
        let head_dim = options.head_dim.unwrap_or(2 * half);
        if head_dim < 2 * half {
            bail!("Rotary: {half} frequencies rotate {} elements, but a head has {head_dim}", 2 * half);
        }
        let factor = options.factor as f32;
        if half == 0 || max_positions == 0 {
            bail!("Rotary: needs a frequency and a position, found {half} and {max_positions}");
        }
        // The angle is rounded to f32 as in PyTorch. At position 8191 that rounding exceeds every other error.
        let angles = (0..max_positions).flat_map(|p| frequencies.iter().map(move |f| p as f32 * f));
        let (mut sin, mut cos) = (reserve(max_positions, half)?, reserve(max_positions, half)?);
        for angle in angles {
            let (of_angle, co) = f64::from(angle).sin_cos();
            sin.push(of_angle as f32 * factor);
            cos.push(co as f32 * factor);
        }
        let to_tensor = |values: &[f32]| {
            let mut own = reserve(max_positions, half)?;
            own.extend_from_slice(values);
            Tensor::from_vec(own, (max_positions, half), device)
        };
        Ok(Self {
            cos: to_tensor(&cos)?,
            sin: to_tensor(&sin)?,
            host: Arc::new(Tables { cos, sin, half, head_dim, positions: max_positions, above: usize::MAX }),
            last_rows: LastUpload::default(),
        })
    }

    /// Returns tables with the angles of `long` for documents, or rows without documents, of more than `above` tokens, as
    /// LongRoPE has them (Ding et al., 2024, arXiv:2402.13753). Documents of one batch may have different angles. Fails
    /// if the tables differ in positions or heads, or one has such angles already.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use fsdp_candle::nn::{Documents, Rotary};
    ///
    /// let tables = |theta| Rotary::new(theta, 2, 8, &Device::Cpu);
    /// let rotary = tables(10.0)?.with_long(2, &Rotary::from_frequencies(&[0.5], 8, &Device::Cpu)?)?;
    /// let x = Tensor::ones((1, 5, 2), DType::F32, &Device::Cpu)?;
    /// let y = rotary.apply_in_documents(&x, &Documents::new(vec![vec![2, 3]])?)?.to_vec3::<f32>()?;
    /// assert_eq!(y[0][1][0], 1f32.cos() - 1f32.sin());
    /// assert_eq!(y[0][3][0], 0.5f32.cos() - 0.5f32.sin());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn with_long(self, above: usize, long: &Rotary) -> Result<Self> {
        let Tables { cos, sin, half, head_dim, positions, above: own } = &*self.host;
        let other = &*long.host;
        if (*half, *head_dim, *positions) != (other.half, other.head_dim, other.positions) {
            bail!(
                "Rotary: the angles for long documents are of {} positions and {} pairs in heads of {}, expected \
                 {positions} and {half} in heads of {head_dim}",
                other.positions,
                other.half,
                other.head_dim
            );
        }
        if *own != usize::MAX || other.above != usize::MAX {
            bail!("Rotary: the tables have angles for long documents already");
        }
        let both = |own: &[f32], long: &[f32]| {
            let mut both = reserve(2 * positions, *half)?;
            both.extend_from_slice(own);
            both.extend_from_slice(long);
            Ok::<_, candle_core::Error>(both)
        };
        let (cos, sin) = (both(cos, &other.cos)?, both(sin, &other.sin)?);
        Ok(Rotary {
            cos: Tensor::cat(&[&self.cos, &long.cos], 0)?,
            sin: Tensor::cat(&[&self.sin, &long.sin], 0)?,
            host: Arc::new(Tables { cos, sin, half: *half, head_dim: *head_dim, positions: *positions, above }),
            last_rows: LastUpload::default(),
        })
    }

    /// Returns the row of the tables for position 0 of a document of `tokens` tokens.
    fn first_row(&self, tokens: usize) -> usize {
        if tokens > self.host.above { self.host.positions } else { 0 }
    }

    /// Returns the row of the tables for each token.
    fn rows(&self, documents: &Documents) -> Arc<[u32]> {
        if documents.longest() <= self.host.above {
            return documents.shared_positions();
        }
        let of_document = |&tokens: &usize| (0..tokens).map(move |at| (self.first_row(tokens) + at) as u32);
        (0..documents.batch()).flat_map(|row| documents.row(row).iter().flat_map(of_document)).collect()
    }

    /// Returns the elements of a head.
    pub fn head_dim(&self) -> usize {
        self.host.head_dim
    }

    /// Rotates the heads of `x`, `[batch, T, heads, head_dim]` or `[batch, T, heads * head_dim]`. The first position is
    /// `offset`.
    ///
    /// Fails for another shape, or if `offset + T` exceeds the tables' positions.
    pub fn apply(&self, x: &Tensor, offset: usize) -> Result<Tensor> {
        let (batch, steps, _) = self.dims(x)?;
        if let Some(scope) = current() {
            return self.apply_in_context(x, offset, scope.context());
        }
        let end = offset.saturating_add(steps);
        if end > self.host.positions {
            bail!("Rotary: positions {offset}..{end} exceed the tables' {}", self.host.positions);
        }
        let first = self.first_row(end) + offset;
        if let Some(cuda) = Cuda::of(x) {
            return self.rotate_on_device(cuda, x, first, None);
        }
        let at = (first..first + steps).map(|row| row as u32);
        self.rotate_at(x, std::iter::repeat_n(at, batch).flatten().collect())
    }

    /// Rotates the heads of a rank's part `[batch, T, ..]` of sequences.
    fn apply_in_context(&self, x: &Tensor, offset: usize, context: &ContextParallel) -> Result<Tensor> {
        let (batch, steps, _) = self.dims(x)?;
        let end = steps * context.group().size();
        if offset > 0 {
            bail!("Rotary: a context-parallel forward has whole sequences, so the offset must be 0, found {offset}");
        }
        if end > self.host.positions {
            bail!("Rotary: positions 0..{end} exceed the tables' {}", self.host.positions);
        }
        let (first, own) = (self.first_row(end), context.positions_of(steps));
        let rows = (0..steps).map(|token| (first + own.of(token)) as u32);
        self.rotate_by_rows(x, std::iter::repeat_n(rows, batch).flatten().collect())
    }

    /// Rotates each token of `x` by its row of the tables.
    fn rotate_by_rows(&self, x: &Tensor, rows: Arc<[u32]>) -> Result<Tensor> {
        match Cuda::of(x) {
            Some(cuda) => self.rotate_on_device(cuda, x, 0, Some(self.last_rows.get(&rows, x.device())?)),
            None => self.rotate_at(x, rows),
        }
    }

    /// [`Rotary::apply`] for packed documents in the rows of `x`. Each document starts at position 0.
    ///
    /// # Errors
    /// When the shape is not the documents', or a document is longer than the tables.
    pub fn apply_in_documents(&self, x: &Tensor, documents: &Documents) -> Result<Tensor> {
        let (batch, steps, _) = self.dims(x)?;
        let scope = current();
        let ranks = scope.as_ref().map_or(1, |scope| scope.context().group().size());
        documents.check("Rotary", batch, steps * ranks)?;
        if documents.longest() > self.host.positions {
            bail!("Rotary: a document of {} tokens exceeds the tables' {}", documents.longest(), self.host.positions);
        }
        let rows = self.rows(documents);
        let rows = match scope {
            Some(scope) => documents.own(&rows, scope.context().positions_of(steps), steps),
            None => rows,
        };
        self.rotate_by_rows(x, rows)
    }

    /// Rotates each row of `x` by the angles of its position, or of successive positions.
    fn rotate_on_device(&self, cuda: Cuda, x: &Tensor, offset: usize, positions: Option<Tensor>) -> Result<Tensor> {
        let (_, steps, width) = self.dims(x)?;
        let Tables { half, head_dim: dim, .. } = *self.host;
        let heads = width / dim;
        let rotation = Rotation { heads, dim, half, offset, steps, tables: None, interleaved: false };
        cuda.rotate("Rotary", x, [self.cos.clone(), self.sin.clone()], positions, rotation)
    }

    /// Returns the batch size, the positions, and the elements at a position.
    fn dims(&self, x: &Tensor) -> Result<(usize, usize, usize)> {
        let head_dim = self.head_dim();
        match *x.dims() {
            [batch, steps, heads, width] if width == head_dim => Ok((batch, steps, heads * width)),
            [batch, steps, width] if width.is_multiple_of(head_dim) => Ok((batch, steps, width)),
            _ => bail!(
                "Rotary: expected [batch, T, heads, {head_dim}] or [batch, T, heads * {head_dim}], found {:?}",
                x.dims()
            ),
        }
    }

    /// Rotates each row of `x` by the angles of its position.
    fn rotate_at(&self, x: &Tensor, positions: Arc<[u32]>) -> Result<Tensor> {
        if !has_cpu_kernels(x) {
            return self.composite(x, &positions);
        }
        let (.., width) = self.dims(x)?;
        let tables = self.host.clone();
        rotate_rows("Rotary", x, width, move |row, y, x, sign| {
            let Tables { cos, sin, half, head_dim, .. } = &*tables;
            let at = positions[row] as usize * half;
            rotate_heads(y, x, *head_dim, &cos[at..at + half], &sin[at..at + half], sign);
        })
    }

    /// The rotation as a chain of Candle's operations.
    pub(in crate::nn) fn composite(&self, x: &Tensor, positions: &[u32]) -> Result<Tensor> {
        if let Some(empty) = if_empty("Rotary", x, &[x], x.shape())? {
            return Ok(empty);
        }
        let (batch, steps) = (x.dim(0)?, x.dim(1)?);
        let Tables { half, head_dim, .. } = *self.host;
        let heads = x.reshape((batch, steps, (), head_dim))?;
        let positions = Tensor::from_slice(positions, positions.len(), x.device())?;
        let table = |t: &Tensor| t.index_select(&positions, 0)?.reshape((batch, steps, 1, half))?.to_dtype(x.dtype());
        let (cos, sin) = (table(&self.cos)?, table(&self.sin)?);
        let (a, b) = (heads.narrow(3, 0, half)?, heads.narrow(3, half, half)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
        let rest = heads.narrow(3, 2 * half, head_dim - 2 * half)?;
        let parts = if head_dim == 2 * half { vec![first, second] } else { vec![first, second, rest] };
        Tensor::cat(&parts, 3)?.reshape(x.shape())
    }
}

/// Rotates rows of `width` elements. `rotate(row, y, x, sign)` rotates one row, or rotates it back for a negative sign.
pub(super) fn rotate_rows(
    function: &'static str,
    x: &Tensor,
    width: usize,
    rotate: impl Fn(usize, &mut [f32], &[f32], f32) + Send + Sync + 'static,
) -> Result<Tensor> {
    let rotated = move |x: &Tensor, sign: f32| -> Result<Vec<f32>> {
        read!(values, x);
        let mut y = vec![0f32; values.len()];
        map_rows(&mut y, width, width, |first, y| {
            for (i, y) in y.chunks_exact_mut(width).enumerate() {
                rotate(first + i, y, &values[(first + i) * width..][..width], sign);
            }
        });
        Ok(y)
    };
    graph_op(function, &[x], storage(rotated(x, 1.0)?, x.dtype())?, x.shape(), Reads::Nothing, move |_, _, dy| {
        Ok([Some(tensor_like(rotated(dy, -1.0)?, dy)?)])
    })
}

kernel! {
    /// Rotates each head of one position by the angles with these cosines and sines, or rotates back for a negative
    /// sign.
    pub(super) fn rotate_heads(y: &mut [f32], x: &[f32], head_dim: usize, cos: &[f32], sin: &[f32], sign: f32) {
        let half = cos.len();
        let sin = &sin[..half];
        for (y, x) in y.chunks_exact_mut(head_dim).zip(x.chunks_exact(head_dim)) {
            let (first, second) = y.split_at_mut(half);
            let (a, b) = x.split_at(half);
            let (second, rest) = second.split_at_mut(half);
            let (b, unrotated) = b.split_at(half);
            for i in 0..half {
                let s = sin[i] * sign;
                first[i] = a[i] * cos[i] - b[i] * s;
                second[i] = b[i] * cos[i] + a[i] * s;
            }
            rest.copy_from_slice(unrotated);
        }
    }
}
