//! Who makes which matrix orthogonal, and what moves to it and back.

use std::sync::Arc;

use fsdp_core::ProcessGroup;
use fsdp_core::layout::{Region, local_region};

use crate::error::Result;
use crate::fsdp::FsdpParam;

/// Ranks in a line, along which matrices are cut, or are the same.
#[derive(Clone)]
pub(super) struct Axis {
    pub(super) group: ProcessGroup,
    /// The dimension of the parameters' mesh that cuts them, if one does.
    pub(super) cut: Option<usize>,
}

/// A matrix, where it is in the optimizer, and the rank that makes it orthogonal: its place along each axis.
pub(super) struct Matrix {
    pub(super) state: usize,
    pub(super) param: Arc<FsdpParam>,
    pub(super) owner: Vec<usize>,
}

/// Matrices that are cut over the same ranks.
pub(super) struct Class {
    pub(super) axes: Vec<Axis>,
    /// In the order of the optimizer's states.
    pub(super) matrices: Vec<Matrix>,
}

/// A box of a matrix that a rank has, and by which ranks of the axes before it came there.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Place {
    /// By its position among the class's.
    pub(super) matrix: usize,
    pub(super) region: Region,
    pub(super) from: Vec<usize>,
}

/// The work of all matrices: shared out by size, so that the ranks that hold them (replicas too) have as even shares as
/// whole matrices allow. The same on every rank.
pub(super) fn shared_out(params: &[Arc<FsdpParam>]) -> Vec<Class> {
    // Those of the same ranks share their work out together.
    let mut together: Vec<(Vec<Axis>, Vec<usize>)> = vec![];
    for (state, param) in params.iter().enumerate() {
        let axes = axes(param);
        match together.iter_mut().find(|(others, _)| are_same_ranks(others, &axes)) {
            Some((_, states)) => states.push(state),
            None => together.push((axes, vec![state])),
        }
    }
    let mut classes: Vec<Class> = vec![];
    for (axes_of_first, states) in together {
        let sizes: Vec<usize> = axes_of_first.iter().map(|axis| axis.group.size()).collect();
        let costs: Vec<u128> = states.iter().map(|&state| cost(params[state].shape().dims())).collect();
        let first = classes.len();
        for (&state, worker) in states.iter().zip(owners(&costs, sizes.iter().product())) {
            let axes = axes(&params[state]);
            let matrix = Matrix { state, param: params[state].clone(), owner: coordinate(&sizes, worker) };
            let cut = |axes: &[Axis]| axes.iter().map(|axis| axis.cut).collect::<Vec<_>>();
            match classes[first..].iter_mut().find(|class| cut(&class.axes) == cut(&axes)) {
                Some(class) => class.matrices.push(matrix),
                None => classes.push(Class { axes, matrices: vec![matrix] }),
            }
        }
    }
    classes
}

fn are_same_ranks(a: &[Axis], b: &[Axis]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.group.is(&b.group))
}

/// The ranks that a parameter is cut over, and those that hold the same of it: along the dimension that shards, the one
/// that replicates (where replicas divide shards, they hold parts), and that of tensor parallelism.
fn axes(param: &FsdpParam) -> Vec<Axis> {
    let ranks = &param.spec.ranks;
    let dims = 0..ranks.mesh().layout().shape().len();
    let dim_of = |group: &ProcessGroup| dims.clone().find(|&dim| ranks.mesh().group(dim).is_ok_and(|of| of.is(group)));
    let shard = Axis { group: ranks.shard().clone(), cut: dim_of(ranks.shard()) };
    let replicate = ranks
        .replicate()
        .map(|group| Axis { cut: if ranks.is_divided() { dim_of(group) } else { None }, group: group.clone() });
    let parallel = param.parallel().map(|parallel| {
        let group = parallel.group().clone();
        Axis { cut: param.cut_over().and_then(dim_of), group }
    });
    std::iter::once(shard).chain(replicate).chain(parallel).collect()
}

/// What a matrix costs: the products of Newton-Schulz.
fn cost(shape: &[usize]) -> u128 {
    let (rows, columns) = (shape[0] as u128, shape[1] as u128);
    rows * columns * rows.min(columns)
}

