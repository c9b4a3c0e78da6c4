//! How the processes of a run share a model: copies of it, shards of a copy, and ranks that compute layers together.

use anyhow::ensure;
use fsdp_candle::{DataParallelMeshDims, ShardedVarMap, World};
use fsdp_core::DeviceMesh;

/// The names of a mesh's dimensions.
const REPLICATE: &str = "dp_replicate";
const SHARD: &str = "dp_shard";
const TENSOR: &str = "tp";

/// Ranks as a grid. Those that compute layers together are neighbours, then come the shards of a copy, then the copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// Copies of the model.
    pub replicate: usize,
    /// Shards of a copy.
    pub shard: usize,
    /// Ranks that compute each layer together, on the same data.
    pub tensor: usize,
}

impl Ranks {
    /// `size` ranks, as `--replicate` and `--tensor-parallel` divide them.
    ///
    /// # Errors
    /// When they don't.
    ///
    /// ```
    /// use fsdp_examples::ranks::Ranks;
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

    /// How many ranks read different data.
    pub fn data(&self) -> usize {
        self.replicate * self.shard
    }

    /// The number of `rank` among those that read different data. Ranks that compute layers together have the same.
    pub fn data_rank(&self, rank: usize) -> usize {
        rank / self.tensor
    }

    /// The parameters of a model that the ranks of `world` share so. Collective.
    ///
    /// # Errors
    /// When a rank is lost.
    pub fn vars(&self, world: &World) -> fsdp_candle::Result<ShardedVarMap> {
        let of = |name, size: usize| (size > 1).then_some((name, size));
        let dims = [of(REPLICATE, self.replicate), Some((SHARD, self.shard)), of(TENSOR, self.tensor)];
        let mesh = world.mesh(&dims.into_iter().flatten().collect::<Vec<_>>())?;
        if self.tensor == 1 {
            return Ok(ShardedVarMap::new(&mesh, world.device()));
        }
        let replicate: &[&str] = if self.replicate > 1 { &[REPLICATE] } else { &[] };
        ShardedVarMap::with_mesh_dims(&mesh, &DataParallelMeshDims { shard: &[SHARD], replicate }, world.device())
    }

    /// Of the mesh of such parameters, the ranks that compute layers together, if there are several.
    ///
    /// # Errors
    /// When it is another mesh.
    pub fn tensor_mesh(&self, vars: &ShardedVarMap) -> fsdp_candle::Result<Option<DeviceMesh>> {
        Ok(match self.tensor {
            1 => None,
            _ => Some(vars.mesh().slice(&[TENSOR])?),
        })
    }
}
