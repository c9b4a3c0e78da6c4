//! A tensor on its way into parallel layers, several of which may take it: queries, keys and values have one input.
//!
//! In the graph `x -> Token -> layers`: the token is a scalar, the layers read the values beside it and leave their
//! gradients with it, and its backward, which comes after all of theirs, sends the sum through one collective. So there
//! is no copy of a tensor that every rank holds, one gather of one that is cut, and one collective in backward,
//! whatever the number of layers.
//!
//! The last one is remembered while a forward runs ([`scope`]), for the layers that take the same tensor.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Result, Shape, Tensor, TensorId};
use fsdp_core::ProcessGroup;

use super::functions::WayBack;
use super::moves::{Input, check, gathered, own_part};
use crate::graph::keeps_graph;
use crate::kernels::{Backward, node};
use crate::storage::{copied_storage, scalar, with_slice, with_slice_mut};

/// What layers that differ on the ranks do to an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// They take it as it is, the same on every rank. Backward: all-reduce.
    Copy,
    /// They take all parts of this dimension. Backward: reduce-scatter.
    Gather(usize),
    /// They take a part of this dimension, of a tensor that every rank holds. Backward: all-gather.
    Split(usize),
}

/// A tensor that layers take.
#[derive(Clone)]
pub(crate) struct SharedInput {
    /// Without a graph.
    values: Tensor,
    /// Where it has a gradient.
    token: Option<(Tensor, Collected)>,
}

impl SharedInput {
    /// What layers take of `x`. The same call within a [`scope`], with nothing else in between, gives the same again.
    ///
    /// # Errors
    /// When a dimension does not divide by the ranks, and those of the collective.
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
        let (values, way_back) = match entry {
            Entry::Copy => {
                check(function, x, None, group)?;
                (x.detach(), WayBack::Sum)
            }
            Entry::Gather(dim) => {
                check(function, x, None, group)?;
                let all = gathered(x, dim, group);
                (all.map_err(|error| error.context(format!("{function}: its input")))?, WayBack::Scatter(dim))
            }
            Entry::Split(dim) => {
                check(function, x, Some(dim), group)?;
                (own_part(&x.detach(), dim, group)?, WayBack::Gather(dim))
            }
        };
        if !(keeps_graph() && x.track_op()) {
            return Ok(SharedInput { values, token: None });
        }
        let collected = Collected::default();
        let back = Token { collected: collected.clone(), like: values.clone(), group: group.clone(), way_back };
        let token = node(x, scalar(x.device())?, Shape::from(()), back)?;
        Ok(SharedInput { values, token: Some((token, collected)) })
    }

    /// The values, without a graph.
    pub(crate) fn values(&self) -> &Tensor {
        &self.values
    }

    /// What an operation takes as its graph argument in the input's place, if the input has a gradient.
    pub(crate) fn node(&self) -> Option<&Tensor> {
        self.token.as_ref().map(|(token, _)| token)
    }

    /// In backward: leaves the gradient of the values, which nobody else reads. Returns what the operation's backward
    /// returns for [`SharedInput::node`].
    pub(crate) fn leave(&self, gradient: Tensor) -> Result<Option<Tensor>> {
        match &self.token {
            Some((token, collected)) => {
                collected.add(gradient)?;
                Ok(Some(token.zeros_like()?))
            }
            None => Ok(None),
        }
    }

    /// What Candle's own operations take in the input's place, which costs a copy.
    pub(crate) fn in_graph(&self) -> Result<Tensor> {
        match self.node() {
            Some(token) => {
                node(token, copied_storage(&self.values)?, self.values.shape().clone(), Values(self.clone()))
            }
            None => Ok(self.values.clone()),
        }
    }
}

/// The sum of the gradients that layers have left.
#[derive(Clone, Default)]
struct Collected(Arc<Mutex<Option<Tensor>>>);

