//! A check of gradients by finite differences of the loss, unit by unit. Finds gradients lost in a silent graph cut.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use candle_nn::Init;
use fsdp_core::{Buffer, ProcessGroup, ReduceOp};

use crate::autograd::no_grad;
use crate::data_parallel::DataParallel;
use crate::error::{Error, GradientMismatch, Result, UnitGradient};
use crate::fsdp::{FsdpModule, FsdpParam, Unit};
use crate::initializer::{Initializer, Philox, ShardRequest};
use crate::storage::{to_core_dtype, to_tensor};

/// Target change of the loss, relative to it, and largest move of the parameters, relative to their norm.
const CHANGE: f64 = 0.02;
const MAX_MOVE: f64 = 0.05;
/// Where the loss jumps, as when a router switches experts, shorter steps are tried: the factor and the number of
/// tries. Still shorter steps have too much rounding.
const SHRINK: f64 = 4.;
const TRIES: usize = 3;

/// Options of [`gradcheck`].
#[derive(Clone, Copy, Debug)]
pub struct GradcheckOptions {
    /// Largest relative difference of gradient and finite difference; 0.02 by default.
    pub rtol: f64,
    /// Number of random directions for each unit; 2 by default.
    pub directions: usize,
    /// Seed of the directions.
    pub seed: u64,
}

impl Default for GradcheckOptions {
    fn default() -> Self {
        GradcheckOptions { rtol: 0.02, directions: 2, seed: 0 }
    }
}

/// Checks the gradients of a model by finite differences, as `torch.autograd.gradcheck` does. Direction each unit's
/// trainable parameters along a random direction, both ways, and compares the difference of the losses with the product
/// of gradient and direction. Collective, on sharded parameters, which are restored. Returns the results in forward
/// order.
///
/// It finds operations without a backward (see [`nn`](crate::nn)): gradients that take another way around them (a
/// residual, or adapters on a frozen base) look right but are wrong. It also finds wrong hand-written backwards.
///
/// `loss` runs forward on this rank's batch several times and must return the same each time: seed random operations.
/// For a forward of `&mut self`, call a clone of the module ([`FsdpModule::call_mut`]), which has the same units. Each
/// direction of a unit takes four forwards without a graph, up to twelve where the loss jumps; all units share one
/// backward. Running statistics ([`ShardedVarMap::buffers`](crate::ShardedVarMap::buffers)) see each forward. Call it
/// between steps, with gradients averaged over the ranks.
///
/// # Errors
/// Returns [`Error::Gradcheck`] with the units whose gradients are wrong. Returns [`Error::Argument`] when the loss
/// differs from call to call, or parameters compute in half precision, whose differences are noise. Also returns the
/// errors of `loss`.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// use fsdp_candle::{gradcheck, GradcheckOptions};
/// # let world = World::single()?;
/// # let x = Tensor::new(&[[1f32, -2., 3., 0.5]], world.device())?;
/// # let vars = ShardedVarMap::of_world(&world)?;
/// # let opts = FullyShard::new(&vars);
///
/// let model = fully_shard(&opts, vars.builder(DType::F32), |vb| {
///     Ok((nn::linear(4, 4, vb.pp("up"))?, nn::layer_norm(4, 1e-5, vb.pp("norm"))?))
/// })?;
/// let checked = gradcheck(&model, &GradcheckOptions::default(), |model| {
///     model.call(|(up, norm)| norm.forward(&up.forward(&x)?))?.powf(3.)?.mean_all()
/// })?;
/// assert_eq!(checked[0].unit, "(root)");
///
/// # let vars = ShardedVarMap::of_world(&world)?;
/// # let opts = FullyShard::new(&vars);
/// let model = fully_shard(&opts, vars.builder(DType::F32), |vb| {
///     Ok((nn::linear(4, 4, vb.pp("up"))?, candle_nn::layer_norm(4, 1e-5, vb.pp("norm"))?)) // has no backward
/// })?;
/// let checked = gradcheck(&model, &GradcheckOptions::default(), |model| {
///     let y = model.call(|(up, norm)| up.forward(&x)? + norm.forward(&up.forward(&x)?)?)?;
///     y.powf(3.)?.mean_all()
/// });
/// assert!(matches!(checked, Err(Error::Gradcheck(_))));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn gradcheck<M>(
    model: &FsdpModule<M>,
    options: &GradcheckOptions,
    mut loss: impl FnMut(&FsdpModule<M>) -> candle_core::Result<Tensor>,
) -> Result<Vec<UnitGradient>> {
    let check = Check::of(model)?;
    let first = check.loss(model, &mut loss)?;
    let second = check.loss(model, &mut loss)?;
    if first.to_bits() != second.to_bits() {
        return Err(Error::Argument(format!(
            "gradcheck: the loss is {first}, then {second} with the same parameters: seed random operations in it"
        )));
    }
    let grads = model.backward(&loss(model)?)?;
    let order = model.schedule.forward_order();
    let is_checked = |unit: &Unit| unit.params().iter().any(|param| param.trainable());
    let mut units: Vec<_> = model.units().into_iter().filter(is_checked).collect();
    units.sort_by_key(|unit| order.iter().position(|&index| index == unit.index()));
    let mut all = vec![];
    for unit in units {
        let mut worst: Option<UnitGradient> = None;
        for direction in 0..options.directions.max(1) {
            let seed = options.seed.wrapping_add(direction as u64);
            let moves = check.moves(unit.params(), &grads, seed)?;
            let found = check.compare(unit.name(), &moves, options.rtol, first, || check.loss(model, &mut loss))?;
            if worst.as_ref().is_none_or(|worst| found.excess() > worst.excess()) {
                worst = Some(found);
            }
        }
        all.extend(worst);
    }
    match all.iter().all(UnitGradient::agrees) {
        true => Ok(all),
        false => Err(Error::Gradcheck(GradientMismatch { units: all })),
    }
}

