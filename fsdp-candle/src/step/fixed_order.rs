//! The order of a backward's collectives when ranks may use different units: one that follows from how the model was
//! built and from its forward, never from what a rank's loss reaches.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The units whose turn is still to come.
pub(super) struct FixedOrder {
    reductions: VecDeque<usize>,
    /// Units whose gradients are whole, and that wait for their turn.
    ready: BTreeSet<usize>,
    gathers: VecDeque<Ran>,
    /// Of the units that ran, when their first forward began.
    began: BTreeMap<usize, usize>,
}

/// The forwards of one unit, as numbers of forwards that had begun.
#[derive(Clone, Copy)]
pub(super) struct Ran {
    pub(super) unit: usize,
    /// When the first since the last backward began.
    pub(super) first: usize,
    /// When the last began, and when it ended.
    pub(super) began: usize,
    pub(super) ended: usize,
}

impl FixedOrder {
    /// Reductions go from the unit that was built last to the first, a unit after those inside it (`parents` has for
    /// each unit the one around it): as they become ready when all are used and each ran after those built before it.
    /// Units without gradients, of which `reduces` is false, have none. Gathers go from the unit that ran last to the
    /// first; those that backward does not gather, of which `gathers` is false, are passed over.
    pub(super) fn new(
        parents: &[Option<usize>],
        ran: &[Ran],
        reduces: impl Fn(usize) -> bool,
        gathers: impl Fn(usize) -> bool,
    ) -> Self {
        FixedOrder {
            reductions: inside_out(parents).into_iter().filter(|&unit| reduces(unit)).collect(),
            ready: BTreeSet::new(),
            gathers: ran.iter().rev().filter(|ran| gathers(ran.unit)).copied().collect(),
            began: ran.iter().map(|ran| (ran.unit, ran.first)).collect(),
        }
    }

    /// Notes that a unit's gradients are whole; returns the units whose turn to be reduced it is now.
    pub(super) fn ready(&mut self, unit: usize) -> Vec<usize> {
        self.ready.insert(unit);
        let mut turn = vec![];
        while let Some(&next) = self.reductions.front().filter(|next| self.ready.contains(next)) {
            self.reductions.pop_front();
            turn.push(next);
        }
        turn
    }

    /// The units to gather so that `unit` is: it, and those before it.
    pub(super) fn gathers_up_to(&mut self, unit: usize) -> impl Iterator<Item = usize> {
        let count = self.gathers.iter().position(|other| other.unit == unit).map_or(0, |position| position + 1);
        self.gathers.drain(..count).map(|ran| ran.unit)
    }

    /// The units to gather before `unit` is reduced. Another rank may need them before it gets to its gradients: all
    /// that ran after the unit first began, which is more than those up to it when it ran several times or has units
    /// inside.
    pub(super) fn gathers_before_reducing(&mut self, unit: usize) -> impl Iterator<Item = usize> {
        let began = self.began.get(&unit).copied().unwrap_or(usize::MAX);
        let count = self.gathers.iter().take_while(|ran| ran.ended >= began).count();
        self.gathers.drain(..count).map(|ran| ran.unit)
    }

    /// The units that no reduction on this rank asked for: frozen ones.
    pub(super) fn gathers_left(&mut self) -> impl Iterator<Item = usize> {
        self.gathers.drain(..).map(|ran| ran.unit)
    }
}

/// Units from last to first, each after those inside it.
fn inside_out(parents: &[Option<usize>]) -> Vec<usize> {
    fn visit(unit: Option<usize>, parents: &[Option<usize>], order: &mut Vec<usize>) {
        for child in (0..parents.len()).rev().filter(|&child| parents[child] == unit) {
            visit(Some(child), parents, order);
        }
        order.extend(unit);
    }
    let mut order = Vec::with_capacity(parents.len());
    visit(None, parents, &mut order);
    order
}
