//! Copies between the host's memory and a device's, on streams beside the one that it computes on.

use candle_core::Result;
use fsdp_core::{Buffer, View};

use super::slice::Slice;

/// A tensor of the host that is copied to a device again and again. It keeps the tensor's memory until the last copy
/// has read it.
pub(crate) trait HostSource: Send + Sync {
    /// Starts to copy all elements to `to`, on the device. Does not block where the memory is page-locked. A buffer of
    /// another dtype gets them cast, by way of `via`, which has the tensor's. Who calls it keeps both until the device
    /// has been told to wait ([`Copying::order`]).
    fn upload(&self, to: &Buffer, via: Option<&Buffer>) -> Result<Box<dyn Copying>>;

    /// Blocks until every copy that was started has read the tensor: then it may be written.
    fn settle(&self) -> Result<()>;
}

/// Memory of the host that a device's memory is copied to again and again.
pub(crate) trait HostSink: Send {
    /// Starts to copy all elements of a buffer of the device's. Does not block where the memory is page-locked. Who
    /// calls it keeps the buffer until the device has been told to wait.
    fn download(&mut self, from: &Buffer) -> Result<Box<dyn Copying>>;

    /// What was copied last. Blocks until it is there.
    fn values(&self) -> Result<Slice<'_>>;
}

/// A copy that was started.
pub(crate) trait Copying: Send + Sync {
    /// Lets what the device computes next go on only behind the copy. Does not block.
    fn order(&self) -> Result<()>;

    /// Calls `f` with memory that the copy writes, for what waits for the copy by itself.
    fn view(&self, written: &Buffer, f: &mut dyn FnMut(View<'_>));
}