/// The settings of all units.
struct Check {
    ranks: Arc<DataParallel>,
    /// Relative rounding of a loss.
    noise: f64,
}

/// A direction in a unit's parameter space.
struct Direction {
    shards: Vec<(Arc<FsdpParam>, Tensor, Tensor)>,
    /// Product of the gradient with the direction.
    analytic: f64,
    /// Norm of the parameters.
    size: f64,
}

impl Check {
    fn of<M>(model: &FsdpModule<M>) -> Result<Self> {
        let params: Vec<_> = model.units().iter().flat_map(|unit| unit.params().to_vec()).collect();
        let Some(first) = params.iter().find(|param| param.trainable()) else {
            return Err(Error::Argument("gradcheck: the model has no trainable parameter".into()));
        };
        for param in &params {
            let trained = param.trainable().then(|| param.dtype());
            for dtype in trained.into_iter().chain([param.compute_dtype()]) {
                if !matches!(dtype, DType::F32 | DType::F64) {
                    return Err(Error::Argument(format!(
                        "gradcheck: parameter `{}` is {dtype:?}, expected F32 or F64: use a policy (`param_dtype`) and \
                         a builder of that dtype",
                        param.name()
                    )));
                }
            }
        }
        let exact = params.iter().all(|param| param.compute_dtype() == DType::F64);
        Ok(Check { ranks: first.spec.ranks.clone(), noise: if exact { 1e-13 } else { 2e-6 } })
    }

    /// Returns the mean of the ranks' losses.
    fn loss<M>(
        &self,
        model: &FsdpModule<M>,
        loss: &mut impl FnMut(&FsdpModule<M>) -> candle_core::Result<Tensor>,
    ) -> Result<f64> {
        // Drop gathered parameters, which are stale.
        model.schedule.reshard_all()?;
        let own = no_grad(|| loss(model))?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        let mean = self.ranks.shard.all_reduce_scalar(own, ReduceOp::Avg)?;
        match self.ranks.replicate() {
            Some(replicas) => Ok(replicas.all_reduce_scalar(mean, ReduceOp::Avg)?),
            None => Ok(mean),
        }
    }

