//! The order of a step's collectives: a state machine with events in and actions out. It knows no tensor, process, lock
//! or clock.
//!
//! Terms: the *root* is the unit whose call runs inside no other call. A *pass* is one forward of a unit, which may
//! have several passes before a backward. The *number* of a graph node is its position in the order in which Candle
//! made all nodes. It tells which nodes belong to a pass. [Note: Visits] in `plan` defines a *visit*.
//!
//! [Note: Guarantees of the order]
//!
//! - All ranks issue the same collectives in the same order, whatever their speed. Where ranks may use different units,
//!   that holds whatever their losses reach.
//! - At most the parameters of the running units and of the next unit are unsharded.
//! - Everything that was unsharded is resharded.
//!
//! The order therefore depends on two things only: the events, which follow from the model's code, and the settings,
//! which are the same on all ranks. `tests` runs made-up models on simulated ranks against these guarantees.
//!
//! Two kinds of units exist. The user calls a unit that `fully_shard` made, so its forward has a begin and an end.
//! Nobody calls a unit by name: its forward begins with the first use of one of its parameters. It ends when a unit
//! beside it is used or called, or when the call around it ends.
//!
//! [Note: Two ways through backward]
//!
//! Most backwards need no plan: their own events tell what to do ([`Order::pre_backward`],
//! [`Order::post_accumulate_grad`]). When backward comes to a unit, the unit whose forward ended before it is
//! prefetched. A unit is reduced at its last gradient.
//!
//! Events do not suffice where units ran several times, or where ranks may use different units. Such a backward follows
//! a plan ([Note: Visits] in `plan`).
//!
//! A plan does not suffice for all backwards, because of units by name. It knows a pass by the numbers of the nodes
//! that were made meanwhile. The pass of a unit by name lasts until a unit beside it is used, and Candle does not tell
//! which of the nodes use its parameters. The plan may then contain visits in a wrong order, or visits that backward
//! never comes to. On simulated ranks, such plans unshard more units than the memory bound allows: held to the checks
//! of other backwards, `ranks_issue_the_same_collectives_within_the_memory_bound` fails.

use std::collections::BTreeSet;
use std::ops::{Range, RangeInclusive};

use self::plan::Plan;
use super::policy::ReshardAfterForward;
use super::settings::{ModelSettings, UnshardSettings};
use crate::autograd::next_number;

mod plan;
#[cfg(test)]
mod tests;

/// One thing to do. Units are named by their index, the order of `fully_shard` calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Issue the unit's all-gather, unless it is pending or done.
    Unshard(usize),
    /// Wait for the unit's all-gather.
    WaitForUnshard(usize),
    /// Free the unit's full parameters.
    Reshard(usize),
    /// Free the full parameters except for the part that this many neighbouring ranks need to unshard the unit again.
    ReshardTo { unit: usize, ranks: usize },
    /// Free one full parameter.
    ReshardParam { unit: usize, position: usize },
    /// Free the unit's frozen parameters.
    ReshardFrozen(usize),
    /// Reduce the unit's gradients: a reduce-scatter, and the all-reduces that follow.
    Reduce(usize),
    /// Give the unit's parameters new anchors for this pass, or the first pass's anchors for `None`.
    BeginPass { unit: usize, pass: Option<usize> },
}

/// The state machine.
#[derive(Default)]
pub(crate) struct Order {
    pub(crate) settings: ModelSettings,
    units: Vec<UnitInfo>,
    step: Step,
}

/// One unit, as the order sees it.
#[derive(Clone, Default)]
pub(crate) struct UnitInfo {
    /// For a unit by name: the unit whose call runs it.
    pub(crate) by_name_in: Option<usize>,
    /// Units by name that this unit is inside of.
    pub(crate) enclosing: Vec<usize>,
    pub(crate) settings: UnshardSettings,
    /// Number of handles of `unshard_all` that hold it.
    pub(crate) holds: usize,
}

/// Numbers of a unit's parameters. The user may freeze parameters between steps, so each backward asks for them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ParamCounts {
    /// Parameters that get gradients.
    pub(crate) trainable: usize,
    pub(crate) frozen: usize,
}

/// Why an event is not allowed now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OrderError {
    /// A backward runs.
    InBackward,
    /// A forward runs.
    InForward,
    /// No backward runs.
    NoBackward,
    /// The graph did not show that this backward comes to the unit.
    NotPlanned,
    /// A handle of `unshard_all` holds the unit.
    Held,
}

