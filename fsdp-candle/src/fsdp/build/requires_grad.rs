//! Freezing and training parameters that are built.

use std::sync::Arc;

use fsdp_core::ReduceOp;

use super::var_map::ShardedVarMap;
use crate::error::{Error, Result};
use crate::fsdp::unit::FsdpParam;

impl ShardedVarMap {
    /// Freezes the parameters whose FQN `select` accepts, or trains them: PyTorch's `param.requires_grad_(..)`. Returns
    /// how many `select` accepts. Between steps: after an iteration's last backward, before the next forward.
    /// Collective: every rank chooses the same.
    ///
    /// A frozen parameter has no gradient from now on, no memory for one and no reduction, and what waited for one is
    /// dropped. It is gathered as before. An optimizer that has it keeps its state and passes it over; one that is to
    /// step it when it is trained again is made of it, as `AdamW::new(vars.params(), ..)` is of all.
    ///
    /// Layers of [`nn`](crate::nn) ask each time they compute. Others hold a tensor that has a graph or has none: one
    /// that was built trainable stays in their graph while it is frozen, where Candle computes its gradient to drop it.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
    /// # let world = World::single()?;
    /// let vars = ShardedVarMap::of_world(&world)?;
    /// let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
    ///     Ok((nn::linear(4, 4, vb.pp("body"))?, nn::linear(4, 2, vb.pp("head"))?))
    /// })?;
    /// let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// let step = || model.backward(&model.call(|(body, head)| head.forward(&body.forward(&x)?))?.sum_all()?);
    /// let weight = vars.get("body.weight").unwrap();
    ///
    /// assert_eq!(vars.set_requires_grad(false, |fqn| fqn.starts_with("body."))?, 2); // the head first
    /// assert!(step()?.get(weight.var()).is_none());
    /// vars.set_requires_grad(true, |_| true)?; // then all
    /// assert!(step()?.get(weight.var()).is_some());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When `select` accepts no parameter; inside a forward or backward; when ranks choose differently, which names a
    /// parameter; when a parameter is to be trained that leaves out ranks of the map's mesh, or that was frozen when it
    /// was built and that no layer of `nn` holds, for no gradient would reach it. Nothing is changed then, on any rank.
    pub fn set_requires_grad(&self, requires_grad: bool, select: impl Fn(&str) -> bool) -> Result<usize> {
        let schedule = self.schedule();
        if schedule.is_at_work() {
            return Err(Error::Argument(
                "set_requires_grad was called inside a forward or backward of the model: call it between steps".into(),
            ));
        }
        let params = self.params();
        let selected: Vec<bool> = params.iter().map(|param| select(param.name())).collect();
        let after: Vec<bool> = (params.iter().zip(&selected))
            .map(|(param, selected)| if *selected { requires_grad } else { param.trainable() })
            .collect();
        self.agree(&params, &after)?;
        let count = selected.iter().filter(|selected| **selected).count();
        if count == 0 {
            return Err(Error::Argument(format!(
                "set_requires_grad: none of the {} parameters was chosen. `ShardedVarMap::params` has their names",
                params.len()
            )));
        }
        let changes = || params.iter().zip(&after).filter(|(param, after)| param.trainable() != **after);
        for (param, _) in changes().filter(|(_, after)| **after) {
            self.check_trained(param)?;
        }
        changes().for_each(|(param, after)| param.set_requires_grad(*after));
        schedule.trainable_changed();
        Ok(count)
    }

    /// Fails for a parameter that can't be trained.
    fn check_trained(&self, param: &FsdpParam) -> Result<()> {
        let fail = |message: String| Error::Parameter { name: param.name().into(), message };
        param.ranks().check_covers(&self.copies()).map_err(fail)?;
        match param.can_be_trained() {
            true => Ok(()),
            false => Err(fail(
                "it was frozen (`freeze`) when it was built, and what holds it is no layer of fsdp_candle::nn: no \
                 gradient would reach it. Build it trainable, and freeze it afterwards with set_requires_grad"
                    .into(),
            )),
        }
    }

    /// Fails on every rank where ranks have chosen differently.
    fn agree(&self, params: &[Arc<FsdpParam>], after: &[bool]) -> Result<()> {
        let mesh = self.mesh();
        // Of each parameter: whether some rank trains it, and whether some freezes it.
        let mut some: Vec<f32> = after.iter().flat_map(|&on| [f32::from(on), f32::from(!on)]).collect();
        for dim in 0..mesh.layout().shape().len() {
            some = mesh.group(dim)?.all_reduce_values(some, ReduceOp::Max)?;
        }
        let differ = |some: &[f32]| some.iter().all(|&some| some > 0.);
        let found = params.iter().zip(after).zip(some.chunks(2)).find(|(_, some)| differ(some));
        let Some(((param, after), _)) = found else { return Ok(()) };
        let message = format!(
            "ranks disagree on whether it is trained: rank {} would {} it, others would not. Call set_requires_grad \
             with the same choice on every rank; nothing was changed",
            mesh.rank(),
            if *after { "train" } else { "freeze" }
        );
        Err(Error::Parameter { name: param.name().into(), message })
    }
}
