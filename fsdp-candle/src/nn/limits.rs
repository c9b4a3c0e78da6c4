//! How large an operation on a device may be: an error that says so stands before the launch.

use candle_core::{DType, Device, Result, Tensor, bail};

/// Candle launches a thread for each element and counts them in 32 bits, on the host and in its kernels: from here on a
/// kernel runs over its own end, never ends, or is refused by the driver without a word about sizes.
const ELEMENTS: u128 = 1 << 31;
/// Matrices of less than this share of a device's memory are not asked about: that costs a call of the driver.
#[cfg(feature = "cuda")]
const WORTH_ASKING: u128 = 16;

/// Checks that Candle can count the elements of a tensor of these dimensions on a device.
///
/// # Errors
/// When there are 2^31 or more.
pub(in crate::nn) fn countable(function: &str, what: &str, dims: &[usize], device: &Device) -> Result<()> {
    match uncountable(function, what, dims).filter(|_| !device.is_cpu()) {
        Some(error) => bail!("{error}"),
        None => Ok(()),
    }
}

/// [`countable`] for a layer's input.
pub(in crate::nn) fn countable_input<'a>(function: &str, x: &'a Tensor) -> Result<&'a Tensor> {
    countable(function, "the input", x.dims(), x.device()).map(|()| x)
}

/// Checks that a device can hold the scores of an attention, `[batch, heads, T, S]`, in `copies` matrices at a time.
///
/// # Errors
/// When a matrix has 2^31 elements or more, or all of them take more memory than the device has left.
pub(in crate::nn) fn scores_fit(
    function: &str,
    dims: [usize; 4],
    copies: usize,
    dtype: DType,
    device: &Device,
) -> Result<()> {
    countable(function, "the scores [batch, heads, queries, keys]", &dims, device)?;
    let scores = Scores { dims, copies, size: dtype.size_in_bytes() };
    match room(device, scores.bytes())?.and_then(|room| scores.refusal(function, room)) {
        Some(error) => bail!("{error}"),
        None => Ok(()),
    }
}

/// The matrices of an attention's scores.
#[derive(Clone, Copy)]
struct Scores {
    dims: [usize; 4],
    /// How many there are at a time.
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

    /// Says that they do not fit, where they do not.
    fn refusal(&self, function: &str, [free, total]: [u64; 2]) -> Option<String> {
        let bytes = self.bytes();
        let gib = |bytes: u128| bytes as f64 / (1u64 << 30) as f64;
        (bytes > u128::from(free)).then(|| {
            format!(
                "{function}: the scores [batch, heads, queries, keys] = {:?} take {:.2} GiB ({bytes} bytes) in {} \
                 matrices of f{} at a time, and the device has {:.2} GiB free of {:.2} GiB. Take a smaller batch or \
                 shorter sequences, or divide the heads by tensor parallelism",
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

/// Says that a tensor has too many elements, where it has.
fn uncountable(function: &str, what: &str, dims: &[usize]) -> Option<String> {
    let elements = count(dims);
    (elements >= ELEMENTS).then(|| {
        format!(
            "{function}: {what} = {dims:?} has {elements} elements, and Candle's kernels for devices count fewer than \
             {ELEMENTS} (2^31). Take a smaller batch or shorter sequences, or divide the tensor by tensor parallelism"
        )
    })
}

/// Returns the bytes that a device has free, and those that it has, where `wanted` may be more.
#[cfg(feature = "cuda")]
fn room(device: &Device, wanted: u128) -> Result<Option<[u64; 2]>> {
    use cudarc::driver::DriverError;
    use fsdp_core::device::cuda::{DeviceMemory, failed};

    use crate::error::Error;

    if !device.is_cuda() {
        return Ok(None);
    }
    let stream = crate::kernels::compute_stream(device)?;
    let refused = |what: &str, error: DriverError| Error::Core(failed(&stream, what, &error));
    let total = stream.context().total_mem().map_err(|error| refused("asking for its memory", error))?;
    if wanted < total as u128 / WORTH_ASKING {
        return Ok(None);
    }
    let ask = || -> Result<[u64; 2]> {
        let memory = DeviceMemory::of(&stream).map_err(Error::from)?;
        Ok([memory.free, memory.total])
    };
    let [free, total] = ask()?;
    if wanted <= u128::from(free) {
        return Ok(Some([free, total]));
    }
    // Memory that is freed on the stream may count as used until the device comes to that.
    stream.synchronize().map_err(|error| refused("waiting for the device", error))?;
    ask().map(Some)
}

/// The host's memory and that of other devices is not asked about.
#[cfg(not(feature = "cuda"))]
fn room(_: &Device, _: u128) -> Result<Option<[u64; 2]>> {
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_that_candle_cannot_count_are_refused_by_their_elements() {
        for (dims, elements) in [
            (&[2, 32, 8192, 8192][..], Some("4294967296")),
            (&[1, 32, 12288, 12288], Some("4831838208")),
            (&[1 << 31], Some("2147483648")),
            (&[(1 << 31) - 1], None),
            (&[1, 31, 8192, 8192], None),
            (&[0, usize::MAX, usize::MAX], None),
            (&[usize::MAX; 5], Some("340282366920938463463374607431768211455")),
        ] {
            let error = uncountable("attention", "the scores", dims);
            assert_eq!(error.is_some(), elements.is_some(), "{dims:?}");
            let Some((error, elements)) = error.zip(elements) else { continue };
            let parts = ["attention: the scores = [", elements, "count fewer than 2147483648 (2^31)", "smaller batch"];
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }

    #[test]
    fn scores_that_do_not_fit_are_refused_by_their_bytes() {
        let scores = Scores { dims: [1, 32, 8192, 8192], copies: 6, size: 4 };
        let bytes = 6 * 32 * 8192 * 8192 * 4;
        assert_eq!((scores.refusal("attention", [bytes, 80 << 30]), scores.bytes()), (None, u128::from(bytes)));
        let error = scores.refusal("attention", [bytes - 1, 80 << 30]).unwrap();
        let parts = ["48.00 GiB (51539607552 bytes) in 6 matrices of f32", "free of 80.00 GiB", "shorter sequences"];
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }

    #[test]
    fn the_host_counts_in_64_bits() {
        assert!(countable("attention", "the scores", &[1 << 40], &Device::Cpu).is_ok());
        assert!(scores_fit("attention", [1 << 20, 1 << 20, 1, 1], 6, DType::F32, &Device::Cpu).is_ok());
    }
}
