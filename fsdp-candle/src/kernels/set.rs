//! The set of kernels that a device has.

use std::ops::Range;

use candle_core::{Result, Storage, Tensor, bail};
use fsdp_core::{Buffer, DType};

use super::doors::StorageMut;
use super::eight_bits::EightBits;
use super::host_copies::{HostSink, HostSource};
use super::norm::NormType;
use super::slice::{Slice, SliceMut};
use super::update::{AdamUpdate, SgdUpdate};

/// Rows of elements that lie at even distances.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) count: usize,
    /// Elements of a row.
    pub(crate) len: usize,
    /// Elements from the beginning of a row to that of the next, where they are read.
    pub(crate) from_stride: usize,
    /// The same where they are written.
    pub(crate) to_stride: usize,
}

impl Rows {
    /// An error unless all rows fit into both, which are of one dtype. Returns the bytes of an element.
    pub(super) fn check(&self, from: &Slice<'_>, to: &SliceMut<'_>) -> Result<usize> {
        let (dtype, wanted) = (from.dtype(), to.dtype());
        if dtype != wanted {
            bail!("elements of {dtype} can't be copied to {wanted}")
        }
        let Rows { count, len, from_stride, to_stride } = *self;
        if count == 0 || len == 0 {
            return Ok(dtype.size());
        }
        let end = |stride: usize| (count - 1).checked_mul(stride).and_then(|last| last.checked_add(len));
        let fits = |stride, room| end(stride).is_some_and(|end| end <= room);
        if !fits(from_stride, from.len()) || !fits(to_stride, to.len()) || (count > 1 && to_stride < len) {
            bail!("{count} rows of {len} elements do not fit into {} and {}", from.len(), to.len())
        }
        Ok(dtype.size())
    }
}

/// What a device computes for this library. Each call is one choice of dtype and then a loop over elements; memory of
/// another device, and dtypes or lengths that do not fit each other, are errors.
pub(crate) trait Kernels: Send + Sync {
    /// Memory of zeros.
    fn zeros(&self, dtype: DType, len: usize) -> fsdp_core::Result<Buffer>;

    /// A buffer's memory as a tensor's, without a copy.
    fn storage(&self, buffer: Buffer) -> Result<Storage>;

    /// A tensor's memory as a buffer, without a copy; `None` for the poison and for dtypes that collectives do not
    /// move.
    fn buffer(&self, storage: Storage) -> Option<Buffer>;

    /// What lies under a sharded parameter: no compute kernel accepts it, so that every use is a clean error instead of
    /// freed memory being read.
    fn freed_storage(&self) -> Result<Storage>;

    /// Elements of a tensor's memory, to be read.
    fn slice<'a>(&self, storage: &'a Storage, elements: Range<usize>) -> Result<Slice<'a>>;

    /// Elements of a tensor's memory, to be written.
    fn slice_mut<'a>(&self, storage: StorageMut<'a>, elements: Range<usize>) -> Result<SliceMut<'a>>;

    /// Calls `f` once with the elements as bytes of the host, in native order. The host waits for a device.
    fn read(&self, from: Slice<'_>, f: &mut dyn FnMut(&[u8])) -> Result<()>;

    /// Calls `f` once with bytes of the host, in native order, which become the elements: it writes all of them.
    fn write(&self, to: SliceMut<'_>, f: &mut dyn FnMut(&mut [u8])) -> Result<()>;

    /// Copies rows of elements of any dtype.
    fn copy_rows(&self, from: Slice<'_>, to: SliceMut<'_>, rows: Rows) -> Result<()>;

    /// Copies all elements.
    fn copy(&self, from: Slice<'_>, to: SliceMut<'_>) -> Result<()> {
        let (len, room) = (from.len(), to.len());
        if len != room {
            bail!("{len} elements can't be copied to {room}")
        }
        self.copy_rows(from, to, Rows { count: 1, len, from_stride: len, to_stride: len })
    }

    /// `sum += more`, of one dtype, rounded to it.
    fn add(&self, sum: SliceMut<'_>, more: Slice<'_>) -> Result<()>;

    /// `values *= factor`: in f64 for f64, else in f32.
    fn scale(&self, values: SliceMut<'_>, factor: f64) -> Result<()>;

    /// The same values in another dtype, rounded to the nearest.
    fn cast(&self, from: Slice<'_>, to: SliceMut<'_>) -> Result<()>;

    /// Leaves the sum of powers of magnitudes, or the largest, in one element of F64: what [`NormType::root`] makes a
    /// norm of.
    fn powers(&self, values: Slice<'_>, norm: NormType, sum: SliceMut<'_>) -> Result<()>;

    /// Leaves how many are infinite or not a number in one element of F64.
    fn count_non_finite(&self, values: Slice<'_>, count: SliceMut<'_>) -> Result<()>;

    /// `values = kept values + taken more`, of any two dtypes of floats, rounded to that of `values`: computed in f64
    /// for f64, else in f32.
    fn mix(&self, values: SliceMut<'_>, kept: f64, more: Slice<'_>, taken: f64) -> Result<()>;

    /// One step of Adam or AdamW; `moments` are the running means of gradients and of their squares. All are of one
    /// dtype.
    fn adam(&self, update: &AdamUpdate, param: SliceMut<'_>, grad: Slice<'_>, moments: [SliceMut<'_>; 2])
    -> Result<()>;

    /// One step of SGD; `buffer` is the momentum's, if there is momentum. All are of one dtype.
    fn sgd(&self, update: &SgdUpdate, param: SliceMut<'_>, grad: Slice<'_>, buffer: Option<SliceMut<'_>>)
    -> Result<()>;

    /// One step of AdamW whose moments are in 8 bits, of parameters of F32, BF16 or F16: codes and scales of the
    /// running mean of gradients ([`EightBits::Signed`]), then those of the root of that of their squares
    /// ([`EightBits::Unsigned`]), each for blocks of [`super::STATE_BLOCK`] elements. It is computed in f32.
    fn adam_8bit(
        &self,
        update: &AdamUpdate,
        param: SliceMut<'_>,
        grad: Slice<'_>,
        moments: [SliceMut<'_>; 4],
    ) -> Result<()>;

    /// Encodes values of f32 into a code of U8 each, and a scale of F32 for each `block` of them. A block that is not
    /// finite becomes NaN as a whole.
    fn quantise(
        &self,
        bits: EightBits,
        block: usize,
        values: Slice<'_>,
        codes: SliceMut<'_>,
        scales: SliceMut<'_>,
    ) -> Result<()>;

    /// Decodes what [`Kernels::quantise`] has made into floats of any width.
    fn dequantise(
        &self,
        bits: EightBits,
        block: usize,
        codes: Slice<'_>,
        scales: Slice<'_>,
        values: SliceMut<'_>,
    ) -> Result<()>;

    /// A contiguous tensor of the host as what is copied to this device; none where the device is the host, which has
    /// nothing to copy.
    fn host_source(&self, _tensor: &Tensor, _page_locked: bool) -> Result<Option<Box<dyn HostSource>>> {
        Ok(None)
    }

    /// Memory of the host to copy so many elements of this device to; none as above.
    fn host_sink(&self, _dtype: DType, _len: usize, _page_locked: bool) -> Result<Option<Box<dyn HostSink>>> {
        Ok(None)
    }
}
