//! Reports of gradients that are missing or wrong because forward left the graph.
//!
//! Candle does not tell which operation made a tensor or what it read, and the result of an operation without backward
//! looks like a constant. The graph from a unit's outputs to variables is available, and the values are recorded. It is
//! inspected when a unit's forward ends, while its parameters are gathered, until the unit has been through a backward.
//! Later steps cost nothing.

mod evidence;
mod norm;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use candle_core::{Result, Tensor, TensorId};
use parking_lot::Mutex;

use super::listed::listed;
use super::param_group::FsdpParamGroup;
use crate::autograd::{checkpoints, next_number, offloads};
use crate::graph::RecordedOutputs;
use crate::tensors::{Tensors, with_tensors};
use crate::warning::warn;
use evidence::{Call, Inspection};

/// A place where forward left the graph. The gradients of everything before it are wrong or missing.
///
/// The first iteration of each unit detects:
///
/// - `candle_nn`'s fused norms ([`GraphCutKind::Norm`]), if their input or their unit's input is in the graph and a
///   trainable matrix, or the unit's output, uses the result;
/// - a unit whose outputs do not lead back to its inputs ([`GraphCutKind::Input`]) or to the results of the units
///   inside it ([`GraphCutKind::Units`]);
/// - a unit whose input has a graph that its weights do not meet ([`GraphCutKind::Weights`]).
///
/// Not detected: `softmax_last_dim`, `rotary_emb` and other operations without backward beside a residual path to the
/// input; anything inside a checkpointed closure; [`GraphCutKind::Input`] and [`GraphCutKind::Weights`] in units called
/// by [`FsdpModule::call`](crate::FsdpModule::call), whose inputs are unknown; a cut after a unit with offloaded
/// activations, except after the last such unit. The layers of [`nn`](crate::nn) do not cut the graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphCut {
    /// Unit whose forward left the graph.
    pub unit: String,
    /// Kind of the cut.
    pub cut: GraphCutKind,
    /// Trainable parameters before the cut, whose gradients are wrong or missing.
    pub before: Vec<String>,
}

/// The kind of a [`GraphCut`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GraphCutKind {
    /// A fused norm of `candle_nn` was applied to a tensor with a graph.
    Norm {
        /// Path of the layer; several paths if their weights are equal.
        layers: Vec<String>,
        /// `RmsNorm` or `LayerNorm`.
        kind: &'static str,
    },
    /// The unit's input has a graph, but its outputs do not lead back to it.
    Input,
    /// The results of units inside it have a graph, but its outputs do not lead back to them.
    Units,
    /// The unit's input has a graph, but the inputs of these weights have none.
    Weights(Vec<String>),
}

impl fmt::Display for GraphCut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unit `{}`: ", self.unit)?;
        match &self.cut {
            GraphCutKind::Norm { layers, kind } => {
                write!(f, "`{}` is candle_nn's {kind}, which has no backward", layers.join("` or `"))
            }
            GraphCutKind::Input => f.write_str("its input has a graph, but its output does not lead back to it"),
            GraphCutKind::Units => {
                f.write_str("units inside it return a graph, but its output does not lead back to it")
            }
            GraphCutKind::Weights(names) => {
                write!(f, "its input has a graph, but the inputs of these weights have none: {}", listed(names))
            }
        }
    }
}

/// Number of calls of a unit that are inspected without a backward.
const MAX_CALLS: usize = 8;

fn has_graph(tensor: &Tensor) -> bool {
    tensor.track_op() && tensor.dtype().is_float()
}

/// The inspected units and the cuts found.
#[derive(Default)]
pub(crate) struct GraphWatch(Mutex<State>);

#[derive(Default)]
struct State {
    /// Running calls, the innermost last.
    open: Vec<Call>,
    /// Number of inspected calls of each unit.
    calls: HashMap<usize, usize>,
    /// Units that have been through a backward.
    done: HashSet<usize>,
    found: Vec<(usize, GraphCut)>,
    /// Reported cuts.
    told: Vec<GraphCut>,
}

impl GraphWatch {
    pub(crate) fn is_watched(&self, unit: usize) -> bool {
        let state = self.0.lock();
        !state.done.contains(&unit) && state.calls.get(&unit).is_none_or(|&calls| calls < MAX_CALLS)
    }

