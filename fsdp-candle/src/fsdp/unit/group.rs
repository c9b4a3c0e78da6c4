//! The communication unit: the parameters of one `fully_shard` call, gathered, freed and reduced together.

use std::sync::{Arc, Mutex, MutexGuard, Weak};

use candle_core::{Result, Tensor};
use fsdp_core::layout::chunk_range;

use super::gather::Gathering;
use super::holder::Holder;
use super::members::Members;
use super::memory::Memory;
use super::param::FsdpParam;
use super::parts::ShardGathering;
use super::path::{UnitId, UnitPath};
use super::settings::Settings;
use super::turn::{Refused, Turn, Turns};
use super::uses::Uses;
use crate::error::Error;
use crate::fsdp::policy::MixedPrecisionPolicy;
use crate::storage::Pool;

/// The parameters that move together.
pub(crate) struct ParamGroup {
    path: UnitPath,
    members: Members,
    mp_policy: MixedPrecisionPolicy,
    settings: Mutex<Settings>,
    presence: Turns<Presence>,
    /// The gathers of shards over replicas in flight.
    shards: Mutex<Vec<ShardGathering>>,
    carried: Mutex<Carried>,
}

/// Where a unit's parameters are.
#[derive(Default)]
enum Presence {
    #[default]
    Sharded,
    /// Their all-gathers are in flight.
    OnTheirWay(Gathering),
    /// All were there; backward frees one after the other.
    Unsharded,
}

/// The backwards whose gradients wait, in the unit, for the next reduce-scatter and for the next all-reduce.
#[derive(Default)]
pub(super) struct Carried {
    pub(super) scattered: Backwards,
    pub(super) replicated: Backwards,
}

/// How many backwards' gradients a reduction carries: which is the same on all ranks, or some sum what others have
/// summed already.
#[derive(Clone, Copy, Default)]
pub(super) struct Backwards {
    count: usize,
    carried: bool,
}

impl Backwards {
    fn begin(&mut self) {
        if std::mem::take(&mut self.carried) {
            self.count = 0;
        }
        self.count += 1;
    }

    /// The number, which starts anew with the next backward.
    pub(super) fn carry(&mut self) -> usize {
        self.carried = true;
        self.count
    }
}

impl ParamGroup {
    /// The unit at the path and position `id`.
    pub(crate) fn new(
        id: UnitId,
        params: Vec<Arc<FsdpParam>>,
        mp_policy: MixedPrecisionPolicy,
        pool: Arc<Pool>,
    ) -> Arc<Self> {
        let group = Arc::new(ParamGroup {
            path: UnitPath::new(id.name.clone()),
            members: Members::new(id, params, pool),
            mp_policy,
            settings: Mutex::default(),
            presence: Turns::new(),
            shards: Mutex::default(),
            carried: Mutex::default(),
        });
        let holder = Arc::downgrade(&group);
        group.params().iter().for_each(|param| param.holder().set(holder.clone()));
        group
    }

    pub(crate) fn id(&self) -> &UnitId {
        &self.members.unit
    }

    pub(crate) fn name(&self) -> &str {
        self.members.name()
    }

    pub(crate) fn index(&self) -> usize {
        self.members.unit.index
    }

    pub(crate) fn path(&self) -> &UnitPath {
        &self.path
    }

    pub(crate) fn params(&self) -> &[Arc<FsdpParam>] {
        &self.members.params
    }

    pub(super) fn members(&self) -> &Members {
        &self.members
    }

    pub(crate) fn mp_policy(&self) -> &MixedPrecisionPolicy {
        &self.mp_policy
    }

