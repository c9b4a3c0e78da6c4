//! The order in which tensors were made.

use std::hash::{Hash, Hasher};

use candle_core::{DType, Device, Tensor, TensorId};

/// Candle numbers its tensors in the order in which they are made, and shows the number to hashers only.
pub(crate) fn number(id: TensorId) -> usize {
    struct Number(usize);
    impl Hasher for Number {
        fn write(&mut self, bytes: &[u8]) {
            bytes.iter().for_each(|&byte| self.0 = self.0 << 8 | usize::from(byte));
        }
        fn write_usize(&mut self, number: usize) {
            self.0 = number;
        }
        fn finish(&self) -> u64 {
            self.0 as u64
        }
    }
    let mut hasher = Number(0);
    id.hash(&mut hasher);
    hasher.0
}

/// A number greater than those of all tensors before, and smaller than those of all that follow.
pub(crate) fn next_number() -> usize {
    // A byte of host memory is always there. Without it, no node would belong to a pass.
    Tensor::zeros((), DType::U8, &Device::Cpu).map_or(usize::MAX, |tensor| number(tensor.id()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_tensors_have_greater_numbers() {
        let numbers: Vec<usize> = (0..600).map(|_| next_number()).collect();
        assert!(numbers.is_sorted_by(|a, b| a < b));
    }
}
