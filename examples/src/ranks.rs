//! Mesh of a run: replicas of the model, shards of a replica, and tensor-parallel ranks.

use anyhow::ensure;
use fsdp_candle::{DataParallelMeshDims, ShardedVarMap, World};
use fsdp_core::DeviceMesh;

/// Names of the mesh dimensions.
const REPLICATE: &str = "dp_replicate";
const SHARD: &str = "dp_shard";
const TENSOR: &str = "tp";

/// Sizes of the mesh. Neighbouring ranks are tensor-parallel, then come the shards of a replica, then the replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// Replicas of the model.
    pub replicate: usize,
    /// Shards of a replica.
    pub shard: usize,
    /// Tensor-parallel ranks, which read the same data.
    pub tensor: usize,
}

impl Ranks {
    /// Divides `size` ranks by `--replicate` and `--tensor-parallel`.
    ///
    /// ```
    /// use fsdp_train::ranks::Ranks;
    ///
    /// let ranks = Ranks::new(8, 2, 2)?;
    /// assert_eq!((ranks.shard, ranks.data()), (2, 4));
    /// // Two neighbours read the same data.
    /// assert_eq!((0..8).map(|rank| ranks.data_rank(rank)).collect::<Vec<_>>(), [0, 0, 1, 1, 2, 2, 3, 3]);
    /// assert!(Ranks::new(8, 3, 1).is_err());
    /// # anyhow::Ok(())
    /// ```
    pub fn new(size: usize, replicate: usize, tensor: usize) -> anyhow::Result<Self> {
        let flags = [("--replicate", replicate), ("--tensor-parallel", tensor)];
        for (flag, number) in flags {
            ensure!(
                number > 0 && size.is_multiple_of(number),
                "{flag} {number} does not divide the {size} processes: start a multiple of {number}, or change it"
            );
        }
        let both = replicate.saturating_mul(tensor);
        ensure!(
            size.is_multiple_of(both),
            "--replicate {replicate} times --tensor-parallel {tensor} does not divide the {size} processes: start a \
             multiple of {both}, or change one of them"
        );
        Ok(Ranks { replicate, shard: size / both, tensor })
    }

    /// Returns the number of ranks that read different data.
    pub fn data(&self) -> usize {
        self.replicate * self.shard
    }

    /// Returns the index of `rank` among the ranks that read different data. Tensor-parallel ranks have the same index.
    pub fn data_rank(&self, rank: usize) -> usize {
        rank / self.tensor
    }

    /// Creates the variables of a model on this mesh. Collective.
    pub fn vars(&self, world: &World) -> fsdp_candle::Result<ShardedVarMap> {
        let of = |name, size: usize| (size > 1).then_some((name, size));
        let dims = [of(REPLICATE, self.replicate), Some((SHARD, self.shard)), of(TENSOR, self.tensor)];
        let mesh = world.mesh(&dims.into_iter().flatten().collect::<Vec<_>>())?;
        if self.tensor == 1 {
            return Ok(ShardedVarMap::new(&mesh, world.device()));
        }
        let replicate: &[&str] = if self.replicate > 1 { &[REPLICATE] } else { &[] };
        ShardedVarMap::with_dp_mesh_dims(&mesh, &DataParallelMeshDims { shard: &[SHARD], replicate }, world.device())
    }

    /// Returns the mesh of the tensor-parallel ranks, if there are several.
    pub fn tensor_mesh(&self, vars: &ShardedVarMap) -> fsdp_candle::Result<Option<DeviceMesh>> {
        Ok(match self.tensor {
            1 => None,
            _ => Some(vars.mesh().slice(&[TENSOR])?),
        })
    }
}