/// State of one step. A step that failed is replaced by a new one.
#[derive(Default)]
struct Step {
    /// Running forwards, the innermost last.
    frames: Vec<Frame>,
    forwards_begun: usize,
    /// Units in the order in which their forwards began, in this iteration and in the last complete one.
    forward_order: Vec<usize>,
    last_forward_order: Vec<usize>,
    /// Passes in the order in which they ended, since the last root forward that followed a backward. Backward runs in
    /// reverse.
    passes: Vec<Pass>,
    /// Root forwards since then whose graphs can end.
    roots: Vec<RootForward>,
    recomputations: Vec<Recomputation>,
    /// Whether a backward has run since the last root forward began.
    is_over: bool,
    /// Units that returned outputs without a pre-backward hook: backward unshards them when it begins.
    unhooked: BTreeSet<usize>,
    states: Vec<UnitState>,
    backward: Option<Backward>,
}

/// State of one unit within a step.
#[derive(Clone, Copy, Default)]
struct UnitState {
    /// Whether the unit ran in forward since gradients were handed out.
    ran_forward: bool,
    /// Whether a forward unsharded the unit and no backward followed.
    left_by_forward: bool,
    /// Whether the unit's last forward left it unsharded for backward. Its next forward needs no all-gather then.
    kept: bool,
    /// Whether the user unsharded it by hand, and neither a backward nor a forward with a graph has freed it.
    by_hand: bool,
    /// Number of the unit's modules that ran since the unit was resharded after forward.
    parts_run: usize,
    /// The running or last pass, and the number of its first graph node.
    pass: usize,
    from: usize,
    /// The pass of the current anchors; `None` for the first pass's anchors.
    anchors_of: Option<usize>,
    /// The last recorded pass since passes were cleared.
    recorded: Option<usize>,
}

impl UnitState {
    /// Records that the unit is resharded.
    fn forget_values(&mut self) {
        (self.left_by_forward, self.kept, self.by_hand) = (false, false, false);
    }
}

/// A pass of a unit: one forward with a graph, or the forwards of all modules of the unit.
#[derive(Clone, Debug)]
struct Pass {
    unit: usize,
    /// Number of forwards begun at that time, which identifies the pass.
    pass: usize,
    /// Number of forwards begun when the pass ended.
    ended: usize,
    /// Numbers of the graph nodes that the pass made.
    nodes: Range<usize>,
}

/// A root forward, whose passes are forgotten once its graph does not exist any more.
struct RootForward {
    passes: RangeInclusive<usize>,
    exists: GraphExists,
}

/// Returns whether a graph exists.
pub(crate) type GraphExists = Box<dyn Fn() -> bool + Send>;

/// A checkpointed closure, which runs again when backward comes to `node`.
#[derive(Clone, Debug)]
struct Recomputation {
    /// Numbers of the graph nodes that the closure made in forward.
    made: Range<usize>,
    node: usize,
}

/// Bound on recorded passes and recomputations, for forwards whose graphs are dropped without a backward.
const MOST_PASSES: usize = 1 << 16;

/// State of the running backward.
struct Backward {
    units: Vec<BackwardProgress>,
    /// The plan, where units ran several times or ranks may use different units.
    plan: Option<Plan>,
}

/// Progress of one unit in the running backward.
#[derive(Clone, Copy, Default)]
struct BackwardProgress {
    params: ParamCounts,
    /// Number of complete gradients.
    complete: usize,
    /// Whether the reduction was issued.
    reduced: bool,
    /// Whether backward has come to the unit. For a unit by name: whether it is still unsharded.
    entered: bool,
    /// Whether backward has come to the unit at any time.
    seen: bool,
}

/// A running forward of a called unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forward {
    pub(crate) is_root: bool,
    pub(crate) pass: usize,
    /// Whether the forward keeps a graph, so that a backward may follow.
    graph: bool,
}

/// A running forward.
#[derive(Clone, Copy, Debug)]
struct Frame {
    unit: usize,
    pass: usize,
    /// Whether the forward keeps a graph.
    graph: bool,
    begun_by: BegunBy,
}

