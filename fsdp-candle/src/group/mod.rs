//! The communication unit: the parameters of one `fully_shard` call, gathered, freed and reduced together.

mod gather;
mod reduction;
mod settings;

use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use candle_core::{DType, Result, Tensor, TensorId, bail};
use fsdp_core::Allocator;
use fsdp_core::layout::chunk_range;
use fsdp_core::process_group::{Signature, Subject};

pub(crate) use reduction::Reduction;
pub(crate) use settings::Settings;

use crate::Error;
use crate::context::Context;
use crate::param::{FsdpParam, Memory, Stage};
use crate::policy::{MixedPrecisionPolicy, ReshardAfterForward};
use crate::storage::{Pool, to_tensor};
use gather::Gathering;

/// The parameters that move together.
pub(crate) struct ParamGroup {
    name: String,
    /// The position in the order of `fully_shard` calls.
    index: usize,
    params: Vec<Arc<FsdpParam>>,
    /// The parameters, for the signatures of collectives.
    subject: Arc<Subject>,
    mp_policy: MixedPrecisionPolicy,
    pool: Arc<Pool>,
    context: Weak<Context>,
    /// The paths of its modules, if they are called apart.
    parts: OnceLock<BTreeSet<String>>,
    settings: Mutex<Settings>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    unsharded: bool,
    gathering: Option<Gathering>,
    /// How many ranks share what forward kept, while it is kept.
    kept_for: Option<usize>,
    /// Trainable parameters whose gradient is complete in the backward that is running.
    reported: usize,
    /// How many will be; `None`: all of them, unless some are unused.
    expected: Option<usize>,
    /// Whether that backward has issued the unit's reduction.
    reduced: bool,
    /// Backwards since the last reduce-scatter and since the last all-reduce.
    unscattered: Backwards,
    unreplicated: Backwards,
    ran_forward: bool,
    /// Whether a forward gathered what is there and no backward has followed: stale, once an optimizer has stepped.
    left_by_forward: bool,
    /// Modules of the unit that ran since it was last resharded after forward.
    parts_run: usize,
}

/// How many backwards' gradients a reduction carries: which is the same on all ranks, or some sum what others have
/// summed already.
#[derive(Clone, Copy, Default)]
struct Backwards {
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
    fn carry(&mut self) -> usize {
        self.carried = true;
        self.count
    }
}

/// What a unit is made of.
pub(crate) struct GroupSpec {
    pub(crate) name: String,
    pub(crate) index: usize,
    pub(crate) params: Vec<Arc<FsdpParam>>,
    pub(crate) mp_policy: MixedPrecisionPolicy,
    pub(crate) reshard_after_forward: ReshardAfterForward,
}

