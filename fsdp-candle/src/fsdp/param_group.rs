//! The parameters of one unit, which are unsharded, resharded and reduced together: PyTorch's `FSDPParamGroup`.

use std::cell::RefCell;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use candle_core::{Result, Tensor};
use fsdp_core::layout::chunk_range;
use parking_lot::{Mutex, ReentrantMutex};

use super::all_gather::AllGatherResult;
use super::param::FsdpParam;
use super::param_events::ParamUnit;
use super::policy::MixedPrecisionPolicy;
use super::replica_shards::ReplicaShards;
use super::settings::CommSettings;
use super::unit_params::UnitParams;
use super::unit_path::{UnitId, UnitPath};
use super::unsharded_memory::UnshardMemory;
use crate::error::Error;
use crate::storage::Pool;

/// The parameters of one unit.
pub(crate) struct FsdpParamGroup {
    unit: UnitParams,
    path: UnitPath,
    pub(super) mp_policy: MixedPrecisionPolicy,
    pub(super) settings: Mutex<CommSettings>,
    /// The pending all-gather. A thread that unshards or reshards the whole unit holds the lock. The cell refuses the
    /// user's code that runs meanwhile on the same thread.
    pending: ReentrantMutex<RefCell<Option<AllGatherResult>>>,
    /// Whether a shard may have been written since the parameters were unsharded.
    may_be_written: AtomicBool,
    /// Whether the module took nothing from its builder.
    pub(super) is_hollow: bool,
    replica_shards: ReplicaShards,
    accumulated: Mutex<AccumulatedBackwards>,
}

/// Numbers of backwards whose gradients wait for the next reduce-scatter, and for the next all-reduce.
#[derive(Default)]
struct AccumulatedBackwards {
    reduce_scatter: BackwardCount,
    all_reduce: BackwardCount,
}

/// Number of backwards whose gradients one reduction sums. Signatures hold it: it must be the same on all ranks.
#[derive(Clone, Copy, Default)]
struct BackwardCount {
    count: usize,
    reduced: bool,
}

impl BackwardCount {
    fn begin_backward(&mut self) {
        if std::mem::take(&mut self.reduced) {
            self.count = 0;
        }
        self.count += 1;
    }

    /// Returns the number. The next backward counts from 0.
    fn reduce(&mut self) -> usize {
        self.reduced = true;
        self.count
    }
}

/// The parameters, by [`UnitParams`].
impl Deref for FsdpParamGroup {
    type Target = UnitParams;

    fn deref(&self) -> &UnitParams {
        &self.unit
    }
}

impl FsdpParamGroup {
    /// Makes the unit `id` of the `map`-th map of its ranks. `has_pre_use_hooks` tells whether uses of its parameters unshard it: it is a unit by name.
    /// `is_hollow` tells whether its module took nothing from its builder.
    pub(crate) fn new(
        id: UnitId,
        params: Vec<Arc<FsdpParam>>,
        mp_policy: MixedPrecisionPolicy,
        pool: Arc<Pool>,
        map: u64,
        has_pre_use_hooks: bool,
        is_hollow: bool,
    ) -> Arc<Self> {
        let group = Arc::new(FsdpParamGroup {
            path: UnitPath::new(id.name.clone()),
            unit: UnitParams::new(id, params, pool, map),
            mp_policy,
            settings: Mutex::default(),
            pending: ReentrantMutex::default(),
            may_be_written: AtomicBool::new(false),
            is_hollow,
            replica_shards: ReplicaShards::default(),
            accumulated: Mutex::default(),
        });
        for (position, param) in group.params().iter().enumerate() {
            let unit: Weak<dyn ParamUnit> = Arc::downgrade(&group) as _;
            param.set_unit(group.id(), unit, position, has_pre_use_hooks);
        }
        group
    }

    pub(crate) fn path(&self) -> &UnitPath {
        &self.path
    }

    /// Returns whether any full parameter has memory.
    pub(crate) fn is_unsharded(&self) -> bool {
        self.params().iter().any(|param| param.is_unsharded())
    }

    /// Returns whether all full parameters have memory.
    pub(super) fn is_whole(&self) -> bool {
        self.params().iter().all(|param| param.is_unsharded())
    }

    /// Returns whether unsharded values may be older than the shards. The same on every rank, if every rank writes.
    pub(super) fn may_be_stale(&self) -> bool {
        self.may_be_written.load(Ordering::Relaxed) || self.params().iter().any(|param| param.may_be_stepped_unseen())
    }

    /// Returns whether some parameters are frozen.
    pub(crate) fn has_frozen(&self) -> bool {
        self.params().iter().any(|param| !param.trainable())
    }

