//! The input of parallel layers. Several layers may share one: queries, keys and values have the same input.
//!
//! The graph is `x -> Token -> layers`. The token is a scalar. The layers read the values beside it and add their
//! gradients to it; its backward, which comes after theirs, sends the sum through one collective. So a replicated
//! tensor is not copied, a sharded tensor is gathered once, and backward runs one collective, for any number of layers.
//!
//! A forward remembers its last shared input ([`scope`]) for layers that take the same tensor. When the
//! forward ends, it forgets the input, which holds the graph before it. Nested forwards do not share inputs.

use std::cell::RefCell;

use candle_core::{Result, Tensor, TensorId};
use fsdp_core::ProcessGroup;
use scopeguard::guard;

use super::BackwardCollective;
use super::without_grad::{Input, check, gathered, own_part};
use crate::autograd::keeps_graph;
use crate::graph::{self, Backward, Running, node, node_without_values};
use crate::storage::{copied_storage, scalar};

/// The collective between an input and layers that differ on the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Layers take the replicated tensor. Backward: all-reduce.
    Copy,
    /// Layers take all parts of this dimension. Backward: reduce-scatter.
    Gather(usize),
    /// Layers take a part of this dimension of a replicated tensor. Backward: all-gather.
    Split(usize),
}

/// The input of parallel layers.
#[derive(Clone)]
pub(crate) struct SharedInput {
    /// The values, without a graph.
    values: Tensor,
    /// The node in the graph and the place of the gradients' sum, if the input has a gradient.
    token: Option<(Tensor, graph::Key)>,
}

impl SharedInput {
    /// Returns the input of layers for `x`. A repeated call within a [`scope`] returns the same input if no other call
    /// came between. Fails if the number of ranks does not divide a dimension.
    pub(crate) fn of(function: &str, x: &Tensor, entry: Entry, group: &ProcessGroup) -> Result<Self> {
        let key = Key { x: x.id(), entry, group: group.clone(), keeps_graph: keeps_graph() };
        if let Some(known) = remembered(&key) {
            return Ok(known);
        }
        let made = Self::new(function, x, entry, group)?;
        remember(key, &made);
        Ok(made)
    }

    fn new(function: &str, x: &Tensor, entry: Entry, group: &ProcessGroup) -> Result<Self> {
        let (values, backward) = match entry {
            Entry::Copy => {
                check(function, x, None, group)?;
                (x.detach(), BackwardCollective::Sum)
            }
            Entry::Gather(dim) => {
                check(function, x, None, group)?;
                let all = gathered(x, dim, group);
                (all.map_err(|error| error.context(format!("{function}: input")))?, BackwardCollective::Scatter(dim))
            }
            Entry::Split(dim) => {
                check(function, x, Some(dim), group)?;
                (own_part(&x.detach(), dim, group)?, BackwardCollective::Gather(dim))
            }
        };
        if !(keeps_graph() && x.track_op()) {
            return Ok(SharedInput { values, token: None });
        }
        let collected = graph::Key::new();
        let back = Token { collected, like: values.clone(), group: group.clone(), backward };
        let token =
            node_without_values("parallel-input", x, scalar(x.device())?, (), move |_| back.gradient().map(Some))?;
        Ok(SharedInput { values, token: Some((token, collected)) })
    }

    /// Returns the values, without a graph.
    pub(crate) fn values(&self) -> &Tensor {
        &self.values
    }

    /// Returns the graph argument of an operation on this input, if the input has a gradient.
    pub(crate) fn node(&self) -> Option<&Tensor> {
        self.token.as_ref().map(|(token, _)| token)
    }

    /// Adds the gradient of the values, which has no other reader. Returns the result of the operation's backward for
    /// [`SharedInput::node`].
    pub(crate) fn add_gradient(&self, gradient: Tensor) -> Result<Option<Tensor>> {
        match &self.token {
            Some((token, collected)) => Running::current().add_owned(*collected, gradient, token),
            None => Ok(None),
        }
    }

    /// Returns the input for Candle's own operations. Copies the values.
    pub(crate) fn in_graph(&self) -> Result<Tensor> {
        match self.node() {
            Some(token) => {
                node(token, copied_storage(&self.values)?, self.values.shape().clone(), Values(self.clone()))
            }
            None => Ok(self.values.clone()),
        }
    }
}

struct Token {
    collected: graph::Key,
    /// The values, for their shape.
    like: Tensor,
    group: ProcessGroup,
    backward: BackwardCollective,
}

