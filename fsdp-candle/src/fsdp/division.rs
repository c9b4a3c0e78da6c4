//! The division of a parameter among ranks.

use std::sync::Arc;

use fsdp_core::layout::Region;

use crate::data_parallel::{DataParallel, ReplicaLayout, ShardLayout};
use crate::error::{Error, Result};
use crate::tensor_parallel::Parallel;

/// How a parameter is divided among ranks.
pub(super) struct Division {
    /// Shape that layers hold on this rank.
    pub(super) local: Vec<usize>,
    /// Box of the global shape that this rank holds.
    pub(super) region: Region,
    pub(super) layout: ShardLayout,
    pub(super) over_replicas: Option<ReplicaLayout>,
}

impl Division {
    /// Divides a parameter of shape `dims` along `shard_dim`. `owner` is the rank that has its expert. Fails for dimensions
    /// that do not divide evenly where they must.
    pub(super) fn of(
        name: &str,
        dims: &[usize],
        (ranks, shard_dim): (&Arc<DataParallel>, usize),
        parallel: Option<&Parallel>,
        owner: Option<usize>,
    ) -> Result<Self> {
        let mut local = parallel.map_or(dims.to_vec(), |parallel| parallel.local(dims));
        if let (Some(rows), Some(experts)) = (local.first_mut(), ranks.experts())
            && Some(experts.rank()) != owner
        {
            *rows = 0;
        }
        let (region, layout) = ranks.lay_out(name, (dims, &local), shard_dim, parallel, owner)?;
        let over_replicas = ranks.lay_out_parts(name, &local, shard_dim)?;
        Ok(Division { local, region, layout, over_replicas })
    }
}

/// Fails for an ignored parameter of a module that a plan makes parallel.
pub(super) fn check_ignored(name: &str, parallel: Option<&Parallel>, is_owned: bool) -> Result<()> {
    let style = match parallel {
        Some(parallel) => parallel.style.name(),
        None if is_owned => "ExpertParallel",
        None => return Ok(()),
    };
    let message = format!(
        "it is ignored, and so whole on every rank, but the plan makes its module {style}: remove it from \
         ignored_params or from the plan"
    );
    Err(Error::parameter(name, message))
}
