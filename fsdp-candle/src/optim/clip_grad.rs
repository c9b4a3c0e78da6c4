//! Norms and clipping of sharded gradients.

use std::sync::Arc;

use candle_core::Tensor;
use candle_core::backprop::GradStore;
use fsdp_core::process_group::{Signature, Subject};
use fsdp_core::{ProcessGroup, ReduceOp};

use super::check_finite::non_finite_of_norm;
use crate::data_parallel::largest_over;
use crate::error::{Error, Result};
use crate::fsdp::{FsdpParam, ShardedVarMap};
use crate::kernels::NormType;
use crate::storage::{numbers_of, with_slice_mut};

/// Largest relative difference of the powers of a gradient that tensor-parallel ranks replicate. Rounding differs by
/// much less, terms of a sum by much more.
const MAX_DIFFERENCE: f64 = 1e-3;

/// Options of [`clip_grad_norm_with`].
#[derive(Clone, Copy, Debug)]
pub struct ClipOptions {
    /// Largest norm after clipping.
    pub max_norm: f64,
    /// The norm.
    pub norm_type: NormType,
    /// Whether a norm that is not finite is an error, which names the parameters.
    pub error_if_nonfinite: bool,
}

/// Scales the sharded gradients to a global 2-norm of at most `max_norm`. Returns the norm before scaling, the same on
/// every rank. Collective.
///
/// As PyTorch's `clip_grad_norm_`, multiplies by `max_norm / (norm + 1e-6)`, at most 1. An infinite gradient makes the
/// norm infinite and the other gradients zero; a NaN makes the norm NaN. Check the returned norm before a step, or use
/// [`ClipOptions::error_if_nonfinite`].
///
/// If nothing else reads the clipped gradients, [`clip_factor`] gives the same step without a pass over them.
pub fn clip_grad_norm(vars: &ShardedVarMap, grads: &mut GradStore, max_norm: f64) -> Result<f64> {
    clip_grad_norm_with(vars, grads, &ClipOptions { max_norm, norm_type: NormType::Two, error_if_nonfinite: false })
}

/// Clips gradients by any norm, as [`clip_grad_norm`] does.
///
/// # Errors
/// Returns an error on every rank, with unchanged gradients, when:
///
/// - the norm is not finite and the options refuse it;
/// - tensor-parallel ranks have different gradients of a replicated parameter, as a module on a part of the sequence
///   does that is not [`SequenceParallel`](crate::SequenceParallel).
///
/// Also returns the errors of the all-reduce.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
/// use fsdp_candle::{clip_grad_norm, clip_grad_norm_with, grad_norm, ClipOptions, NormType};
///
/// let mut grads = model.backward(&model.forward(&x)?.sum_all()?)?; // 8 elements of 3
/// let norm = |norm_type| ClipOptions { max_norm: f64::INFINITY, norm_type, error_if_nonfinite: true };
/// assert_eq!(clip_grad_norm_with(&vars, &mut grads, &norm(NormType::P(1.)))?, 24.);
/// assert_eq!(clip_grad_norm_with(&vars, &mut grads, &norm(NormType::Infinity))?, 3.);
/// assert_eq!(clip_grad_norm(&vars, &mut grads, 1.)?, 72f64.sqrt()); // the 2-norm before
/// assert!((grad_norm(&vars, &grads)? - 1.).abs() < 1e-6); // and after
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn clip_grad_norm_with(vars: &ShardedVarMap, grads: &mut GradStore, options: &ClipOptions) -> Result<f64> {
    clip_grad_norm_of(vars, &vars.trainable(), grads, options)
}

/// Clips the gradients of some parameters, such as an optimizer's group, by their own norm. All ranks pass the same
/// parameters. Fails as [`clip_grad_norm_with`] does. The error names all parameters whose gradients are not finite.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear)?;
/// use fsdp_candle::{clip_grad_norm_of, group_by_name, ClipOptions, NamePattern, NormType};
///
/// let groups = group_by_name(vars.trainable(), [&[NamePattern::new("bias")?][..]])?;
/// let mut grads = model.backward(&model.forward(&x)?.sum_all()?)?; // all are 3
/// let options = ClipOptions { max_norm: 1., norm_type: NormType::Infinity, error_if_nonfinite: true };
/// let norms = [1, 0].map(|group| clip_grad_norm_of(&vars, &groups[group], &mut grads, &options).unwrap());
/// assert_eq!(norms, [3., 3.]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn clip_grad_norm_of(
    vars: &ShardedVarMap,
    params: &[Arc<FsdpParam>],
    grads: &mut GradStore,
    options: &ClipOptions,
) -> Result<f64> {
    let norm = norm_of(vars, params, grads, options.norm_type)?;
    if options.error_if_nonfinite && !norm.is_finite() {
        return Err(Error::NonFinite(non_finite_of_norm(vars, grads, norm)?));
    }
    clip_with_norm(params, grads, options.max_norm, norm)?;
    Ok(norm)
}

