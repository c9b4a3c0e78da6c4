//! The input of a layer's operation: a tensor of the graph, or an input that parallel layers share.

use candle_core::{Result, Tensor};

use crate::collectives::SharedInput;

/// An operation's input.
#[derive(Clone, Copy)]
pub(in crate::nn) enum Input<'a> {
    Plain(&'a Tensor),
    /// A shared input that has a gradient.
    Shared(&'a SharedInput),
}

impl<'a> From<&'a Tensor> for Input<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Input::Plain(tensor)
    }
}

impl<'a> From<&'a SharedInput> for Input<'a> {
    fn from(input: &'a SharedInput) -> Self {
        match input.node() {
            Some(_) => Input::Shared(input),
            None => Input::Plain(input.values()),
        }
    }
}

impl<'a> Input<'a> {
    /// Returns the values, which must not go into the graph.
    pub(in crate::nn) fn values(self) -> &'a Tensor {
        match self {
            Input::Plain(tensor) => tensor,
            Input::Shared(input) => input.values(),
        }
    }

    /// Returns the operation's graph argument.
    pub(in crate::nn) fn node(self) -> &'a Tensor {
        match self {
            Input::Plain(tensor) => tensor,
            Input::Shared(input) => input.node().unwrap_or(input.values()),
        }
    }

    /// Returns the shared input, which the operation keeps and reads instead of its graph argument.
    pub(in crate::nn) fn shared(self) -> Option<SharedInput> {
        match self {
            Input::Plain(_) => None,
            Input::Shared(input) => Some(input.clone()),
        }
    }

    /// Returns the input as an argument of Candle's own operations.
    pub(in crate::nn) fn in_graph(self) -> Result<Tensor> {
        match self {
            Input::Plain(tensor) => Ok(tensor.clone()),
            Input::Shared(input) => input.in_graph(),
        }
    }
}

/// Returns the values that an operation reads in backward, given its argument and the shared input that it kept.
pub(in crate::nn) fn values<'a>(x: &'a Tensor, shared: &'a Option<SharedInput>) -> &'a Tensor {
    shared.as_ref().map_or(x, SharedInput::values)
}

/// Returns what `bwd` returns for its argument. `compute` makes the gradient, and runs only if one is wanted.
pub(in crate::nn) fn gradient(
    x: &Tensor,
    shared: &Option<SharedInput>,
    compute: impl FnOnce() -> Result<Tensor>,
) -> Result<Option<Tensor>> {
    match shared {
        Some(shared) => shared.add_gradient(compute()?),
        None if x.track_op() => Ok(Some(compute()?)),
        None => Ok(None),
    }
}
