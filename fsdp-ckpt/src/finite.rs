//! Finding NaN and infinity in floating point tensors.

use fsdp_core::DType;
use serde::Serialize;

use crate::{Result, TensorSource};

/// Bytes per read: as much as an object store reads concurrently.
const BLOCK: usize = 48 << 20;
/// Bytes between branches.
const STRIDE: usize = 4 << 10;

/// A tensor with NaN or infinity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NonFinite {
    /// Name of the tensor.
    pub tensor: String,
    /// Dtype of the tensor.
    pub dtype: DType,
    /// Number of elements.
    pub elements: u64,
    /// Number of NaNs.
    pub nan: u64,
    /// Number of infinities of either sign.
    pub infinite: u64,
    /// Global index of the first such element, in the order in which the chunks are listed.
    pub first: Vec<usize>,
    /// File that holds the first such element.
    pub file: String,
}

/// Finds the floating point tensors of a source that have NaN or infinity. Calls `seen` with the bytes of each read.
/// Needs bounded memory. Skips [`TensorSource::unreadable`] tensors.
///
/// # Errors
/// The errors of [`TensorSource::read`].
///
/// ```
/// use fsdp_ckpt::{non_finite, open};
/// # use fsdp_ckpt::TensorShard;
/// # use fsdp_core::{Buffer, process_group::local};
/// # let root = tempfile::tempdir()?;
/// # let dir = root.path().join("model");
/// # local::run(1, |group| {
/// #     let data = std::sync::Arc::new(Buffer::F32(vec![1.0, 2.0, 3.0, f32::NAN, 5.0, f32::INFINITY]));
/// #     fsdp_ckpt::hf::export(&dir, &group, &[TensorShard::whole("lm_head.weight", &[3, 2], data)], &[]).unwrap();
/// # });
/// let found = non_finite(&*open(&dir)?, &mut |_| ())?;
/// assert_eq!((found[0].tensor.as_str(), found[0].nan, found[0].infinite), ("lm_head.weight", 1, 1));
/// assert_eq!(found[0].first, [1, 1]);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub fn non_finite(source: &dyn TensorSource, seen: &mut dyn FnMut(u64)) -> Result<Vec<NonFinite>> {
    let mut found = Vec::new();
    let mut memory = Vec::new();
    for (fqn, tensor) in source.tensors().iter().filter(|(_, tensor)| tensor.dtype.is_float()) {
        let (dtype, size) = (tensor.dtype, tensor.dtype.size());
        let elements = tensor.bytes() / size as u64;
        let mut here: Option<NonFinite> = None;
        for chunk in &tensor.chunks {
            for block in chunk.region().pieces(BLOCK / size) {
                memory.resize(block.elements() * size, 0);
                source.read(fqn, &block, &mut memory)?;
                seen(memory.len() as u64);
                let Some((first, [nan, infinite])) = count_non_finite(dtype, &memory) else { continue };
                let here = here.get_or_insert_with(|| NonFinite {
                    tensor: fqn.clone(),
                    dtype,
                    elements,
                    nan: 0,
                    infinite: 0,
                    first: index(first, &block.offsets, &block.sizes),
                    file: chunk.file.clone(),
                });
                here.nan += nan;
                here.infinite += infinite;
            }
        }
        found.extend(here);
    }
    Ok(found)
}

