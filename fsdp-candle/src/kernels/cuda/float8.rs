//! Matrix products in 8-bit floats: operands are cast, and cuBLASLt multiplies them.

use candle_core::{Result, bail};
use cudarc::driver::LaunchConfig;
use fsdp_core::{Buffer, DType};

use super::super::layers::{Float8Cast, Float8Format};
use super::super::slice::{SliceMut, same_length};
use super::clear;
use super::compiler::Module;
use super::cublas_lt::{Codes, CodesProduct};
use super::device::{Arg, CudaKernels, THREADS, elementwise, of_slice};
use super::product::{Matrix, MatrixLayout};

/// `TILE` in the source.
const TILE: usize = 64;
/// Rows of which a block finds the largest magnitudes of columns.
const STRETCH: usize = 128;

/// Computes `to += lhs rhs`, or `to = lhs rhs` unless `accumulate`, of operands that are cast to 8-bit floats. The
/// operands are F32, BF16 or F16, whole in memory, and the result has their dtype or is F32. `is_fast` lets tensor cores
/// add with fewer bits.
pub(crate) fn add_float8_product(
    to: &mut Buffer,
    accumulate: bool,
    lhs: Matrix<'_>,
    rhs: Matrix<'_>,
    [left, right]: [Float8Cast; 2],
    is_fast: bool,
) -> Result<()> {
    let cuda = of_slice(&lhs.elements)?;
    let ((rows, terms), (rhs_terms, cols)) = (lhs.dims(), rhs.dims());
    same_length(terms, rhs_terms)?;
    same_length(rows * cols, to.len())?;
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    if terms == 0 {
        return if accumulate { Ok(()) } else { clear(cuda, cuda.view_mut(to.into())?) };
    }
    // cuBLASLt takes vectors of scales for both operands or for none.
    let by_vector = left.per_vector || right.per_vector;
    let lhs = Operand::new(cuda, lhs, left, by_vector, lhs.is_transposed)?;
    let rhs = Operand::new(cuda, rhs, right, by_vector, !rhs.is_transposed)?;
    let dtype = to.dtype();
    let to = cuda.view_mut(to.into())?.address();
    let codes = |operand: &Operand, format| -> Result<Codes> {
        let scales = cuda.view((&operand.scales).into())?.address();
        Ok(Codes {
            address: cuda.view((&operand.codes).into())?.address(),
            inverses: scales + (operand.scales.len() / 2 * size_of::<f32>()) as u64,
            format,
        })
    };
    let product = CodesProduct {
        sizes: [rows, cols, terms.next_multiple_of(Float8Cast::TERMS)],
        lhs: codes(&lhs, left.format)?,
        rhs: codes(&rhs, right.format)?,
        by_vector,
        is_fast,
        accumulate,
        to,
        dtype,
    };
    // SAFETY: the codes have these sizes, each has its scale, and the result has one element for each pair of vectors.
    unsafe { cuda.cublas_lt()?.multiply(cuda, product) }
}

/// An operand in codes: a row for each vector of the sums.
struct Operand {
    codes: Buffer,
    /// The scales, then their inverses.
    scales: Buffer,
}