    /// Returns the number of parameters that get gradients.
    pub(crate) fn trainable(&self) -> usize {
        self.params().iter().filter(|param| param.trainable()).count()
    }

    /// Returns whether replicas divide some shards among them.
    pub(super) fn is_sharded_over_replicas(&self) -> bool {
        self.params().iter().any(|param| param.spec.over_replicas.is_some())
    }

    /// Records that the unit is several modules that are called one by one.
    pub(super) fn split_into_modules(&self) {
        self.path.split_into_modules(self.params().iter().map(|param| param.name()));
    }
}

/// Unshard and reshard.
impl FsdpParamGroup {
    /// Returns where full values are allocated.
    fn memory(&self) -> UnshardMemory {
        let (custom, keep, from_process_group) = {
            let settings = self.settings.lock();
            (settings.all_gather.clone(), settings.keep_unsharded_storage, settings.memory_from_process_group)
        };
        let allocator = custom.and_then(|custom| custom.allocate()).unwrap_or_else(|| self.pool().clone());
        UnshardMemory { allocator, keep, from_process_group }
    }

    /// Calls `f` with the pending all-gather, while no other thread unshards or reshards the unit. Does nothing for a
    /// unit without parameters.
    fn with_pending(&self, f: impl FnOnce(&mut Option<AllGatherResult>) -> Result<()>) -> Result<()> {
        let Some(param) = self.params().first() else { return Ok(()) };
        let limit = param.spec.ranks.shard.timeout();
        let Some(pending) = self.pending.try_lock_for(limit) else {
            let message = format!(
                "another thread has been unsharding or resharding it for {limit:?}: call a unit from one thread"
            );
            return Err(Error::unit(self.name(), message).into());
        };
        let Ok(mut pending) = pending.try_borrow_mut() else {
            let message = "its own all-gather, allocator or extension must not unshard or reshard it";
            return Err(Error::unit(self.name(), message).into());
        };
        f(&mut pending)
    }

    /// Issues the all-gather, unless it is pending or the parameters are unsharded.
    pub(crate) fn start_unshard(&self) -> Result<()> {
        self.with_pending(|pending| self.start_all_gather(pending))
    }

    /// Issues the all-gather, unless it is pending or the parameters are unsharded. Waits until the shards are gathered
    /// over replicas.
    fn start_all_gather(&self, pending: &mut Option<AllGatherResult>) -> Result<()> {
        if pending.is_some() {
            return Ok(());
        }
        // Backward may be done with some parameters, and may have freed others early.
        let is_missing = |param: &FsdpParam| !param.is_unsharded() && !param.gradient.is_complete();
        let all = self.params().iter().enumerate();
        let missing: Vec<usize> = all.filter(|(_, param)| is_missing(param)).map(|(position, _)| position).collect();
        if missing.is_empty() {
            return Ok(());
        }
        // The shards that replicas divide are inputs of the all-gather. Usually they were gathered when the root's
        // forward began.
        self.replica_shards.start(&self.unit)?;
        self.replica_shards.wait(&self.unit)?;
        let custom = self.settings.lock().all_gather.clone();
        *pending =
            Some(AllGatherResult::start(&self.unit, &self.replica_shards, &missing, &self.memory(), custom.as_ref())?);
        Ok(())
    }

    /// Unshards the parameters, and waits until they are there.
    pub(crate) fn unshard(&self) -> Result<()> {
        self.with_pending(|pending| {
            self.start_all_gather(pending)?;
            let Some(result) = pending.take() else { return Ok(()) };
            let full = result.wait(&self.unit, &self.memory())?;
            full.into_iter().try_for_each(|(param, full)| param.full.set(full))
        })
    }

    /// Frees the full parameters, and the parts that forward kept.
    pub(crate) fn reshard(&self) -> Result<()> {
        self.with_pending(|pending| {
            let memory = self.memory();
            if let Some(result) = pending.take() {
                for (param, full) in result.wait(&self.unit, &memory)? {
                    param.full.free(full, &memory);
                }
            } else if self.is_unsharded() {
                tracing::debug!(unit = self.name(), "reshard");
            }
            self.may_be_written.store(false, Ordering::Relaxed);
            self.params().iter().try_for_each(|param| param.full.reshard(&memory))
        })
    }

