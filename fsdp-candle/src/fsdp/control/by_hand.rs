//! What a program does with a unit by hand: gathering and freeing it, ending a backward, beginning anew.

use candle_core::Result;
use candle_core::backprop::GradStore;

use super::handles::{FinalizeHandle, Unit, UnshardHandle};
use crate::fsdp::module::FsdpModule;

impl<M> FsdpModule<M> {
    /// The unit, for prefetch lists.
    pub fn unit(&self) -> Unit {
        Unit(self.group().clone())
    }

    /// This unit and those inside it, in the order in which they were made: units by name ([`shard`](crate::shard))
    /// among them.
    pub fn units(&self) -> Vec<Unit> {
        let units = self.schedule().units().into_iter();
        units.filter(|unit| self.group().path().contains(unit.path())).map(Unit).collect()
    }

    /// Gathers the unit's parameters until [`FsdpModule::reshard`], the next forward that frees them, or backward. Not
    /// recursive. Collective.
    ///
    /// # Errors
    /// Those of the all-gather.
    pub fn unshard(&self) -> Result<()> {
        self.group().unshard()
    }

    /// As [`FsdpModule::unshard`], without waiting: PyTorch's `unshard(async_op=True)`.
    ///
    /// # Errors
    /// When the all-gather can't be issued.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
    /// # let opts = FullyShard::new(&vars);
    /// # let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
    /// # let weight = vars.params()[0].var().clone();
    /// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// let handle = model.unshard_async()?;
    /// // What the gather can overlap with: loading a batch, say.
    /// handle.wait()?;
    /// assert!(model.params().iter().all(|param| param.is_unsharded()));
    /// model.inner().forward(&x)?; // past the hooks: the parameters are there
    /// model.reshard()?;
    /// assert!(model.inner().forward(&x).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn unshard_async(&self) -> Result<UnshardHandle> {
        self.group().start_unshard()?;
        Ok(UnshardHandle(self.group().clone()))
    }

    /// Frees the unit's full parameters. Not recursive.
    ///
    /// # Errors
    /// Candle's.
    pub fn reshard(&self) -> Result<()> {
        self.schedule().reshard(self.group())
    }

    /// Makes the whole model ready for a new iteration after one that failed: what is in flight is waited for,
    /// gradients are dropped, parameters freed. Gradients that accumulated without synchronisation are lost.
    ///
    /// An error of a forward or backward does this by itself. Call it when the iteration ends in another way, between a
    /// forward and its backward, say. It can't bring ranks together that stand at different collectives: what ends an
    /// iteration must do so on every rank at the same point.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
    /// # let opts = FullyShard::new(&vars);
    /// # let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
    /// # let weight = vars.params()[0].var().clone();
    /// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// let _loss = model.forward(&x)?.sum_all()?; // not a number, say: no backward for it
    /// model.reset_iter_state();
    /// assert!(model.params().iter().all(|param| !param.is_unsharded()));
    /// model.backward(&model.forward(&x)?.sum_all()?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn reset_iter_state(&self) {
        self.schedule().forget_step();
    }

    /// Waits for the reductions and files the sharded gradients in `grads`. Collective.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn finalize_backward(&self, grads: &mut GradStore) -> Result<()> {
        self.schedule().finalize_backward(grads)
    }

    /// As [`FsdpModule::finalize_backward`], to be waited for later: PyTorch's `finalize_backward(async_op=True)`. The
    /// reductions run meanwhile.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
    /// # let opts = FullyShard::new(&vars);
    /// # let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
    /// # let weight = vars.params()[0].var().clone();
    /// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// model.set_manual_backward_finalization(true);
    /// let mut grads = model.backward(&model.forward(&x)?.sum_all()?)?;
    /// assert!(grads.get(&weight).is_none());
    /// let handle = model.finalize_backward_async();
    /// // Work that needs no gradients of this model goes here; `finalize_backward(&mut grads)` is both at once.
    /// handle.wait(&mut grads)?;
    /// assert!(grads.get(&weight).is_some());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn finalize_backward_async(&self) -> FinalizeHandle {
        FinalizeHandle(self.schedule().clone())
    }
}
