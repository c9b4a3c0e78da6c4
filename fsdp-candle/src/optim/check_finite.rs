//! Checks for NaN and infinity. A value on any rank is reported on all ranks.

use std::sync::Arc;

use candle_core::Tensor;
use candle_core::backprop::GradStore;
use fsdp_core::process_group::{self, Signature};
use fsdp_core::{ProcessGroup, ReduceOp};

use super::disk::OnDisk;
use super::sharded_optimizer::ShardedOptimizer;
use super::state::Moment;
use crate::data_parallel::{DataParallel, largest_over};
use crate::disk::FileTensor;
use crate::error::{Error, NonFinite, NonFiniteTensor, Result};
use crate::fsdp::{FsdpParam, ShardedVarMap};
use crate::storage::numbers_of;

/// The values that [`check_finite`] checks.
#[derive(Clone, Copy)]
pub enum ValuesOf<'a> {
    /// Every parameter, frozen and ignored ones too, and every buffer: the tensors of [`crate::model_tensors`].
    Parameters,
    /// Sharded gradients of [`crate::FsdpModule::backward`].
    Gradients(&'a GradStore),
    /// The tensors of an optimizer's state. For 8-bit state, counts scales, one for each block of values.
    Moments(&'a dyn ShardedOptimizer),
}

/// Checks that all values are finite, on all ranks of the map's mesh. Every rank gets the same result. Collective.
///
/// Reads this rank's values once and all-reduces one number along each mesh dimension. Only if a value is not finite, a
/// few more collectives locate it. Call it before you save a checkpoint or export a model.
///
/// Gradients do not need this check in each step, because their norm shows it: see
/// [`crate::ClipOptions::error_if_nonfinite`]. Gradients under a [`crate::GradScaler`] may overflow; the scaler skips
/// such steps. Fails with [`Error::NonFinite`] on every rank, which has the tensors and their counts.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
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
    let own = subjects(vars, of).and_then(|subjects| Ok((counts(&subjects)?, subjects)));
    // A rank that cannot read its values tells the other ranks, which would wait for it.
    let found = match &own {
        Ok((counts, _)) => u8::from(counts.iter().any(|&count| count > 0.)),
        Err(_) => 2,
    };
    let worst = largest_over(vars.mesh(), vec![f64::from(found)], "check for NaN and infinity")?[0];
    let (counts, subjects) = own?;
    match worst {
        0. => Ok(()),
        1. => Err(Error::NonFinite(locate(vars, &subjects, counts)?)),
        _ => Err(Error::Argument(format!(
            "rank {}: another rank could not read its values to check them for NaN and infinity: see its error",
            vars.mesh().rank()
        ))),
    }
}

/// Locates the values that are not finite in gradients whose norm is not finite. Collective.
pub(crate) fn non_finite_of_norm(vars: &ShardedVarMap, grads: &GradStore, norm: f64) -> Result<NonFinite> {
    let subjects = subjects(vars, &[ValuesOf::Gradients(grads)])?;
    let own = counts(&subjects)?;
    Ok(NonFinite { norm: Some(norm), ..locate(vars, &subjects, own)? })
}

/// One tensor to check. All ranks have the same list.
struct CheckedTensor {
    parameter: String,
    what: &'static str,
    /// Number of elements of the global tensor.
    elements: usize,
    /// Ranks that it is sharded over; `None` for a tensor that every rank holds.
    ranks: Option<Arc<DataParallel>>,
    /// This rank's part; `None` for a parameter without a gradient.
    own: Option<OwnPart>,
}

/// This rank's part of a tensor to check.
enum OwnPart {
    InMemory(Tensor),
    OnDisk(OnDisk),
    Shard(FileTensor),
}

/// Counts the values of this rank's parts that are not finite.
fn counts(subjects: &[CheckedTensor]) -> Result<Vec<f64>> {
    let tensors = subjects.iter().filter_map(|subject| match &subject.own {
        Some(OwnPart::InMemory(tensor)) => Some(tensor),
        Some(OwnPart::OnDisk(_) | OwnPart::Shard(_)) | None => None,
    });
    let mut found = numbers_of(tensors, |kernels, values, count| kernels.count_non_finite(values, count))?.into_iter();
    let count = |subject: &CheckedTensor| match &subject.own {
        Some(OwnPart::InMemory(_)) => Ok(found.next().unwrap_or(0.)),
        Some(OwnPart::OnDisk(moment)) => moment.count_non_finite(),
        Some(OwnPart::Shard(shard)) => shard.count_non_finite(),
        None => Ok(0.),
    };
    subjects.iter().map(count).collect()
}

