//! A training step: what runs and communicates when.

mod backward;
mod frames;
mod order;
mod plan;
mod reductions;
mod rules;
mod schedule;
mod spans;

pub(crate) use rules::UnitRules;
pub(crate) use schedule::Schedule;
