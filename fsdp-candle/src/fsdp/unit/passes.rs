//! The anchors of one parameter, where its unit runs several times before backward.

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{Result, Tensor};

/// Makes the anchor of a further pass on top of the first pass's.
pub(crate) type OfPass = dyn Fn(&Tensor, usize) -> Result<Tensor> + Send + Sync;

/// The pass that runs, and its anchor once a layer has asked for it.
pub(super) struct Passes {
    make: Box<OfPass>,
    now: Mutex<Option<(usize, Option<Tensor>)>>,
}

impl Passes {
    pub(super) fn new(make: Box<OfPass>) -> Self {
        Passes { make, now: Mutex::default() }
    }

    fn now(&self) -> MutexGuard<'_, Option<(usize, Option<Tensor>)>> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a further pass, or a first one.
    pub(super) fn begin(&self, pass: Option<usize>) {
        *self.now() = pass.map(|pass| (pass, None));
    }

    /// The anchor of the pass that runs: `first` in a first one.
    pub(super) fn anchor(&self, first: &Tensor) -> Result<Tensor> {
        match &mut *self.now() {
            None => Ok(first.clone()),
            Some((_, Some(anchor))) => Ok(anchor.clone()),
            Some((pass, anchor)) => Ok(anchor.insert((self.make)(first, *pass)?).clone()),
        }
    }
}
