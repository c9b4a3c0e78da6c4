//! Evidence of cuts in the graph of a unit's outputs.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use candle_core::{Result, Tensor, TensorId};

use super::super::param::FsdpParam;
use super::super::param_group::FsdpParamGroup;
use super::norm::{Matrix, Norm, is_itself};
use super::{GraphCut, GraphCutKind};
use crate::autograd::{BACKWARD_STACK_BYTES, checkpoints, number, on_a_stack_of};
use crate::graph::followed;

/// Bound on the walks through the graph of a call, so that the cost of a call stays linear in its operations. A unit
/// with fewer results than this is inspected completely.
const MOST_WALKS: usize = 256;
/// Bound on the uses of a matrix that are compared, on average.
const MOST_USES: usize = 16;

/// A running call of a unit.
pub(super) struct Call {
    /// A number smaller than the numbers of all tensors that the call makes.
    pub(super) begin: usize,
    /// Known inputs.
    pub(super) inputs: Vec<Tensor>,
    /// Results with a graph of units inside it.
    pub(super) inner: Vec<Tensor>,
    pub(super) detached: Vec<Tensor>,
    /// Whether the graph was cut inside one of them.
    pub(super) is_cut_inside: bool,
    /// Number of closures checkpointed before it.
    pub(super) checkpoints: usize,
    /// Number of inputs offloaded before it.
    pub(super) offloads: usize,
}

/// The inspection of a call that has just ended.
pub(super) struct Inspection<'a> {
    pub(super) unit: &'a Arc<FsdpParamGroup>,
    pub(super) call: &'a Call,
    /// Outputs of the call's operations, each by the id of the node that stands for it in the graph.
    pub(super) made: HashMap<TensorId, Tensor>,
}

/// The result of a trainable matrix for an input without a graph.
struct Use {
    matrix: Arc<FsdpParam>,
    bias: Option<Arc<FsdpParam>>,
    result: Tensor,
    /// Whether the matrix is stored as `[in, out]`.
    in_out: bool,
}

impl Use {
    fn inputs(&self) -> usize {
        self.matrix.unsharded_shape().dims()[usize::from(!self.in_out)]
    }
}

fn last(tensor: &Tensor) -> usize {
    tensor.dims().last().copied().unwrap_or(0)
}

fn rows(tensor: &Tensor) -> usize {
    tensor.elem_count() / last(tensor).max(1)
}

/// Returns the trainable parameters at the leaves of a graph, by name.
fn start_of<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Vec<String> {
    let mut names = indexmap::IndexSet::new();
    for tensor in tensors {
        let params = tensor.sorted_nodes().into_iter().filter_map(FsdpParam::of).filter(|param| param.trainable());
        names.extend(params.map(|param| param.name().to_string()));
    }
    let mut names: Vec<String> = names.into_iter().collect();
    names.sort();
    names
}

