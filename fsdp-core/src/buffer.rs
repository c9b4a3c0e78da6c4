//! Memory that collectives read and write.
//!
//! A collective runs while its caller continues, so it owns its memory. Outputs are [`Buffer`]s that are moved in and
//! handed back. Inputs that stay in place, such as a parameter's shard inside a tensor, are [`Readable`]s that the
//! collective locks while it copies.

use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::allocation::try_zeroed_vec;
use half::{bf16, f16};

use crate::{DType, DeviceId, Error, Result, Scalar, View};

/// Owned memory of one element type: a vector in host memory, or device memory.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Buffer {
    /// See [`DType::U8`].
    U8(Vec<u8>),
    /// See [`DType::U32`].
    U32(Vec<u32>),
    /// See [`DType::I64`].
    I64(Vec<i64>),
    /// See [`DType::BF16`].
    BF16(Vec<bf16>),
    /// See [`DType::F16`].
    F16(Vec<f16>),
    /// See [`DType::F32`].
    F32(Vec<f32>),
    /// See [`DType::F64`].
    F64(Vec<f64>),
    /// On a CUDA device.
    #[cfg(feature = "cuda")]
    Cuda(crate::device::cuda::CudaMemory),
}

/// Runs `$body` with `$v` bound to the vector inside a [`Buffer`], or `$device` with `$d` bound to device memory.
macro_rules! each {
    ($buffer:expr, $v:ident => $body:expr, $d:ident => $device:expr) => {
        match $buffer {
            Buffer::U8($v) => $body,
            Buffer::U32($v) => $body,
            Buffer::I64($v) => $body,
            Buffer::BF16($v) => $body,
            Buffer::F16($v) => $body,
            Buffer::F32($v) => $body,
            Buffer::F64($v) => $body,
            #[cfg(feature = "cuda")]
            Buffer::Cuda($d) => $device,
        }
    };
}

mod sealed {
    use super::Buffer;

    /// Conversions behind [`super::Element`]; only the types of [`super::DType`] have them.
    pub trait Vector: Sized {
        fn wrap(elements: Vec<Self>) -> Buffer;
        fn unwrap(buffer: Buffer) -> Result<Vec<Self>, Buffer>;
    }
}

/// A type whose vectors are [`Buffer`]s.
///
/// ```
/// use fsdp_core::Buffer;
/// assert_eq!(Buffer::from(vec![1u8, 2]), Buffer::U8(vec![1, 2]));
/// assert_eq!(Buffer::U8(vec![1, 2]).into_vec::<u8>(), Ok(vec![1, 2]));
/// assert_eq!(Buffer::U8(vec![1, 2]).into_vec::<f32>(), Err(Buffer::U8(vec![1, 2])));
/// ```
pub trait Element: sealed::Vector + Scalar {}

macro_rules! elements {
    ($($t:ty: $variant:ident),*) => {$(
        impl sealed::Vector for $t {
            fn wrap(elements: Vec<Self>) -> Buffer {
                Buffer::$variant(elements)
            }
            fn unwrap(buffer: Buffer) -> Result<Vec<Self>, Buffer> {
                match buffer {
                    Buffer::$variant(elements) => Ok(elements),
                    other => Err(other),
                }
            }
        }
        impl Element for $t {}
    )*};
}
elements!(u8: U8, u32: U32, i64: I64, bf16: BF16, f16: F16, f32: F32, f64: F64);

impl<T: Element> From<Vec<T>> for Buffer {
    fn from(elements: Vec<T>) -> Self {
        T::wrap(elements)
    }
}

impl Buffer {
    /// Returns the elements if they are of type `T`.
    ///
    /// # Errors
    /// Returns the buffer when its elements are of another type.
    pub fn into_vec<T: Element>(self) -> Result<Vec<T>, Buffer> {
        T::unwrap(self)
    }

    /// Returns `len` zeros. For small lengths: the process ends when there is no memory. [`Buffer::try_zeros`] returns
    /// an error.
    pub fn zeros(dtype: DType, len: usize) -> Self {
        match dtype {
            DType::U8 => Buffer::U8(vec![0; len]),
            DType::U32 => Buffer::U32(vec![0; len]),
            DType::I64 => Buffer::I64(vec![0; len]),
            DType::BF16 => Buffer::BF16(vec![bf16::ZERO; len]),
            DType::F16 => Buffer::F16(vec![f16::ZERO; len]),
            DType::F32 => Buffer::F32(vec![0.0; len]),
            DType::F64 => Buffer::F64(vec![0.0; len]),
        }
    }