    /// Frees the full parameters except for the parts that this many neighbouring ranks need to unshard them again.
    pub(super) fn reshard_to(&self, ranks: usize) -> Result<()> {
        self.with_pending(|_| {
            let memory = self.memory();
            for param in self.params() {
                let fewer = param.spec.ranks.post_forward_group(ranks)?;
                let chunk = chunk_range(param.unsharded_shape().elem_count(), fewer.size(), fewer.rank());
                param.full.reshard_to(chunk, ranks, &memory)?;
            }
            tracing::debug!(unit = self.name(), ranks, "reshard to fewer ranks");
            Ok(())
        })
    }

    /// Frees one full parameter.
    pub(super) fn reshard_param(&self, position: usize) -> Result<()> {
        self.params()[position].full.reshard(&self.memory())
    }

    /// Frees the frozen parameters.
    pub(super) fn reshard_frozen(&self) -> Result<()> {
        let memory = self.memory();
        let mut frozen = self.params().iter().filter(|param| !param.trainable());
        frozen.try_for_each(|param| param.full.reshard(&memory))
    }
}

/// Shards that replicas divide among them.
impl FsdpParamGroup {
    /// Issues the all-gathers over replicas of the shards that are neither pending nor gathered.
    pub(super) fn start_replica_gather(&self) -> Result<()> {
        self.replica_shards.start(&self.unit)
    }

    /// Drops the gathered shards, since the replicas' parts may have changed.
    pub(super) fn drop_replica_shards(&self) {
        self.replica_shards.clear(&self.unit);
    }

    /// Drops the gathered shards, unless they remain up to date.
    pub(super) fn drop_stale_replica_shards(&self) {
        self.replica_shards.clear_unless_fresh(&self.unit);
    }

    /// Records whether the gathered shards remain up to date until the next forward. Drops them otherwise.
    pub(super) fn set_replica_shards_fresh(&self, are_fresh: bool) {
        self.replica_shards.set_fresh(&self.unit, are_fresh);
    }
}

/// Steps.
impl FsdpParamGroup {
    /// Begins a further pass, or returns to the first.
    pub(super) fn begin_pass(&self, pass: Option<usize>) {
        self.params().iter().for_each(|param| param.begin_pass(pass));
    }

    /// Prepares a backward: drops what a failed backward left.
    pub(super) fn begin_backward(&self) {
        {
            let mut accumulated = self.accumulated.lock();
            accumulated.reduce_scatter.begin_backward();
            accumulated.all_reduce.begin_backward();
        }
        self.params().iter().for_each(|param| param.gradient.clear_current());
    }

    /// Ends a backward: drops gradients that no reduction took.
    pub(super) fn end_backward(&self) {
        self.params().iter().for_each(|param| param.gradient.clear_current());
    }

    /// Returns the numbers of backwards whose gradients the next reductions sum: since the last reduce-scatter, and
    /// since the last all-reduce.
    pub(super) fn reduce_backwards(&self) -> (usize, usize) {
        let all_reduce = self.settings.lock().requires_all_reduce;
        let mut accumulated = self.accumulated.lock();
        let reduce_scatter = accumulated.reduce_scatter.reduce();
        (reduce_scatter, if all_reduce { accumulated.all_reduce.reduce() } else { 0 })
    }

    /// Takes the reduced gradients of the parameters that `choose` accepts, each with whether any rank used the
    /// parameter.
    pub(super) fn take_gradients(
        &self,
        choose: impl Fn(&FsdpParam) -> bool,
    ) -> Result<Vec<(Arc<FsdpParam>, Tensor, bool)>> {
        let mut grads = vec![];
        for param in self.params().iter().filter(|param| choose(param)) {
            if let Some(grad) = param.take_reduced()? {
                grads.push((param.clone(), grad, param.gradient.take_used()));
            }
        }
        Ok(grads)
    }

    /// Forgets a failed forward or backward: waits for pending collectives, drops gradients, frees parameters.
    pub(super) fn reset(&self) {
        *self.accumulated.lock() = AccumulatedBackwards::default();
        self.begin_pass(None);
        self.set_replica_shards_fresh(false);
        let memory = self.memory();
        let discarded = self.with_pending(|pending| {
            pending.take().into_iter().for_each(|result| result.discard(&memory));
            Ok(())
        });
        self.params().iter().for_each(|param| param.drop_gradients());
        if let Err(error) = discarded.and_then(|()| self.reshard()) {
            tracing::warn!(unit = self.name(), %error, "reshard after a failed step");
        }
    }
}

impl ParamUnit for FsdpParamGroup {
    fn is_unsharded(&self) -> bool {
        FsdpParamGroup::is_unsharded(self)
    }

    fn note_write(&self) {
        self.may_be_written.store(true, Ordering::Relaxed);
    }

    fn reshard_stale(&self) -> Result<()> {
        self.drop_replica_shards();
        self.reshard()
    }
}
