//! The order of a backward's collectives when ranks may use different units: one that follows from how the model was built and from its forward, never from
//! what a rank's loss reaches.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use crate::group::ParamGroup;

/// The units whose turn is still to come.
pub(crate) struct FixedOrder {
    reductions: VecDeque<usize>,
    /// Units whose gradients are whole, and that wait for their turn.
    ready: BTreeSet<usize>,
    gathers: VecDeque<usize>,
}

impl FixedOrder {
    /// Reductions go from the unit that was built last to the first, a unit after those inside it: as they become ready when all are used and each ran after
    /// those built before it. Gathers go from the unit that ran last to the first.
    pub(crate) fn new(groups: &[Arc<ParamGroup>], ran: impl DoubleEndedIterator<Item = usize>) -> Self {
        let gathers = ran.rev().filter(|&index| groups[index].settings().unshard_in_backward).collect();
        let reductions = inside_out(groups).into_iter().filter(|&index| groups[index].has_trainable()).collect();
        FixedOrder { reductions, ready: BTreeSet::new(), gathers }
    }

    /// Notes that a unit's gradients are whole; returns the units whose turn to be reduced it is now.
    pub(crate) fn ready(&mut self, index: usize) -> Vec<usize> {
        self.ready.insert(index);
        let mut turn = vec![];
        while let Some(&next) = self.reductions.front().filter(|next| self.ready.contains(next)) {
            self.reductions.pop_front();
            turn.push(next);
        }
        turn
    }

    /// The units to gather so that unit `index` is: it, and those before it.
    pub(crate) fn gathers_up_to(&mut self, index: usize) -> Vec<usize> {
        let count = self.gathers.iter().position(|&other| other == index).map_or(0, |position| position + 1);
        self.gathers.drain(..count).collect()
    }

    /// The units that no reduction on this rank asked for: frozen ones.
    pub(crate) fn gathers_left(&mut self) -> Vec<usize> {
        self.gathers.drain(..).collect()
    }
}

/// Units from last to first, each after those inside it.
fn inside_out(groups: &[Arc<ParamGroup>]) -> Vec<usize> {
    fn visit(unit: Option<usize>, parents: &[Option<usize>], order: &mut Vec<usize>) {
        for child in (0..parents.len()).rev().filter(|&child| parents[child] == unit) {
            visit(Some(child), parents, order);
        }
        order.extend(unit);
    }
    let parents: Vec<_> = groups.iter().map(|group| group.parent(groups).map(|parent| parent.index())).collect();
    let mut order = Vec::with_capacity(groups.len());
    visit(None, &parents, &mut order);
    order
}
