//! Sharded parameters, the units that gather them, and the order in which that happens.

mod build;
mod comm;
mod control;
mod graph;
mod module;
mod policy;
mod step;
mod unit;

pub use build::{
    ExtensionFn, FullyShard, ShardPlacement, ShardPlacementFn, ShardedVarMap, fully_shard, parallelize, shard,
};
pub use comm::{AllGather, AllReduceHook, ReduceScatter};
pub use control::{FinalizeHandle, Unit, UnshardHandle};
pub(crate) use graph::without_reports;
pub use module::FsdpModule;
pub use policy::{MixedPrecisionPolicy, NamePredicate, OffloadPolicy, Recurse, ReshardAfterForward};
pub(crate) use step::Schedule;
pub use unit::FsdpParam;
pub(crate) use unit::{ParamGroup, UnitPath};
