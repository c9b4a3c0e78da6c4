//! The state of a running backward: gradients that bypass Candle's store, and activations that are computed again.
//!
//! A graph may go through several backwards, at the same time in several threads, and a backward may fail. So none of
//! this state is in the graph: it belongs to one backward, by [`Key`], and ends with it.
//!
//! [`backward`] owns its state. Candle's own `backward` calls nothing of this library when it begins or fails. There,
//! Candle's store owns the state: a gradient that waits in the state has a scalar in the store ([`Running::hold`]),
//! whose graph holds the state. The store drops the scalar when it reaches the node, or when backward fails.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use candle_core::backprop::GradStore;
use candle_core::{Result, Shape, Tensor, bail};
use parking_lot::Mutex;

use super::computed::{Computed, Forward, custom_op};
use super::teardown::drop_flat;
use crate::storage::{scalar, sum, with_slice, with_slice_mut};

/// A place in the state of each backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key(u64);

impl Key {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Key(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The state of a running backward.
#[derive(Default)]
pub(crate) struct Running {
    /// Whether the backward frees each operation's values once it has passed it.
    pub(super) frees: bool,
    /// Whether a [`backward`] owns the state, rather than Candle's store.
    is_owned: bool,
    gradients: Mutex<HashMap<Key, Gradient>>,
    /// Values of activations that were computed again.
    values: Mutex<HashMap<Key, Tensor>>,
}

/// A sum of gradients.
enum Gradient {
    /// Others may hold its memory.
    Moved(Tensor),
    Owned(Tensor),
}

thread_local! {
    /// States of this thread's backwards that own theirs, the innermost last.
    static OWNED: RefCell<Vec<Arc<Running>>> = const { RefCell::new(vec![]) };
    /// The state that Candle's store owns.
    static OF_STORE: RefCell<Weak<Running>> = const { RefCell::new(Weak::new()) };
}

/// Runs Candle's backward with a state of its own. If it `frees`, a later backward over the same graph fails.
pub(crate) fn backward(loss: &Tensor, frees: bool) -> Result<GradStore> {
    let running = Running { frees, is_owned: true, ..Running::default() };
    OWNED.with_borrow_mut(|owned| owned.push(Arc::new(running)));
    // Gradients are dropped after the cell is released, because that may free a graph.
    let _end = scopeguard::guard((), |()| drop(OWNED.with_borrow_mut(Vec::pop)));
    loss.backward()
}

impl Running {
    /// Returns the state of this thread's innermost backward.
    pub(crate) fn current() -> Arc<Running> {
        let owned = OWNED.with_borrow(|owned| owned.last().cloned());
        owned.unwrap_or_else(|| {
            OF_STORE.with_borrow_mut(|known| {
                known.upgrade().unwrap_or_else(|| {
                    let new = Arc::default();
                    *known = Arc::downgrade(&new);
                    new
                })
            })
        })
    }

    /// Adds a gradient whose memory others may hold. Returns the gradient that Candle's store gets for `node`, the
    /// scalar whose backward takes the sum, or `None` if the store has one.
    pub(crate) fn add(self: &Arc<Self>, key: Key, gradient: Tensor, node: &Tensor) -> Result<Option<Tensor>> {
        self.add_by(key, node, |known| match known {
            None => Ok(Gradient::Moved(gradient)),
            Some(Gradient::Moved(first)) => Ok(Gradient::Owned(sum(&first, &gradient)?)),
            Some(Gradient::Owned(total)) => Ok(Gradient::Owned(add_to(total, &gradient)?)),
        })
    }

    /// [`Running::add`] of a gradient that has no other reader.
    pub(crate) fn add_owned(self: &Arc<Self>, key: Key, gradient: Tensor, node: &Tensor) -> Result<Option<Tensor>> {
        self.add_by(key, node, |known| {
            Ok(Gradient::Owned(match known {
                None => gradient.contiguous()?,
                Some(Gradient::Moved(first)) => add_to(gradient.contiguous()?, &first)?,
                Some(Gradient::Owned(total)) => add_to(total, &gradient)?,
            }))
        })
    }

    fn add_by(
        self: &Arc<Self>,
        key: Key,
        node: &Tensor,
        add: impl FnOnce(Option<Gradient>) -> Result<Gradient>,
    ) -> Result<Option<Tensor>> {
        let known = self.gradients.lock().remove(&key);
        let is_first = known.is_none();
        let sum = add(known)?;
        self.gradients.lock().insert(key, sum);
        // The store keeps the first until it reaches the node.
        is_first.then(|| self.hold(node)).transpose()
    }

    /// Leaves the only gradient at a place. Use [`Running::hold`] for the node whose backward takes it.
    pub(crate) fn put(&self, key: Key, gradient: Tensor) {
        let before = self.gradients.lock().insert(key, Gradient::Moved(gradient));
        drop(before);
    }

    /// Takes the sum of the gradients.
    pub(crate) fn take(&self, key: Key) -> Option<Tensor> {
        let sum = self.gradients.lock().remove(&key);
        sum.map(|(Gradient::Moved(sum) | Gradient::Owned(sum))| sum)
    }

    /// Returns zero as the gradient of a scalar node of the graph. While Candle's store has it, the state exists.
    pub(crate) fn hold(self: &Arc<Self>, node: &Tensor) -> Result<Tensor> {
        if self.is_owned || !node.track_op() {
            return Ok(node.detach());
        }
        let computed = Computed { memory: scalar(node.device())?, shape: Shape::from(()) };
        node.apply_op1(Holder { forward: Forward::new("gradient", computed), state: Some(self.clone()) })
    }

    pub(super) fn values(&self, key: Key) -> Option<Tensor> {
        self.values.lock().get(&key).cloned()
    }

    pub(super) fn set_values(&self, key: Key, values: Tensor) {
        self.values.lock().insert(key, values);
    }

    pub(super) fn drop_values(&self, key: Key) {
        let values = self.values.lock().remove(&key);
        drop(values);
    }
}

/// The operation of a gradient that holds the state.
struct Holder {
    forward: Forward,
    /// Set until it is dropped.
    state: Option<Arc<Running>>,
}

impl Holder {
    fn backward(&self, _: &[&Tensor; 1], _: &Tensor, _: &Tensor) -> Result<[Option<Tensor>; 1]> {
        bail!("a gradient has no backward")
    }
}

custom_op!(Holder: CustomOp1(a), [da] => da, Option<Tensor>);

impl Drop for Holder {
    fn drop(&mut self) {
        drop_flat(self.state.take());
    }
}

/// Adds to a contiguous tensor in place.
fn add_to(total: Tensor, more: &Tensor) -> Result<Tensor> {
    let more = more.contiguous()?;
    with_slice_mut(&total, |kernels, total| with_slice(&more, |_, more| kernels.add(total, more)))?;
    Ok(total)
}

/// Returns the error for an operation whose values a backward has freed.
pub(super) fn freed<T>(name: &str) -> Result<T> {
    bail!(
        "{name}: the graph has been through backward, which freed it: run forward again, or keep the graph by \
         backward_retain_graph. If several optimizers share the loss, call `let grads = model.backward(&loss)?` once, and \
         `step(&grads)` of each"
    )
}