    /// Starts to inspect a call of a unit, if the unit is still inspected.
    pub(crate) fn begin(&self, unit: &Arc<FsdpParamGroup>, inputs: Vec<Tensor>) -> Result<Option<WatchedCall<'_>>> {
        if !self.is_watched(unit.index()) {
            return Ok(None);
        }
        let begin = next_number();
        let mut state = self.0.lock();
        *state.calls.entry(unit.index()).or_default() += 1;
        state.open.push(Call {
            begin,
            inputs,
            inner: vec![],
            detached: vec![],
            is_cut_inside: false,
            checkpoints: checkpoints(),
            offloads: offloads(),
        });
        let recorded = RecordedOutputs::begin();
        Ok(Some(WatchedCall { watch: self, unit: unit.clone(), depth: state.open.len(), recorded: Some(recorded) }))
    }

    /// Records that a unit has been through a backward. Returns new cuts in it.
    pub(crate) fn pass(&self, unit: usize) -> Vec<GraphCut> {
        let mut state = self.0.lock();
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

    /// Notes an inspected call's outputs for the call around it. These have hooks, and the next unit keeps their memory
    /// in any case.
    pub(crate) fn note_returned<O: Tensors>(&self, outputs: O) -> Result<O> {
        let (outputs, returned) = with_tensors(outputs)?;
        if let Some(outer) = self.0.lock().open.last_mut() {
            outer.inner.extend(returned.into_iter().filter(has_graph));
        }
        Ok(outputs)
    }

    /// Inspects a unit again, because other parameters of it are trained now.
    pub(crate) fn watch_again(&self, unit: usize) {
        let mut state = self.0.lock();
        state.done.remove(&unit);
        state.calls.remove(&unit);
    }

    /// Returns the cuts reported so far.
    pub(crate) fn reported_cuts(&self) -> Vec<GraphCut> {
        self.0.lock().told.clone()
    }
}

/// An inspected call. If it is dropped before its end, the call failed.
pub(crate) struct WatchedCall<'a> {
    watch: &'a GraphWatch,
    unit: Arc<FsdpParamGroup>,
    depth: usize,
    recorded: Option<RecordedOutputs>,
}

impl WatchedCall<'_> {
    /// Inspects the outputs of the call, while the unit's parameters are gathered.
    pub(crate) fn end<O: Tensors>(mut self, outputs: O) -> Result<O> {
        let call = self.watch.0.lock().open.pop();
        let (outputs, returned) = with_tensors(outputs)?;
        let Some(call) = call else { return Ok(outputs) };
        // An inspection error does not fail the call.
        let made = self.recorded.take().map(RecordedOutputs::end).unwrap_or_default();
        let cuts = Inspection { unit: &self.unit, call: &call, made }.cuts(&returned).unwrap_or_else(|error| {
            tracing::debug!(unit = self.unit.name(), %error, "cannot inspect the graph");
            vec![]
        });
        let mut state = self.watch.0.lock();
        if let Some(outer) = state.open.last_mut() {
            if call.offloads != offloads() {
                // Results of earlier units must not stay in memory.
                outer.inner.clear();
            }
            outer.detached.extend(call.inputs.into_iter().filter(|input| !has_graph(input)));
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
        self.watch.0.lock().open.truncate(self.depth - 1);
    }
}

/// Number of variables that are remembered.
const MAX_VARIABLES: usize = 1 << 12;

/// Variables that losses lead to and that are not parameters of the map.
#[derive(Default)]
struct Variables {
    passed_over: HashSet<TensorId>,
    seen: HashSet<TensorId>,
    told: bool,
}

/// The diagnostics of one model.
pub(crate) struct Diagnostics {
    /// Detects cuts of the graph.
    pub(crate) graph: GraphWatch,
    reported: Mutex<HashSet<String>>,
    /// Parameters that the last backward did not reach on any rank.
    pub(crate) unused: Mutex<Vec<String>>,
    variables: Mutex<Variables>,
    /// This process's rank in the mesh. Rank 0 reports for all.
    rank: usize,
}