/// Scales gradients as [`clip_grad_norm`] does for a known norm: PyTorch's `clip_grads_with_norm_`. Does not
/// communicate.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
/// use fsdp_candle::{clip_grads_with_norm, grad_norm};
///
/// let mut grads = model.backward(&model.forward(&x)?.sum_all()?)?;
/// let before = grad_norm(&vars, &grads)?;
/// clip_grads_with_norm(&vars, &mut grads, 1., 4.)?;
/// assert!((grad_norm(&vars, &grads)? - before / 4.).abs() < 1e-5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn clip_grads_with_norm(vars: &ShardedVarMap, grads: &mut GradStore, max_norm: f64, total_norm: f64) -> Result<()> {
    clip_with_norm(&vars.trainable(), grads, max_norm, total_norm)
}

/// Returns the factor by which [`clip_grads_with_norm`] multiplies gradients: `max_norm / (total_norm + 1e-6)`, at most
/// 1, and 1 for a NaN. [`ShardedOptimizer::step_scaled`](crate::ShardedOptimizer::step_scaled) takes it, which saves a
/// pass over the gradients.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
/// use fsdp_candle::{clip_factor, grad_norm, ShardedOptimizer, SGD};
///
/// let mut optim = SGD::new(vars.trainable(), 1.)?;
/// let before = vars.params()[0].var().to_vec2::<f32>()?[0][0];
/// let grads = model.backward(&model.forward(&x)?.sum_all()?)?; // 8 elements of 3
/// let norm = grad_norm(&vars, &grads)?;
/// optim.step_scaled(&grads, clip_factor(1., norm))?; // as clip_grad_norm(&vars, &mut grads, 1.) and a step
/// let after = vars.params()[0].var().to_vec2::<f32>()?[0][0];
/// assert!((before - after - 1. / 8f32.sqrt()).abs() < 1e-6);
/// assert_eq!(grad_norm(&vars, &grads)?, norm); // the gradients did not change
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn clip_factor(max_norm: f64, total_norm: f64) -> f64 {
    let factor = max_norm / (total_norm + 1e-6);
    if factor < 1. { factor } else { 1. }
}

fn clip_with_norm(params: &[Arc<FsdpParam>], grads: &mut GradStore, max_norm: f64, total_norm: f64) -> Result<()> {
    let factor = clip_factor(max_norm, total_norm);
    if factor < 1. {
        let grads = params.iter().filter_map(|param| grads.get(param.var()));
        grads.into_iter().try_for_each(|grad| scale(grad, factor))?;
    }
    Ok(())
}

/// Returns the 2-norm of all sharded gradients, accumulated in f64. Collective.
pub fn grad_norm(vars: &ShardedVarMap, grads: &GradStore) -> Result<f64> {
    norm_of(vars, &vars.trainable(), grads, NormType::Two)
}

fn norm_of(vars: &ShardedVarMap, params: &[Arc<FsdpParam>], grads: &GradStore, norm_type: NormType) -> Result<f64> {
    norm_type.check()?;
    if vars.trainable().is_empty() {
        return Err(Error::Argument(
            "the gradients' norm: there are no trainable parameters, so the norm would be 0 and nothing clipped. Pass \
             the map that the model was built from, after the model"
                .into(),
        ));
    }
    let mut norm = GradNorm { norm_type, ..GradNorm::new(vars) };
    norm.add_some(params, grads)?;
    norm.norm()
}

/// The 2-norm of gradients that come in parts, such as those of a hook of backward
/// ([`set_post_accumulate_grad_hook`](crate::FsdpModule::set_post_accumulate_grad_hook)).
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
/// use fsdp_candle::{GradNorm, grad_norm};
///
/// let grads = model.backward(&model.forward(&x)?.sum_all()?)?;
/// let mut norm = GradNorm::new(&vars);
/// norm.add(&grads)?;
/// assert_eq!(norm.norm()?, grad_norm(&vars, &grads)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct GradNorm {
    vars: ShardedVarMap,
    norm_type: NormType,
    /// This rank's powers of each gradient.
    powers: Vec<(Arc<FsdpParam>, f64)>,
}

impl GradNorm {
    /// Makes the norm of no gradients.
    pub fn new(vars: &ShardedVarMap) -> Self {
        GradNorm { vars: vars.clone(), norm_type: NormType::Two, powers: vec![] }
    }

    /// Adds this rank's sharded gradients. Does not communicate.
    pub fn add(&mut self, grads: &GradStore) -> Result<()> {
        self.add_some(&self.vars.trainable(), grads)
    }