/// Event that began a forward.
#[derive(Clone, Copy, Debug)]
enum BegunBy {
    /// A call, whose end is reported.
    Call {
        /// Index of the next unit by name inside the call, where units have a fixed order.
        next: usize,
    },
    /// A use of a parameter. A later event ends the forward.
    Use,
}

impl Frame {
    fn is_use(&self) -> bool {
        matches!(self.begun_by, BegunBy::Use)
    }
}

impl Order {
    /// Adds a unit. `inside` lists the units inside it, for a unit by name.
    pub(crate) fn add(&mut self, unit: UnitInfo, inside: &[usize]) {
        let index = self.units.len();
        for &inner in inside {
            self.units[inner].enclosing.push(index);
        }
        self.units.push(unit);
        self.step.states.push(UnitState::default());
    }

    /// Removes the units from index `count` on: the units inside one that failed to build.
    pub(crate) fn truncate(&mut self, count: usize) {
        self.units.truncate(count);
        for unit in &mut self.units {
            unit.settings.keep_prefetch_below(count);
            unit.enclosing.retain(|&unit| unit < count);
        }
        let step = &mut self.step;
        step.states.truncate(count);
        step.forward_order.retain(|&unit| unit < count);
        step.last_forward_order.retain(|&unit| unit < count);
        step.passes.retain(|pass| pass.unit < count);
        step.unhooked.retain(|&unit| unit < count);
    }

    /// Returns whether a handle of `unshard_all` holds the unit.
    pub(crate) fn is_held(&self, unit: usize) -> bool {
        self.units.get(unit).is_some_and(|unit| unit.holds > 0)
    }

    pub(crate) fn unit(&mut self, unit: usize) -> Option<&mut UnitInfo> {
        self.units.get_mut(unit)
    }

    /// Returns the units in the order in which their forwards began.
    pub(crate) fn forward_order(&self) -> Vec<usize> {
        self.step.forward_order.clone()
    }

    /// Returns whether a unit was made by name.
    pub(crate) fn is_by_name(&self, unit: usize) -> bool {
        self.units.get(unit).is_some_and(|unit| unit.by_name_in.is_some())
    }

    /// Returns whether a forward or backward runs.
    pub(crate) fn is_running(&self) -> bool {
        !self.step.frames.is_empty() || self.step.backward.is_some()
    }

    pub(crate) fn is_in_backward(&self) -> bool {
        self.step.backward.is_some()
    }

    /// Returns a called unit, and the units by name that its call runs.
    pub(crate) fn called_with(&self, called: usize) -> Vec<usize> {
        let is_inside = |unit: &usize| *unit == called || self.units[*unit].by_name_in == Some(called);
        (0..self.units.len()).filter(is_inside).collect()
    }

    /// Records that the user unshards a unit by hand. Returns whether a forward left it unsharded.
    pub(crate) fn unshard_by_hand(&mut self, unit: usize) -> bool {
        let state = &mut self.step.states[unit];
        state.by_hand = true;
        state.left_by_forward
    }

    /// Returns whether the user unsharded a unit by hand, and nothing but the user's reshard is to free it.
    pub(crate) fn is_unsharded_by_hand(&self, unit: usize) -> bool {
        self.step.states[unit].by_hand
    }

    /// Records that a handle holds a unit unsharded. Returns whether a forward left it unsharded.
    pub(crate) fn hold(&mut self, unit: usize) -> bool {
        self.units[unit].holds += 1;
        let left = self.step.states[unit].left_by_forward;
        self.step.states[unit].forget_values();
        left
    }

    /// Records that a handle of a unit is dropped. Returns whether another one holds it.
    pub(crate) fn release(&mut self, unit: usize) -> bool {
        self.units[unit].holds -= 1;
        self.step.states[unit].forget_values();
        self.units[unit].holds > 0
    }

    /// Records that the user reshards a unit.
    pub(crate) fn reshard_by_hand(&mut self, unit: usize) {
        self.step.states[unit].forget_values();
    }

    /// Returns whether the unit ran in forward since the last call.
    pub(crate) fn take_ran_forward(&mut self, unit: usize) -> bool {
        self.step.states.get_mut(unit).is_some_and(|state| std::mem::take(&mut state.ran_forward))
    }

    /// Forgets the step, which has failed.
    pub(crate) fn reset(&mut self) {
        self.step = Step { states: vec![UnitState::default(); self.units.len()], ..Step::default() };
    }
}

