//! Parameters by the tensors that stand for them.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock, Weak};

use candle_core::{Tensor, TensorId};

use crate::param::FsdpParam;

/// Finds a parameter by the id of a tensor, as long as it lives.
#[derive(Default)]
pub(crate) struct Lookup(RwLock<HashMap<TensorId, Weak<FsdpParam>>>);

impl Lookup {
    pub(crate) fn insert(&self, tensor: &Tensor, param: &Arc<FsdpParam>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(tensor.id(), Arc::downgrade(param));
    }

    pub(crate) fn remove(&self, tensor: &Tensor) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&tensor.id());
    }

    pub(crate) fn find(&self, tensor: &Tensor) -> Option<Arc<FsdpParam>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&tensor.id())?.upgrade()
    }
}
