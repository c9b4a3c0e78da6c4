//! Silent cuts of the graph: operations without a backward, as far as they show at the border of a unit.
//!
//! Candle tells neither which operation made a tensor nor what it read, and a result without backward looks like a
//! constant. What can be had are the nodes that lead from a unit's outputs to variables, in order and with their
//! values. They are looked at when a unit's forward ends, while its parameters are gathered, and until the unit has
//! been through a backward: after that a step costs nothing more.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{Result, Tensor};

use super::cut::GraphCut;
use super::evidence::{Call, Seen};
use crate::activation_checkpoint::checkpoints;
use crate::autograd::next_number;
use crate::fsdp::ParamGroup;
use crate::tensors::Tensors;

/// How many calls of a unit are looked at when no backward comes.
const MOST_CALLS: usize = 8;

fn has_graph(tensor: &Tensor) -> bool {
    tensor.track_op() && tensor.dtype().is_float()
}

/// The units that are watched, and what was seen.
#[derive(Default)]
pub(crate) struct GraphWatch(Mutex<State>);

#[derive(Default)]
struct State {
    /// The calls that run, the innermost last.
    open: Vec<Call>,
    /// How many calls of each unit have been looked at.
    calls: HashMap<usize, usize>,
    /// Units that have been through a backward.
    done: HashSet<usize>,
    found: Vec<(usize, GraphCut)>,
    /// Those of units that are done.
    told: Vec<GraphCut>,
}

impl GraphWatch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn is_watched(&self, unit: usize) -> bool {
        let state = self.state();
        !state.done.contains(&unit) && state.calls.get(&unit).is_none_or(|&calls| calls < MOST_CALLS)
    }

    /// Begins to watch a call of a unit, if it is still watched.
    pub(crate) fn begin(&self, unit: &Arc<ParamGroup>, inputs: Vec<Tensor>) -> Result<Option<WatchedCall<'_>>> {
        if !self.is_watched(unit.index()) {
            return Ok(None);
        }
        let begin = next_number();
        let mut state = self.state();
        *state.calls.entry(unit.index()).or_default() += 1;
        state.open.push(Call {
            begin,
            inputs,
            inner: vec![],
            detached: vec![],
            is_cut_inside: false,
            checkpoints: checkpoints(),
        });
        Ok(Some(WatchedCall { watch: self, unit: unit.clone(), depth: state.open.len() }))
    }

    /// Notes that a unit has been through a backward. Returns what is new of what was seen in it.
    pub(crate) fn pass(&self, unit: usize) -> Vec<GraphCut> {
        let mut state = self.state();
        if !state.done.insert(unit) {
            return vec![];
        }
        let found = std::mem::take(&mut state.found);
        let (new, rest): (Vec<_>, Vec<_>) = found.into_iter().partition(|(other, _)| *other == unit);
        state.found = rest;
        let known = |cut: &GraphCut| state.told.iter().any(|told| told.unit == cut.unit && told.cut == cut.cut);
        let new: Vec<GraphCut> = new.into_iter().map(|(_, cut)| cut).filter(|cut| !known(cut)).collect();
        state.told.extend(new.iter().cloned());
        new
    }

    /// Looks at a unit as if it had not been through a backward: other parameters of it are trained now.
    pub(crate) fn watch_again(&self, unit: usize) {
        let mut state = self.state();
        state.done.remove(&unit);
        state.calls.remove(&unit);
    }

    /// What has been told so far.
    pub(crate) fn told(&self) -> Vec<GraphCut> {
        self.state().told.clone()
    }
}

/// A call that is watched. Dropped before its end, it failed.
pub(crate) struct WatchedCall<'a> {
    watch: &'a GraphWatch,
    unit: Arc<ParamGroup>,
    depth: usize,
}

impl WatchedCall<'_> {
    /// Looks at what the call returned, while the unit's parameters are gathered.
    pub(crate) fn end<O: Tensors>(self, outputs: O) -> Result<O> {
        let call = self.watch.state().open.pop();
        let mut returned = vec![];
        let outputs = outputs.map_tensors(&mut |tensor| {
            returned.push(tensor.clone());
            Ok(tensor)
        })?;
        let Some(call) = call else { return Ok(outputs) };
        // A look never fails what is looked at.
        let cuts = Seen { unit: &self.unit, call: &call }.cuts(&returned).unwrap_or_else(|error| {
            tracing::debug!(unit = self.unit.name(), %error, "no look at the graph");
            vec![]
        });
        let mut state = self.watch.state();
        if let Some(outer) = state.open.last_mut() {
            let (with, _): (Vec<_>, Vec<_>) = returned.into_iter().partition(has_graph);
            let (_, without): (Vec<_>, Vec<_>) = call.inputs.into_iter().partition(has_graph);
            outer.inner.extend(with);
            outer.detached.extend(without);
            outer.is_cut_inside |= call.is_cut_inside || !cuts.is_empty();
        }
        for cut in cuts {
            let known = |(_, other): &(usize, GraphCut)| other.unit == cut.unit && other.cut == cut.cut;
            if !state.found.iter().any(known) {
                state.found.push((self.unit.index(), cut));
            }
        }
        drop(state);
        Ok(outputs)
    }
}

impl Drop for WatchedCall<'_> {
    fn drop(&mut self) {
        self.watch.state().open.truncate(self.depth - 1);
    }
}
