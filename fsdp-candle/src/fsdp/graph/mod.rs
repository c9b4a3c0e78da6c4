//! Candle's autograd graph: the operations in it that stand for FSDP's hooks, and what its nodes tell.

mod border;
mod events;
mod frozen_call;
mod nodes;

pub(crate) use border::{input, output};
pub(crate) use events::{BackwardEvents, Listener};
pub(crate) use frozen_call::{FrozenCall, begin_backward};
pub(crate) use nodes::{nodes_of, without_reports};