/// Counts the non-finite elements of `dtype` in native byte order. Returns the index of the first one and the numbers
/// of NaNs and infinities. Returns `None` if all are finite or `dtype` is not floating point.
///
/// ```
/// use fsdp_ckpt::count_non_finite;
/// use fsdp_core::{Buffer, DType};
/// let numbers = Buffer::F32(vec![1.0, f32::NAN, -f32::INFINITY, f32::MAX]);
/// assert_eq!(count_non_finite(DType::F32, numbers.bytes()), Some((1, [1, 1])));
/// ```
pub fn count_non_finite(dtype: DType, bytes: &[u8]) -> Option<(usize, [u64; 2])> {
    // A number is not finite if all bits of its exponent are set, and infinite if its mantissa is also zero.
    macro_rules! scan {
        ($bits:ty, $exponent:expr) => {{
            const SIZE: usize = size_of::<$bits>();
            const EXPONENT: $bits = $exponent;
            const MANTISSA: $bits = <$bits>::MAX >> 1 & !EXPONENT;
            let (mut first, mut nan, mut infinite) = (None, 0, 0);
            for (stride, bytes) in bytes.chunks(STRIDE).enumerate() {
                let elements = bytes.as_chunks::<SIZE>().0.iter().map(|bytes| <$bits>::from_ne_bytes(*bytes));
                // Without a branch, the compiler vectorizes it.
                let any = elements.clone().fold(0, |any: $bits, bits| any | <$bits>::from(bits & EXPONENT == EXPONENT));
                if any == 0 {
                    continue;
                }
                for (at, bits) in elements.enumerate().filter(|(_, bits)| bits & EXPONENT == EXPONENT) {
                    first.get_or_insert(stride * (STRIDE / SIZE) + at);
                    *(if bits & MANTISSA == 0 { &mut infinite } else { &mut nan }) += 1u64;
                }
            }
            first.map(|first| (first, [nan, infinite]))
        }};
    }
    match dtype {
        DType::BF16 => scan!(u16, 0x7f80),
        DType::F16 => scan!(u16, 0x7c00),
        DType::F32 => scan!(u32, 0x7f80_0000),
        DType::F64 => scan!(u64, 0x7ff0_0000_0000_0000),
        _ => None,
    }
}

/// Returns the global index of an element of a region.
fn index(element: usize, offsets: &[usize], sizes: &[usize]) -> Vec<usize> {
    let mut rest = element;
    let mut index = offsets.to_vec();
    for (dim, &size) in sizes.iter().enumerate().rev() {
        index[dim] += rest % size;
        rest /= size;
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    use half::{bf16, f16};

    #[test]
    fn counts_nan_and_infinity_of_each_dtype() {
        fn check<const N: usize>(dtype: DType, finite: [[u8; N]; 4], nan: [u8; N], infinities: [[u8; N]; 2]) {
            // Beyond the first stride, and at its end.
            for count in [4, STRIDE / N, STRIDE / N + 1, 3 * STRIDE / N + 5] {
                let mut numbers: Vec<[u8; N]> = finite.into_iter().cycle().take(count).collect();
                assert_eq!(count_non_finite(dtype, numbers.as_flattened()), None, "{dtype}");
                numbers[count - 1] = nan;
                assert_eq!(count_non_finite(dtype, numbers.as_flattened()), Some((count - 1, [1, 0])), "{dtype}");
                [numbers[1], numbers[2]] = infinities;
                assert_eq!(count_non_finite(dtype, numbers.as_flattened()), Some((1, [1, 2])), "{dtype}");
            }
        }
        macro_rules! check {
            ($dtype:ident, $float:ty) => {
                check(
                    DType::$dtype,
                    [<$float>::MAX, <$float>::MIN, <$float>::MIN_POSITIVE, -<$float>::from(0u8)]
                        .map(<$float>::to_ne_bytes),
                    (-<$float>::NAN).to_ne_bytes(),
                    [<$float>::INFINITY, -<$float>::INFINITY].map(<$float>::to_ne_bytes),
                )
            };
        }
        check!(F32, f32);
        check!(F64, f64);
        check!(BF16, bf16);
        check!(F16, f16);
        assert_eq!(count_non_finite(DType::I64, &[0xff; 64]), None);
        assert_eq!(count_non_finite(DType::F32, &[]), None);
    }

    #[test]
    fn index_is_global() {
        assert_eq!(index(7, &[10, 0, 5], &[2, 2, 3]), [11, 0, 6]);
        assert_eq!(index(0, &[], &[]), [0; 0]);
    }
}