    /// Returns `len` zeros.
    ///
    /// # Errors
    /// Returns [`Error::Memory`] when there is not enough memory.
    ///
    /// ```
    /// use fsdp_core::{Buffer, DType};
    /// assert_eq!(Buffer::try_zeros(DType::F32, 2).unwrap(), Buffer::F32(vec![0., 0.]));
    /// let error = Buffer::try_zeros(DType::F32, 1 << 62).unwrap_err().to_string();
    /// assert!(error.contains("4611686018427387904 elements of F32") && error.contains("GiB"), "{error}");
    /// ```
    pub fn try_zeros(dtype: DType, len: usize) -> Result<Self> {
        let zeros = match dtype {
            DType::U8 => try_zeroed_vec(len).map(Buffer::U8),
            DType::U32 => try_zeroed_vec(len).map(Buffer::U32),
            DType::I64 => try_zeroed_vec(len).map(Buffer::I64),
            DType::BF16 => try_zeroed_vec(len).map(Buffer::BF16),
            DType::F16 => try_zeroed_vec(len).map(Buffer::F16),
            DType::F32 => try_zeroed_vec(len).map(Buffer::F32),
            DType::F64 => try_zeroed_vec(len).map(Buffer::F64),
        };
        zeros.map_err(|()| Error::Memory {
            what: format!("{len} elements of {dtype}"),
            bytes: len as u128 * dtype.size() as u128,
        })
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        fn of<T: Scalar>(_: &[T]) -> DType {
            T::DTYPE
        }
        each!(self, v => of(v), memory => memory.dtype())
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        each!(self, v => v.len(), memory => memory.len())
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of elements that the allocation has room for. Only device memory may have more than its length:
    /// see `CudaMemory::zeros_with_room`.
    pub fn room(&self) -> usize {
        each!(self, v => v.len(), memory => memory.room())
    }

    /// Sets the room of device memory, which a conversion to a tensor and back loses. Does not change host memory.
    ///
    /// # Safety
    /// The allocation has room for `room` elements.
    pub unsafe fn with_room(self, room: usize) -> Self {
        match self {
            #[cfg(feature = "cuda")]
            // SAFETY: as the caller guarantees.
            Buffer::Cuda(memory) => Buffer::Cuda(unsafe { memory.with_room(room) }),
            host => {
                let _ = room;
                host
            }
        }
    }

    /// Returns the device of the elements.
    pub fn device(&self) -> DeviceId {
        each!(self, _v => DeviceId::Host, memory => memory.device())
    }

    /// Returns the elements as bytes, in native order. Empty for device memory; [`Readable::read`] copies it.
    pub fn bytes(&self) -> &[u8] {
        each!(self, v => bytemuck::cast_slice(v), _memory => &[])
    }

    /// Returns the elements as mutable bytes, in native order. Every bit pattern is a valid element. Empty for device
    /// memory.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        each!(self, v => bytemuck::cast_slice_mut(v), _memory => &mut [])
    }
}

