//! Activation checkpointing: a part of forward keeps only its inputs, and chosen outputs, for backward, which runs the
//! part again. The inputs may wait in host memory or on disk ([`ActivationOffload`]).

mod checkpoint;
mod offload;
mod saved_outputs;

use std::fmt;
use std::sync::Arc;

use candle_core::Result;

use crate::error;
use crate::pattern::NamePattern;
use crate::tensors::Tensors;
use checkpoint::run;
use saved_outputs::Keep;

pub use checkpoint::{checkpoint, selective_checkpoint};
pub use offload::ActivationOffload;
pub use saved_outputs::{Operation, OperationCall};
pub(crate) use saved_outputs::{is_kept, operation};

/// The layers of a model that run again in backward, and the outputs that they keep, as PyTorch's
/// `apply_activation_checkpointing` and `create_selective_checkpoint_contexts`. The model asks it in the forward of
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
/// // Layers 0 and 2 run again. They keep the outputs of attention and of every other linear layer.
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
    offload: Option<ActivationOffload>,
}

#[derive(Clone, Debug, Default)]
enum Layers {
    #[default]
    None,
    Every(usize),
    Named(Vec<NamePattern>),
}

impl CheckpointPolicy {
    /// Makes a policy that checkpoints no layer.
    pub fn none() -> Self {
        CheckpointPolicy::default()
    }

    /// Makes a policy that checkpoints every layer.
    pub fn all() -> Self {
        CheckpointPolicy::every(1)
    }

    /// Makes a policy that checkpoints the first of every `count` layers; none if `count` is 0.
    pub fn every(count: usize) -> Self {
        CheckpointPolicy {
            layers: if count == 0 { Layers::None } else { Layers::Every(count) },
            ..CheckpointPolicy::default()
        }
    }

    /// Makes a policy that checkpoints the layers whose FQN, whole or at its end, matches one of the
    /// [patterns](NamePattern). Fails if a pattern is invalid.
    pub fn named(patterns: impl IntoIterator<Item = impl AsRef<str>>) -> error::Result<Self> {
        let patterns = patterns.into_iter().map(|pattern| NamePattern::new(pattern.as_ref()));
        let layers = Layers::Named(patterns.collect::<error::Result<_>>()?);
        Ok(CheckpointPolicy { layers, ..CheckpointPolicy::default() })
    }

    /// Keeps the outputs of the operations that `keep` accepts.
    pub fn keep(mut self, keep: impl Fn(&OperationCall<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.keep = Some(Arc::new(keep));
        self
    }

    /// Keeps the inputs of the selected layers in host memory or on disk until backward runs the layers again. Losses and
    /// gradients have the same bits. Nothing is offloaded under [`no_grad`](crate::no_grad).
    ///
    /// In memory stay: inputs without a gradient, such as masks; [kept](CheckpointPolicy::keep) outputs; an input that
    /// the model also holds itself; and one that another operation reads or returns between two layers, since the graph
    /// holds it for backward.
    ///
    /// ```
    /// use fsdp_candle::activation_checkpoint::{ActivationOffload, CheckpointPolicy};
    ///
    /// # let world = fsdp_candle::World::single()?;
    /// # let dir = std::env::temp_dir();
    /// let policy = CheckpointPolicy::all().offload(ActivationOffload::disk(&world, dir)?);
    /// # Ok::<(), fsdp_candle::Error>(())
    /// ```
    pub fn offload(mut self, offload: ActivationOffload) -> Self {
        self.offload = Some(offload);
        self
    }

    /// Returns whether the layer of this number and FQN runs again.
    pub fn runs_again(&self, layer: usize, name: &str) -> bool {
        match &self.layers {
            Layers::None => false,
            Layers::Every(count) => layer.is_multiple_of(*count),
            Layers::Named(patterns) => patterns.iter().any(|pattern| pattern.matches_end(name)),
        }
    }

    /// Returns the first pattern that matches none of a model's layers.
    pub fn unmatched(&self, layers: &[String]) -> Option<&NamePattern> {
        let Layers::Named(patterns) = &self.layers else { return None };
        patterns.iter().find(|pattern| !layers.iter().any(|layer| pattern.matches_end(layer)))
    }

    /// Runs the forward `f` of a layer, checkpointed if the policy selects the layer.
    pub fn run<I, O, F>(&self, layer: usize, name: &str, f: F, inputs: I) -> Result<O>
    where
        I: Tensors + Clone + Send + Sync + 'static,
        O: Tensors,
        F: Fn(I) -> Result<O> + Send + Sync + 'static,
    {
        match self.runs_again(layer, name) {
            true => run(self.keep.as_ref(), self.offload.as_ref(), f, inputs),
            false => f(inputs),
        }
    }
}

impl fmt::Debug for CheckpointPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CheckpointPolicy({:?}{}", self.layers, if self.keep.is_some() { ", keeping some" } else { "" })?;
        self.offload.as_ref().map_or(Ok(()), |offload| write!(f, ", {offload:?}"))?;
        f.write_str(")")
    }
}
