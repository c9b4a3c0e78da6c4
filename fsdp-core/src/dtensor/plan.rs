//! Plans redistributions: a list of steps, each of which changes the placement of one mesh dimension.

use super::spec::DTensorSpec;
use crate::{Error, Placement, ReduceOp, Result};

/// One step of a redistribution, which changes the placement of one mesh dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The mesh dimension, whose groups communicate.
    pub mesh_dim: usize,
    /// Placement before the step.
    pub from: Placement,
    /// Placement after the step.
    pub to: Placement,
}

/// The operation of a [`Step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Shard to replicate: every rank gets all shards.
    AllGather,
    /// Shard to another shard: every rank exchanges with every other rank.
    AllToAll,
    /// Partial to replicate.
    AllReduce(ReduceOp),
    /// Partial to shard.
    ReduceScatter(ReduceOp),
    /// Replicate to shard: a local copy.
    Slice,
    /// Replicate to partial, locally: makes terms whose reduction is the tensor.
    Split(ReduceOp),
}

impl Step {
    /// Returns the operation. `None` for shard or partial to partial, which no plan contains.
    pub fn action(&self) -> Option<Action> {
        use Placement::{Partial, Replicate};
        Some(match (self.from, self.to) {
            (Partial(op), Replicate) => Action::AllReduce(op),
            (Replicate, Partial(op)) => Action::Split(op),
            (_, Partial(_)) | (Replicate, Replicate) => return None,
            (Partial(op), _) => Action::ReduceScatter(op),
            (Replicate, _) => Action::Slice,
            (_, Replicate) => Action::AllGather,
            _ => Action::AllToAll,
        })
    }
}

/// Returns the steps from one layout of a tensor to another, in order. Every rank computes the same steps.
///
/// Of two mesh dimensions that shard one tensor dimension, the one that splits last is gathered first and sharded last.
/// If that prevents a direct step, the mesh dimension goes through [`Placement::Replicate`]. Steps that shrink tensors
/// (slices, reduce-scatters) come before steps that grow them.
///
/// ```
/// use fsdp_core::{
///     dtensor::{plan, Action}, DType, DTensorSpec, MeshLayout, Placement::{Partial, Replicate, Shard}, ReduceOp,
/// };
/// let mesh = MeshLayout::new(&[("replicate", 2), ("shard", 2)])?;
/// let partial = DTensorSpec::new(mesh, &[Partial(ReduceOp::Avg); 2], &[8, 8], DType::F32)?;
/// let steps = plan(&partial, &partial.with_placements(&[Replicate, Shard(0)])?)?;
/// // HSDP's reduction of a gradient: reduce-scatter in the shard dimension, then all-reduce the smaller rest.
/// assert_eq!(steps[0].action(), Some(Action::ReduceScatter(ReduceOp::Avg)));
/// assert_eq!((steps[0].mesh_dim, steps[1].mesh_dim), (1, 0));
/// assert_eq!(steps[1].action(), Some(Action::AllReduce(ReduceOp::Avg)));
/// # Ok::<(), fsdp_core::Error>(())
/// ```
///
/// # Errors
/// Returns [`Error::Layout`] when the tensors or meshes differ, from shard to partial, and from replicate to the
/// partial of a product.
pub fn plan(from: &DTensorSpec, to: &DTensorSpec) -> Result<Vec<Step>> {
    if (from.mesh(), from.shape(), from.dtype()) != (to.mesh(), to.shape(), to.dtype()) {
        return Err(Error::Layout(format!(
            "{from} and {to} differ in more than placements: a redistribution needs the same mesh, shape and dtype"
        )));
    }
    for (mesh_dim, (&from, &to)) in from.placements().iter().zip(to.placements()).enumerate() {
        let why = match (from, to) {
            (_, Placement::Partial(ReduceOp::Product)) if from != to => "which rank keeps the factors is undefined",
            (_, Placement::Partial(_)) if from.shard_dim().is_some() => {
                "a shard is not a term of a reduction; redistribute to replicate first"
            }
            _ => continue,
        };
        return Err(Error::Layout(format!("mesh dimension {mesh_dim} cannot go from {from} to {to}: {why}")));
    }
    let (goal, mut at, mut steps) =
        (to.with_placements(&normal(to))?, from.with_placements(&normal(from))?, Vec::new());
    while at.placements() != goal.placements() {
        let (step, next) = next(&at, &goal)?;
        steps.push(step);
        at = next;
    }
    Ok(steps)
}

/// Returns the placements with `StridedShard` of split factor 1 written as `Shard`.
fn normal(spec: &DTensorSpec) -> Vec<Placement> {
    let normal = |&placement: &_| match placement {
        Placement::StridedShard { dim, split_factor: 1 } => Placement::Shard(dim),
        _ => placement,
    };
    spec.placements().iter().map(normal).collect()
}

