//! Outputs that the graph does not keep, and computes again when a backward reads them.

use std::sync::Arc;

use candle_core::op::BackpropOp;
use candle_core::{Result, Shape, Storage, Tensor};
use parking_lot::Mutex;

use super::running::{Key, Running, freed};
use super::teardown::drop_flat;

/// Computes the memory of an output from the values of its sources.
pub(super) type Compute = dyn Fn(&[&Tensor]) -> Result<Storage> + Send + Sync;

/// An output that is computed again.
pub(super) struct Recomputation {
    /// Place of the values in the state of a backward.
    key: Key,
    shape: Shape,
    /// `None` once a backward has freed it.
    recipe: Mutex<Option<Recipe>>,
}

/// How an output is computed.
#[derive(Clone)]
struct Recipe {
    compute: Arc<Compute>,
    sources: Vec<Values>,
}

impl Recomputation {
    pub(super) fn new(key: Key, shape: Shape, compute: Arc<Compute>, sources: Vec<Values>) -> Self {
        Recomputation { key, shape, recipe: Mutex::new(Some(Recipe { compute, sources })) }
    }

    fn is_freed(&self) -> bool {
        self.recipe.lock().is_none()
    }

    /// Frees what the output is computed from. Backwards that run later cannot compute it.
    pub(super) fn free(&self) {
        // Outside of the lock, because it may free a graph.
        let recipe = self.recipe.lock().take();
        drop(recipe);
    }

    /// Returns the values. They stay until backward has passed the output.
    fn values(&self, running: &Arc<Running>) -> Result<Tensor> {
        if let Some(values) = running.values(self.key) {
            return Ok(values);
        }
        let Some(Recipe { compute, sources }) = self.recipe.lock().clone() else { return freed("an activation") };
        let of_sources = sources.iter().map(|source| source.get(running)).collect::<Result<Vec<_>>>()?;
        let memory = compute(&of_sources.iter().collect::<Vec<_>>())?;
        // A variable, since operations ask whether the source has a gradient.
        let computed = Tensor::from_storage(memory, self.shape.clone(), BackpropOp::none(), true);
        running.set_values(self.key, computed.clone());
        Ok(computed)
    }
}

impl Drop for Recomputation {
    fn drop(&mut self) {
        drop_flat(self.recipe.get_mut().take());
    }
}

/// The values of an operation's source.
#[derive(Clone)]
pub(super) enum Values {
    Kept(Tensor),
    /// The values of an output that is computed again.
    Recomputed(Arc<Recomputation>),
}

impl Values {
    /// Returns the values of a source, which is kept unless it can be computed again.
    pub(super) fn of(source: &Tensor, recomputation: Option<&Arc<Recomputation>>) -> Self {
        match recomputation {
            Some(recomputation) if !recomputation.is_freed() => Values::Recomputed(recomputation.clone()),
            _ => Values::Kept(source.clone()),
        }
    }

    pub(super) fn get(&self, running: &Arc<Running>) -> Result<Tensor> {
        match self {
            Values::Kept(values) => Ok(values.clone()),
            Values::Recomputed(recomputation) => recomputation.values(running),
        }
    }
}
