//! How units come to be: `fully_shard`, and the map that its parameters land in.

mod buffers;
mod by_name;
mod fully_shard;
mod of_world;
mod options;
mod parallelize;
mod parameter;
mod requires_grad;
mod transaction;
mod var_map;

pub use fully_shard::{FullyShard, fully_shard, shard};
pub use options::{ExtensionFn, ShardPlacement, ShardPlacementFn};
pub use parallelize::parallelize;
pub use var_map::ShardedVarMap;
