//! One node for any number of sources. An operation of Candle has at most three.

use candle_core::{Result, Tensor, bail};

use super::operation::{Reads, graph_op};
use super::running::{Key, Running};
use super::token::Token;
use crate::storage::scalar;

/// Sources of one operation of Candle.
const SOURCES: usize = 3;

/// A scalar without meaning that follows sources in the graph, and passes on the gradients that an operation after it
/// computes.
pub(crate) struct Joined {
    node: Tensor,
    /// Places of the gradients, in the order of the sources.
    keys: Vec<Key>,
}

impl Joined {
    /// Joins at least one source.
    pub(crate) fn new(sources: &[Tensor]) -> Result<Self> {
        let keys: Vec<Key> = sources.iter().map(|_| Key::new()).collect();
        let joins = sources.chunks(SOURCES).zip(keys.chunks(SOURCES)).map(|(sources, keys)| {
            let (keys, has_token) = (keys.to_vec(), sources.iter().map(|source| Token::of(source).is_some()));
            let has_token: Vec<bool> = has_token.collect();
            graph_op("joined", sources, scalar(sources[0].device())?, (), Reads::Nothing, move |sources, _, _| {
                let running = Running::current();
                let gradient = |((key, &source), has_token): ((&Key, &&Tensor), &bool)| match running.take(*key) {
                    // Candle needs a gradient of every node that it visits.
                    None if !has_token && !source.is_variable() => source.zeros_like().map(Some),
                    gradient => Ok(gradient),
                };
                keys.iter().zip(sources).zip(&has_token).map(gradient).collect::<Result<Vec<_>>>()
            })
        });
        let mut nodes = joins.collect::<Result<Vec<_>>>()?;
        while nodes.len() > 1 {
            let join = |nodes: &[Tensor]| {
                graph_op("joined", nodes, scalar(nodes[0].device())?, (), Reads::Nothing, |nodes, _, _| {
                    let running = Running::current();
                    nodes.iter().map(|node| running.hold(node).map(Some)).collect::<Result<Vec<_>>>()
                })
            };
            nodes = nodes.chunks(SOURCES).map(join).collect::<Result<_>>()?;
        }
        let Some(node) = nodes.pop() else { bail!("joined: no sources") };
        Ok(Joined { node, keys })
    }

    /// Returns the graph argument of the operation after it.
    pub(crate) fn node(&self) -> &Tensor {
        &self.node
    }

    /// Passes on the gradients of the sources, in their order. Returns the gradient of [`Joined::node`].
    pub(crate) fn set_gradients(&self, gradients: impl IntoIterator<Item = Option<Tensor>>) -> Result<Option<Tensor>> {
        if !self.node.track_op() {
            return Ok(None);
        }
        let running = Running::current();
        for (key, gradient) in self.keys.iter().zip(gradients) {
            gradient.into_iter().for_each(|gradient| running.put(*key, gradient));
        }
        running.hold(&self.node).map(Some)
    }
}