    pub(crate) fn settings(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn shards(&self) -> MutexGuard<'_, Vec<ShardGathering>> {
        self.shards.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn carried(&self) -> MutexGuard<'_, Carried> {
        self.carried.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Whether the parameters have been gathered. They are not while a thread moves them.
    pub(crate) fn is_unsharded(&self) -> bool {
        self.presence.look(|presence| matches!(presence, Presence::Unsharded)).unwrap_or(false)
    }

    /// Notes that the unit is several modules that are called apart.
    pub(crate) fn take_apart(&self) {
        self.path.take_apart(self.params().iter().map(|param| param.name()));
    }

    /// Makes the parameters tell of their uses.
    pub(crate) fn tell_uses<T: Uses + 'static>(&self, to: &Arc<T>) {
        let to: Weak<T> = Arc::downgrade(to);
        self.params().iter().for_each(|param| param.tell_uses(to.clone()));
    }

    /// Where unsharded parameters come from and go to.
    fn memory(&self) -> Memory {
        let (custom, keep) = {
            let settings = self.settings();
            (settings.all_gather.clone(), settings.keep_unsharded_storage)
        };
        let allocator = custom.and_then(|custom| custom.allocate()).unwrap_or_else(|| self.members.pool.clone());
        Memory { allocator, keep }
    }

