//! Putting a storage into a tensor and taking the old one out, as PyTorch's `untyped_storage().resize_()` does for
//! FSDP2.
//!
//! Views of a tensor share its storage, so the graph that forward recorded sees what is put in before backward.

use std::sync::Mutex;

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Tensor, bail};

struct Swap(Mutex<Option<CpuStorage>>);

impl InplaceOp1 for Swap {
    fn name(&self) -> &'static str {
        "swap-storage"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        let mut slot = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(new) = slot.as_mut() {
            std::mem::swap(storage, new);
        }
        Ok(())
    }
}

/// Puts `storage` under `tensor` and all of its views; returns what was there.
pub(crate) fn swap(tensor: &Tensor, storage: CpuStorage) -> Result<CpuStorage> {
    let op = Swap(Mutex::new(Some(storage)));
    tensor.inplace_op1(&op)?;
    match op.0.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        Some(old) => Ok(old),
        None => bail!("swap-storage lost a storage"),
    }
}

/// What lies under a sharded parameter: no compute kernel accepts it, so that every use is a clean error instead of
/// freed memory being read.
pub(crate) fn poison() -> CpuStorage {
    CpuStorage::F4(vec![])
}

/// A storage of no elements: a tensor born with it reports `dtype` for good, whatever is swapped in later.
pub(crate) fn empty(dtype: DType) -> Result<CpuStorage> {
    Ok(match dtype {
        DType::BF16 => CpuStorage::BF16(vec![]),
        DType::F16 => CpuStorage::F16(vec![]),
        DType::F32 => CpuStorage::F32(vec![]),
        DType::F64 => CpuStorage::F64(vec![]),
        other => bail!("a parameter of {other:?} can't be sharded; use BF16, F16, F32 or F64"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn views_see_the_new_storage() {
        let tensor = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        let view = tensor.t().unwrap();
        let old = swap(&tensor, CpuStorage::F32(vec![0., 1., 2., 3., 4., 5.])).unwrap();
        assert!(matches!(old, CpuStorage::F32(v) if v == [0.; 6]));
        assert_eq!(view.to_vec2::<f32>().unwrap(), [[0., 3.], [1., 4.], [2., 5.]]);
    }

    #[test]
    fn every_use_of_a_poisoned_tensor_is_an_error() {
        let bad = Tensor::zeros((2, 2), DType::F32, &Device::Cpu).unwrap();
        let good = bad.copy().unwrap();
        swap(&bad, poison()).unwrap();
        let ids = Tensor::new(&[0u32], &Device::Cpu).unwrap();
        for result in [
            good.matmul(&bad),
            &good + &bad,
            bad.exp(),
            bad.sum_all(),
            bad.to_dtype(DType::F64),
            bad.contiguous().and_then(|t| t.affine(2., 0.)),
            bad.t().and_then(|t| t.contiguous()),
            bad.index_select(&ids, 0),
            Tensor::cat(&[&bad, &good], 0),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("F4") || error.contains("dtype"), "{error}");
        }
    }
}