impl Inspection<'_> {
    /// Returns the cuts, while the unit's parameters are gathered.
    pub(super) fn cuts(&self, outputs: &[Tensor]) -> Result<Vec<GraphCut>> {
        // Candle visits a graph recursively.
        on_a_stack_of(BACKWARD_STACK_BYTES, "graph inspection", || self.look(outputs))?
    }

    fn look(&self, outputs: &[Tensor]) -> Result<Vec<GraphCut>> {
        let outputs: Vec<&Tensor> = outputs.iter().filter(|tensor| tensor.dtype().is_float()).collect();
        let mut known = HashSet::new();
        let nodes = outputs.iter().flat_map(|output| output.sorted_nodes()).filter(|node| known.insert(node.id()));
        let nodes: Vec<&Tensor> = nodes.collect();
        // An output of an operation stands for its token.
        let nodes: Vec<&Tensor> = (nodes.into_iter())
            .filter_map(|node| match self.made.get(&node.id()) {
                Some(output) => known.insert(output.id()).then_some(output),
                None => Some(node),
            })
            .collect();
        // A choice among experts has an operation but no gradient.
        let has_graph = |tensor: &Tensor| known.contains(&tensor.id()) || !tensor.sorted_nodes().is_empty();
        let tracked = |tensor: &&Tensor| tensor.dtype().is_float() && has_graph(tensor);
        let inputs: Vec<&Tensor> = self.call.inputs.iter().filter(tracked).collect();
        let inner: Vec<&Tensor> = self.call.inner.iter().filter(tracked).collect();
        let uses = self.uses(&nodes)?;

        let mut before: Vec<&Tensor> = nodes.iter().copied().filter(|node| node.dtype().is_float()).collect();
        before.extend(inputs.iter().chain(&inner));
        let norms = self.norms(&uses, &outputs, &before)?;
        if !norms.is_empty() {
            return Ok(norms);
        }
        let mut cut = None;
        for (from, what) in [(&inputs, GraphCutKind::Input), (&inner, GraphCutKind::Units)] {
            // A cut inside a unit is reported for that unit.
            let told = what == GraphCutKind::Units && self.call.is_cut_inside;
            if cut.is_none() && !told && self.is_lost(from, &outputs, &known, &uses)? {
                cut = Some((what, from));
            }
        }
        if cut.is_none() {
            cut = self.unmet(&uses, &nodes, &inputs, &outputs)?.map(|names| (GraphCutKind::Weights(names), &inputs));
        }
        let cut = cut.map(|(cut, from)| GraphCut {
            unit: self.unit.name().into(),
            cut,
            before: start_of(from.iter().copied()),
        });
        Ok(cut.into_iter().collect())
    }

    fn is_inside(&self, node: &Tensor) -> bool {
        number(node.id()) > self.call.begin
    }

    /// Returns the results of the unit's trainable matrices for inputs without a graph: nodes that lead only to a
    /// matrix and maybe a bias.
    fn uses(&self, nodes: &[&Tensor]) -> Result<Vec<Use>> {
        let mut uses = vec![];
        let could_be = |node: &&Tensor| {
            node.rank() >= 2 && node.is_contiguous() && node.dtype().is_float() && self.is_inside(node)
        };
        let is_matrix = |param: &&Arc<FsdpParam>| param.trainable() && param.unsharded_shape().rank() == 2;
        let matrices: Vec<_> = self.unit.params().iter().filter(is_matrix).collect();
        let has_a_width =
            |node: &&Tensor| matrices.iter().any(|matrix| matrix.unsharded_shape().dims().contains(&last(node)));
        let mut results: Vec<&Tensor> = nodes.iter().copied().filter(could_be).filter(has_a_width).collect();
        // The oldest have the shortest histories.
        results.sort_by_key(|result| number(result.id()));
        let mut budget = MOST_WALKS.saturating_mul(nodes.len());
        for result in results {
            if budget == 0 || uses.len() >= MOST_USES * matrices.len() {
                break;
            }
            // One walk for each result, for any number of matrices.
            let history = result.sorted_nodes();
            budget = budget.saturating_sub(history.len());
            #[cfg(test)]
            tests::WALKED.set(tests::WALKED.get() + history.len());
            let params: Vec<_> = history.iter().filter_map(|node| FsdpParam::of(node)).collect();
            for (position, &matrix) in matrices.iter().enumerate() {
                let &[first, second] = matrix.unsharded_shape().dims() else { continue };
                // A node of the matrix's shape is a view of it, or the matrix in another dtype.
                let fits = (last(result) == first || last(result) == second) && result.dims() != [first, second];
                let is_there = params.iter().any(|param| Arc::ptr_eq(param, matrix));
                if !(fits && is_there) {
                    continue;
                }
                if let Some(bias) = leads_only_to(result, &history, matrix) {
                    for in_out in
                        [false, true].into_iter().filter(|in_out| last(result) == [first, second][usize::from(*in_out)])
                    {
                        let (matrix, bias, result) = (matrix.clone(), bias.clone(), result.clone());
                        uses.push((position, Use { matrix, bias, result, in_out }));
                    }
                }
            }
        }
        uses.sort_by_key(|(position, _)| *position);
        Ok(uses.into_iter().map(|(_, used)| used).collect())
    }

    /// Returns the norms of inputs with a graph whose results a matrix used or the unit returned.
    fn norms(&self, uses: &[Use], outputs: &[&Tensor], before: &[&Tensor]) -> Result<Vec<GraphCut>> {
        let mut cuts: Vec<GraphCut> = vec![];
        let mut note = |cut: GraphCutKind, of: &Tensor| match cuts.iter_mut().find(|other| other.cut == cut) {
            Some(known) => known.before.extend(start_of([of])),
            None => cuts.push(GraphCut { unit: self.unit.name().into(), cut, before: start_of([of]) }),
        };
        for used in uses {
            let matrix = Matrix::of(&used.matrix, used.bias.as_deref(), used.in_out)?;
            self.find(&used.result, Some(&matrix), used.inputs(), before, &mut note)?;
        }
        for output in outputs.iter().filter(|output| !output.track_op() && output.rank() > 0) {
            self.find(output, None, last(output), before, &mut note)?;
        }
        for cut in &mut cuts {
            cut.before.sort();
            cut.before.dedup();
        }
        Ok(cuts)
    }

    /// Finds the norm of one of `before` that made `result`.
    fn find(
        &self,
        result: &Tensor,
        matrix: Option<&Matrix>,
        width: usize,
        before: &[&Tensor],
        note: &mut impl FnMut(GraphCutKind, &Tensor),
    ) -> Result<()> {
        let fits = |of: &&&Tensor| last(of) == width && rows(of) == rows(result) && of.id() != result.id();
        let norms = Norm::of_width(width, self.unit.params())?;
        if norms.is_empty() {
            return Ok(());
        }
        for of in before.iter().filter(fits) {
            if is_itself(result, of, matrix) {
                return Ok(()); // detached on purpose
            }
        }
        for of in before.iter().filter(fits) {
            let made: Vec<&Norm> = norms.iter().filter(|norm| norm.made(result, of, matrix)).collect();
            if let Some(first) = made.first() {
                let layers = made.iter().filter(|norm| norm.kind() == first.kind()).map(|norm| norm.layer.clone());
                note(GraphCutKind::Norm { layers: layers.collect(), kind: first.kind() }, of);
                return Ok(());
            }
        }
        Ok(())
    }

    /// Returns whether the unit's results do not lead back to any of `from`, and none of them was detached on purpose.
    fn is_lost(&self, from: &[&Tensor], outputs: &[&Tensor], known: &HashSet<TensorId>, uses: &[Use]) -> Result<bool> {
        let returned =
            |of: &&Tensor| outputs.iter().any(|output| of.rank() > 0 && output.dims().first() == of.dims().first());
        let used = |of: &&Tensor| !outputs.is_empty() && uses.iter().any(|used| rows(&used.result) == rows(of));
        if from.iter().any(|of| [of.id(), followed(of)].iter().any(|id| known.contains(id)))
            || !from.iter().any(|of| returned(of) || used(of))
        {
            return Ok(false);
        }
        for of in from {
            let mut without = outputs.iter().copied().chain(&self.call.detached);
            if without.any(|other| other.dims() == of.dims() && is_itself(other, of, None)) {
                return Ok(false);
            }
            for used in uses.iter().filter(|used| used.inputs() == last(of) && rows(&used.result) == rows(of)) {
                let matrix = Matrix::of(&used.matrix, used.bias.as_deref(), used.in_out)?;
                if is_itself(&used.result, of, Some(&matrix)) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Returns weights that should have met the input's graph and did not.
    fn unmet(
        &self,
        uses: &[Use],
        nodes: &[&Tensor],
        inputs: &[&Tensor],
        outputs: &[&Tensor],
    ) -> Result<Option<Vec<String>>> {
        let names = |params: &[&Arc<FsdpParam>]| params.iter().map(|param| param.name().to_string()).collect();
        for input in inputs {
            let width = last(input);
            let alike = |output: &&&Tensor| rows(output) == rows(input);
            if width < 2 || !outputs.iter().any(|output| alike(&output)) || checkpoints() != self.call.checkpoints {
                continue;
            }
            let matrices = |trainable: bool| {
                let of_width = move |param: &&Arc<FsdpParam>| {
                    param.trainable() == trainable
                        && matches!(param.unsharded_shape().dims(), [a, b] if (*a == width) != (*b == width))
                };
                self.unit.params().iter().filter(of_width)
            };
            // Adapters whose inputs had no graph and were not detached on purpose.
            let adapters: Vec<_> = matrices(true).filter(|param| param.unsharded_shape().dims()[1] == width).collect();
            let blind = |param: &&Arc<FsdpParam>| -> Result<bool> {
                for used in uses.iter().filter(|used| Arc::ptr_eq(&used.matrix, param) && !used.in_out) {
                    let matrix = Matrix::of(&used.matrix, used.bias.as_deref(), false)?;
                    let fits = |of: &&&Tensor| last(of) == width && rows(of) == rows(&used.result);
                    let mut before = nodes.iter().chain(inputs).filter(fits);
                    let detached = before.any(|of| is_itself(&used.result, of, Some(&matrix)));
                    if rows(&used.result) == rows(input) && !detached {
                        return Ok(true);
                    }
                }
                Ok(false)
            };
            let mut all_blind = !adapters.is_empty();
            for adapter in &adapters {
                all_blind = all_blind && blind(adapter)?;
            }
            if all_blind {
                return Ok(Some(names(&adapters)));
            }
            // A frozen layer with a norm, whose matrices made no node of the graph.
            let norm = |param: &Arc<FsdpParam>| !param.trainable() && param.unsharded_shape().dims() == [width];
            let frozen: Vec<_> = matrices(false).collect();
            let made = |param: &&Arc<FsdpParam>| {
                let other = param.unsharded_shape().dims().iter().copied().find(|&dim| dim != width);
                nodes.iter().any(|node| Some(last(node)) == other && self.is_inside(node))
            };
            if self.unit.params().iter().any(norm) && !frozen.is_empty() && !frozen.iter().any(made) {
                return Ok(Some(names(&frozen)));
            }
        }
        Ok(None)
    }
}

/// Returns whether the graph `nodes` of `result` leads only to views of this matrix and maybe a bias. Returns the bias.
fn leads_only_to(result: &Tensor, nodes: &[&Tensor], matrix: &Arc<FsdpParam>) -> Option<Option<Arc<FsdpParam>>> {
    let (mut found, mut bias) = (false, None);
    for &node in nodes {
        match FsdpParam::of(node) {
            Some(param) if Arc::ptr_eq(&param, matrix) => found = true,
            Some(param) if param.unsharded_shape().dims() == [last(result)] => bias = Some(param),
            Some(_) => return None,
            None if [result.id(), followed(result)].contains(&node.id()) || node.is_variable() => {}
            None if node.elem_count() == matrix.unsharded_shape().elem_count() => {}
            None => return None,
        }
    }
    // Another variable is not a bias.
    let leaves = [Some(matrix.leaf), bias.as_ref().map(|bias| bias.leaf)];
    let only_leaves = nodes.iter().all(|node| !node.is_variable() || leaves.contains(&Some(node.id())));
    (found && only_leaves).then_some(bias)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use candle_core::{DType, Device, Module, Tensor};

    use super::{MOST_USES, MOST_WALKS};
    use crate::doc_example::*;
    use crate::nn;

    thread_local! {
        /// Nodes of the histories that an inspection walked through.
        pub(super) static WALKED: Cell<usize> = const { Cell::new(0) };
    }

    /// Returns the nodes walked through in the first forward of a unit with this many operations.
    fn walked(operations: usize) -> usize {
        let (_world, _vars, model, _) = one_layer(nn::linear_no_bias).unwrap();
        let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
        WALKED.set(0);
        let run = |layer: &nn::Linear| (0..operations).try_fold(layer.forward(&x)?, |x, _| nn::silu(&x));
        model.call(run).unwrap();
        WALKED.get()
    }

    #[test]
    fn the_inspection_is_linear_in_the_operations() {
        // Each result's history has at least the results before it.
        let complete = walked(MOST_USES);
        assert!(complete >= (1..=MOST_USES).sum(), "{complete}");
        for operations in [1000, 2000, 4000] {
            let walked = walked(operations);
            assert!(walked <= (MOST_WALKS + 1) * (operations + 8), "{operations} operations: {walked}");
        }
    }
}
