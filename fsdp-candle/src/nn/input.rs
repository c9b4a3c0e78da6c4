//! What a layer's operation takes: a tensor of the graph, or one that parallel layers share.

use candle_core::{Result, Tensor};

use crate::collectives::SharedInput;

/// An input.
#[derive(Clone, Copy)]
pub(in crate::nn) enum Input<'a> {
    Plain(&'a Tensor),
    /// It has a gradient.
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
    /// The values. They must not go into the graph.
    pub(in crate::nn) fn values(self) -> &'a Tensor {
        match self {
            Input::Plain(tensor) => tensor,
            Input::Shared(input) => input.values(),
        }
    }

    /// What an operation takes as its graph argument.
    pub(in crate::nn) fn node(self) -> &'a Tensor {
        match self {
            Input::Plain(tensor) => tensor,
            Input::Shared(input) => input.node().unwrap_or(input.values()),
        }
    }

    /// What an operation keeps to read in the argument's place.
    pub(in crate::nn) fn shared(self) -> Option<SharedInput> {
        match self {
            Input::Plain(_) => None,
            Input::Shared(input) => Some(input.clone()),
        }
    }

    /// What Candle's own operations take.
    pub(in crate::nn) fn in_graph(self) -> Result<Tensor> {
        match self {
            Input::Plain(tensor) => Ok(tensor.clone()),
            Input::Shared(input) => input.in_graph(),
        }
    }
}

/// The values that an operation reads in backward, given its argument and what it has kept.
pub(in crate::nn) fn values<'a>(x: &'a Tensor, shared: &'a Option<SharedInput>) -> &'a Tensor {
    shared.as_ref().map_or(x, SharedInput::values)
}

/// What an operation's backward returns for its argument, whose gradient `compute` makes where there is one.
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
