//! Loads kernels before the first collective.
//!
//! CUDA loads a kernel when a program first asks for it, and may then wait for the whole device
//! (<https://docs.nvidia.com/cuda/cuda-programming-guide/04-special-topics/lazy-loading.html>). A collective that is
//! under way waits for the other ranks, which would thus wait for each other's loading.

use std::collections::BTreeSet;

use candle_core::cuda_backend::kernels as candle;
use candle_core::{DType, Device, Result, Tensor};

use super::device::of_candle;
use crate::error;

/// All of Candle's modules of kernels.
const CANDLES: [&candle::Module; 11] = [
    &candle::AFFINE,
    &candle::BINARY,
    &candle::CAST,
    &candle::CONV,
    &candle::FILL,
    &candle::INDEXING,
    &candle::QUANTIZED,
    &candle::REDUCE,
    &candle::SORT,
    &candle::TERNARY,
    &candle::UNARY,
];

/// Loads Candle's kernels, and lets cuBLAS multiply matrices of each dtype and layout. The kernels of this library are
/// loaded when they are compiled. cuBLAS still chooses others for other shapes.
pub(crate) fn preload(device: &Device) -> error::Result<()> {
    let cuda = &of_candle(device.as_cuda_device()?)?.device;
    for module in CANDLES {
        for name in kernel_names(module.ptx().as_bytes()) {
            cuda.get_or_load_func(&name, module)?;
        }
    }
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        multiply(dtype, device)?;
    }
    Ok(device.synchronize()?)
}

/// Multiplies as a linear layer's forward and both parts of its backward do.
fn multiply(dtype: DType, device: &Device) -> Result<()> {
    let square = Tensor::zeros((128, 128), dtype, device)?;
    let transposed = square.t()?;
    square.matmul(&transposed)?;
    square.matmul(&square)?;
    transposed.matmul(&square)?;
    Ok(())
}

/// Returns the names of the kernels in PTX, or in machine code, an ELF file with sections for each kernel.
pub(super) fn kernel_names(image: &[u8]) -> BTreeSet<String> {
    let is_of_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"_$".contains(byte);
    let mut names = BTreeSet::new();
    // The bytes before a name, and the bytes that may follow it.
    for (mark, ends) in [(b".entry ".as_slice(), b"( \n".as_slice()), (b".nv.constant0.", b"\0")] {
        let starts = image.windows(mark.len()).enumerate().filter(|(_, bytes)| *bytes == mark);
        for (start, _) in starts {
            let rest = &image[start + mark.len()..];
            let name: Vec<u8> = rest.iter().copied().take_while(is_of_name).collect();
            if rest.get(name.len()).is_some_and(|end| ends.contains(end)) {
                names.extend(String::from_utf8(name).ok());
            }
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_names_in_both_forms() {
        let ptx = b".version 9.0\n.target sm_90\n.visible .entry first_f32(\n.param .u64 a)\n.weak .entry second_bf16(";
        assert_eq!(kernel_names(ptx), BTreeSet::from(["first_f32".into(), "second_bf16".into()]));
        let elf = b"\x7fELF\0.nv.constant0.first_f32\0.nv.info\0.nv.constant0\0.rela.nv.constant0.second_bf16\0";
        assert_eq!(kernel_names(elf), BTreeSet::from(["first_f32".into(), "second_bf16".into()]));
        assert!(kernel_names(b"").is_empty());
    }
}
