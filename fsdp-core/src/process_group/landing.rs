//! What a backend hands over: outputs, and what has to be waited for before they are used.

use crate::{Buffer, Result};

/// The outputs of a collective.
#[derive(Default)]
pub struct CollectiveOutput {
    // Before the outputs: they are freed when what the device computes next waits for the collective, and not before.
    pub(super) fence: Option<Box<dyn Fence>>,
    /// One a part or buffer, in the order in which they were passed.
    pub outputs: Vec<Buffer>,
}

impl CollectiveOutput {
    /// Outputs that are there when `fence` says so: a device is still at it.
    pub fn behind(outputs: Vec<Buffer>, fence: Box<dyn Fence>) -> Self {
        CollectiveOutput { outputs, fence: Some(fence) }
    }
}

impl From<Vec<Buffer>> for CollectiveOutput {
    /// Outputs that are there.
    fn from(outputs: Vec<Buffer>) -> Self {
        CollectiveOutput { outputs, fence: None }
    }
}

/// A collective that a device has still to run. It keeps whatever the device reads and writes meanwhile.
///
/// Dropping it is [`Fence::order`] without a word of what goes wrong: memory must not go back while it is in use.
pub trait Fence: Send {
    /// Lets the device's compute stream go on only when the collective is done, and releases what it kept. Does not
    /// block.
    ///
    /// # Errors
    /// Those of the device.
    fn order(&mut self) -> Result<()>;

    /// Blocks the calling thread until the collective is done, and releases what it kept.
    ///
    /// # Errors
    /// Those of the device.
    fn block(&mut self) -> Result<()>;
}