impl Step {
    /// Forgets the passes of root forwards whose graphs were dropped without a backward.
    fn forget_ended_graphs(&mut self) {
        let mut ended = self.roots.extract_if(.., |root| !(root.exists)()).map(|root| root.passes).peekable();
        if ended.peek().is_some() {
            // Both are in ascending order, apart from units inside others.
            let ended: Vec<_> = ended.collect();
            let is_over = |pass: &Pass| {
                let at = ended.partition_point(|passes| *passes.end() < pass.pass);
                ended.get(at).is_some_and(|passes| passes.contains(&pass.pass))
            };
            self.passes.retain(|pass| !is_over(pass));
        }
    }
}

/// Forward.
impl Order {
    /// Begins the forward of a called unit. It is the root's if no other forward runs. A root's forward reshards the
    /// units that an earlier forward left unsharded by a prefetch, and those that `may_be_stale`.
    pub(crate) fn pre_forward(
        &mut self,
        unit: usize,
        graph: bool,
        may_be_stale: impl Fn(usize) -> bool,
    ) -> Result<(Forward, Vec<Action>), OrderError> {
        if self.units[unit].holds > 0 {
            return Err(OrderError::Held);
        }
        let step = &mut self.step;
        if step.backward.is_some() {
            return Err(OrderError::InBackward);
        }
        let is_root = step.frames.is_empty();
        let mut actions = vec![];
        if is_root {
            if std::mem::take(&mut step.is_over) {
                step.passes.clear();
                step.roots.clear();
                step.recomputations.clear();
                step.states.iter_mut().for_each(|state| state.recorded = None);
            }
            if !step.forward_order.is_empty() {
                step.last_forward_order = std::mem::take(&mut step.forward_order);
            }
            for (unit, state) in step.states.iter_mut().enumerate() {
                state.parts_run = 0;
                let stays = self.units[unit].holds > 0 || (state.kept || state.by_hand) && !may_be_stale(unit);
                if state.left_by_forward && !stays {
                    state.forget_values();
                    actions.push(Action::Reshard(unit));
                }
            }
        }
        self.end_uses_beside(Some(unit), &mut actions);
        let pass = self.begin(unit, graph, &mut actions);
        self.step.frames.push(Frame { unit, pass, graph, begun_by: BegunBy::Call { next: 0 } });
        Ok((Forward { is_root, pass, graph }, actions))
    }

    /// Ends the forward of a called unit. `parts` is the number of modules that make up the unit. Also returns whether
    /// the outputs need a pre-backward hook.
    pub(crate) fn post_forward(&mut self, unit: usize, forward: Forward, parts: usize) -> (bool, Vec<Action>) {
        let mut actions = vec![];
        self.begin_uses_up_to(unit, None, forward.graph, &mut actions);
        self.end_uses_beside(None, &mut actions);
        self.record_pass(unit, forward.pass, forward.graph);
        let state = &mut self.step.states[unit];
        state.parts_run += 1;
        if state.parts_run < parts {
            return (forward.graph, actions);
        }
        state.parts_run = 0;
        let reshard = self.reshard_after_forward(unit, forward.is_root, forward.graph);
        // `root_pre_backward` unshards a root that keeps its parameters, so it needs no hook.
        let hook = forward.graph && (reshard.is_some() || !forward.is_root);
        if forward.graph && !hook {
            self.step.unhooked.insert(unit);
        }
        actions.extend(reshard);
        (hook, actions)
    }

    /// Leaves the forward of a called unit, which has ended or failed. Called once the outputs have their hooks.
    /// `exists` returns whether the graph of the outputs exists, if that can be told.
    pub(crate) fn end_forward(&mut self, forward: Forward, exists: Option<GraphExists>) {
        let step = &mut self.step;
        if let Some(exists) = exists.filter(|_| forward.is_root && forward.graph) {
            step.roots.push(RootForward { passes: forward.pass..=step.forwards_begun, exists });
        }
        while step.frames.pop().is_some_and(|frame| frame.is_use()) {}
        let passes = if forward.graph { &mut step.passes[..] } else { &mut [] };
        if let Some(pass) = passes.iter_mut().rev().find(|pass| pass.pass == forward.pass) {
            pass.nodes.end = next_number();
        }
    }

