//! A parameter under tensor parallelism, and the layer that does its part for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use candle_core::Tensor;
use fsdp_core::ProcessGroup;

use super::param::FsdpParam;
use crate::tensor_parallel::{Parallel, ParallelStyle};

impl FsdpParam {
    /// The tensor-parallel ranks, where each of them has a part of it.
    pub(crate) fn cut_over(&self) -> Option<&ProcessGroup> {
        self.parallel().filter(|parallel| parallel.cut().is_some()).map(Parallel::group)
    }

    /// For a layer of one's own that holds the tensor `weight`: how its module is parallel, and the ranks, where a plan
    /// of [`parallelize`](crate::parallelize) names it. Who asks does the collectives; without a layer that asks,
    /// building fails. Layers of [`nn`](crate::nn) do so by themselves.
    ///
    /// ```
    /// use candle_core::{DType, Module, Result, Tensor};
    /// use fsdp_candle::{ColwiseParallel, DataParallelMeshDims, FsdpParam, FullyShard, ParallelPlan, ProcessGroup};
    /// use fsdp_candle::{ShardedVarMap, World, collectives, fully_shard, parallelize};
    /// use fsdp_core::process_group::local;
    ///
    /// /// `x W^T` of a weight that may be cut along its rows.
    /// struct Columns(Tensor, Option<ProcessGroup>);
    ///
    /// impl Module for Columns {
    ///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
    ///         let x = self.1.as_ref().map_or(Ok(x.clone()), |ranks| collectives::copy(x, ranks))?;
    ///         x.matmul(&self.0.t()?)
    ///     }
    /// }
    ///
    /// local::run(2, |group| {
    ///     let world = World::of(group);
    ///     let mesh = world.mesh(&[("tp", 2)])?;
    ///     let vars = ShardedVarMap::on(&mesh, &DataParallelMeshDims::default(), world.device())?;
    ///     parallelize(&vars, &mesh, &ParallelPlan::new().module("up", ColwiseParallel::default()))?;
    ///     let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
    ///         let weight = vb.pp("up").get((6, 4), "weight")?;
    ///         let ranks = FsdpParam::register_tp_layer(&weight).map(|(_, ranks)| ranks);
    ///         Ok(Columns(weight, ranks))
    ///     })?;
    ///     let y = model.forward(&Tensor::ones((5, 4), DType::F32, world.device())?)?;
    ///     assert_eq!(y.dims(), [5, 3]); // this rank's half of 6 features
    ///     Ok::<_, fsdp_candle::Error>(())
    /// })
    /// .into_iter()
    /// .collect::<std::result::Result<Vec<_>, _>>()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn serve(weight: &Tensor) -> Option<(ParallelStyle, ProcessGroup)> {
        let param = FsdpParam::of(weight)?;
        param.serve_parallel().map(|parallel| (parallel.style(), parallel.group().clone()))
    }

    /// [`FsdpParam::parallel`], for a layer that holds the parameter and does its part: without one, building fails.
    pub(crate) fn serve_parallel(&self) -> Option<&Arc<Parallel>> {
        self.served.store(true, Ordering::Relaxed);
        self.parallel.as_ref()
    }

    /// Whether a layer that does its part under tensor parallelism holds it, or none needs to.
    pub(crate) fn is_served(&self) -> bool {
        self.parallel().is_none_or(|parallel| !parallel.needs_layer()) || self.served.load(Ordering::Relaxed)
    }
}