impl Collected {
    fn add(&self, gradient: Tensor) -> Result<()> {
        let mut sum = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &*sum {
            Some(sum) => {
                let gradient = gradient.contiguous()?;
                with_slice_mut(sum, |kernels, sum| with_slice(&gradient, |_, more| kernels.add(sum, more)))
            }
            None => {
                *sum = Some(gradient.contiguous()?);
                Ok(())
            }
        }
    }

    fn take(&self) -> Option<Tensor> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

struct Token {
    collected: Collected,
    /// The values, for their shape.
    like: Tensor,
    group: ProcessGroup,
    way_back: WayBack,
}

impl Backward for Token {
    fn name(&self) -> &'static str {
        "parallel-input"
    }

    fn backward(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        let gradient = match self.collected.take() {
            Some(gradient) => gradient,
            // The peers wait for this rank.
            None => self.like.zeros_like()?,
        };
        let gradient = self.way_back.run(Input::Taken(&gradient), &self.group);
        Ok(Some(gradient.map_err(|error| error.context("in the backward of a parallel layer's input"))?))
    }
}

/// The values as a tensor of the graph.
struct Values(SharedInput);

impl Backward for Values {
    fn name(&self) -> &'static str {
        "parallel-input-values"
    }

    fn backward(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        // Candle may hold it elsewhere as well.
        self.0.leave(gradient.force_contiguous()?)
    }
}

/// What an input is made of.
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
    /// The last input of the forward that runs; `None` outside of forwards.
    static LAST: RefCell<Option<Option<(Key, SharedInput)>>> = const { RefCell::new(None) };
}

/// Runs a forward, in which layers that take the same tensor share what they do to it. What it remembers is gone when
/// it ends.
pub(crate) fn scope<T>(forward: impl FnOnce() -> T) -> T {
    struct Guard(Option<Option<(Key, SharedInput)>>);
    impl Drop for Guard {
        fn drop(&mut self) {
            let before = self.0.take();
            // Dropped when the cell is free again: a graph may go with it.
            let _last = LAST.with(|last| last.replace(before));
        }
    }
    let _guard = Guard(LAST.with(|last| last.replace(Some(None))));
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
    fn what_every_rank_holds_is_not_copied() {
        local::run(2, |group| {
            let x = input();
            for entry in [Entry::Copy, Entry::Split(1)] {
                let input = SharedInput::of("test", &x, entry, &group).unwrap();
                assert!(input.node().is_some() && share_memory(input.values(), &x));
            }
        });
    }

    #[test]
    fn terms_are_added_up_in_their_own_memory() {
        let address = |tensor: &Tensor| match &*tensor.storage_and_layout().0 {
            candle_core::Storage::Cpu(candle_core::CpuStorage::F32(values)) => values.as_ptr() as usize,
            _ => 0,
        };
        local::run(2, |group| {
            let term = (input() * 3.).unwrap();
            let at = address(&term);
            let sum = all_reduce_owned(&term, &group).unwrap();
            assert_eq!((address(&sum), sum.to_vec2::<f32>().unwrap()), (at, vec![vec![6.; 4]; 2]));
            // What is left of a term can't be used.
            assert_eq!(address(&term), 0);
            let part = reduce_scatter_owned(&sum, 1, &group).unwrap();
            assert_eq!((part.to_vec2::<f32>().unwrap(), address(&sum)), (vec![vec![12.; 2]; 2], at));
        });
    }

    #[test]
    fn an_input_is_remembered_within_a_scope_and_by_what_it_is_made_of() {
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
                assert_ne!(token(&x, Entry::Copy), first, "the last one is remembered, and no other");
                let gathered = token(&x, Entry::Gather(0));
                assert_eq!(token(&x, Entry::Gather(0)), gathered);
                assert_ne!(token(&x, Entry::Gather(1)), gathered);
                assert_ne!(token(&other, Entry::Gather(1)), token(&x, Entry::Gather(1)));
            });
        });
    }
}