    /// Records a checkpointed closure that made the nodes numbered `made`. It runs again when backward comes to `node`.
    pub(crate) fn add_recomputation(&mut self, made: Range<usize>, node: usize) {
        let recomputations = &mut self.step.recomputations;
        if recomputations.len() == MOST_PASSES {
            recomputations.drain(..MOST_PASSES / 2);
        }
        recomputations.push(Recomputation { made, node });
    }

    /// Handles the use of a parameter of a unit by name, before a layer reads it. `misses` tells whether the layer
    /// needs values that are sharded.
    pub(crate) fn pre_use(&mut self, unit: usize, graph: bool, misses: bool) -> Result<Vec<Action>, OrderError> {
        if let Some(backward) = &self.step.backward {
            return match (backward.units[unit].entered, misses && self.is_planned()) {
                (false, _) => self.pre_backward(unit, None),
                (true, true) => self.enter_next_visit(unit),
                (true, false) => Ok(vec![]),
            };
        }
        let frames = &mut self.step.frames;
        let running = frames.iter_mut().rev().find(|frame| frame.unit == unit);
        let is_running = running.map(|frame| frame.graph |= graph).is_some();
        let mut actions = vec![];
        // Outside any forward, a use does not unshard.
        if frames.is_empty() || is_running {
            return Ok(actions);
        }
        match self.units[unit].by_name_in.filter(|_| self.settings.fixed_order) {
            Some(called) => self.begin_uses_up_to(called, Some(unit), graph, &mut actions),
            None => self.begin_use(unit, graph, &mut actions),
        }
        Ok(actions)
    }

    /// Begins the units by name inside `called` that come next, up to `last` or all of them, whether this rank uses
    /// them or not. If none of them is left, or units have no fixed order, begins `last` alone.
    fn begin_uses_up_to(&mut self, called: usize, last: Option<usize>, graph: bool, actions: &mut Vec<Action>) {
        let end = last.map_or(self.units.len(), |last| last + 1);
        let next = self.step.frames.iter_mut().rev().find_map(|frame| match &mut frame.begun_by {
            BegunBy::Call { next } if frame.unit == called => Some(next),
            _ => None,
        });
        let first = match next {
            Some(next) if self.settings.fixed_order => {
                let first = *next;
                *next = end.max(first);
                first
            }
            _ => end,
        };
        let due: Vec<usize> = (first..end).filter(|&unit| self.units[unit].by_name_in == Some(called)).collect();
        for &unit in &due {
            self.begin_use(unit, graph, actions);
        }
        if let (Some(again), true) = (last, due.is_empty()) {
            self.begin_use(again, graph, actions);
        }
    }

    /// Begins the forward of a unit by name.
    fn begin_use(&mut self, unit: usize, graph: bool, actions: &mut Vec<Action>) {
        self.end_uses_beside(Some(unit), actions);
        let pass = self.begin(unit, graph, actions);
        self.step.frames.push(Frame { unit, pass, graph, begun_by: BegunBy::Use });
    }

    /// Ends the forwards of units by name that do not enclose `unit`.
    fn end_uses_beside(&mut self, unit: Option<usize>, actions: &mut Vec<Action>) {
        let enclosing = unit.map_or(&[][..], |unit| self.units[unit].enclosing.as_slice());
        let mut ended = vec![];
        while let Some(frame) = self.step.frames.pop_if(|frame| frame.is_use() && !enclosing.contains(&frame.unit)) {
            ended.push(frame);
        }
        for Frame { unit, pass, graph, .. } in ended {
            self.record_pass(unit, pass, graph);
            actions.extend(self.reshard_after_forward(unit, false, graph));
        }
    }

    /// Begins the forward of any unit. Returns its pass.
    fn begin(&mut self, unit: usize, graph: bool, actions: &mut Vec<Action>) -> usize {
        let step = &mut self.step;
        step.forwards_begun += 1;
        let position = step.forward_order.len();
        step.forward_order.push(unit);
        let last = &step.last_forward_order;
        let as_last_time = last.get(position) == Some(&unit);
        let followed = last.get(position + 1).copied().filter(|_| as_last_time);
        let state = &mut step.states[unit];
        state.ran_forward |= graph;
        if state.parts_run == 0 {
            (state.pass, state.from) = (step.forwards_begun, next_number());
            // New anchors tell when backward is done with the pass.
            let again = state.recorded.map(|_| state.pass);
            if graph && again != std::mem::replace(&mut state.anchors_of, again) {
                actions.push(Action::BeginPass { unit, pass: again });
            }
        }
        let pass = state.pass;
        actions.extend([Action::Unshard(unit), Action::WaitForUnshard(unit)]);
        let prefetched = prefetched(&self.units[unit].settings.forward_prefetch, &followed, self.settings);
        step.states[unit].left_by_forward = true;
        for &unit in prefetched {
            step.states[unit].left_by_forward = true;
            actions.push(Action::Unshard(unit));
        }
        pass
    }

