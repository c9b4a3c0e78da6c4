//! Which placements an operation's result has, given its operands'. What would take communication is an error that says
//! which redistribution to call.

use fsdp_core::{DTensorSpec, MeshLayout, Placement, ReduceOp};

use crate::error::{Error, Result};
use Placement::{Partial, Replicate};

/// What an elementwise operation of one operand does.
#[derive(Clone, Copy)]
pub(super) enum Unary {
    /// Changes signs.
    Negation,
    /// Keeps values, up to rounding.
    Conversion,
    /// Keeps the order of values.
    Increasing,
    /// Anything else.
    Other,
}

impl Unary {
    /// What the results of the terms of such a reduction are terms of, if of anything.
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

/// An elementwise operation of two operands.
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

    /// The same of two operands, of which `None` is one that all ranks hold: PyTorch's rules.
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

/// An elementwise operation of one operand.
pub(super) fn unary(name: &str, kind: Unary, spec: &DTensorSpec) -> Result<Vec<Placement>> {
    partials(name, spec, |op| kind.keeps(op))
}

/// The placements with each partial one as `keeps` has it.
fn partials(name: &str, spec: &DTensorSpec, keeps: impl Fn(ReduceOp) -> Option<ReduceOp>) -> Result<Vec<Placement>> {
    let mut placements = spec.placements().to_vec();
    for (mesh_dim, placement) in placements.iter_mut().enumerate() {
        if let Partial(op) = *placement {
            *placement = Partial(keeps(op).ok_or_else(|| {
                let to = shown(&with(spec.placements(), mesh_dim, Replicate));
                Error::Argument(format!(
                    "{name} of {spec}: the {op} of the terms along mesh dimension \"{}\" is still to be made, and \
                     {name} of each term is no term of the result; redistribute to {to} first",
                    spec.mesh().names()[mesh_dim]
                ))
            })?);
        }
    }
    Ok(placements)
}

/// An elementwise operation with a number, as of an operand that all ranks hold.
pub(super) fn scalar(op: Binary, spec: &DTensorSpec) -> Result<Vec<Placement>> {
    partials(op.name(), spec, |partial| op.keeps(Some(partial), None))
}

/// An elementwise operation of two operands that are broadcast: the result's shape and placements.
pub(super) fn binary(op: Binary, left: &DTensorSpec, right: &DTensorSpec) -> Result<(Vec<usize>, Vec<Placement>)> {
    let shape = broadcast(op, left, right)?;
    let mut placements = Vec::new();
    for mesh_dim in 0..left.placements().len() {
        let (l, r) = (normal(left.placements()[mesh_dim]), normal(right.placements()[mesh_dim]));
        let outer = lifted(left, l, &shape).or_else(|| lifted(right, r, &shape));
        // What each operand is to be for the result to be made where it is.
        let (wanted_left, wanted_right, result) = match outer {
            Some(outer) => (follow(left, outer, &shape), follow(right, outer, &shape), Some(outer)),
            None if l.shard_dim().is_some() || r.shard_dim().is_some() => (whole(l), whole(r), None),
            None => match (reduction(l), reduction(r)) {
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
                    false => Some(format!("the {side} to {}", shown(&with(spec.placements(), mesh_dim, wanted)))),
                };
                let fixes: Vec<_> = [fix("left", left, l, wanted_left), fix("right", right, r, wanted_right)]
                    .into_iter()
                    .flatten()
                    .collect();
                return Err(Error::Argument(format!(
                    "{} of {left} and {right}: along mesh dimension \"{}\" the left lies as {l} and the right as {r}, \
                     which takes communication; redistribute {} first",
                    op.name(),
                    left.mesh().names()[mesh_dim],
                    fixes.join(" and ")
                )));
            }
        }
    }
    // Terms of one reduction along one mesh dimension, and of another along another.
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
            "{} of {left} and {right}: the shapes don't go together; dimensions are equal, or 1 in one of them",
            op.name()
        ))
    })
}

/// A shard of an operand as one of the result, where the operand has the whole dimension.
fn lifted(spec: &DTensorSpec, placement: Placement, shape: &[usize]) -> Option<Placement> {
    let dim = placement.shard_dim()?;
    let outer = dim + shape.len() - spec.shape().len();
    (spec.shape()[dim] == shape[outer]).then(|| at_dim(placement, outer))
}

/// What an operand is to be for a result that is sharded so: sharded alike, or held by all where it is broadcast.
fn follow(spec: &DTensorSpec, outer: Placement, shape: &[usize]) -> Placement {
    let own = outer.shard_dim().and_then(|dim| Some((dim, (dim + spec.shape().len()).checked_sub(shape.len())?)));
    match own {
        Some((dim, own)) if spec.shape()[own] == shape[dim] => at_dim(outer, own),
        _ => Replicate,
    }
}

