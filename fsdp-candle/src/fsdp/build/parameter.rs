//! A parameter, from what a layer asks its builder for to a shard of this rank's.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;
use fsdp_core::layout::Region;
use indexmap::IndexMap;

use super::var_map::{Owned, PROBE, ShardedVarMap, lock};
use crate::error::{Error, Result};
use crate::fsdp::graph::nodes_of;
use crate::fsdp::policy::ReshardAfterForward;
use crate::fsdp::unit::{FsdpParam, Offload, ParamSpec, Parts};
use crate::initializer::ShardRequest;
use crate::kernels;
use crate::storage::{to_core_dtype, to_var};

impl ShardedVarMap {
    fn build(&self, name: &str, shape: Shape, init: Init, dtype: DType) -> Result<Tensor> {
        let fail = |message: String| Error::Parameter { name: name.into(), message };
        let (unit, opts, ranks) = match lock(&self.0.building).last() {
            Some(unit) => ((unit.name.clone(), unit.serial), unit.opts.clone(), unit.ranks.clone()),
            None => {
                return Err(fail(
                    "it was asked for outside fully_shard: build the module inside the closure of a fully_shard call"
                        .into(),
                ));
            }
        };
        if let Some(param) = self.shared(name, &shape, dtype, &unit)? {
            return Ok(param.held().clone());
        }
        if !dtype.is_float() {
            return Err(fail(format!("parameters are floating point; it was asked for as {dtype:?}")));
        }
        let dims = shape.dims();
        self.check_size(name, dims, dtype)?;
        if is_buffer(name) {
            return self.whole(&self.0.buffers, name, dims, init, dtype);
        }
        let plan = lock(&self.0.plan).clone();
        let parallel = plan.map_or(Ok(None), |plan| plan.of(name, dims))?;
        if opts.ignored_params.as_ref().is_some_and(|ignored| ignored(name)) {
            if let Some(parallel) = parallel {
                let style = parallel.style().name();
                return Err(fail(format!(
                    "it is among the ignored parameters, which are whole on every rank, and the plan makes its module \
                     {style}: leave it out of one of them"
                )));
            }
            return self.whole(&self.0.ignored, name, dims, init, dtype);
        }
        let placement = opts.shard_placement_fn.as_ref().and_then(|choose| choose(name, dims)).unwrap_or_default();
        let ranks = placement.mesh.map_or(ranks, |mesh| self.on_whole_mesh(mesh.0));
        let dim = placement.dim;
        if let ReshardAfterForward::To(size) = opts.reshard_after_forward {
            ranks.neighbours(size)?;
        }
        let local = parallel.as_ref().map_or(dims.to_vec(), |parallel| parallel.local(dims));
        // The user's choice is made without our lock.
        let frozen = lock(&self.0.frozen).clone();
        let trainable = !frozen(name);
        let adapters = lock(&self.0.adapters).clone();
        if trainable {
            ranks.check_covers(&self.copies()).map_err(fail)?;
        }
        // What is frozen has no optimizer state, and is gathered over the shard ranks alone.
        let ranks = if opts.shard_optimizer_over_replicas && trainable { ranks.divided()? } else { ranks };
        let (region, layout) = ranks.lay_out(name, (dims, &local), dim, parallel.as_deref())?;
        let request = ShardRequest { name, shape: dims, dtype, region: &region, init };
        let shard = self.initial(&request, opts.offload_policy.home(&self.0.device))?;
        let schedule = &self.0.schedule;
        let offload = Offload::of(&shard, opts.offload_policy, &self.0.device, schedule.downloads())?;
        // As it was built, unless the policy has another.
        let compute_dtype = opts.mp_policy.param_dtype_of(name).unwrap_or(dtype);
        let spec = ParamSpec {
            name: name.into(),
            region,
            shard_dim: dim,
            layout,
            parts: ranks.lay_out_parts(name, &local, dim)?.map(|(shape, layout)| Parts::new(shape, layout)),
            ranks,
            parallel,
            compute_dtype,
            trainable,
            extension: opts.extension.as_ref().and_then(|choose| choose(name)),
            adapter: adapters.and_then(|adapters| adapters.of(name)),
            offload,
            shape,
        };
        let nodes = nodes_of(&self.0.device, &local.into(), compute_dtype, schedule.listener())?;
        let param = FsdpParam::new(spec, shard, nodes, schedule.pool().clone())?;
        lock(&self.0.params).insert(name.into(), Owned { param: param.clone(), unit });
        if let Some(unit) = lock(&self.0.building).last_mut() {
            unit.params.push(param.clone());
        }
        Ok(param.held().clone())
    }