    /// Records a forward that has ended.
    fn record_pass(&mut self, unit: usize, pass: usize, graph: bool) {
        let step = &mut self.step;
        step.states[unit].left_by_forward = true;
        if !graph {
            return; // backward does not come to it
        }
        // Among the modules of one unit, the last one counts.
        if step.states[unit].recorded.replace(pass) == Some(pass)
            && let Some(before) = step.passes.iter().rposition(|other| other.pass == pass)
        {
            step.passes.remove(before);
        }
        if step.passes.len() == step.passes.capacity() {
            step.forget_ended_graphs();
        }
        if step.passes.len() == MOST_PASSES {
            step.passes.drain(..MOST_PASSES / 2);
        }
        let nodes = step.states[unit].from..next_number();
        step.passes.push(Pass { unit, pass, ended: step.forwards_begun, nodes });
    }

    fn reshard_after_forward(&mut self, unit: usize, is_root: bool, graph: bool) -> Option<Action> {
        let state = &mut self.step.states[unit];
        let action = match self.units[unit].settings.reshard_after_forward {
            // Units that the user unsharded by hand stay.
            _ if !graph => (!state.by_hand).then_some(Action::Reshard(unit)),
            ReshardAfterForward::Never => None,
            ReshardAfterForward::Default if is_root => None,
            ReshardAfterForward::Default | ReshardAfterForward::Always => Some(Action::Reshard(unit)),
            ReshardAfterForward::To(ranks) => Some(Action::ReshardTo { unit, ranks }),
        };
        state.kept = action.is_none();
        state.by_hand &= state.kept;
        action
    }
}

/// Backward.
impl Order {
    /// Begins a backward. `params` returns the numbers of a unit's parameters.
    pub(crate) fn begin_backward(&mut self, params: impl Fn(usize) -> ParamCounts) -> Result<(), OrderError> {
        let step = &mut self.step;
        if step.backward.is_some() {
            return Err(OrderError::InBackward);
        }
        if !step.frames.is_empty() {
            return Err(OrderError::InForward);
        }
        step.is_over = true;
        let progress = |unit| BackwardProgress { params: params(unit), ..BackwardProgress::default() };
        step.backward = Some(Backward { units: (0..self.units.len()).map(progress).collect(), plan: None });
        Ok(())
    }

    /// Prepares Candle's backward. Returns the unit that it comes to first, and the actions that unshard this unit and
    /// all units whose outputs have no hook.
    pub(crate) fn root_pre_backward(&mut self) -> (Option<usize>, Vec<Action>) {
        let Some(backward) = &self.step.backward else { return (None, vec![]) };
        let first = match &backward.plan {
            Some(plan) => plan.first(),
            None => self.step.passes.last().map(|pass| pass.unit),
        };
        // These units are known, so the order accepts them.
        let mut actions = first.map_or(vec![], |unit| self.pre_backward(unit, None).unwrap_or_default());
        for unit in self.step.unhooked.clone() {
            match self.is_planned() {
                true if !self.has_visit(unit) => {}
                true => actions.extend(self.pre_backward(unit, None).unwrap_or_default()),
                false => actions.extend([Action::Unshard(unit), Action::WaitForUnshard(unit)]),
            }
        }
        (first, actions)
    }