/// A worker for each cost: the dearest first, each for whom has the least so far.
fn owners(costs: &[u128], workers: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|&at| (std::cmp::Reverse(costs[at]), at));
    let mut loads = vec![0; workers.max(1)];
    let mut owners = vec![0; costs.len()];
    for at in order {
        let worker = (0..loads.len()).min_by_key(|&worker| loads[worker]).unwrap_or(0);
        loads[worker] += costs[at];
        owners[at] = worker;
    }
    owners
}

fn coordinate(sizes: &[usize], index: usize) -> Vec<usize> {
    let mut rest = index;
    let mut at: Vec<usize> = sizes
        .iter()
        .rev()
        .map(|size| {
            let at = rest % size;
            rest /= size;
            at
        })
        .collect();
    at.reverse();
    at
}

impl Class {
    /// This rank's place along each axis.
    pub(super) fn own(&self) -> Vec<usize> {
        self.axes.iter().map(|axis| axis.group.rank()).collect()
    }

    /// Whether the rank at `at` takes part in moving a matrix to its owner: along axes where all have the same, only
    /// those in line with it do.
    pub(super) fn is_in_line(&self, matrix: &Matrix, at: &[usize]) -> bool {
        (0..self.axes.len()).all(|axis| self.axes[axis].cut.is_some() || matrix.owner[axis] == at[axis])
    }

    /// The axes along which matrices are cut.
    pub(super) fn cuts(&self) -> Vec<usize> {
        (0..self.axes.len()).filter(|&axis| self.axes[axis].cut.is_some()).collect()
    }

    /// The box of a matrix that the rank at `at` holds.
    pub(super) fn region(&self, matrix: usize, at: &[usize]) -> Result<Region> {
        let param = &self.matrices[matrix].param;
        let mesh = param.spec.ranks.mesh();
        let mut coordinate = mesh.coordinate();
        for (axis, &at) in self.axes.iter().zip(at) {
            if let Some(dim) = axis.cut {
                coordinate[dim] = at;
            }
        }
        Ok(local_region(param.shape().dims(), mesh.layout(), &coordinate, &param.placements())?)
    }

    /// What the rank at `at` has of these matrices after so many axes of [`Class::cuts`], in the order in which it has
    /// it.
    pub(super) fn held(&self, matrices: &[usize], at: &[usize], after: usize) -> Result<Vec<Place>> {
        let Some(last) = after.checked_sub(1) else {
            let own = matrices.iter().filter(|&&matrix| self.is_in_line(&self.matrices[matrix], at));
            return own.map(|&matrix| Ok(Place { matrix, region: self.region(matrix, at)?, from: vec![] })).collect();
        };
        let axis = self.cuts()[last];
        let mut held = vec![];
        for peer in 0..self.axes[axis].group.size() {
            held.extend(self.moved(matrices, at, last, peer)?);
        }
        Ok(held)
    }

    /// What comes to the rank at `at` from a peer along the axis number `last` of [`Class::cuts`].
    pub(super) fn moved(&self, matrices: &[usize], at: &[usize], last: usize, peer: usize) -> Result<Vec<Place>> {
        let axis = self.cuts()[last];
        let mut there = at.to_vec();
        there[axis] = peer;
        let mut places = self.held(matrices, &there, last)?;
        places.retain(|place| self.matrices[place.matrix].owner[axis] == at[axis]);
        places.iter_mut().for_each(|place| place.from.push(peer));
        Ok(places)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_shared_by_size() {
        assert_eq!(owners(&[1, 8, 3, 3, 2], 2), [0, 0, 1, 1, 1]);
        assert_eq!(owners(&[5, 5, 5], 4), [0, 1, 2]);
        assert_eq!(owners(&[], 3), [0usize; 0]);
        // Nobody has more than the mean and the dearest one.
        let costs: Vec<u128> = (1..100).map(|at| at * at % 37 + 1).collect();
        let owners = owners(&costs, 7);
        let load = |worker| costs.iter().zip(&owners).filter(|(_, owner)| **owner == worker).map(|(c, _)| c).sum();
        let loads: Vec<u128> = (0..7).map(load).collect();
        assert!(loads.iter().all(|&load| load <= costs.iter().sum::<u128>() / 7 + 37), "{loads:?}");
    }

    #[test]
    fn workers_have_places_along_axes() {
        let all: Vec<_> = (0..6).map(|worker| coordinate(&[2, 3], worker)).collect();
        assert_eq!(all, [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]);
    }
}