/// What a reduction over tensor dimensions does.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Reduction {
    Sum,
    Mean,
    Max,
    Min,
    /// The sum of powers of magnitudes.
    Powers,
    /// The largest magnitude.
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

    /// How ranks' results of a dimension that they share are put together.
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

/// A reduction over tensor dimensions, which become of size 1 or go.
pub(super) fn reduce(what: Reduction, spec: &DTensorSpec, dims: &[usize], keepdim: bool) -> Result<Vec<Placement>> {
    let placements = partials(what.name(), spec, |op| what.keeps(op))?;
    let reduced = |placement: Placement| match placement.shard_dim() {
        Some(dim) if dims.contains(&dim) => Partial(what.across()),
        Some(dim) if !keepdim => at_dim(placement, dim - dims.iter().filter(|&&gone| gone < dim).count()),
        _ => placement,
    };
    Ok(placements.into_iter().map(reduced).collect())
}

/// A product of matrices, with equal dimensions before the last two.
pub(super) fn matmul(left: &DTensorSpec, right: &DTensorSpec) -> Result<Vec<Placement>> {
    let rank = left.shape().len();
    let (rows, inner_left, inner_right, columns) = (rank - 2, rank - 1, rank - 2, rank - 1);
    let linear = |op| matches!(op, ReduceOp::Sum | ReduceOp::Avg);
    let pairs = left.placements().iter().zip(right.placements()).enumerate();
    let result = |(mesh_dim, (&l, &r)): (usize, (&Placement, &Placement))| {
        let (l, r) = (normal(l), normal(r));
        Ok(match (l.shard_dim(), r.shard_dim()) {
            (Some(dim), None) if dim == rows && r == Replicate => l,
            (None, Some(dim)) if dim == columns && l == Replicate => r,
            (Some(a), Some(b)) if a == inner_left && b == inner_right && at_dim(l, b) == r => Partial(ReduceOp::Sum),
            (Some(a), Some(_)) if a < rows && l == r => l,
            (None, None) => match (reduction(l), reduction(r)) {
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
    let batch = match rank {
        2 => String::new(),
        _ => ", both by a dimension before".into(),
    };
    Error::Argument(format!(
        "matmul of {left} and {right}: along mesh dimension \"{name}\" the left lies as {} and the right as {}, which \
         takes communication; redistribute first, so that the left is S({}) and the right R (the result is sharded by \
         rows), the left R and the right S({}) (by columns), the left S({}) and the right S({}) (the result is \
         P(sum)){batch}, or both R",
        left.placements()[mesh_dim],
        right.placements()[mesh_dim],
        rank - 2,
        rank - 1,
        rank - 1,
        rank - 2,
    ))
}

/// Fails unless two operands are on one mesh.
pub(super) fn same_mesh(name: &str, left: &DTensorSpec, right: &DTensorSpec, is_same: bool) -> Result<()> {
    let shown = |mesh: &MeshLayout| mesh.to_string();
    match is_same && left.mesh() == right.mesh() {
        true => Ok(()),
        false => Err(Error::Argument(format!(
            "{name} of {left} and {right}: the meshes {} and {} are not the same ranks in the same order; make both \
             operands on one mesh",
            shown(left.mesh()),
            shown(right.mesh())
        ))),
    }
}

/// A shard of the same kind of another dimension; other placements as they are.
pub(super) fn at_dim(placement: Placement, dim: usize) -> Placement {
    match placement {
        Placement::Shard(_) => Placement::Shard(dim),
        Placement::StridedShard { split_factor, .. } => Placement::StridedShard { dim, split_factor },
        other => other,
    }
}

/// Equal placements written alike.
fn normal(placement: Placement) -> Placement {
    match placement {
        Placement::StridedShard { dim, split_factor: 1 } => Placement::Shard(dim),
        other => other,
    }
}

/// A shard of what is broadcast is to be whole on every rank.
fn whole(placement: Placement) -> Placement {
    if placement.shard_dim().is_some() { Replicate } else { placement }
}

fn reduction(placement: Placement) -> Option<ReduceOp> {
    match placement {
        Partial(op) => Some(op),
        _ => None,
    }
}

fn with(placements: &[Placement], mesh_dim: usize, placement: Placement) -> Vec<Placement> {
    let mut placements = placements.to_vec();
    placements[mesh_dim] = placement;
    placements
}

fn shown(placements: &[Placement]) -> String {
    let placements: Vec<_> = placements.iter().map(ToString::to_string).collect();
    format!("[{}]", placements.join(", "))
}
