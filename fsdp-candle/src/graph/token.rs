//! Tokens of outputs, and the outputs that follow them.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, OnceLock, Weak};

use candle_core::{DType, Device, Result, Shape, Tensor, TensorId, bail};
use parking_lot::Mutex;

use super::computed::{Computed, Forward, custom_op};
use super::recomputation::{Recomputation, Values};
use super::running::{Key, Running};
use super::teardown::drop_flat;

/// The tokens of all outputs that exist, by the outputs' ids.
static TOKENS: LazyLock<Mutex<HashMap<TensorId, Token>>> = LazyLock::new(Mutex::default);

/// The token of an output.
#[derive(Clone)]
pub(super) struct Token {
    /// The scalar that stands for the output in the graph.
    pub(super) node: Tensor,
    pub(super) slot: Arc<Slot>,
}

impl Token {
    pub(super) fn of(output: &Tensor) -> Option<Self> {
        TOKENS.lock().get(&output.id()).cloned()
    }

    /// Returns the values of `output`, which this is the token of, if a backward reads them.
    pub(super) fn values(&self, output: &Tensor) -> Values {
        Values::of(output, self.slot.recomputation.as_ref())
    }

    /// Returns the output that follows the token. If `is_read`, the graph keeps its values for the token's backward.
    pub(super) fn output(self, name: &'static str, computed: Computed, is_read: bool) -> Result<Tensor> {
        let output = Output { forward: Forward::new(name, computed), slot: self.slot.clone() };
        let output = self.node.apply_op1(output)?;
        let _ = self.slot.output.set(OutputKind::of(&output));
        if is_read {
            *self.slot.values.lock() = Some(output.detach());
        }
        TOKENS.lock().insert(output.id(), self);
        Ok(output)
    }
}

/// Returns the node that stands for a tensor where an operation of this library takes it: its token, if it has one.
pub(crate) fn followed(tensor: &Tensor) -> TensorId {
    Token::of(tensor).map_or(tensor.id(), |token| token.node.id())
}

/// Tells whether the graph of an operation's output exists.
#[derive(Clone)]
pub(crate) struct Lifetime(Weak<Slot>);

impl Lifetime {
    pub(crate) fn is_over(&self) -> bool {
        self.0.strong_count() == 0
    }
}

/// Returns the lifetime of a tensor's graph, or `None` if the tensor is not an output with a token.
pub(crate) fn lifetime(tensor: &Tensor) -> Option<Lifetime> {
    Some(Lifetime(Arc::downgrade(&Token::of(tensor)?.slot)))
}

/// Returns whether this is an existing output that has a token.
#[cfg(test)]
pub(crate) fn is_output(id: TensorId) -> bool {
    TOKENS.lock().contains_key(&id)
}

/// State that an output and its token share.
pub(super) struct Slot {
    /// Place of the output's gradient in the state of a backward.
    pub(super) key: Key,
    output: OnceLock<OutputKind>,
    /// The values of the output, if its token's backward reads them.
    values: Mutex<Option<Tensor>>,
    /// Set if the output is computed again in backward.
    recomputation: Option<Arc<Recomputation>>,
}

/// Gradient and values of an output, when backward comes to the output's token.
pub(super) struct OutputState {
    /// The sum of the output's gradients, or zeros.
    pub(super) gradient: Tensor,
    /// The values, if backward reads them.
    pub(super) values: Option<Tensor>,
}

impl Slot {
    pub(super) fn new(key: Key, recomputation: Option<Recomputation>) -> Self {
        Slot { key, output: OnceLock::new(), values: Mutex::default(), recomputation: recomputation.map(Arc::new) }
    }

    /// Takes the output's state for the backward of its token, which is `name`. Nothing computes the output again
    /// after it if the backward `frees`.
    pub(super) fn take(&self, name: &str, running: &Running, frees: bool) -> Result<OutputState> {
        let Some(kind) = self.output.get() else { bail!("{name}: backward ran during forward") };
        running.drop_values(self.key);
        if let Some(recomputation) = self.recomputation.as_ref().filter(|_| frees) {
            recomputation.free();
        }
        let gradient = running.take(self.key).map_or_else(|| kind.zeros(), Ok)?;
        let values = if frees { self.values.lock().take() } else { self.values.lock().clone() };
        Ok(OutputState { gradient, values })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        drop_flat((self.values.get_mut().take(), self.recomputation.take()));
    }
}

/// An output's id, and what its gradient is like.
struct OutputKind {
    id: TensorId,
    shape: Shape,
    dtype: DType,
    device: Device,
}

impl OutputKind {
    fn of(output: &Tensor) -> Self {
        OutputKind {
            id: output.id(),
            shape: output.shape().clone(),
            dtype: output.dtype(),
            device: output.device().clone(),
        }
    }

    fn zeros(&self) -> Result<Tensor> {
        Tensor::zeros(&self.shape, self.dtype, &self.device)
    }
}

/// The operation of an output, which follows its token.
struct Output {
    forward: Forward,
    slot: Arc<Slot>,
}

impl Output {
    fn backward(&self, [token]: &[&Tensor; 1], _: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 1]> {
        Ok([Running::current().add(self.slot.key, gradient.clone(), token)?])
    }
}

custom_op!(Output: CustomOp1(a), [da] => da, Option<Tensor>);

impl Drop for Output {
    fn drop(&mut self) {
        let token = self.slot.output.get().and_then(|kind| TOKENS.lock().remove(&kind.id));
        // Outside of the lock, because it may free a graph with other outputs.
        drop(token);
    }
}
