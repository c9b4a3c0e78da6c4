//! What one `fully_shard` call owns: its parameters, how they are gathered and freed, and how their gradients are
//! reduced. When that happens, the step decides.

mod agreement;
mod as_dtensor;
mod claims;
mod gather;
mod gradient;
mod group;
mod holder;
mod lookup;
mod members;
mod memory;
mod offload;
mod param;
mod parts;
mod passes;
mod path;
mod reduction;
mod replicas;
mod room;
mod serve;
mod settings;
mod turn;
mod uses;

pub(crate) use agreement::largest;
pub(crate) use group::ParamGroup;
pub(crate) use offload::{Downloads, Offload};
pub use param::FsdpParam;
pub(crate) use param::{Nodes, ParamSpec};
pub(crate) use parts::Parts;
pub(crate) use path::{ROOT, UnitId, UnitPath};
pub(crate) use reduction::Reduction;
pub(crate) use settings::Settings;
pub(crate) use uses::Uses;