impl Diagnostics {
    /// Returns the rank.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn of_rank(rank: usize) -> Self {
        Diagnostics {
            graph: GraphWatch::default(),
            reported: Mutex::default(),
            unused: Mutex::default(),
            variables: Mutex::default(),
            rank,
        }
    }

    /// Reports each problem once, on rank 0, because all ranks run the same units. If ranks may run different units,
    /// every rank reports.
    pub(crate) fn report(&self, without_gradient: Vec<String>, cuts: &[GraphCut], ranks_may_differ: bool) {
        let new: Vec<String> = {
            let mut reported = self.reported.lock();
            without_gradient.into_iter().filter(|name| reported.insert(name.clone())).collect()
        };
        let Some(message) = message(&new, cuts) else { return };
        if ranks_may_differ { warn(&message) } else { self.warn(&message) }
    }

    /// Warns on rank 0, for all ranks.
    pub(crate) fn warn(&self, message: &str) {
        if self.rank == 0 { warn(message) } else { tracing::debug!("{message}") }
    }

    /// Warns once of variables in the graph of a loss that are not parameters of the map, given with whether each is
    /// known. `ranks` train copies of the model. A variable is a parameter only if a second loss leads to it: an input
    /// whose gradient is wanted is usually a new one in each step.
    pub(crate) fn note_variables(&self, variables: &[&Tensor], ranks: usize) {
        let message = {
            let mut noted = self.variables.lock();
            let is_new = |variable: &&&Tensor| !noted.passed_over.contains(&variable.id());
            let found: Vec<&Tensor> = variables.iter().filter(is_new).copied().collect();
            if ranks < 2 || noted.told || found.is_empty() {
                return;
            }
            let again = found.iter().find(|variable| noted.seen.contains(&variable.id())).copied();
            if noted.seen.len() + found.len() > MAX_VARIABLES {
                noted.seen.clear();
            }
            noted.seen.extend(found.iter().map(|variable| variable.id()));
            let Some(again) = again else { return };
            noted.told = true;
            format!(
                "the loss leads to a variable of shape {:?}, {:?}, that did not come from the builder: backward does not \
                 reduce its gradient, so its values will differ between the {ranks} ranks. Get it from the builder in \
                 the closure of shard or fully_shard (`vb.get(shape, name)`), or average its gradient over the ranks \
                 (`World::group`, `ProcessGroup::all_reduce`). An input of the model may be such a variable",
                again.dims(),
                again.dtype()
            )
        };
        self.warn(&message);
    }

    /// Records a variable that stays whole on purpose: an ignored parameter or a buffer.
    pub(crate) fn pass_over(&self, variable: TensorId) {
        self.variables.lock().passed_over.insert(variable);
    }

    /// Returns the names reported so far, sorted.
    pub(crate) fn without_gradient(&self) -> Vec<String> {
        let mut names: Vec<String> = self.reported.lock().iter().cloned().collect();
        names.sort();
        names
    }
}

/// Returns the warning about missing or wrong gradients, if any.
fn message(without_gradient: &[String], cuts: &[GraphCut]) -> Option<String> {
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
        text += &format!("\n  - wrong for the {} parameters before these: {}", before.len(), listed(&before));
    }
    if !without_gradient.is_empty() {
        text += &format!(
            "\n  - these trainable parameters were used in forward and got no gradient: {}. Either they do not reach \
             the loss, or a layer cut the graph, and the gradients of everything before it are wrong too",
            listed(without_gradient)
        );
    }
    text += "\n  candle_nn's LayerNorm, RmsNorm, softmax_last_dim and rotary_emb have no backward: use those of \
             fsdp_candle::nn. (Tensors that were detached on purpose are fine.)";
    Some(text)
}

/// Returns whether an error of Candle is about a sharded parameter and is not explained yet.
pub(crate) fn is_freed_storage_error(error: &candle_core::Error) -> bool {
    let text = error.to_string();
    let names_it = text.split(|c: char| !c.is_alphanumeric()).any(|word| word == "F4");
    // Fused norms name the dtype of their input instead of the weight's.
    let norm = ["F32", "F16", "BF16"].map(|dtype| format!("unsupported dtype for rmsnorm {dtype}"));
    let norm = norm.iter().any(|words| text.contains(words));
    (names_it || norm) && !text.contains("FSDP unit")
}
