//! A training step: what runs and communicates when.

mod backward;
mod fixed_order;
mod order;
mod reductions;
mod schedule;
mod spans;

pub(crate) use order::UnitRules;
pub(crate) use schedule::Schedule;