    /// The parameter of this name, if the same unit has it already.
    fn shared(
        &self,
        name: &str,
        shape: &Shape,
        dtype: DType,
        unit: &(String, usize),
    ) -> Result<Option<Arc<FsdpParam>>> {
        let all = lock(&self.0.params);
        let Some(owned) = all.get(name) else { return Ok(None) };
        let message = if owned.unit != *unit {
            format!(
                "it already belongs to FSDP unit `{}` and was asked for again by unit `{}`: apply fully_shard once to \
                 each module, bottom-up, and hand the built \
                 submodules on",
                owned.unit.0, unit.0
            )
        } else if owned.param.shape() != shape || owned.param.dtype() != dtype {
            format!(
                "it is shared inside unit `{}` as {:?} {:?} and as {:?} {dtype:?}: shared parameters have one shape \
                 and dtype",
                unit.0,
                owned.param.shape().dims(),
                owned.param.dtype(),
                shape.dims()
            )
        } else {
            return Ok(Some(owned.param.clone()));
        };
        Err(Error::Parameter { name: name.into(), message })
    }

    /// An ignored parameter or a buffer.
    fn whole(
        &self,
        all: &Mutex<IndexMap<String, Var>>,
        name: &str,
        dims: &[usize],
        init: Init,
        dtype: DType,
    ) -> Result<Tensor> {
        if let Some(var) = lock(all).get(name) {
            if (var.dims(), var.dtype()) == (dims, dtype) {
                return Ok(var.as_tensor().clone());
            }
            let message = format!(
                "it is held whole, and was asked for as {:?} {:?} and as {dims:?} {dtype:?}: shared tensors have one \
                 shape and dtype",
                var.dims(),
                var.dtype()
            );
            return Err(Error::Parameter { name: name.into(), message });
        }
        let request = ShardRequest { name, shape: dims, dtype, region: &Region::whole(dims), init };
        let var = self.initial(&request, &self.0.device)?;
        lock(all).insert(name.into(), var.clone());
        Ok(var.as_tensor().clone())
    }

    /// Fails for a parameter that no memory can hold, before any is asked for.
    fn check_size(&self, name: &str, dims: &[usize], dtype: DType) -> Result<()> {
        let bytes = dims.iter().try_fold(dtype.size_in_bytes(), |bytes, &size| bytes.checked_mul(size.max(1)));
        if bytes.is_some_and(|bytes| bytes <= isize::MAX as usize) {
            return Ok(());
        }
        let message =
            format!("of shape {dims:?} and {dtype:?} it is larger than memory can be: check the model's sizes");
        Err(Error::Parameter { name: name.into(), message })
    }

    /// A variable on a device with the initial values of a region.
    fn initial(&self, request: &ShardRequest<'_>, device: &Device) -> Result<Var> {
        let initializer = lock(&self.0.initializer).clone();
        initializer.check(request)?;
        let kernels = kernels::of_device(device)?;
        let memory = kernels.zeros(to_core_dtype(request.dtype)?, request.region.elements());
        let mut shard =
            memory.map_err(|error| Error::Parameter { name: request.name.into(), message: error.to_string() })?;
        let mut filled = Ok(());
        kernels.write((&mut shard).into(), &mut |bytes| filled = initializer.fill(request, bytes))?;
        filled?;
        Ok(to_var(shard, &request.region.sizes, device)?)
    }
}

impl SimpleBackend for ShardedVarMap {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        Ok(self.build(name, shape, init, dtype)?)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        Err(Error::Parameter {
            name: name.into(),
            message: "a sharded parameter needs its shape: ask with `get` instead of `get_unchecked`".into(),
        }
        .into())
    }

    fn contains_tensor(&self, name: &str) -> bool {
        if name.ends_with(PROBE) {
            self.0.probed.store(true, Ordering::Relaxed);
            return false;
        }
        let initializer = lock(&self.0.initializer).clone();
        lock(&self.0.params).contains_key(name) || initializer.contains(name)
    }
}

/// Whether a tensor of this name is a buffer, which forward updates and no optimizer does: those that PyTorch registers
/// as buffers and Candle's `BatchNorm` asks its builder for.
fn is_buffer(name: &str) -> bool {
    matches!(name.rsplit('.').next(), Some("running_mean" | "running_var"))
}