    /// Enters a unit in backward. `pass` is known for a called unit.
    pub(crate) fn pre_backward(&mut self, unit: usize, pass: Option<usize>) -> Result<Vec<Action>, OrderError> {
        if self.is_planned() {
            return self.enter_visit(unit, pass);
        }
        let Some(backward) = &mut self.step.backward else { return Err(OrderError::NoBackward) };
        let mut actions = vec![];
        let passes = &self.step.passes;
        let position = passes.iter().position(|pass| pass.unit == unit);
        if let Some(position) = position {
            // Backward is done with the units that ran after this one. If such a unit still waits for gradients, its
            // parameters are unused: it is reduced now rather than at the end.
            for later in passes.iter().rev().filter(|later| later.pass > passes[position].ended) {
                let progress = &mut backward.units[later.unit];
                if progress.complete > 0 && !progress.reduced {
                    progress.reduced = true;
                    actions.push(Action::Reduce(later.unit));
                }
            }
            // Frozen parameters of units by name have no hook: they are freed when backward comes to an earlier unit.
            for later in passes.iter().filter(|later| later.pass > passes[position].ended) {
                let info = &self.units[later.unit];
                let progress = &mut backward.units[later.unit];
                let has_frozen = progress.params.frozen > 0;
                let frees = info.by_name_in.is_some() && has_frozen && info.settings.reshard_after_backward;
                if frees && std::mem::take(&mut progress.entered) {
                    actions.push(Action::ReshardFrozen(later.unit));
                }
            }
        }
        backward.units[unit].entered = true;
        backward.units[unit].seen = true;
        if self.units[unit].settings.unshard_in_backward {
            actions.extend([Action::Unshard(unit), Action::WaitForUnshard(unit)]);
        }
        let preceded = position.and_then(|position| position.checked_sub(1)).map(|before| passes[before].unit);
        let prefetched = prefetched(&self.units[unit].settings.backward_prefetch, &preceded, self.settings);
        for &unit in prefetched.iter().filter(|&&unit| self.units[unit].settings.unshard_in_backward) {
            // Backward may enter a unit by name before its enclosing unit: its freed parameters are not needed again.
            if self.units[unit].by_name_in.is_none() || !backward.units[unit].seen {
                actions.push(Action::Unshard(unit));
            }
        }
        Ok(actions)
    }

    /// Leaves a unit in backward: everything between its inputs and outputs is done.
    pub(crate) fn post_backward(&self, unit: usize) -> Option<Action> {
        // Frozen parameters have no hook of their own. A plan has the end of each visit.
        (self.units[unit].settings.reshard_after_backward && !self.is_planned()).then_some(Action::ReshardFrozen(unit))
    }

    /// Records that the gradient of a parameter is complete. Also returns whether its values are not needed again.
    pub(crate) fn post_accumulate_grad(
        &mut self,
        unit: usize,
        position: usize,
    ) -> Result<(bool, Vec<Action>), OrderError> {
        let Some(backward) = &mut self.step.backward else { return Err(OrderError::NoBackward) };
        let mut actions = vec![];
        if self.units[unit].settings.reshard_after_backward {
            actions.push(Action::ReshardParam { unit, position });
        }
        if backward.plan.is_some() {
            return Ok((false, actions));
        }
        let progress = &mut backward.units[unit];
        progress.complete += 1;
        progress.reduced = progress.complete == progress.params.trainable;
        if progress.reduced {
            actions.push(Action::Reduce(unit));
        }
        Ok((true, actions))
    }

    /// Finishes after Candle's backward: reduces and reshards what is left.
    pub(crate) fn root_post_backward(&mut self) -> Vec<Action> {
        let mut actions = self.finish_plan();
        let Some(backward) = &mut self.step.backward else { return actions };
        let planned = backward.plan.as_ref().filter(|_| self.settings.fixed_order);
        for unit in 0..backward.units.len() {
            // Gradients that are missing now belong to unused parameters, or to parameters behind a cut in the graph.
            let is_left = match planned {
                Some(plan) => backward.units[unit].params.trainable > 0 && !plan.has(unit),
                None => !backward.units[unit].reduced,
            };
            if is_left {
                actions.push(Action::Reduce(unit));
            }
            let state = &mut self.step.states[unit];
            state.left_by_forward = false;
            state.parts_run = 0;
            if self.units[unit].settings.reshard_after_backward && self.units[unit].holds == 0 {
                state.forget_values();
                actions.push(Action::Reshard(unit));
            }
        }
        actions
    }

    /// Leaves a backward, which has ended or failed.
    pub(crate) fn end_backward(&mut self) {
        self.step.backward = None;
    }
}

/// Returns the units to prefetch: the unit's own list, or else the one that the last iteration implies.
fn prefetched<'a>(listed: &'a [usize], implied: &'a Option<usize>, settings: ModelSettings) -> &'a [usize] {
    if listed.is_empty() && settings.implicit_prefetch { implied.as_slice() } else { listed }
}
