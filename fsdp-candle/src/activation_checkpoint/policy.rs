//! Which layers of a model run again.

use std::fmt;
use std::sync::Arc;

use candle_core::Result;

use super::closure::run;
use super::kept::{Keep, OperationCall};
use crate::error;
use crate::pattern::NamePattern;
use crate::tensors::Tensors;

/// Which layers of a model run again in backward, and what these keep: what PyTorch has
/// `apply_activation_checkpointing` and `create_selective_checkpoint_contexts` for. The model asks it in the forward of
/// each layer.
///
/// ```
/// use std::sync::Arc;
/// use candle_core::{DType, Module, Tensor};
/// use fsdp_candle::activation_checkpoint::{CheckpointPolicy, Operation};
/// use fsdp_candle::{FullyShard, FsdpModule, ShardedVarMap, World, fully_shard, nn};
///
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::of_world(&world)?;
/// # let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
/// let layers: Vec<FsdpModule<Arc<nn::Linear>>> = (0..4)
///     .map(|i| fully_shard(&opts, vb.pp(format!("layers.{i}")), |vb| Ok(Arc::new(nn::linear(8, 8, vb)?))))
///     .collect::<Result<_, _>>()?;
/// let model = fully_shard(&opts, vb, |_| Ok(layers))?;
/// // Layers 0 and 2 run again, and keep what attention and every other linear layer make.
/// let policy = CheckpointPolicy::every(2).keep(|call| match call.operation {
///     Operation::Linear => call.number % 2 == 0,
///     _ => true,
/// });
/// let x = Tensor::ones((3, 8), DType::F32, world.device())?;
/// let y = model.call(|layers| {
///     layers.iter().enumerate().try_fold(x, |x, (i, layer)| {
///         layer.call(|layer| {
///             let layer = layer.clone();
///             policy.run(i, &format!("layers.{i}"), move |x: Tensor| nn::gelu(&layer.forward(&x)?), x)
///         })
///     })
/// })?;
/// model.backward(&y.sum_all()?)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
pub struct CheckpointPolicy {
    layers: Layers,
    keep: Option<Arc<Keep>>,
}

#[derive(Clone, Debug, Default)]
enum Layers {
    #[default]
    None,
    Every(usize),
    Named(Vec<NamePattern>),
}

impl CheckpointPolicy {
    /// No layer runs again.
    pub fn none() -> Self {
        CheckpointPolicy::default()
    }

    /// Every layer does.
    pub fn all() -> Self {
        CheckpointPolicy::every(1)
    }

    /// The first of every `count` layers does; of 0, none.
    pub fn every(count: usize) -> Self {
        CheckpointPolicy { layers: if count == 0 { Layers::None } else { Layers::Every(count) }, keep: None }
    }

    /// The layers do whose FQN one of the [patterns](NamePattern) matches, whole or at its end.
    ///
    /// # Errors
    /// When a pattern is none.
    pub fn named(patterns: impl IntoIterator<Item = impl AsRef<str>>) -> error::Result<Self> {
        let patterns = patterns.into_iter().map(|pattern| NamePattern::new(pattern.as_ref()));
        Ok(CheckpointPolicy { layers: Layers::Named(patterns.collect::<error::Result<_>>()?), keep: None })
    }

    /// Layers that run again keep the outputs of the operations that `keep` accepts.
    pub fn keep(mut self, keep: impl Fn(&OperationCall<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.keep = Some(Arc::new(keep));
        self
    }

    /// Whether the layer of this number and FQN runs again.
    pub fn runs_again(&self, layer: usize, name: &str) -> bool {
        match &self.layers {
            Layers::None => false,
            Layers::Every(count) => layer.is_multiple_of(*count),
            Layers::Named(patterns) => patterns.iter().any(|pattern| pattern.matches_end(name)),
        }
    }

    /// The first pattern that matches none of these layers, which are all that a model has.
    pub fn idle(&self, layers: &[String]) -> Option<&NamePattern> {
        let Layers::Named(patterns) = &self.layers else { return None };
        patterns.iter().find(|pattern| !layers.iter().any(|layer| pattern.matches_end(layer)))
    }

    /// Runs the forward `f` of the layer of this number and FQN, as [`checkpoint`](super::checkpoint) does where it is
    /// to run again, and as it is elsewhere.
    ///
    /// # Errors
    /// Those of `f`, and of [`checkpoint`](super::checkpoint).
    pub fn run<I, O, F>(&self, layer: usize, name: &str, f: F, inputs: I) -> Result<O>
    where
        I: Tensors + Clone + Send + Sync + 'static,
        O: Tensors,
        F: Fn(I) -> Result<O> + Send + Sync + 'static,
    {
        if self.runs_again(layer, name) { run(self.keep.as_ref(), f, inputs) } else { f(inputs) }
    }
}

impl fmt::Debug for CheckpointPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CheckpointPolicy({:?}{})", self.layers, if self.keep.is_some() { ", keeping some" } else { "" })
    }
}