/// Memory that a collective reads from another thread.
///
/// A tensor library implements it by locking a tensor's storage around `read`, so that no thread writes meanwhile.
pub trait Readable: Send + Sync {
    /// Returns the element type.
    fn dtype(&self) -> DType;
    /// Returns the number of elements.
    fn len(&self) -> usize;
    /// Returns whether there are no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Returns the device of the elements. Collectives refuse memory of a device other than their backend's.
    fn device(&self) -> DeviceId {
        DeviceId::Host
    }
    /// Calls `f` once with all elements as bytes in native order, on any device.
    ///
    /// # Errors
    /// Returns the reason when the memory cannot be read now.
    fn read(&self, f: &mut dyn FnMut(&[u8])) -> Result<(), String>;
    /// Calls `f` with all elements in order, in one or several pieces. State in a file is thus never in memory as a
    /// whole. `f` must not read other memory of the same file.
    ///
    /// # Errors
    /// Returns the reason when the memory cannot be read now.
    fn read_pieces(&self, f: &mut dyn FnMut(&[u8])) -> Result<(), String> {
        self.read(f)
    }
    /// Calls `f` once with a view of all elements on their device. Backends use it.
    fn view(&self, f: &mut dyn FnMut(View<'_>)) -> Result<(), String> {
        self.read(&mut |bytes| f(View::Host(bytes)))
    }
}

impl Readable for Buffer {
    fn dtype(&self) -> DType {
        Buffer::dtype(self)
    }
    fn len(&self) -> usize {
        Buffer::len(self)
    }
    fn device(&self) -> DeviceId {
        Buffer::device(self)
    }
    fn read(&self, f: &mut dyn FnMut(&[u8])) -> Result<(), String> {
        #[cfg(feature = "cuda")]
        if let Buffer::Cuda(memory) = self {
            f(&memory.to_host().map_err(|error| error.to_string())?);
            return Ok(());
        }
        f(self.bytes());
        Ok(())
    }
    fn view(&self, f: &mut dyn FnMut(View<'_>)) -> Result<(), String> {
        #[cfg(feature = "cuda")]
        if let Buffer::Cuda(memory) = self {
            f(View::Cuda(memory.view()));
            return Ok(());
        }
        f(View::Host(self.bytes()));
        Ok(())
    }
}

/// Host memory that is written in place, such as a tensor that a checkpoint is loaded into.
pub trait Writable: Send + Sync {
    /// Returns the element type.
    fn dtype(&self) -> DType;
    /// Returns the number of elements.
    fn len(&self) -> usize;
    /// Returns whether there are no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Calls `f` once with all elements as mutable bytes in native order.
    ///
    /// # Errors
    /// Returns the reason when the memory cannot be written now.
    fn write(&self, f: &mut dyn FnMut(&mut [u8])) -> Result<(), String>;
}

impl Writable for Mutex<Buffer> {
    fn dtype(&self) -> DType {
        self.lock().unwrap_or_else(PoisonError::into_inner).dtype()
    }
    fn len(&self) -> usize {
        self.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
    fn write(&self, f: &mut dyn FnMut(&mut [u8])) -> Result<(), String> {
        f(self.lock().unwrap_or_else(PoisonError::into_inner).bytes_mut());
        Ok(())
    }
}

/// The source of a collective's outputs, which also takes consumed inputs back.
///
/// A collective takes memory when it starts to run, not when it is issued. Memory that an earlier collective of the
/// same group gave back is then available, so a queue of collectives needs no more memory than its largest.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use fsdp_core::{Allocator, Buffer, DType, Heap, ReduceOp, Result, ScatterPart, process_group::local};
///
/// /// Keeps buffers for the next who asks for their size.
/// #[derive(Default)]
/// struct Reused(Mutex<Vec<Buffer>>);
///
/// impl Allocator for Reused {
///     fn take(&self, dtype: DType, len: usize) -> Result<Buffer> {
///         let mut reused = self.0.lock().unwrap();
///         match reused.iter().position(|buffer| (buffer.dtype(), buffer.len()) == (dtype, len)) {
///             Some(at) => Ok(reused.swap_remove(at)),
///             None => Heap.take(dtype, len),
///         }
///     }
///
///     fn give(&self, buffer: Buffer) {
///         self.0.lock().unwrap().push(buffer);
///     }
/// }
///
/// local::run(2, |group| {
///     let reused = Arc::new(Reused::default());
///     let part = ScatterPart { input: Buffer::F32(vec![1.; 4]), counts: vec![2, 2] };
///     let sums = group.reduce_scatter(vec![part], ReduceOp::Sum, reused.clone()).wait().unwrap();
///     assert_eq!(sums, [Buffer::F32(vec![2.; 2])]);
///     assert_eq!(reused.0.lock().unwrap().len(), 1); // the input, which the collective has consumed
/// });
/// ```
pub trait Allocator: Send + Sync {
    /// Returns `len` elements with unspecified values.
    ///
    /// # Errors
    /// Returns an error when there is not enough memory; the collective then fails on every rank.
    fn take(&self, dtype: DType, len: usize) -> Result<Buffer>;
    /// Takes a buffer back.
    fn give(&self, buffer: Buffer);
}

/// An [`Allocator`] of host memory that allocates and frees.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heap;

impl Heap {
    /// Returns a shared instance.
    pub fn shared() -> Arc<dyn Allocator> {
        Arc::new(Heap)
    }
}

impl Allocator for Heap {
    fn take(&self, dtype: DType, len: usize) -> Result<Buffer> {
        Buffer::try_zeros(dtype, len)
    }
    fn give(&self, buffer: Buffer) {
        drop(buffer);
    }
}
