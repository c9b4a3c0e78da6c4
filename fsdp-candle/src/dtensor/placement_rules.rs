//! The placements of an operation's result, given its operands'. If the operation needs communication, the error names
//! the redistribution to call.

use fsdp_core::{DTensorSpec, Placement, ReduceOp};

use crate::error::{Error, Result};
use Placement::{Partial, Replicate};

/// Kinds of elementwise operations of one operand.
#[derive(Clone, Copy)]
pub(super) enum Unary {
    /// Negates values.
    Negation,
    /// Keeps values, up to rounding.
    Conversion,
    /// Is increasing: keeps the order of values.
    Increasing,
    /// Any other operation.
    Other,
}

impl Unary {
    /// Returns the reduction whose terms are the results of the terms of `op`, if any.
    fn keeps(self, op: ReduceOp) -> Option<ReduceOp> {
        use ReduceOp::{Avg, Max, Min, Sum};
        match (self, op) {
            (Unary::Negation, Max) => Some(Min),
            (Unary::Negation, Min) => Some(Max),
            (Unary::Negation | Unary::Conversion, Sum | Avg) => Some(op),
            (Unary::Conversion | Unary::Increasing, Max | Min) => Some(op),
            _ => None,
        }
    }
}

/// Elementwise operations of two operands.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Maximum,
    Minimum,
}

impl Binary {
    pub(super) fn name(self) -> &'static str {
        match self {
            Binary::Add => "add",
            Binary::Sub => "sub",
            Binary::Mul => "mul",
            Binary::Div => "div",
            Binary::Maximum => "maximum",
            Binary::Minimum => "minimum",
        }
    }

    /// Returns the reduction of the result, where `None` is a replicated operand: PyTorch's rules.
    fn keeps(self, left: Option<ReduceOp>, right: Option<ReduceOp>) -> Option<ReduceOp> {
        use Binary::{Add, Div, Maximum, Minimum, Mul, Sub};
        use ReduceOp::{Avg, Max, Min, Sum};
        match (self, left, right) {
            (Add | Sub, Some(l @ (Sum | Avg)), Some(r)) if l == r => Some(l),
            (Add | Sub, Some(l @ (Avg | Max | Min)), None) => Some(l),
            (Add, None, Some(r @ (Avg | Max | Min))) | (Sub, None, Some(r @ Avg)) => Some(r),
            (Mul | Div, Some(l @ (Sum | Avg)), None) => Some(l),
            (Mul, None, Some(r @ (Sum | Avg))) => Some(r),
            (Maximum, Some(Max), Some(Max)) => Some(Max),
            (Minimum, Some(Min), Some(Min)) => Some(Min),
            (Maximum | Minimum, Some(op @ (Max | Min)), None) | (Maximum | Minimum, None, Some(op @ (Max | Min))) => {
                Some(op)
            }
            _ => None,
        }
    }
}

/// Returns the placements after an elementwise operation of one operand.
pub(super) fn unary(name: &str, kind: Unary, spec: &DTensorSpec) -> Result<Vec<Placement>> {
    partials(name, spec, |op| kind.keeps(op))
}

/// Replaces the reduction of each partial placement by the result of `keeps`.
fn partials(name: &str, spec: &DTensorSpec, keeps: impl Fn(ReduceOp) -> Option<ReduceOp>) -> Result<Vec<Placement>> {
    let mut placements = spec.placements().to_vec();
    for (mesh_dim, placement) in placements.iter_mut().enumerate() {
        if let Partial(op) = *placement {
            *placement = Partial(keeps(op).ok_or_else(|| {
                let to = list(&replaced(spec.placements(), mesh_dim, Replicate));
                Error::Argument(format!(
                    "{name} of {spec}: the {op} along mesh dimension \"{}\" is partial, and {name} does not keep it; \
                     redistribute to {to} first",
                    spec.mesh().names()[mesh_dim]
                ))
            })?);
        }
    }
    Ok(placements)
}

/// Returns the placements after an operation with a number, which is like a replicated operand.
pub(super) fn scalar(op: Binary, spec: &DTensorSpec) -> Result<Vec<Placement>> {
    partials(op.name(), spec, |partial| op.keeps(Some(partial), None))
}

