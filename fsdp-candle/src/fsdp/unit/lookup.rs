//! Things by the tensors that stand for them.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock, Weak};

use candle_core::{Tensor, TensorId};

/// Finds a thing by the id of a tensor, as long as it lives.
pub(super) struct Lookup<T>(RwLock<HashMap<TensorId, Weak<T>>>);

impl<T> Default for Lookup<T> {
    fn default() -> Self {
        Lookup(RwLock::default())
    }
}

impl<T> Lookup<T> {
    pub(super) fn insert(&self, tensor: &Tensor, thing: &Arc<T>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(tensor.id(), Arc::downgrade(thing));
    }

    pub(super) fn remove(&self, tensor: &Tensor) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&tensor.id());
    }

    pub(super) fn find(&self, tensor: &Tensor) -> Option<Arc<T>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&tensor.id())?.upgrade()
    }
}