fn subjects(vars: &ShardedVarMap, of: &[ValuesOf<'_>]) -> Result<Vec<CheckedTensor>> {
    let of_param = |param: &FsdpParam, what, own| CheckedTensor {
        parameter: param.name().into(),
        what,
        elements: param.shape().elem_count(),
        ranks: Some(param.spec.ranks.clone()),
        own,
    };
    let in_memory = |tensor: &Tensor| Some(OwnPart::InMemory(tensor.clone()));
    let mut subjects = Vec::new();
    for of in of {
        match of {
            ValuesOf::Parameters => {
                for param in &vars.params() {
                    let own = match param.shard.on_disk() {
                        Some(shard) if param.spec.encoding.blocks().is_none() => Some(OwnPart::Shard(shard.clone())),
                        _ => in_memory(&param.overflow_witness()?),
                    };
                    subjects.push(of_param(param, "", own));
                }
                subjects.extend(vars.wholes().into_iter().map(|(parameter, var)| {
                    let (elements, own) = (var.elem_count(), in_memory(&var));
                    CheckedTensor { parameter, what: "", elements, ranks: None, own }
                }));
            }
            ValuesOf::Gradients(grads) => {
                let gradient =
                    |param: &Arc<FsdpParam>| of_param(param, "gradient", grads.get(param.var()).and_then(in_memory));
                subjects.extend(vars.trainable().iter().map(gradient));
            }
            ValuesOf::Moments(optim) => {
                for state in optim.states() {
                    // A scale is not finite if a value of its block is not.
                    let own = |moment: &Moment| match moment {
                        Moment::Full(tensor) => in_memory(tensor),
                        Moment::Quantized(quantized) => in_memory(quantized.parts()[1]),
                        Moment::OnDisk(moment) => Some(OwnPart::OnDisk(moment.clone())),
                    };
                    subjects.extend(state.moments().map(|(what, m)| of_param(&state.param, what, own(m))));
                }
            }
        }
    }
    Ok(subjects)
}

const COUNTS: &str = "counts of NaN and infinity";

/// Combines the counts of all ranks. Collective.
fn locate(vars: &ShardedVarMap, subjects: &[CheckedTensor], own: Vec<f64>) -> Result<NonFinite> {
    let mut counts = own.clone();
    // Counts of shards add up over the ranks that a tensor is sharded over, in an order that all ranks share. Ranks
    // outside the map's mesh take no part, because they may have found nothing: for tensors that they share, the
    // largest count holds.
    let mut meshes: Vec<&Arc<DataParallel>> = Vec::new();
    for ranks in subjects.iter().filter_map(|subject| subject.ranks.as_ref()) {
        if vars.mesh().covers(&ranks.mesh) && !meshes.iter().any(|mesh| Arc::ptr_eq(mesh, ranks)) {
            meshes.push(ranks);
        }
    }
    for mesh in meshes {
        let is_of_mesh = |at: &usize| subjects[*at].ranks.as_ref().is_some_and(|ranks| Arc::ptr_eq(ranks, mesh));
        let at: Vec<usize> = (0..subjects.len()).filter(is_of_mesh).collect();
        let shares = at.iter().map(|&at| own[at]).collect();
        let sum = |shares, group: &ProcessGroup| all_reduce(group, shares, ReduceOp::Sum, COUNTS);
        for (&at, sum) in at.iter().zip(mesh.parts().try_fold(shares, sum)?) {
            counts[at] = sum;
        }
    }
    // Counts of tensor-parallel parts add up as well.
    let tensor_parallel = |subject: &CheckedTensor| subject.ranks.as_ref().and_then(|_| vars.get(&subject.parameter));
    let tensor_parallel =
        |subject: &CheckedTensor| tensor_parallel(subject).and_then(|param| param.split_over().cloned());
    let at: Vec<usize> = (0..subjects.len()).filter(|&at| tensor_parallel(&subjects[at]).is_some()).collect();
    if let Some(ranks) = at.first().and_then(|&at| tensor_parallel(&subjects[at])) {
        let shares = at.iter().map(|&at| counts[at]).collect();
        for (&at, sum) in at.iter().zip(all_reduce(&ranks, shares, ReduceOp::Sum, COUNTS)?) {
            counts[at] = sum;
        }
    }
    // Replicas hold the same values. Every rank also reports whether it found any.
    let mut holders = vec![0.; vars.mesh().size()];
    holders[vars.mesh().rank()] = f64::from(u8::from(own.iter().any(|&count| count > 0.)));
    counts.extend(holders);
    let counts = largest_over(vars.mesh(), counts, COUNTS)?;
    let (counts, holders) = counts.split_at(subjects.len());
    let tensors = subjects.iter().zip(counts).filter(|(_, count)| **count > 0.).map(|(subject, &count)| {
        let CheckedTensor { parameter, what, elements, .. } = subject;
        NonFiniteTensor { parameter: parameter.clone(), what, values: count as u64, of: *elements as u64 }
    });
    let ranks = holders.iter().enumerate().filter(|(_, held)| **held > 0.).map(|(rank, _)| rank);
    Ok(NonFinite { norm: None, tensors: tensors.collect(), ranks: ranks.collect() })
}

/// All-reduces with a signature, so that a rank in another all-reduce cannot get these numbers.
fn all_reduce(group: &ProcessGroup, values: Vec<f64>, op: ReduceOp, about: &str) -> Result<Vec<f64>> {
    let group = group.signed(Signature::new(&process_group::Subject::new(about, []), []));
    Ok(group.all_reduce_values(values, op)?)
}
