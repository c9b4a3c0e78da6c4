//! What an optimizer keeps for a parameter.

use std::sync::Arc;

use candle_core::Tensor;

use super::moment::Moment;
use crate::error::{Error, Result};
use crate::fsdp::FsdpParam;

/// What an optimizer keeps for one parameter: how many steps it has taken, and tensors of its shard's shape, by
/// PyTorch's names. A state dict has them as `state.<fqn>.<name>`.
#[derive(Clone, Debug)]
pub struct ParamState {
    /// The parameter.
    pub param: Arc<FsdpParam>,
    /// How many steps the parameter has taken.
    pub step: u64,
    /// Whether a state dict may be without the number of steps, as PyTorch's of this optimizer are.
    pub(crate) may_lack_step: bool,
    /// The index of its group in its own optimizer.
    pub(super) group: usize,
    moments: Vec<(&'static str, Moment)>,
}

impl ParamState {
    /// The state of a parameter before the first step. The tensors are of the shape of the parameter's shard,
    /// contiguous, and shared: who writes into them changes the state, as loading a checkpoint does.
    pub fn new(param: Arc<FsdpParam>, tensors: Vec<(&'static str, Tensor)>) -> Self {
        let moments = tensors.into_iter().map(|(name, tensor)| (name, Moment::Plain(tensor))).collect();
        ParamState::of(param, 0, moments, false)
    }

    pub(super) fn of(
        param: Arc<FsdpParam>,
        group: usize,
        moments: Vec<(&'static str, Moment)>,
        may_lack_step: bool,
    ) -> Self {
        ParamState { param, step: 0, may_lack_step, group, moments }
    }

    /// The names of its tensors.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.moments.iter().map(|(name, _)| *name)
    }

    /// The tensor of a name, such as `exp_avg`, of the shape of the parameter's shard: the state itself, or a copy in
    /// f32 of what is kept in 8 bits.
    ///
    /// # Errors
    /// When there is none of this name; when there is no memory for a copy.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        match self.moments.iter().find(|(own, _)| *own == name) {
            Some((_, moment)) => Ok(moment.tensor()?),
            None => Err(Error::Parameter {
                name: self.param.name().into(),
                message: format!("its optimizer keeps no `{name}`, but {:?}", self.names().collect::<Vec<_>>()),
            }),
        }
    }

    /// The bytes that its tensors take on this rank.
    pub fn bytes(&self) -> usize {
        self.moments.iter().map(|(_, moment)| moment.bytes()).sum()
    }

    pub(crate) fn moments(&self) -> impl Iterator<Item = (&'static str, &Moment)> + '_ {
        self.moments.iter().map(|(name, moment)| (*name, moment))
    }

    pub(super) fn set_moments(&mut self, moments: Vec<(&'static str, Moment)>) {
        self.moments = moments;
    }

    pub(super) fn add_moments(&mut self, moments: Vec<(&'static str, Moment)>) {
        self.moments.extend(moments);
    }
}