/// Returns the shape and placements of an elementwise operation with broadcasting.
pub(super) fn binary(op: Binary, left: &DTensorSpec, right: &DTensorSpec) -> Result<(Vec<usize>, Vec<Placement>)> {
    let shape = broadcast(op, left, right)?;
    let mut placements = Vec::new();
    for mesh_dim in 0..left.placements().len() {
        let (l, r) = (canonical(left.placements()[mesh_dim]), canonical(right.placements()[mesh_dim]));
        let outer = result_shard(left, l, &shape).or_else(|| result_shard(right, r, &shape));
        // Placements that each operand needs for a local result.
        let (wanted_left, wanted_right, result) = match outer {
            Some(outer) => {
                (operand_placement(left, outer, &shape), operand_placement(right, outer, &shape), Some(outer))
            }
            None if l.shard_dim().is_some() || r.shard_dim().is_some() => (unsharded(l), unsharded(r), None),
            None => match (partial_op(l), partial_op(r)) {
                (None, None) => (l, r, Some(Replicate)),
                (left_op, right_op) => match op.keeps(left_op, right_op) {
                    Some(op) => (l, r, Some(Partial(op))),
                    None => (Replicate, Replicate, None),
                },
            },
        };
        match result {
            Some(placement) if (l, r) == (wanted_left, wanted_right) => placements.push(placement),
            _ => {
                let fix = |side: &str, spec: &DTensorSpec, now, wanted| match now == wanted {
                    true => None,
                    false => Some(format!("the {side} to {}", list(&replaced(spec.placements(), mesh_dim, wanted)))),
                };
                let fixes: Vec<_> = [fix("left", left, l, wanted_left), fix("right", right, r, wanted_right)]
                    .into_iter()
                    .flatten()
                    .collect();
                return Err(Error::Argument(format!(
                    "{} of {left} and {right}: along mesh dimension \"{}\", {l} and {r} need communication; \
                     redistribute {} first",
                    op.name(),
                    left.mesh().names()[mesh_dim],
                    fixes.join(" and ")
                )));
            }
        }
    }
    // Mesh dimensions may hold partials of different reductions, which do not combine.
    let spec = DTensorSpec::new(left.mesh().clone(), &placements, &shape, left.dtype());
    spec.map_err(|error| {
        let name = op.name();
        Error::Argument(format!("{name} of {left} and {right}: {error}; redistribute the left or the right first"))
    })?;
    Ok((shape, placements))
}

fn broadcast(op: Binary, left: &DTensorSpec, right: &DTensorSpec) -> Result<Vec<usize>> {
    let rank = left.shape().len().max(right.shape().len());
    let size = |spec: &DTensorSpec, dim: usize| match (dim + spec.shape().len()).checked_sub(rank) {
        Some(own) => spec.shape()[own],
        None => 1,
    };
    let sizes = (0..rank).map(|dim| match (size(left, dim), size(right, dim)) {
        (l, r) if l == r || r == 1 => Some(l),
        (1, r) => Some(r),
        _ => None,
    });
    sizes.collect::<Option<_>>().ok_or_else(|| {
        Error::Argument(format!(
            "{} of {left} and {right}: the shapes do not broadcast; dimensions must be equal, or 1 in one operand",
            op.name()
        ))
    })
}

/// Returns an operand's shard as a shard of the result, if the operand is not broadcast along the dimension.
fn result_shard(spec: &DTensorSpec, placement: Placement, shape: &[usize]) -> Option<Placement> {
    let dim = placement.shard_dim()?;
    let outer = dim + shape.len() - spec.shape().len();
    (spec.shape()[dim] == shape[outer]).then(|| at_dim(placement, outer))
}

/// Returns the placement that an operand needs for a result sharded by `outer`: the same shard, or replicated where it
/// is broadcast.
fn operand_placement(spec: &DTensorSpec, outer: Placement, shape: &[usize]) -> Placement {
    let own = outer.shard_dim().and_then(|dim| Some((dim, (dim + spec.shape().len()).checked_sub(shape.len())?)));
    match own {
        Some((dim, own)) if spec.shape()[own] == shape[dim] => at_dim(outer, own),
        _ => Replicate,
    }
}

/// Kinds of reductions over tensor dimensions.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Reduction {
    Sum,
    Mean,
    Max,
    Min,
    /// Sum of powers of magnitudes.
    Powers,
    /// Largest magnitude.
    LargestMagnitude,
}

impl Reduction {
    pub(super) fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Mean => "mean",
            Reduction::Max => "max",
            Reduction::Min => "min",
            Reduction::Powers | Reduction::LargestMagnitude => "norm",
        }
    }

    /// Returns the operation that combines the ranks' results of a sharded dimension.
    fn across(self) -> ReduceOp {
        match self {
            Reduction::Sum | Reduction::Mean | Reduction::Powers => ReduceOp::Sum,
            Reduction::Max | Reduction::LargestMagnitude => ReduceOp::Max,
            Reduction::Min => ReduceOp::Min,
        }
    }

    fn keeps(self, op: ReduceOp) -> Option<ReduceOp> {
        let keeps = match self {
            Reduction::Sum | Reduction::Mean => matches!(op, ReduceOp::Sum | ReduceOp::Avg),
            Reduction::Max => op == ReduceOp::Max,
            Reduction::Min => op == ReduceOp::Min,
            Reduction::Powers | Reduction::LargestMagnitude => false,
        };
        keeps.then_some(op)
    }
}