    /// Returns a direction: the sum of a random unit vector and of the gradient's, along which lost gradients show
    /// best.
    fn moves(
        &self,
        params: &[Arc<FsdpParam>],
        grads: &candle_core::backprop::GradStore,
        seed: u64,
    ) -> Result<Direction> {
        let mut drawn = vec![];
        // For each set of ranks with different parts: squares of the random vector, the gradient and the parameters,
        // and the product of the first two.
        let mut sums: Vec<(Vec<ProcessGroup>, [f64; 4])> = vec![];
        for param in params.iter().filter(|param| param.trainable()) {
            let parts: Vec<ProcessGroup> = param.spec.ranks.parts().chain(param.split_over()).cloned().collect();
            let known = |(others, _): &(Vec<ProcessGroup>, _)| {
                others.len() == parts.len() && others.iter().zip(&parts).all(|(other, part)| other.is(part))
            };
            let at = sums.iter().position(known).unwrap_or(sums.len());
            if at == sums.len() {
                sums.push((parts, [0.; 4]));
            }
            if param.region().is_empty() {
                continue;
            }
            let random = random(param, seed)?;
            let gradient = match grads.get(param.var()) {
                Some(gradient) => gradient.clone(),
                None => random.zeros_like()?,
            };
            let values = param.shard.values()?.copy()?.detach();
            let products = [(&random, &random), (&gradient, &gradient), (&values, &values), (&gradient, &random)];
            for (sum, (a, b)) in sums[at].1.iter_mut().zip(products) {
                let product = a.to_dtype(DType::F64)?.mul(&b.to_dtype(DType::F64)?)?;
                *sum += product.sum_all()?.to_scalar::<f64>()?;
            }
            drawn.push((param.clone(), random, gradient, values));
        }
        let mut all = [0.; 4];
        for (parts, sums) in sums {
            let sum = |sums, part: &ProcessGroup| part.all_reduce_values(sums, ReduceOp::Sum);
            let sums = parts.iter().try_fold(sums.to_vec(), sum)?;
            all.iter_mut().zip(sums).for_each(|(all, sum)| *all += sum);
        }
        let [random, gradient, size, both] = all;
        let of_norm = |square: f64| if square > 0. { square.sqrt().recip() } else { 0. };
        let (by_random, by_gradient) = (of_norm(random), of_norm(gradient));
        let shards = drawn.into_iter().map(|(param, random, gradient, values)| {
            let direction = ((random * by_random)? + (gradient * by_gradient)?)?;
            Ok((param, values, direction))
        });
        Ok(Direction {
            shards: shards.collect::<Result<_>>()?,
            analytic: both * by_random + gradient * by_gradient,
            size: size.sqrt(),
        })
    }

    /// Compares a direction's finite difference with the gradient's product.
    fn compare(
        &self,
        unit: &str,
        moves: &Direction,
        rtol: f64,
        loss: f64,
        mut at: impl FnMut() -> Result<f64>,
    ) -> Result<UnitGradient> {
        let analytic = moves.analytic;
        let farthest = if moves.size > 0. { MAX_MOVE * moves.size } else { MAX_MOVE };
        let wanted = CHANGE * loss.abs().max(1e-3) / analytic.abs();
        let step = if wanted.is_finite() { wanted.min(farthest) } else { farthest };
        let mut moved = |by: f64| -> Result<f64> {
            let outcome = moves.set(by).and_then(|()| at());
            // Restore the parameters in any case.
            moves.set(0.)?;
            outcome
        };
        let mut difference = |step: f64| -> Result<UnitGradient> {
            let wide = (moved(step)? - moved(-step)?) / (2. * step);
            let narrow = (moved(step / 2.)? - moved(-step / 2.)?) / step;
            // Third-order terms cancel.
            let numeric = (4. * narrow - wide) / 3.;
            let noise = 4. * self.noise * loss.abs() / step + (wide - narrow).abs();
            let tolerance = rtol * analytic.abs().max(numeric.abs()) + noise;
            Ok(UnitGradient { unit: unit.into(), analytic, numeric, tolerance })
        };
        let mut found = difference(step)?;
        let mut last = found.numeric;
        for shorter in 1..TRIES {
            if found.agrees() {
                return Ok(found);
            }
            let closer = difference(step / SHRINK.powi(shorter as i32))?;
            // A wrong gradient keeps its first result, which has the least rounding. A loss that jumps until the last
            // step is known only within that jump.
            found.tolerance += if shorter + 1 == TRIES { (closer.numeric - last).abs() } else { 0. };
            last = closer.numeric;
            if closer.agrees() {
                found = closer;
            }
        }
        Ok(found)
    }
}

impl Direction {
    /// Sets the parameters to their values plus `by` times the direction.
    fn set(&self, by: f64) -> Result<()> {
        for (param, values, direction) in &self.shards {
            match by {
                0. => param.shard.set(values)?,
                by => param.shard.set(&(values + (direction * by)?)?)?,
            }
        }
        Ok(())
    }
}

/// Draws normal numbers for a parameter's shard, independent of the sharding.
fn random(param: &FsdpParam, seed: u64) -> Result<Tensor> {
    let (shape, region) = (param.shape().dims(), param.region());
    let init = Init::Randn { mean: 0., stdev: 1. };
    let mut buffer = Buffer::try_zeros(to_core_dtype(param.dtype())?, region.elements())?;
    let request = ShardRequest { name: param.name(), shape, dtype: param.dtype(), region, init };
    Philox::new(seed).fill(&request, buffer.bytes_mut())?;
    Ok(to_tensor(buffer, &region.sizes, param.var().device())?)
}