    /// This thread's turn to move the parameters; `None` where there are none.
    fn turn(&self) -> Result<Option<Turn<'_, Presence>>> {
        let Some(param) = self.params().first() else { return Ok(None) };
        let limit = param.ranks().shard().timeout();
        match self.presence.take(limit) {
            Ok(turn) => Ok(Some(turn)),
            Err(refused) => {
                let message = match refused {
                    Refused::Nested => {
                        "its parameters were to be gathered or freed by code that runs while they are: its own \
                         all-gather, allocator or extension must leave them alone"
                            .into()
                    }
                    Refused::Late => format!(
                        "another thread has been gathering or freeing its parameters for {limit:?}: call a unit from \
                         one thread"
                    ),
                };
                Err(Error::Unit { unit: self.name().into(), message }.into())
            }
        }
    }

    /// Issues the all-gather, unless the parameters are there or on their way.
    pub(crate) fn start_unshard(&self) -> Result<()> {
        match self.turn()? {
            Some(mut turn) => self.issue(&mut turn.state),
            None => Ok(()),
        }
    }

    fn issue(&self, presence: &mut Presence) -> Result<()> {
        if matches!(presence, Presence::OnTheirWay(_)) {
            return Ok(());
        }
        // In backward some may be done with already, and others freed early.
        let is_missing = |param: &FsdpParam| !param.is_unsharded() && !param.gradient().is_complete();
        let all = self.params().iter().enumerate();
        let missing: Vec<usize> = all.filter(|(_, param)| is_missing(param)).map(|(position, _)| position).collect();
        if missing.is_empty() {
            return Ok(());
        }
        self.gather_shards()?;
        self.await_shards()?;
        let custom = self.settings().all_gather.clone();
        let gathering = Gathering::issue(&self.members, &missing, &self.memory(), custom.as_ref())?;
        *presence = Presence::OnTheirWay(gathering);
        Ok(())
    }

    /// Makes the full parameters available.
    pub(crate) fn unshard(&self) -> Result<()> {
        let Some(mut turn) = self.turn()? else { return Ok(()) };
        self.issue(&mut turn.state)?;
        match std::mem::take(&mut turn.state) {
            Presence::OnTheirWay(gathering) => {
                for (param, full) in gathering.land(&self.members, &self.memory())? {
                    param.values().install(full)?;
                }
                turn.state = Presence::Unsharded;
            }
            other => turn.state = other,
        }
        Ok(())
    }

    /// Frees the full parameters, and what forward kept of them.
    pub(crate) fn reshard(&self) -> Result<()> {
        let Some(mut turn) = self.turn()? else { return Ok(()) };
        let memory = self.memory();
        match std::mem::take(&mut turn.state) {
            Presence::Sharded => {}
            Presence::OnTheirWay(gathering) => {
                for (param, full) in gathering.land(&self.members, &memory)? {
                    param.values().put_away(full, &memory);
                }
            }
            Presence::Unsharded => tracing::debug!(unit = self.name(), "reshard"),
        }
        self.params().iter().try_for_each(|param| param.values().reshard(&memory))
    }

    /// Frees the full parameters but for the parts that so many neighbouring ranks need to gather them again.
    pub(crate) fn reshard_to(&self, ranks: usize) -> Result<()> {
        let Some(mut turn) = self.turn()? else { return Ok(()) };
        let memory = self.memory();
        for param in self.params() {
            let fewer = param.ranks().neighbours(ranks)?;
            let chunk = chunk_range(param.unsharded_shape().elem_count(), fewer.size(), fewer.rank());
            param.values().reshard_to(chunk, ranks, &memory)?;
        }
        if matches!(turn.state, Presence::Unsharded) {
            turn.state = Presence::Sharded;
        }
        tracing::debug!(unit = self.name(), ranks, "reshard to fewer ranks");
        Ok(())
    }

    /// Frees one full parameter, that backward is done with.
    pub(crate) fn reshard_parameter(&self, position: usize) -> Result<()> {
        self.params()[position].values().reshard(&self.memory())
    }

    /// Frees the frozen parameters.
    pub(crate) fn reshard_frozen(&self) -> Result<()> {
        let memory = self.memory();
        let mut frozen = self.params().iter().filter(|param| !param.trainable());
        frozen.try_for_each(|param| param.values().reshard(&memory))
    }

    /// Frees the buffers that parameters kept for themselves.
    pub(crate) fn release_kept(&self) {
        self.params().iter().for_each(|param| param.values().release_own());
    }

    /// Whether some parameters are frozen.
    pub(crate) fn has_frozen(&self) -> bool {
        self.params().iter().any(|param| !param.trainable())
    }

    /// How many parameters get gradients.
    pub(crate) fn trainable(&self) -> usize {
        self.params().iter().filter(|param| param.trainable()).count()
    }

    /// Makes the unit ready for a backward: drops what one that was refused left.
    pub(crate) fn begin_backward(&self) {
        {
            let mut carried = self.carried();
            carried.scattered.begin();
            carried.replicated.begin();
        }
        self.params().iter().for_each(|param| param.gradient().renew());
    }

    /// Ends a backward for the unit's parameters.
    pub(crate) fn end_backward(&self) {
        self.params().iter().for_each(|param| param.gradient().renew());
    }

    /// Begins a further pass of the unit, or goes back to the first.
    pub(crate) fn next_pass(&self, pass: Option<usize>) {
        self.params().iter().for_each(|param| param.next_pass(pass));
    }

    /// The sharded gradients that are whole, of the parameters' dtypes, and whether a rank used the parameter: what
    /// none used has a gradient of zeros.
    pub(crate) fn take_gradients(&self) -> Result<Vec<(Arc<FsdpParam>, Tensor, bool)>> {
        let mut grads = vec![];
        for param in self.params() {
            if let Some(grad) = param.take_reduced()? {
                grads.push((param.clone(), grad, param.gradient().take_used()));
            }
        }
        Ok(grads)
    }

    /// Forgets a forward or backward that failed half-way: waits for what is in flight, drops gradients, frees
    /// parameters.
    pub(crate) fn forget_step(&self) {
        *self.carried() = Carried::default();
        self.next_pass(None);
        self.drop_shards();
        let ended = self.forget_gathering();
        for param in self.params() {
            param.gradient().forget();
            if let Some(offload) = param.offload() {
                offload.forget();
            }
        }
        if let Err(error) = ended.and_then(|()| self.reshard()) {
            tracing::warn!(unit = self.name(), %error, "reshard after a failed step");
        }
    }

    /// Waits for the all-gathers in flight. What comes of them no longer matters; that they are over does.
    fn forget_gathering(&self) -> Result<()> {
        let Some(mut turn) = self.turn()? else { return Ok(()) };
        match std::mem::take(&mut turn.state) {
            Presence::OnTheirWay(gathering) => gathering.abandon(),
            other => turn.state = other,
        }
        Ok(())
    }
}

impl Holder for ParamGroup {
    fn reshard(&self) -> Result<()> {
        self.drop_shards();
        ParamGroup::reshard(self)
    }
}
