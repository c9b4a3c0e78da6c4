//! Values in a file, as checkpoints read and fill them.

use candle_core::{Device, Tensor};
use fsdp_core::{Buffer, DType, Readable, View, Writable};

use crate::error::Result;
use crate::kernels::{self, Slice};
use crate::storage::{TensorMemory, to_tensor};

/// A tensor whose values are in a file.
pub(crate) trait FileValues {
    /// Returns the dtype of the values.
    fn dtype(&self) -> DType;

    fn shape(&self) -> &[usize];

    /// Calls `f` with all values in order, a piece at a time.
    fn read_values(&self, f: &mut dyn FnMut(&[u8])) -> Result<()>;

    /// Writes the values of a tensor of the same shape and dtype in host memory.
    fn set(&self, values: &Tensor) -> Result<()>;

    /// Returns a copy of the values.
    fn tensor(&self) -> Result<Tensor> {
        let mut values = Buffer::try_zeros(self.dtype(), self.shape().iter().product())?;
        let bytes = values.bytes_mut();
        let mut done = 0;
        self.read_values(&mut |piece| {
            bytes[done..done + piece.len()].copy_from_slice(piece);
            done += piece.len();
        })?;
        Ok(to_tensor(values, self.shape(), &Device::Cpu)?)
    }
}

/// The values of a tensor in a file.
pub(crate) struct FileMemory<V>(pub(crate) V);

impl<V: FileValues + Send + Sync> Readable for FileMemory<V> {
    fn dtype(&self) -> DType {
        self.0.dtype()
    }

    fn len(&self) -> usize {
        self.0.shape().iter().product()
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) -> Result<(), String> {
        TensorMemory(self.0.tensor().map_err(|error| error.to_string())?).read(f)
    }

    fn read_pieces(&self, f: &mut dyn FnMut(&[u8])) -> Result<(), String> {
        self.0.read_values(f).map_err(|error| error.to_string())
    }
}

impl<V: FileValues + Send + Sync> Writable for FileMemory<V> {
    fn dtype(&self) -> DType {
        self.0.dtype()
    }

    fn len(&self) -> usize {
        self.0.shape().iter().product()
    }

    /// Holds all values in memory meanwhile.
    fn write(&self, f: &mut dyn FnMut(&mut [u8])) -> Result<(), String> {
        let values = self.0.tensor().map_err(|error| error.to_string())?;
        TensorMemory(values.clone()).write(f)?;
        self.0.set(&values).map_err(|error| error.to_string())
    }
}

/// Returns the number of values that are not finite.
pub(crate) fn count_non_finite(dtype: DType, bytes: &[u8]) -> Result<f64> {
    let mut count = Buffer::F64(vec![0.]);
    kernels::of_device(&Device::Cpu)?.count_non_finite(Slice::new(dtype, View::Host(bytes)), (&mut count).into())?;
    Ok(match count {
        Buffer::F64(count) => count[0],
        _ => 0.,
    })
}
