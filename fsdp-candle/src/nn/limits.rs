//! Size limits of operations on a device. They are checked before the launch, so that the error names the sizes.

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::kernels;

/// Candle launches a thread for each element and counts them in 32 bits, on the host and in its kernels. With more
/// elements, a kernel writes beyond its memory, never ends, or is refused by the driver.
const ELEMENTS: u128 = 1 << 31;

/// Checks that Candle can count the elements of a tensor with these dimensions on a device. Fails if the tensor has
/// 2^31 elements or more.
pub(in crate::nn) fn check_size(function: &str, what: &str, dims: &[usize], device: &Device) -> Result<()> {
    match size_error(function, what, dims).filter(|_| !device.is_cpu()) {
        Some(error) => bail!("{error}"),
        None => Ok(()),
    }
}

/// [`check_size`] for a layer's input.
pub(in crate::nn) fn check_input_size<'a>(function: &str, x: &'a Tensor) -> Result<&'a Tensor> {
    check_size(function, "the input", x.dims(), x.device()).map(|()| x)
}

/// Checks that a device can hold the scores of an attention, `[batch, heads, T, S]`, in `copies` matrices at a time.
/// Fails if a matrix has 2^31 elements or more, or all matrices take more memory than the device has free.
pub(in crate::nn) fn check_scores_fit(
    function: &str,
    dims: [usize; 4],
    copies: usize,
    dtype: DType,
    device: &Device,
) -> Result<()> {
    check_size(function, "the scores [batch, heads, queries, keys]", &dims, device)?;
    let scores = Scores { dims, copies, size: dtype.size_in_bytes() };
    match free_memory(device, scores.bytes())?.and_then(|memory| scores.error(function, memory)) {
        Some(error) => bail!("{error}"),
        None => Ok(()),
    }
}

/// The score matrices of an attention.
#[derive(Clone, Copy)]
struct Scores {
    dims: [usize; 4],
    /// Number of matrices that exist at a time.
    copies: usize,
    /// Bytes of an element.
    size: usize,
}

fn count(dims: &[usize]) -> u128 {
    dims.iter().map(|&dim| dim as u128).fold(1, u128::saturating_mul)
}

impl Scores {
    fn bytes(&self) -> u128 {
        count(&self.dims).saturating_mul((self.copies * self.size) as u128)
    }

    /// Returns the error if the matrices do not fit.
    fn error(&self, function: &str, [free, total]: [u64; 2]) -> Option<String> {
        let bytes = self.bytes();
        let gib = |bytes: u128| bytes as f64 / (1u64 << 30) as f64;
        (bytes > u128::from(free)).then(|| {
            format!(
                "{function}: the scores [batch, heads, queries, keys] = {:?} take {:.2} GiB ({bytes} bytes) in {} \
                 matrices of f{} at a time, and the device has {:.2} GiB free of {:.2} GiB. Use a smaller batch, \
                 shorter sequences, or more tensor-parallel ranks",
                self.dims,
                gib(bytes),
                self.copies,
                8 * self.size,
                gib(u128::from(free)),
                gib(u128::from(total)),
            )
        })
    }
}

/// Returns the error if a tensor has too many elements.
fn size_error(function: &str, what: &str, dims: &[usize]) -> Option<String> {
    let elements = count(dims);
    (elements >= ELEMENTS).then(|| {
        format!(
            "{function}: {what} = {dims:?} has {elements} elements, and Candle's kernels for devices count fewer than \
             {ELEMENTS} (2^31). Use a smaller batch, shorter sequences, or more tensor-parallel ranks"
        )
    })
}

/// Returns the free and the total bytes of a device, if `wanted` may exceed them. Only CUDA devices are queried.
fn free_memory(device: &Device, wanted: u128) -> Result<Option<[u64; 2]>> {
    if device.is_cuda() { kernels::of_device(device)?.free_memory(wanted) } else { Ok(None) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_tensors_of_too_many_elements() {
        for (dims, elements) in [
            (&[2, 32, 8192, 8192][..], Some("4294967296")),
            (&[1, 32, 12288, 12288], Some("4831838208")),
            (&[1 << 31], Some("2147483648")),
            (&[(1 << 31) - 1], None),
            (&[1, 31, 8192, 8192], None),
            (&[0, usize::MAX, usize::MAX], None),
            (&[usize::MAX; 5], Some("340282366920938463463374607431768211455")),
        ] {
            let error = size_error("attention", "the scores", dims);
            assert_eq!(error.is_some(), elements.is_some(), "{dims:?}");
            let Some((error, elements)) = error.zip(elements) else { continue };
            let parts = ["attention: the scores = [", elements, "count fewer than 2147483648 (2^31)", "smaller batch"];
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }

    #[test]
    fn rejects_scores_larger_than_the_free_memory() {
        let scores = Scores { dims: [1, 32, 8192, 8192], copies: 6, size: 4 };
        let bytes = 6 * 32 * 8192 * 8192 * 4;
        assert_eq!((scores.error("attention", [bytes, 80 << 30]), scores.bytes()), (None, u128::from(bytes)));
        let error = scores.error("attention", [bytes - 1, 80 << 30]).unwrap();
        let parts = ["48.00 GiB (51539607552 bytes) in 6 matrices of f32", "free of 80.00 GiB", "shorter sequences"];
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }

    #[test]
    fn does_not_limit_sizes_on_the_cpu() {
        assert!(check_size("attention", "the scores", &[1 << 40], &Device::Cpu).is_ok());
        assert!(check_scores_fit("attention", [1 << 20, 1 << 20, 1, 1], 6, DType::F32, &Device::Cpu).is_ok());
    }
}
