//! Values that are infinite or not a number: found on any rank, named on all.

use std::sync::Arc;

use candle_core::Tensor;
use candle_core::backprop::GradStore;
use fsdp_core::process_group::{self, Signature};
use fsdp_core::{ProcessGroup, ReduceOp};

use super::sharded::ShardedOptimizer;
use crate::data_parallel::DataParallel;
use crate::error::{Error, NonFinite, NonFiniteTensor, Result};
use crate::fsdp::ShardedVarMap;
use crate::storage::numbers_of;

/// What [`check_finite`] looks at.
#[derive(Clone, Copy)]
pub enum ValuesOf<'a> {
    /// Every parameter, frozen and ignored ones too, and every buffer: what [`crate::model_tensors`] gives to save.
    Parameters,
    /// The sharded gradients that [`crate::FsdpModule::backward`] returned.
    Gradients(&'a GradStore),
    /// The tensors that an optimizer keeps. Of those kept in 8 bits the scales are counted, one for each block of
    /// values: what is not finite makes its block's so.
    Moments(&'a dyn ShardedOptimizer),
}

/// Finds out whether all of these are finite numbers, on all ranks of the map's mesh, which get the same answer.
/// Collective.
///
/// One pass over what this rank holds, at the speed of memory, and one small all-reduce a mesh dimension; only where
/// something is found, a few more say where. Call it before a checkpoint is saved or a model exported: what is wrong in
/// them is wrong for good.
///
/// Gradients need no call in each step, because their norm tells: see [`crate::ClipOptions::error_if_nonfinite`]. Those
/// that a [`crate::GradScaler`] has to do with may well overflow; it skips such steps by itself.
///
/// # Errors
/// [`Error::NonFinite`], on every rank, with the tensors and how many values of each; those of the all-reduce.
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
/// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
/// use fsdp_candle::{check_finite, AdamW, AdamWConfig, Error, ValuesOf};
///
/// let mut optim = AdamW::new(vars.trainable(), AdamWConfig { lr: 1e39, ..AdamWConfig::default() })?;
/// let grads = model.backward(&model.forward(&x)?.sum_all()?)?;
/// check_finite(&vars, &[ValuesOf::Parameters, ValuesOf::Gradients(&grads), ValuesOf::Moments(&optim)])?;
/// optim.step(&grads)?;
/// match check_finite(&vars, &[ValuesOf::Parameters, ValuesOf::Moments(&optim)]) {
///     Err(Error::NonFinite(found)) => assert_eq!((found.tensors.len(), found.tensors[0].values), (1, 8)),
///     other => panic!("{other:?}"),
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn check_finite(vars: &ShardedVarMap, of: &[ValuesOf<'_>]) -> Result<()> {
    let subjects = subjects(vars, of)?;
    let own = counts(&subjects)?;
    let found = own.iter().any(|&count| count > 0.);
    if over_mesh(vars, vec![f64::from(u8::from(found))], "whether any value is not finite")? == [0.] {
        return Ok(());
    }
    Err(Error::NonFinite(located(vars, &subjects, own)?))
}

/// Where the gradients are not finite whose norm is not. Collective.
pub(crate) fn of_norm(vars: &ShardedVarMap, grads: &GradStore, norm: f64) -> Result<NonFinite> {
    let subjects = subjects(vars, &[ValuesOf::Gradients(grads)])?;
    let own = counts(&subjects)?;
    Ok(NonFinite { norm: Some(norm), ..located(vars, &subjects, own)? })
}

/// One tensor to look at: the same list on every rank.
struct Subject {
    parameter: String,
    what: &'static str,
    /// Of the global tensor.
    elements: usize,
    /// The ranks that it is sharded over; none for what is whole on every rank.
    ranks: Option<Arc<DataParallel>>,
    /// What this rank has of it; a parameter may have got no gradient.
    tensor: Option<Tensor>,
}

/// How many values of each are not finite, of what this rank has.
fn counts(subjects: &[Subject]) -> Result<Vec<f64>> {
    let tensors = subjects.iter().filter_map(|subject| subject.tensor.as_ref());
    let mut found = numbers_of(tensors, |kernels, values, count| kernels.count_non_finite(values, count))?.into_iter();
    let count = |subject: &Subject| subject.tensor.as_ref().and_then(|_| found.next()).unwrap_or(0.);
    Ok(subjects.iter().map(count).collect())
}

fn subjects(vars: &ShardedVarMap, of: &[ValuesOf<'_>]) -> Result<Vec<Subject>> {
    let mut subjects = Vec::new();
    for of in of {
        match of {
            ValuesOf::Parameters => {
                subjects.extend(vars.params().iter().map(|param| Subject {
                    parameter: param.name().into(),
                    what: "",
                    elements: param.shape().elem_count(),
                    ranks: Some(param.spec.ranks.clone()),
                    tensor: Some(param.var().as_tensor().clone()),
                }));
                subjects.extend(vars.wholes().into_iter().map(|(parameter, var)| Subject {
                    parameter,
                    what: "",
                    elements: var.elem_count(),
                    ranks: None,
                    tensor: Some(var.as_tensor().clone()),
                }));
            }
            ValuesOf::Gradients(grads) => subjects.extend(vars.trainable().iter().map(|param| Subject {
                parameter: param.name().into(),
                what: GRADIENT,
                elements: param.shape().elem_count(),
                ranks: Some(param.spec.ranks.clone()),
                tensor: grads.get(param.var()).cloned(),
            })),
            ValuesOf::Moments(optim) => {
                for state in optim.states() {
                    for (what, moment) in state.moments() {
                        subjects.push(Subject {
                            parameter: state.param.name().into(),
                            what,
                            elements: state.param.shape().elem_count(),
                            ranks: Some(state.param.spec.ranks.clone()),
                            tensor: Some(moment.telling().clone()),
                        });
                    }
                }
            }
        }
    }
    Ok(subjects)
}

const GRADIENT: &str = "gradient";
const WHERE: &str = "which values are not finite";

/// What all ranks have found together. Collective.
fn located(vars: &ShardedVarMap, subjects: &[Subject], own: Vec<f64>) -> Result<NonFinite> {
    let mut counts = own.clone();
    // Shards of one tensor add up over the ranks that it is sharded over, in an order that is everybody's. Ranks
    // outside of the map's mesh take no part, for they may have found nothing: of a tensor that they share, the largest
    // share counts.
    let mut meshes: Vec<&Arc<DataParallel>> = Vec::new();
    for ranks in subjects.iter().filter_map(|subject| subject.ranks.as_ref()) {
        if vars.mesh().covers(ranks.mesh()) && !meshes.iter().any(|mesh| Arc::ptr_eq(mesh, ranks)) {
            meshes.push(ranks);
        }
    }
    for mesh in meshes {
        let is_of_mesh = |at: &usize| subjects[*at].ranks.as_ref().is_some_and(|ranks| Arc::ptr_eq(ranks, mesh));
        let at: Vec<usize> = (0..subjects.len()).filter(is_of_mesh).collect();
        let shares = at.iter().map(|&at| own[at]).collect();
        let sum = |shares, group: &ProcessGroup| all_reduce(group, shares, ReduceOp::Sum, WHERE);
        for (&at, sum) in at.iter().zip(mesh.parts().try_fold(shares, sum)?) {
            counts[at] = sum;
        }
    }
    // And so do the parts that tensor parallelism has cut.
    let cut = |subject: &Subject| subject.ranks.as_ref().and_then(|_| vars.get(&subject.parameter));
    let cut = |subject: &Subject| cut(subject).and_then(|param| param.cut_over().cloned());
    let at: Vec<usize> = (0..subjects.len()).filter(|&at| cut(&subjects[at]).is_some()).collect();
    if let Some(ranks) = at.first().and_then(|&at| cut(&subjects[at])) {
        let shares = at.iter().map(|&at| counts[at]).collect();
        for (&at, sum) in at.iter().zip(all_reduce(&ranks, shares, ReduceOp::Sum, WHERE)?) {
            counts[at] = sum;
        }
    }
    // Replicas hold the same, if all is well; and every rank says whether it holds any.
    let mut holders = vec![0.; vars.mesh().size()];
    holders[vars.mesh().rank()] = f64::from(u8::from(own.iter().any(|&count| count > 0.)));
    counts.extend(holders);
    let counts = over_mesh(vars, counts, WHERE)?;
    let (counts, holders) = counts.split_at(subjects.len());
    let tensors = subjects.iter().zip(counts).filter(|(_, count)| **count > 0.).map(|(subject, &count)| {
        let Subject { parameter, what, elements, .. } = subject;
        NonFiniteTensor { parameter: parameter.clone(), what, values: count as u64, of: *elements as u64 }
    });
    let ranks = holders.iter().enumerate().filter(|(_, held)| **held > 0.).map(|(rank, _)| rank);
    Ok(NonFinite { norm: None, tensors: tensors.collect(), ranks: ranks.collect() })
}

/// The largest of each value on the ranks of the map's mesh.
fn over_mesh(vars: &ShardedVarMap, mut values: Vec<f64>, about: &str) -> Result<Vec<f64>> {
    let mesh = vars.mesh();
    for dim in 0..mesh.layout().shape().len() {
        values = all_reduce(mesh.group(dim)?, values, ReduceOp::Max, about)?;
    }
    Ok(values)
}

/// Signed: numbers are like one another, and a rank that reduces something else at once must not get these.
fn all_reduce(group: &ProcessGroup, values: Vec<f64>, op: ReduceOp, about: &str) -> Result<Vec<f64>> {
    let group = group.signed(Signature::new(&process_group::Subject::new(about, []), []));
    Ok(group.all_reduce_values(values, op)?)
}