/// Returns the placements after a reduction over tensor dimensions.
pub(super) fn reduce(what: Reduction, spec: &DTensorSpec, dims: &[usize], keepdim: bool) -> Result<Vec<Placement>> {
    let placements = partials(what.name(), spec, |op| what.keeps(op))?;
    let reduced = |placement: Placement| match placement.shard_dim() {
        Some(dim) if dims.contains(&dim) => Partial(what.across()),
        Some(dim) if !keepdim => at_dim(placement, dim - dims.iter().filter(|&&gone| gone < dim).count()),
        _ => placement,
    };
    Ok(placements.into_iter().map(reduced).collect())
}

/// Returns the placements of a matrix product with equal leading dimensions.
pub(super) fn matmul(left: &DTensorSpec, right: &DTensorSpec) -> Result<Vec<Placement>> {
    let rank = left.shape().len();
    let (rows, inner_left, inner_right, columns) = (rank - 2, rank - 1, rank - 2, rank - 1);
    let linear = |op| matches!(op, ReduceOp::Sum | ReduceOp::Avg);
    let pairs = left.placements().iter().zip(right.placements()).enumerate();
    let result = |(mesh_dim, (&l, &r)): (usize, (&Placement, &Placement))| {
        let (l, r) = (canonical(l), canonical(r));
        Ok(match (l.shard_dim(), r.shard_dim()) {
            (Some(dim), None) if dim == rows && r == Replicate => l,
            (None, Some(dim)) if dim == columns && l == Replicate => r,
            (Some(a), Some(b)) if a == inner_left && b == inner_right && at_dim(l, b) == r => Partial(ReduceOp::Sum),
            (Some(a), Some(_)) if a < rows && l == r => l,
            (None, None) => match (partial_op(l), partial_op(r)) {
                (None, None) => Replicate,
                (Some(op), None) | (None, Some(op)) if linear(op) => Partial(op),
                _ => return Err(no_product(left, right, mesh_dim)),
            },
            _ => return Err(no_product(left, right, mesh_dim)),
        })
    };
    pairs.map(result).collect()
}

fn no_product(left: &DTensorSpec, right: &DTensorSpec, mesh_dim: usize) -> Error {
    let rank = left.shape().len();
    let name = &left.mesh().names()[mesh_dim];
    let batch = if rank == 2 { "" } else { ", both by a leading dimension" };
    Error::Argument(format!(
        "matmul of {left} and {right}: along mesh dimension \"{name}\", {} and {} need communication. Redistribute to \
         S({}) and R (the result is sharded by rows), R and S({}) (by columns), S({}) and S({}) (a P(sum)){batch}, or \
         both R",
        left.placements()[mesh_dim],
        right.placements()[mesh_dim],
        rank - 2,
        rank - 1,
        rank - 1,
        rank - 2,
    ))
}

/// Returns an error unless two operands are on one mesh.
pub(super) fn same_mesh(name: &str, left: &DTensorSpec, right: &DTensorSpec, is_same: bool) -> Result<()> {
    match is_same && left.mesh() == right.mesh() {
        true => Ok(()),
        false => Err(Error::Argument(format!(
            "{name} of {left} and {right}: the meshes {} and {} do not have the same ranks in the same order; use one \
             mesh for both operands",
            left.mesh(),
            right.mesh()
        ))),
    }
}

/// Returns a shard of the same kind of another dimension; other placements unchanged.
pub(super) fn at_dim(placement: Placement, dim: usize) -> Placement {
    match placement {
        Placement::Shard(_) => Placement::Shard(dim),
        Placement::StridedShard { split_factor, .. } => Placement::StridedShard { dim, split_factor },
        Placement::OwnedBy { rank, .. } => Placement::OwnedBy { dim, rank },
        other => other,
    }
}

/// Writes a strided shard of split factor 1 as a shard.
fn canonical(placement: Placement) -> Placement {
    match placement {
        Placement::StridedShard { dim, split_factor: 1 } => Placement::Shard(dim),
        other => other,
    }
}

/// Replaces a shard by `Replicate`, as a broadcast operand needs.
fn unsharded(placement: Placement) -> Placement {
    if placement.shard_dim().is_some() { Replicate } else { placement }
}

fn partial_op(placement: Placement) -> Option<ReduceOp> {
    match placement {
        Partial(op) => Some(op),
        _ => None,
    }
}

fn replaced(placements: &[Placement], mesh_dim: usize, placement: Placement) -> Vec<Placement> {
    let mut placements = placements.to_vec();
    placements[mesh_dim] = placement;
    placements
}

fn list(placements: &[Placement]) -> String {
    let placements: Vec<_> = placements.iter().map(ToString::to_string).collect();
    format!("[{}]", placements.join(", "))
}