impl Operand {
    /// Casts an operand. `by_columns` says that the sums run over the rows of the matrix in memory.
    fn new(
        cuda: &CudaKernels,
        matrix: Matrix<'_>,
        cast: Float8Cast,
        by_vector: bool,
        by_columns: bool,
    ) -> Result<Self> {
        let MatrixLayout { rows, cols, .. } = matrix.layout;
        same_length(rows * cols, matrix.elements.len())?;
        let suffix = match matrix.elements.dtype() {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            other => bail!("8-bit products take F32, BF16 and F16, found {other}"),
        };
        let (vectors, terms) = if by_columns { (cols, rows) } else { (rows, cols) };
        let count = if by_vector { vectors } else { 1 };
        let values: Arg = cuda.view(matrix.elements)?.into();
        let mut most = cuda.uninit(DType::U32, if cast.per_vector { vectors } else { 1 })?;
        let most = cuda.view_mut(SliceMut::from(&mut most))?;
        let (kernel, config, args) = match (cast.per_vector, by_columns) {
            (false, _) => ("", elementwise(rows * cols / 8), vec![values, most.into(), (rows * cols).into()]),
            (true, false) => {
                let config = LaunchConfig { grid_dim: (grid(rows)?, 1, 1), ..elementwise(1) };
                ("_of_rows", config, vec![values, most.into(), rows.into(), cols.into()])
            }
            (true, true) => {
                let config = tiles(cols.div_ceil(THREADS as usize), rows.div_ceil(STRETCH))?;
                ("_of_columns", config, vec![values, most.into(), rows.into(), cols.into(), STRETCH.into()])
            }
        };
        if kernel != "_of_rows" {
            clear(cuda, most)?;
        }
        // SAFETY: the kernel's arguments, of the dtype in its name.
        unsafe { cuda.launch(Module::Float8.kernel(&format!("float8_largest{kernel}_{suffix}")), config, &args)? };
        let mut scales = cuda.uninit(DType::F32, 2 * count)?;
        let of_scales = cuda.view_mut(SliceMut::from(&mut scales))?.address();
        let args = [
            most.into(),
            Arg::Long(of_scales),
            count.into(),
            Arg::Float(cast.format.most()),
            Arg::Double(Float8Cast::LEAST),
            Arg::Word(cast.power_of_two.into()),
            Arg::Word((!cast.per_vector).into()),
        ];
        // SAFETY: the kernel's arguments: as many scales and inverses, and a magnitude for each or for all.
        unsafe { cuda.launch(Module::Float8.kernel("float8_scales"), elementwise(count), &args)? };
        let padded = terms.next_multiple_of(Float8Cast::TERMS);
        let mut codes = cuda.uninit(DType::U8, vectors * padded)?;
        let of_codes = cuda.view_mut(SliceMut::from(&mut codes))?.into();
        let format = match cast.format {
            Float8Format::E4M3 => "e4m3",
            Float8Format::E5M2 => "e5m2",
        };
        let per_vector = Arg::Word(cast.per_vector.into());
        let (kernel, config, args) = if by_columns {
            let config = tiles(cols.div_ceil(TILE), padded.div_ceil(TILE))?;
            let sizes = [rows.into(), cols.into(), padded.into(), per_vector];
            ("columns", config, [&[values, Arg::Long(of_scales), of_codes][..], &sizes].concat())
        } else {
            same_length(cols, padded)?;
            let sizes = [(rows * cols).into(), cols.into(), per_vector];
            ("rows", elementwise(rows * cols / 8), [&[values, Arg::Long(of_scales), of_codes][..], &sizes].concat())
        };
        let kernel = format!("float8_cast_{kernel}_{format}_{suffix}");
        // SAFETY: the kernel's arguments: values of the dtype in its name, a scale for each vector or for all, and a row
        // of padded codes for each vector.
        unsafe { cuda.launch(Module::Float8.kernel(&kernel), config, &args)? };
        Ok(Operand { codes, scales })
    }
}

/// Returns the blocks of a launch over tiles of columns and rows.
fn tiles(across: usize, down: usize) -> Result<LaunchConfig> {
    if down > usize::from(u16::MAX) {
        bail!("8-bit products take fewer than 2^22 rows at a time. Use a smaller batch")
    }
    Ok(LaunchConfig { grid_dim: (grid(across)?, down as u32, 1), ..elementwise(1) })
}

fn grid(blocks: usize) -> Result<u32> {
    match i32::try_from(blocks) {
        Ok(blocks) => Ok(blocks as u32),
        Err(_) => bail!("{blocks} rows are more than one launch takes"),
    }
}
