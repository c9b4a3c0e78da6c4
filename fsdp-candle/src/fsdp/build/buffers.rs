//! Buffers: tensors of a model that forward updates and no optimizer does.

use fsdp_core::ReduceOp;

use super::var_map::ShardedVarMap;
use crate::error::Result;
use crate::storage::{copied, copy_in};

impl ShardedVarMap {
    /// Sets every buffer to its mean over the ranks of the map's mesh. Collective: before an evaluation or a save that
    /// is to count all ranks' batches.
    ///
    /// PyTorch's `fully_shard` leaves buffers alone as well. A checkpoint holds those of one rank, and loading gives
    /// them to all.
    ///
    /// # Errors
    /// Those of the all-reduce.
    ///
    /// ```
    /// use fsdp_core::process_group::local;
    /// # use candle_core::{DType, Tensor};
    /// # use candle_nn::ModuleT;
    /// # use fsdp_candle::{fully_shard, FullyShard, ShardedVarMap, World};
    ///
    /// local::run(2, |group| {
    ///     let world = World::of(group);
    ///     let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 2)])?, world.device());
    ///     let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
    ///     let norm = fully_shard(&opts, vb, |vb| candle_nn::batch_norm(3, 1e-5, vb))?;
    ///     assert_eq!(vars.params().len(), 2); // weight and bias; the statistics are buffers
    ///     norm.call(|norm| norm.forward_t(&Tensor::full(world.rank() as f32, (4, 3), world.device())?, true))?;
    ///     vars.average_buffers()?;
    ///     assert_eq!(vars.buffers()[0].0, "running_mean");
    ///     assert_eq!(vars.buffers()[0].1.to_vec1::<f32>()?, [0.05; 3]); // a tenth of the mean of 0 and 1
    ///     Ok::<_, fsdp_candle::Error>(())
    /// })
    /// .into_iter()
    /// .collect::<Result<Vec<_>, _>>()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn average_buffers(&self) -> Result<()> {
        let vars: Vec<_> = self.buffers().into_iter().map(|(_, var)| var).collect();
        let mut values = vars.iter().map(|var| copied(var.as_tensor())).collect::<Result<Vec<_>>>()?;
        if values.is_empty() {
            return Ok(());
        }
        for dim in 0..self.mesh().layout().shape().len() {
            values = self.mesh().group(dim)?.all_reduce(values, ReduceOp::Avg).wait()?;
        }
        for (var, mean) in vars.iter().zip(&values) {
            copy_in(mean, var.as_tensor())?;
        }
        Ok(())
    }
}
