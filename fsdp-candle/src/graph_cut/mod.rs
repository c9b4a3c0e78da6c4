//! Silent cuts of the graph: operations without a backward, as far as they show at the border of a unit.
//!
//! Candle tells neither which operation made a tensor nor what it read, and a result without backward looks like a
//! constant. What can be had are the nodes that lead from a unit's outputs to variables, in order and with their
//! values. They are looked at when a unit's forward ends, while its parameters are gathered, and until the unit has
//! been through a backward: after that a step costs nothing more.

mod evidence;
mod norm;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{DType, Device, Result, Tensor};

use crate::activation_checkpoint::checkpoints;
use crate::frozen_call::number;
use crate::group::ParamGroup;
use crate::tensors::Tensors;
use evidence::Seen;

/// How many calls of a unit are looked at when no backward comes.
const MOST_CALLS: usize = 8;
/// How many names a report spells out.
const MOST_NAMES: usize = 8;

/// A place where forward left the graph: gradients of what comes before are wrong, or there are none.
///
/// What is seen, in the first iteration of each unit: `candle_nn`'s fused norms ([`Cut::Norm`]), where what they
/// normalise or their unit's input is still in the graph and a trainable matrix, or the unit's output, takes the
/// result; a unit whose outputs do not lead back to its inputs ([`Cut::Input`]) or to what the units inside it returned
/// ([`Cut::Units`]); a unit whose input has a graph and whose weights met none of it ([`Cut::Weights`]).
///
/// What is not seen: `softmax_last_dim`, `rotary_emb` and operations of others without backward, where another way
/// around them leads to the input (a residual); anything inside a checkpointed closure; [`Cut::Input`] and
/// [`Cut::Weights`] in units called by [`FsdpModule::call`](crate::FsdpModule::call), whose inputs nobody knows. The
/// layers of [`nn`](crate::nn) cut nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphCut {
    /// The unit in whose forward it was.
    pub unit: String,
    /// What was seen.
    pub cut: Cut,
    /// The trainable parameters before it: their gradients are wrong or missing.
    pub before: Vec<String>,
}

/// What was seen of a cut.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cut {
    /// A fused norm of `candle_nn` was applied to a tensor with a graph.
    Norm {
        /// The layer's path. Several, of which it is one, where their weights are the same.
        layers: Vec<String>,
        /// `RmsNorm` or `LayerNorm`.
        kind: &'static str,
    },
    /// The unit's input has a graph, and its outputs do not lead back to it.
    Input,
    /// What units inside it returned has a graph, and its outputs do not lead back to any of it.
    Units,
    /// The unit's input has a graph, and what these weights were applied to has none.
    Weights(Vec<String>),
}

impl fmt::Display for GraphCut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unit `{}`: ", self.unit)?;
        match &self.cut {
            Cut::Norm { layers, kind } => {
                write!(f, "`{}` is candle_nn's {kind}, which has no backward", layers.join("` or `"))
            }
            Cut::Input => f.write_str("its input has a graph, and its output does not lead back to it"),
            Cut::Units => {
                f.write_str("what units inside it returned has a graph, and its output does not lead back to it")
            }
            Cut::Weights(names) => {
                write!(f, "its input has a graph, and what these weights were applied to has none: {}", listed(names))
            }
        }
    }
}

/// Names for people: the first few, and how many more there are.
fn listed(names: &[String]) -> String {
    let shown: Vec<String> = names.iter().take(MOST_NAMES).map(|name| format!("`{name}`")).collect();
    match names.len().saturating_sub(MOST_NAMES) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// What a program's author is told about gradients that are missing or wrong, if any are.
pub(crate) fn report(without_gradient: &[String], cuts: &[GraphCut]) -> Option<String> {
    if without_gradient.is_empty() && cuts.is_empty() {
        return None;
    }
    let mut text = String::from("gradients are missing or wrong:");
    for cut in cuts {
        text += &format!("\n  - {cut}");
    }
    let mut before: Vec<String> = cuts.iter().flat_map(|cut| cut.before.clone()).collect();
    before.sort();
    before.dedup();
    if !before.is_empty() {
        text += &format!("\n  - wrong for what comes before these, {} parameters: {}", before.len(), listed(&before));
    }
    if !without_gradient.is_empty() {
        text += &format!(
            "\n  - these trainable parameters took part in forward and got no gradient: {}. Either they do not reach the \
             loss, or a layer cut the graph, and then the gradients of everything before it are wrong too",
            listed(without_gradient)
        );
    }
    text += "\n  candle_nn's LayerNorm, RmsNorm, softmax_last_dim and rotary_emb have no backward: use those of \
             fsdp_candle::nn. (What was detached on purpose is as it should be.)";
    Some(text)
}

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

/// A call of a unit that runs.
struct Call {
    /// A number smaller than those of all that the call makes.
    begin: usize,
    /// The inputs that are known.
    inputs: Vec<Tensor>,
    /// What units inside it returned with a graph, and what they were given without.
    inner: Vec<Tensor>,
    detached: Vec<Tensor>,
    /// Whether the graph was cut inside one of them.
    is_cut_inside: bool,
    /// How many closures had been checkpointed before it.
    checkpoints: usize,
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
        let begin = number(Tensor::zeros((), DType::U8, &Device::Cpu)?.id());
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
        let new: Vec<GraphCut> = new.into_iter().map(|(_, cut)| cut).collect();
        state.told.extend(new.iter().cloned());
        new
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
