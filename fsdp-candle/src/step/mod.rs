//! A training step: what runs and communicates when.

mod backward;
mod fixed_order;
mod frames;
mod order;
mod reductions;
mod rules;
mod schedule;
mod spans;

pub(crate) use rules::UnitRules;
pub(crate) use schedule::Schedule;