/// Returns the next step and the layout after it.
fn next(at: &DTensorSpec, goal: &DTensorSpec) -> Result<(Step, DTensorSpec)> {
    let take = |mesh_dim: usize, to: Placement| {
        let mut placements = at.placements().to_vec();
        let step = Step { mesh_dim, from: std::mem::replace(&mut placements[mesh_dim], to), to };
        Ok((step, at.with_placements(&placements)?))
    };
    let open: Vec<(usize, Placement, Placement)> = (at.placements().iter().zip(goal.placements()).enumerate())
        .filter(|(_, (now, then))| now != then)
        .map(|(mesh_dim, (&now, &then))| (mesh_dim, now, then))
        .collect();
    let sharded = |placement: Placement| placement.shard_dim().is_some();
    // First shard each dimension whose earlier splits are those of the goal.
    for &(mesh_dim, now, then) in &open {
        let Some(tensor_dim) = then.shard_dim() else { continue };
        if sharded(now) && !at.is_last_split(mesh_dim) {
            continue;
        }
        if let Ok((step, next)) = take(mesh_dim, then)
            && next.is_last_split(mesh_dim)
            && goal.splits()[tensor_dim].starts_with(&next.splits()[tensor_dim])
        {
            return Ok((step, next));
        }
    }
    // Then reduce, while the tensor is small.
    for &(mesh_dim, now, then) in &open {
        if matches!(now, Placement::Partial(_)) && !sharded(then) {
            return take(mesh_dim, Placement::Replicate);
        }
    }
    // Then gather splits that the goal does not have at this position, last split first.
    for (mesh_dim, &now) in at.placements().iter().enumerate() {
        if let Some(dim) = now.shard_dim()
            && at.is_last_split(mesh_dim)
            && !goal.splits()[dim].starts_with(&at.splits()[dim])
        {
            return take(mesh_dim, Placement::Replicate);
        }
    }
    // Only replicate to partial is left.
    match open.first() {
        Some(&(mesh_dim, _, then)) => take(mesh_dim, then),
        None => Err(Error::Layout(format!("no step leads from {at} to {goal}: redistribute to replicate in between"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, MeshLayout};
    use Placement::{Partial, Replicate, Shard};
    use proptest::prelude::*;

    const SUM: Placement = Partial(ReduceOp::Sum);

    fn spec(dims: &[usize], placements: &[Placement]) -> DTensorSpec {
        let names = ["a", "b", "c"];
        let mesh = MeshLayout::new(&names.into_iter().zip(dims.iter().copied()).collect::<Vec<_>>()).unwrap();
        DTensorSpec::new(mesh, placements, &[12, 12, 12], DType::F32).unwrap()
    }

    fn strided(split_factor: usize) -> Placement {
        Placement::StridedShard { dim: 0, split_factor }
    }

    #[test]
    fn one_dimension_takes_one_step() {
        for (from, to, action) in [
            (Shard(1), Replicate, Action::AllGather),
            (Shard(0), Shard(2), Action::AllToAll),
            (strided(3), Shard(0), Action::AllToAll),
            (strided(3), Replicate, Action::AllGather),
            (SUM, Replicate, Action::AllReduce(ReduceOp::Sum)),
            (SUM, Shard(1), Action::ReduceScatter(ReduceOp::Sum)),
            (Replicate, Shard(1), Action::Slice),
            (Replicate, strided(3), Action::Slice),
            (Replicate, Partial(ReduceOp::Max), Action::Split(ReduceOp::Max)),
        ] {
            let steps = plan(&spec(&[2], &[from]), &spec(&[2], &[to])).unwrap();
            assert_eq!(steps, [Step { mesh_dim: 0, from, to }]);
            assert_eq!(steps[0].action(), Some(action));
        }
        assert_eq!(plan(&spec(&[2], &[strided(1)]), &spec(&[2], &[Shard(0)])).unwrap(), []);
    }

    /// Returns the mesh dimension and the new placement of each step.
    fn steps(from: &[Placement], to: &[Placement]) -> Vec<(usize, Placement)> {
        let steps = plan(&spec(&[2, 2, 2][..from.len()], from), &spec(&[2, 2, 2][..to.len()], to)).unwrap();
        steps.into_iter().map(|step| (step.mesh_dim, step.to)).collect()
    }

    #[test]
    fn nested_shards_are_undone_last_cut_first() {
        assert_eq!(steps(&[Shard(0), Shard(0)], &[Replicate, Replicate]), [(1, Replicate), (0, Replicate)]);
        // The outer split prevents the direct step, so the inner split is undone and made again.
        assert_eq!(
            steps(&[Shard(0), Shard(0)], &[Replicate, Shard(0)]),
            [(1, Replicate), (0, Replicate), (1, Shard(0))]
        );
        assert_eq!(steps(&[Shard(0), Shard(0)], &[Shard(0), Replicate]), [(1, Replicate)]);
        assert_eq!(steps(&[Shard(0), Shard(0)], &[Shard(0), Shard(1)]), [(1, Shard(1))]);
        assert_eq!(
            steps(&[Replicate, Shard(0)], &[Shard(0), Shard(0)]),
            [(1, Replicate), (0, Shard(0)), (1, Shard(0))]
        );
        assert_eq!(steps(&[Shard(0), Shard(1)], &[Shard(1), Shard(0)]), [(0, Replicate), (1, Shard(0)), (0, Shard(1))]);
        // Data parallelism splits the tensor-parallel shards, so its shards are gathered first.
        assert_eq!(steps(&[strided(2), Shard(0)], &[Replicate, Replicate]), [(0, Replicate), (1, Replicate)]);
        assert_eq!(steps(&[Replicate, Shard(0)], &[strided(2), Shard(0)]), [(0, strided(2))]);
    }

    #[test]
    fn reductions_come_before_gathers() {
        assert_eq!(steps(&[SUM, Shard(0)], &[Replicate, Replicate]), [(0, Replicate), (1, Replicate)]);
        assert_eq!(steps(&[Shard(0), SUM], &[Replicate, Shard(1)]), [(1, Shard(1)), (0, Replicate)]);
        assert_eq!(steps(&[SUM, Shard(0)], &[SUM, Replicate]), [(1, Replicate)]);
        assert_eq!(
            steps(&[SUM, Replicate], &[Partial(ReduceOp::Max), Replicate]),
            [(0, Replicate), (0, Partial(ReduceOp::Max))]
        );
    }

    #[test]
    fn undefined_redistributions_are_refused() {
        let other = spec(&[4], &[Replicate]);
        for (from, to, part) in [
            (spec(&[2], &[Shard(0)]), spec(&[2], &[SUM]), "mesh dimension 0 cannot go from S(0) to P(sum)"),
            (spec(&[2], &[Replicate]), spec(&[2], &[Partial(ReduceOp::Product)]), "from R to P(product)"),
            (spec(&[2], &[Replicate]), other, "the same mesh, shape and dtype"),
        ] {
            let error = plan(&from, &to).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    fn placement() -> impl Strategy<Value = Placement> {
        prop_oneof![
            4 => (0usize..3).prop_map(Shard),
            2 => (0usize..2, 1usize..7).prop_map(|(dim, split_factor)| Placement::StridedShard { dim, split_factor }),
            1 => (0usize..3, 0usize..3).prop_map(|(dim, rank)| Placement::OwnedBy { dim, rank }),
            2 => Just(Replicate),
            1 => Just(SUM),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2048, ..ProptestConfig::default() })]

        #[test]
        fn every_plan_reaches_its_goal_by_last_splits(
            dims in prop::collection::vec(1usize..4, 3),
            from in prop::collection::vec(placement(), 3),
            to in prop::collection::vec(placement(), 3),
        ) {
            let mesh = MeshLayout::new(&[("a", dims[0]), ("b", dims[1]), ("c", dims[2])]).unwrap();
            let spec = |placements: &[Placement]| DTensorSpec::new(mesh.clone(), placements, &[12, 12, 12], DType::F32);
            let (Ok(from), Ok(to)) = (spec(&from), spec(&to)) else { return Ok(()) };
            let shard_to_partial = |(from, to): (&Placement, &Placement)| from.shard_dim().is_some() && *to == SUM;
            let steps = plan(&from, &to);
            if from.placements().iter().zip(to.placements()).any(shard_to_partial) {
                prop_assert!(steps.is_err());
                return Ok(());
            }
            let steps = steps.unwrap();
            prop_assert!(steps.len() <= 6, "{from} to {to}: {steps:?}");
            let mut at = from.with_placements(&normal(&from)).unwrap();
            for step in steps {
                prop_assert_eq!(at.placements()[step.mesh_dim], step.from);
                prop_assert!(step.action().is_some());
                prop_assert!(step.from.shard_dim().is_none() || at.is_last_split(step.mesh_dim));
                let mut placements = at.placements().to_vec();
                placements[step.mesh_dim] = step.to;
                let next = spec(&placements).unwrap();
                prop_assert!(step.to.shard_dim().is_none() || next.is_last_split(step.mesh_dim));
                at = next;
            }
            prop_assert_eq!(at.placements(), normal(&to));
        }
    }
}
