//! Candle's autograd graph: the operations in it that stand for FSDP's hooks, and what its nodes tell.

mod border;
mod events;
mod frozen_call;
mod mode;
mod nodes;
mod number;
mod stack;

pub(crate) use border::{input, output};
pub(crate) use events::{BackwardEvents, Listener};
pub(crate) use frozen_call::{FrozenCall, begin_backward};
pub use mode::no_grad;
pub(crate) use mode::{keeps_graph, with_grad};
pub(crate) use nodes::{nodes_of, without_reports};
pub(crate) use number::{next_number, number};
pub(crate) use stack::{BACKWARD_STACK_BYTES, on_a_stack_of, on_at_least};