impl ParamGroup {
    pub(crate) fn new(spec: GroupSpec, context: &Arc<Context>) -> Arc<Self> {
        let names = spec.params.iter().map(|param| param.name().to_string());
        let group = Arc::new(ParamGroup {
            subject: Subject::new(format!("unit `{}`", spec.name), names),
            name: spec.name,
            index: spec.index,
            params: spec.params,
            mp_policy: spec.mp_policy,
            pool: context.pool().clone(),
            context: Arc::downgrade(context),
            parts: OnceLock::new(),
            settings: Mutex::new(Settings::new(spec.reshard_after_forward)),
            state: Mutex::default(),
        });
        for param in &group.params {
            param.set_group(&group);
        }
        group
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn index(&self) -> usize {
        self.index
    }

    pub(crate) fn params(&self) -> &[Arc<FsdpParam>] {
        &self.params
    }

    pub(crate) fn mp_policy(&self) -> &MixedPrecisionPolicy {
        &self.mp_policy
    }

    pub(crate) fn is_unsharded(&self) -> bool {
        self.state().unsharded
    }

    /// Whether `other` is this unit or one inside it, as far as paths tell.
    pub(crate) fn contains(&self, other: &ParamGroup) -> bool {
        match self.parts.get() {
            None => is_within(&other.name, &self.name),
            Some(parts) => self.index == other.index || parts.iter().any(|part| is_within(&other.name, part)),
        }
    }

    /// Notes that the unit is several modules that are called apart: what is beside them at its path is not inside it.
    pub(crate) fn take_apart(&self) {
        let root = self.name == crate::fully_shard::ROOT;
        let path = if root { "" } else { self.name.as_str() };
        let mut parts = BTreeSet::new();
        for param in &self.params {
            let rest = param.name().strip_prefix(path).map(|rest| rest.trim_start_matches('.'));
            if let Some((module, _)) = rest.and_then(|rest| rest.split_once('.')) {
                parts.insert(if root { module.to_string() } else { format!("{path}.{module}") });
            }
        }
        // Taken apart once more, the answer is the same.
        let _ = self.parts.set(parts);
    }

    fn is_inside(&self, other: &ParamGroup) -> bool {
        other.contains(self) && !self.contains(other)
    }

    /// How many of `groups` this one is inside of.
    pub(crate) fn depth(&self, groups: &[Arc<ParamGroup>]) -> usize {
        groups.iter().filter(|other| self.is_inside(other)).count()
    }

    /// The innermost of `groups` that this one is inside of.
    pub(crate) fn parent<'a>(&self, groups: &'a [Arc<ParamGroup>]) -> Option<&'a Arc<ParamGroup>> {
        // The longest path, and at one path the unit that was taken apart: it contains less.
        let inner = |other: &&Arc<ParamGroup>| {
            (other.name != crate::fully_shard::ROOT, other.name.len(), other.parts.get().is_some())
        };
        groups.iter().filter(|other| self.is_inside(other)).max_by_key(inner)
    }

    pub(crate) fn settings(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn context(&self) -> Result<Arc<Context>> {
        match self.context.upgrade() {
            Some(context) => Ok(context),
            None => bail!("the ShardedVarMap of FSDP unit `{}` was dropped; keep it as long as the model", self.name),
        }
    }

    /// Where unsharded parameters come from and go to.
    fn memory(&self) -> Memory {
        let (custom, keep) = {
            let settings = self.settings();
            (settings.all_gather.clone(), settings.keep_unsharded_storage)
        };
        // The user's code runs without our locks.
        let allocator = custom.and_then(|custom| custom.allocate()).unwrap_or_else(|| self.pool.clone());
        Memory { allocator, keep }
    }

    /// Makes the full parameters available.
    pub(crate) fn unshard(&self) -> Result<()> {
        self.start_unshard()?;
        let mut state = self.state();
        let Some(gathering) = state.gathering.take() else { return Ok(()) };
        for (param, full) in self.finish_gather(gathering)? {
            param.install(full)?;
        }
        state.kept_for = None;
        state.unsharded = true;
        Ok(())
    }

    /// Frees the buffers that parameters kept for themselves.
    pub(crate) fn release_kept(&self) {
        self.params.iter().for_each(|param| param.release_kept());
    }

    /// Frees the full parameters, and what forward kept of them.
    pub(crate) fn reshard(&self) -> Result<()> {
        let memory = self.memory();
        let mut state = self.state();
        if let Some(gathering) = state.gathering.take() {
            for (param, full) in self.finish_gather(gathering)? {
                param.put_away(full, &memory);
            }
        }
        if std::mem::take(&mut state.unsharded) {
            tracing::debug!(unit = self.name, "reshard");
        }
        if state.kept_for.take().is_some() {
            self.params.iter().filter_map(|param| param.take_post_forward()).for_each(|buffer| self.pool.give(buffer));
        }
        self.params.iter().try_for_each(|param| param.reshard(&memory))
    }

    /// Does what the policy says after forward. Tells whether backward has to gather again.
    pub(crate) fn reshard_after_forward(&self, is_root: bool, parts: usize) -> Result<bool> {
        {
            let mut state = self.state();
            state.left_by_forward = true;
            state.parts_run += 1;
            if state.parts_run < parts {
                return Ok(true);
            }
            state.parts_run = 0;
        }
        let policy = self.settings().reshard_after_forward;
        match policy {
            ReshardAfterForward::Never => return Ok(false),
            ReshardAfterForward::Default if is_root => return Ok(false),
            ReshardAfterForward::Default | ReshardAfterForward::Always => self.reshard()?,
            ReshardAfterForward::To(ranks) => {
                let memory = self.memory();
                let mut state = self.state();
                for param in &self.params {
                    let fewer = param.ranks().neighbours(ranks)?;
                    let chunk = chunk_range(param.shape().elem_count(), fewer.size(), fewer.rank());
                    param.reshard_to(chunk, &memory)?;
                }
                state.unsharded = false;
                state.kept_for = Some(ranks);
                tracing::debug!(unit = self.name, ranks, "reshard to fewer ranks");
            }
        }
        Ok(true)
    }

    pub(crate) fn mark_forward(&self) {
        self.state().ran_forward = true;
    }

    /// Whether the unit ran in forward since the last call.
    pub(crate) fn take_ran_forward(&self) -> bool {
        std::mem::take(&mut self.state().ran_forward)
    }

    /// Starts to gather ahead of a forward that may not come.
    pub(crate) fn prefetch_for_forward(&self) -> Result<()> {
        self.start_unshard()?;
        self.state().left_by_forward = true;
        Ok(())
    }

    /// Frees what an earlier forward gathered, if no backward came to free it: an optimizer may have changed the shards since.
    pub(crate) fn drop_what_forward_left(&self) -> Result<()> {
        let left = {
            let mut state = self.state();
            state.parts_run = 0;
            std::mem::take(&mut state.left_by_forward)
        };
        if left { self.reshard() } else { Ok(()) }
    }

    /// Runs before the backward of anything inside the unit.
    pub(crate) fn pre_backward(self: &Arc<Self>) -> Result<()> {
        self.context()?.pre_backward(self)
    }

    /// Runs when everything between the unit's inputs and outputs has been processed: frozen parameters, which report nothing, are needed no more.
    pub(crate) fn post_backward(&self) -> Result<()> {
        if !self.settings().reshard_after_backward {
            return Ok(());
        }
        let memory = self.memory();
        self.params.iter().filter(|param| !param.trainable()).try_for_each(|param| param.reshard(&memory))
    }

    /// Whether some parameters are frozen.
    pub(crate) fn has_frozen(&self) -> bool {
        self.params.iter().any(|param| !param.trainable())
    }

    /// Whether some parameters get gradients.
    pub(crate) fn has_trainable(&self) -> bool {
        self.params.iter().any(|param| param.trainable())
    }

    /// Whether some gradients are complete and wait for others.
    pub(crate) fn waits_for_gradients(&self) -> bool {
        let state = self.state();
        state.reported > 0 && !state.reduced
    }

    /// Marks the unit's gradients of this backward as on their way.
    pub(crate) fn mark_reduced(&self) {
        self.state().reduced = true;
    }

    /// Makes the unit ready for a backward: drops what one that was refused left.
    pub(crate) fn begin_backward(&self) {
        {
            let mut state = self.state();
            state.reported = 0;
            state.expected = None;
            state.reduced = false;
            state.unscattered.begin();
            state.unreplicated.begin();
        }
        self.params.iter().filter_map(|param| param.take_grad()).for_each(|grad| self.pool.give(grad));
        self.params.iter().for_each(|param| param.set_complete(false));
    }

    /// Tells the unit which anchors the backward that begins will reach. Returns whether it reaches any.
    pub(crate) fn expect(&self, reached: &HashSet<TensorId>) -> Result<bool> {
        let mut expected = 0;
        for param in self.params.iter().filter(|param| param.trainable()) {
            expected += usize::from(reached.contains(&param.anchor()?.id()));
        }
        self.state().expected = Some(expected);
        Ok(expected > 0)
    }

    /// Every use of `param` in the graph has been processed: nobody needs its values any more, and its gradient is whole.
    pub(crate) fn on_gradient_complete(self: &Arc<Self>, param: &FsdpParam) -> Result<()> {
        let context = self.context()?;
        context.check_in_backward()?;
        if self.settings().reshard_after_backward {
            param.reshard(&self.memory())?;
        }
        param.set_complete(true);
        let complete = {
            let mut state = self.state();
            state.reported += 1;
            let all = || self.params.iter().filter(|param| param.trainable()).count();
            state.reduced = state.reported == state.expected.unwrap_or_else(all);
            state.reduced
        };
        if complete { context.reduce(self) } else { Ok(()) }
    }

    /// Whether the backward that is running has issued the unit's reduction.
    pub(crate) fn has_reduced(&self) -> bool {
        self.state().reduced
    }

    /// Ends a backward for the unit's parameters.
    pub(crate) fn finish_backward(&self) -> Result<()> {
        {
            let mut state = self.state();
            state.reported = 0;
            state.reduced = false;
            state.left_by_forward = false;
            state.parts_run = 0;
        }
        self.params.iter().for_each(|param| param.set_complete(false));
        if self.settings().reshard_after_backward { self.reshard() } else { Ok(()) }
    }

    /// The sharded gradients that are whole, of the parameters' dtypes, and whether a rank used the parameter: what
    /// none used has a gradient of zeros.
    pub(crate) fn take_gradients(&self) -> Result<Vec<(Arc<FsdpParam>, Tensor, bool)>> {
        let mut grads = vec![];
        for param in &self.params {
            if let Some(buffer) = param.take(Stage::Reduced) {
                self.pool.leave(&buffer);
                let used = param.take_used();
                let grad = to_tensor(buffer, &param.region().sizes, param.var().device())?;
                grads.push((param.clone(), grad, used));
            }
        }
        Ok(grads)
    }

    /// Forgets a forward or backward that failed half-way: waits for what is in flight, drops gradients, frees parameters.
    pub(crate) fn reset(&self) {
        let gathering = {
            let mut state = self.state();
            state.reported = 0;
            state.reduced = false;
            state.parts_run = 0;
            state.ran_forward = false;
            state.left_by_forward = false;
            state.unscattered = Backwards::default();
            state.unreplicated = Backwards::default();
            state.gathering.take()
        };
        // What came of it no longer matters; that it is over does.
        if let Some(gathering) = gathering {
            gathering.abandon();
        }
        for param in &self.params {
            param.forget_step();
        }
        if let Err(error) = self.reshard() {
            tracing::warn!(unit = self.name, %error, "reshard after a failed step");
        }
    }

    /// What a collective of the parameters at these positions is about.
    fn signature(&self, positions: impl IntoIterator<Item = usize>) -> Signature {
        Signature::new(&self.subject, positions)
    }

    fn communication_failed(&self, what: &str, source: fsdp_core::Error) -> Error {
        Error::Communication {
            unit: self.name.clone(),
            what: what.into(),
            parameters: self.params.len(),
            source: Box::new(source),
        }
    }
}

/// Whether `path` is `outer` or below it.
fn is_within(path: &str, outer: &str) -> bool {
    outer == crate::fully_shard::ROOT
        || path.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The dtype that a unit computes in, for a parameter built as `dtype`.
pub(crate) fn compute_dtype(policy: &MixedPrecisionPolicy, name: &str, dtype: DType) -> DType {
    policy.param_dtype_of(name).unwrap_or(dtype)
}