    fn add_some(&mut self, params: &[Arc<FsdpParam>], grads: &GradStore) -> Result<()> {
        let with_gradient: Vec<_> = params.iter().filter_map(|param| Some((param, grads.get(param.var())?))).collect();
        let powers = powers(with_gradient.iter().map(|(_, grad)| *grad), self.norm_type)?;
        self.powers.extend(with_gradient.into_iter().zip(powers).map(|((param, _), power)| (param.clone(), power)));
        Ok(())
    }

    /// Returns the norm over all ranks, the same on each. Collective. Fails on every rank if tensor-parallel ranks have
    /// different gradients of a replicated parameter.
    pub fn norm(self) -> Result<f64> {
        let GradNorm { vars, norm_type, powers } = self;
        // Parameters on one mesh are summed together, tensor-parallel parts apart from the others. Replicas count once.
        let mut meshes: Vec<_> = vars.all_ranks()?.into_iter().map(|ranks| (ranks, [0.; 2])).collect();
        for (param, power) in &powers {
            if let Some((_, shares)) = meshes.iter_mut().find(|(ranks, _)| Arc::ptr_eq(ranks, &param.spec.ranks)) {
                let share = &mut shares[usize::from(param.split_over().is_some())];
                *share = norm_type.combine(*share, *power);
            }
        }
        let parallel = vars.parallel_ranks();
        let op = if norm_type == NormType::Infinity { ReduceOp::Max } else { ReduceOp::Sum };
        // The signature keeps a rank in another all-reduce from getting a norm.
        let subject = Subject::new(format!("the gradients' norm ({norm_type:?})"), []);
        let signature = || Signature::new(&subject, []);
        let mut totals = [0.; 2];
        for (ranks, shares) in meshes {
            let shares = if parallel.is_some() { shares.to_vec() } else { vec![shares[0]] };
            let reduce = |shares, group: &ProcessGroup| group.signed(signature()).all_reduce_values(shares, op);
            let reduced = ranks.parts().try_fold(shares, reduce)?;
            for (total, reduced) in totals.iter_mut().zip(reduced) {
                *total = norm_type.combine(*total, reduced);
            }
        }
        let [whole, parts] = totals;
        let Some(ranks) = &parallel else { return Ok(norm_type.root(whole)) };
        // The first rank counts replicated gradients, so all ranks get the same bits.
        let first = if ranks.rank() == 0 { whole } else { 0. };
        let reduced = ranks.signed(signature()).all_reduce_values(vec![parts, first, whole], op)?;
        let &[parts, first, all] = reduced.as_slice() else { return Ok(f64::NAN) };
        if op == ReduceOp::Sum && (all - first * ranks.size() as f64).abs() > MAX_DIFFERENCE * all {
            return Err(replicas_differ(&vars, &powers, ranks)?);
        }
        Ok(norm_type.root(norm_type.combine(first, parts)))
    }
}

/// Returns the error for a replicated parameter whose gradients differ on tensor-parallel ranks. Collective.
fn replicas_differ(vars: &ShardedVarMap, powers: &[(Arc<FsdpParam>, f64)], ranks: &ProcessGroup) -> Result<Error> {
    let whole: Vec<_> = vars.trainable().into_iter().filter(|param| param.split_over().is_none()).collect();
    let power = |param: &Arc<FsdpParam>| -> f64 {
        powers.iter().filter(|(other, _)| Arc::ptr_eq(other, param)).map(|(_, power)| power).sum()
    };
    let mut own: Vec<f64> = whole.iter().map(power).collect();
    own.extend(own.clone().iter().map(|power| -power));
    let largest = ranks.all_reduce_values(own, ReduceOp::Max)?;
    let (most, least) = largest.split_at(whole.len());
    let spread = most.iter().zip(least).map(|(most, least)| (most + least) / most.max(f64::MIN_POSITIVE)).collect();
    let spread: Vec<f64> = largest_over(vars.mesh(), spread, "differences of replicated gradients")?;
    let worst = (0..whole.len()).max_by(|&a, &b| spread[a].total_cmp(&spread[b]));
    let name = worst.map_or("", |at| whole[at].name());
    Ok(Error::parameter(
        name,
        "its gradients differ on tensor-parallel ranks, which replicate it. Make a module on a part of the sequence \
         SequenceParallel, and pass these ranks the same batch",
    ))
}

/// Returns the sum of powers, or the largest magnitude, of each gradient.
pub(crate) fn powers<'a>(grads: impl IntoIterator<Item = &'a Tensor>, norm_type: NormType) -> Result<Vec<f64>> {
    numbers_of(grads, |kernels, values, sum| kernels.powers(values, norm_type, sum))
}

/// Multiplies a sharded gradient in place.
pub(crate) fn scale(grad: &Tensor, factor: f64) -> Result<()> {
    Ok(with_slice_mut(grad, |kernels, values| kernels.scale(values, factor))?)
}
