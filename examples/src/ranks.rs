//! Mesh of a run: replicas of the model, shards of a replica, and ranks of experts, context-parallel and tensor-parallel
//! ranks.

use anyhow::ensure;
use fsdp_candle::{AttentionExchange, ContextParallel, DataParallelMeshDims, ShardedVarMap, World};
use fsdp_core::DeviceMesh;

/// Names of the mesh dimensions.
const REPLICATE: &str = "dp_replicate";
const SHARD: &str = "dp_shard";
const EXPERT: &str = "ep";
const CONTEXT: &str = "cp";
const TENSOR: &str = "tp";

/// Returns the number that must divide the length of a sequence that `context` ranks share, each of them `tensor` ranks
/// that split their part again.
///
/// ```
/// use fsdp_train::ranks::sequence_multiple;
///
/// // Two chunks for each of four ranks; three ranks, each of two that split an even part.
/// assert_eq!((sequence_multiple(4, 1), sequence_multiple(3, 2), sequence_multiple(1, 3)), (8, 6, 3));
/// ```
pub fn sequence_multiple(context: usize, tensor: usize) -> usize {
    match context {
        1 => tensor,
        // Each rank has two equal chunks, which tensor-parallel ranks split together.
        _ => context * if tensor.is_multiple_of(2) { tensor } else { 2 * tensor },
    }
}

/// Sizes of the mesh. Neighbouring ranks are tensor-parallel, then come those that share sequences, then the shards of a
/// replica, of which neighbours may have different experts, then the replicas. Parameters are sharded over the ranks that
/// share sequences, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// Replicas of the model.
    pub replicate: usize,
    /// Shards of a replica that read different data.
    pub shard: usize,
    /// Those of them that have different experts.
    pub expert: usize,
    /// Context-parallel ranks, which share each sequence.
    pub context: usize,
    /// Tensor-parallel ranks, which read the same data.
    pub tensor: usize,
}

impl Ranks {
    /// Divides `size` ranks by `--replicate`, `--context-parallel` and `--tensor-parallel`.
    ///
    /// ```
    /// use fsdp_train::ranks::Ranks;
    ///
    /// let ranks = Ranks::new(8, 2, 1, 2)?;
    /// assert_eq!((ranks.shard, ranks.data()), (2, 4));
    /// // Two neighbours read the same data.
    /// assert_eq!((0..8).map(|rank| ranks.data_rank(rank)).collect::<Vec<_>>(), [0, 0, 1, 1, 2, 2, 3, 3]);
    /// // Four share each sequence, and the model is sharded over all eight.
    /// let ranks = Ranks::new(8, 1, 4, 1)?;
    /// assert_eq!((ranks.data(), ranks.shards()), (2, 8));
    /// assert!(Ranks::new(8, 3, 1, 1).is_err());
    /// # anyhow::Ok(())
    /// ```
    pub fn new(size: usize, replicate: usize, context: usize, tensor: usize) -> anyhow::Result<Self> {
        let flags = [("--replicate", replicate), ("--context-parallel", context), ("--tensor-parallel", tensor)];
        for (flag, number) in flags {
            ensure!(
                number > 0 && size.is_multiple_of(number),
                "{flag} {number} does not divide the {size} processes: start a multiple of {number}, or change it"
            );
        }
        let all = replicate.saturating_mul(context).saturating_mul(tensor);
        let given = flags.iter().filter(|(_, number)| *number > 1).map(|(flag, number)| format!("{flag} {number}"));
        ensure!(
            size.is_multiple_of(all),
            "{} does not divide the {size} processes: start a multiple of {all}, or change one of them",
            given.collect::<Vec<_>>().join(" times ")
        );
        Ok(Ranks { replicate, shard: size / all, expert: 1, context, tensor })
    }

    /// Places experts on `--expert-parallel` of the shards that read different data. Fails unless it divides them.
    ///
    /// ```
    /// use fsdp_train::ranks::Ranks;
    ///
    /// assert_eq!(Ranks::new(8, 2, 1, 1)?.with_experts(4)?.expert, 4);
    /// assert!(Ranks::new(8, 2, 1, 1)?.with_experts(8).is_err());
    /// # anyhow::Ok(())
    /// ```
    pub fn with_experts(self, expert: usize) -> anyhow::Result<Self> {
        let Ranks { shard, .. } = self;
        ensure!(
            expert > 0 && shard.is_multiple_of(expert),
            "--expert-parallel {expert} does not divide the {shard} processes that shard a replica and read different data: \
             use a divisor of {shard}, or start more processes"
        );
        Ok(Ranks { expert, ..self })
    }

    /// Returns the number of ranks that read different data.
    pub fn data(&self) -> usize {
        self.replicate * self.shard
    }

    /// Returns the number of shards of a replica, as far as ranks do not compute layers together.
    pub fn shards(&self) -> usize {
        self.shard * self.context
    }

    /// Returns the index of `rank` among the ranks that read different data. Context-parallel and tensor-parallel ranks
    /// have the same index.
    pub fn data_rank(&self, rank: usize) -> usize {
        rank / (self.context * self.tensor)
    }

    /// Creates the variables of a model on this mesh. Collective.
    pub fn vars(&self, world: &World) -> fsdp_candle::Result<ShardedVarMap> {
        let of = |name, size: usize| (size > 1).then_some((name, size));
        let dims = [
            of(REPLICATE, self.replicate),
            Some((SHARD, self.shard / self.expert)),
            of(EXPERT, self.expert),
            of(CONTEXT, self.context),
            of(TENSOR, self.tensor),
        ];
        let mesh = world.mesh(&dims.into_iter().flatten().collect::<Vec<_>>())?;
        if self.expert * self.context * self.tensor == 1 {
            return Ok(ShardedVarMap::new(&mesh, world.device()));
        }
        let replicate: &[&str] = if self.replicate > 1 { &[REPLICATE] } else { &[] };
        let shard = [Some(SHARD), of(EXPERT, self.expert).map(|_| EXPERT), of(CONTEXT, self.context).map(|_| CONTEXT)];
        let shard: Vec<&str> = shard.into_iter().flatten().collect();
        ShardedVarMap::with_dp_mesh_dims(&mesh, &DataParallelMeshDims { shard: &shard, replicate }, world.device())
    }

    /// Returns the ranks that share sequences with this one, if there are several.
    pub fn context(
        &self,
        vars: &ShardedVarMap,
        exchange: AttentionExchange,
    ) -> fsdp_candle::Result<Option<ContextParallel>> {
        Ok(match self.context {
            1 => None,
            _ => Some(ContextParallel::with_exchange(vars.mesh().slice(&[CONTEXT])?.group(0)?, exchange)),
        })
    }

    /// Returns the mesh of the ranks that have different experts, if there are several.
    pub fn expert_mesh(&self, vars: &ShardedVarMap) -> fsdp_candle::Result<Option<DeviceMesh>> {
        Ok(match self.expert {
            1 => None,
            _ => Some(vars.mesh().slice(&[EXPERT])?),
        })
    }

    /// Returns the mesh of the tensor-parallel ranks, if there are several.
    pub fn tensor_mesh(&self, vars: &ShardedVarMap) -> fsdp_candle::Result<Option<DeviceMesh>> {
        Ok(match self.tensor {
            1 => None,
            _ => Some(vars.mesh().slice(&[TENSOR])?),
        })
    }
}