impl Token {
    fn gradient(&self) -> Result<Tensor> {
        let gradient = match Running::current().take(self.collected) {
            Some(gradient) => gradient,
            // The peers wait for this rank.
            None => self.like.zeros_like()?,
        };
        let gradient = self.backward.run(Input::Owned(&gradient), &self.group);
        gradient.map_err(|error| error.context("in the backward of a parallel layer's input"))
    }
}

/// The values as a node of the graph.
struct Values(SharedInput);

impl Backward for Values {
    fn name(&self) -> &'static str {
        "parallel-input-values"
    }

    fn backward(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        // Candle may also hold the gradient.
        self.0.add_gradient(gradient.force_contiguous()?)
    }
}

/// The arguments of a shared input.
struct Key {
    x: TensorId,
    entry: Entry,
    group: ProcessGroup,
    keeps_graph: bool,
}

impl Key {
    fn is(&self, other: &Key) -> bool {
        self.x == other.x
            && self.entry == other.entry
            && self.keeps_graph == other.keeps_graph
            && self.group.is(&other.group)
    }
}

thread_local! {
    /// The last input of the running forward; `None` outside of forwards.
    static LAST: RefCell<Option<Option<(Key, SharedInput)>>> = const { RefCell::new(None) };
}

/// Runs a forward, in which layers that take the same tensor share its collective.
pub(crate) fn scope<T>(forward: impl FnOnce() -> T) -> T {
    // The last input is dropped after the cell is released, because that may free a graph.
    let _guard = guard(LAST.replace(Some(None)), |before| drop(LAST.replace(before)));
    forward()
}

fn remembered(key: &Key) -> Option<SharedInput> {
    LAST.with_borrow(|last| {
        let (last, input) = last.as_ref()?.as_ref()?;
        last.is(key).then(|| input.clone())
    })
}

fn remember(key: Key, input: &SharedInput) {
    let _before = LAST.with_borrow_mut(|last| last.as_mut().and_then(|last| last.replace((key, input.clone()))));
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};
    use fsdp_core::process_group::local;

    use super::super::{all_reduce_owned, reduce_scatter_owned};
    use super::*;
    use crate::storage::share_memory;

    fn input() -> Tensor {
        Var::ones((2, 4), DType::F32, &Device::Cpu).unwrap().into_inner()
    }

    #[test]
    fn replicated_inputs_are_not_copied() {
        local::run(2, |group| {
            let x = input();
            for entry in [Entry::Copy, Entry::Split(1)] {
                let input = SharedInput::of("test", &x, entry, &group).unwrap();
                assert!(input.node().is_some() && share_memory(input.values(), &x));
            }
        });
    }

    #[test]
    fn owned_terms_are_consumed() {
        let address = |tensor: &Tensor| match &*tensor.storage_and_layout().0 {
            candle_core::Storage::Cpu(candle_core::CpuStorage::F32(values)) => values.as_ptr() as usize,
            _ => 0,
        };
        local::run(2, |group| {
            let term = (input() * 3.).unwrap();
            let at = address(&term);
            let sum = all_reduce_owned(&term, &group).unwrap();
            assert_eq!((address(&sum), sum.to_vec2::<f32>().unwrap()), (at, vec![vec![6.; 4]; 2]));
            // The consumed term cannot be used.
            assert_eq!(address(&term), 0);
            let part = reduce_scatter_owned(&sum, 1, &group).unwrap();
            // This term was copied.
            assert_eq!((part.to_vec2::<f32>().unwrap(), address(&sum)), (vec![vec![12.; 2]; 2], 0));
        });
    }

    #[test]
    fn scopes_remember_the_last_input() {
        local::run(2, |group| {
            let (x, other) = (input(), input());
            let token = |x: &Tensor, entry| {
                let input = SharedInput::of("test", x, entry, &group).unwrap();
                input.node().map(Tensor::id)
            };
            assert_ne!(token(&x, Entry::Copy), token(&x, Entry::Copy));
            scope(|| {
                let first = token(&x, Entry::Copy);
                assert_eq!(token(&x.clone(), Entry::Copy), first);
                assert!(scope(|| token(&x, Entry::Copy)) != first);
                assert_eq!(token(&x, Entry::Copy), first);
                assert_eq!(crate::no_grad(|| token(&x, Entry::Copy)), None);
                assert_ne!(token(&x, Entry::Copy), first, "only the last input is remembered");
                let gathered = token(&x, Entry::Gather(0));
                assert_eq!(token(&x, Entry::Gather(0)), gathered);
                assert_ne!(token(&x, Entry::Gather(1)), gathered);
                assert_ne!(token(&other, Entry::Gather(1)), token(&x, Entry::Gather(1)));
            });
        });
    }
}
