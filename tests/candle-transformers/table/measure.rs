//! Measures one case: gradients against finite differences and against the original file, and training on two ranks.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::{
    AdamW, AdamWConfig, Error, FsdpModule, FullyShard, GradcheckOptions, Recurse, ReduceOp, ShardedVarMap,
    UnitGradient, World, gradcheck, shard,
};
use fsdp_core::process_group::{Options, local};
use serde_json::{Value, json};

use crate::data::{Batch, Forward, Load, floats};
use crate::train::{LEAST, RANKS, RATE, STEPS, square, var_map, vars_of};

/// The largest difference of the original's gradient, relative to its norm, that is rounding.
const ROUNDING: f64 = 1e-3;
/// The number of parameters from which `gradcheck` takes one direction instead of two.
const LARGE: usize = 1 << 20;

/// A model, and whether its forward takes one row at a time.
#[derive(Clone, Copy)]
struct Model {
    load: Load,
    rows: bool,
}

impl Model {
    fn build(self, vb: VarBuilder<'static>) -> Result<Forward> {
        let mut forward = (self.load)(vb)?;
        if !self.rows {
            return Ok(forward);
        }
        Ok(Box::new(move |batch: &Batch| {
            let one = |at| forward(&row(batch, at)?);
            let outputs = (0..batch.ids.dim(0)?).map(one).collect::<Result<Vec<_>>>()?;
            Tensor::cat(&outputs, 0)
        }))
    }
}

/// Returns one row of a batch.
fn row(batch: &Batch, at: usize) -> Result<Batch> {
    let of = |all: &Tensor| all.narrow(0, at, 1);
    Ok(Batch {
        ids: of(&batch.ids)?,
        others: of(&batch.others)?,
        there: of(&batch.there)?,
        images: of(&batch.images)?,
        sounds: of(&batch.sounds)?,
        first: batch.first + at,
    })
}

/// Returns the initial weights and running statistics of every run.
fn initial(load: Load) -> any::Result<BTreeMap<String, Tensor>> {
    let vars = vars_of(&World::single()?);
    shard(&FullyShard::new(&vars), &[], vars.builder(DType::F32), load)?;
    let params = vars.params().into_iter().map(|param| (param.name().to_owned(), param.var().clone()));
    params.chain(vars.buffers()).map(|(name, var)| Ok((name, var.as_tensor().copy()?))).collect()
}

type Gradients = BTreeMap<String, Tensor>;

/// Returns the row of a case as JSON.
pub(crate) fn case(files: &[&str], experts: bool, rows: bool, ours: Load, theirs: Load) -> Value {
    let (ours, theirs) = (Model { load: ours, rows }, Model { load: theirs, rows });
    let mut row = json!({ "files": files });
    let built = attempt(|| initial(ours.load));
    let built = match built {
        Ok(built) => built,
        Err(error) => {
            row["error"] = error.into();
            return row;
        }
    };
    row["parameters"] = built.values().map(Tensor::elem_count).sum::<usize>().into();
    let unsharded = attempt(|| Ok(gradients(&built, ours)?));
    match &unsharded {
        Ok((loss, gradients)) => row["original"] = original(&built, theirs, *loss, gradients),
        Err(error) => row["unsharded"] = error.as_str().into(),
    }
    let gradients = unsharded.ok().map(|(_, gradients)| gradients);
    match attempt(|| sharded(&built, experts, ours, gradients.as_ref())) {
        Ok(found) => row["sharded"] = found,
        Err(error) => row["error"] = error.into(),
    }
    row
}

/// Returns the result of `f`, or the message of its error or panic.
fn attempt<T>(f: impl FnOnce() -> any::Result<T>) -> std::result::Result<T, String> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(found) => found.map_err(|error| error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            Err(text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or("a panic".into()))
        }
    }
}

/// Results with any error.
mod any {
    pub(super) type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
}

fn loss(batch: &Batch, output: &Tensor) -> Result<Tensor> {
    let output = output.to_dtype(DType::F32)?;
    if output.rank() < 4 {
        let (output, targets) = batch.targets(&output)?;
        return candle_nn::loss::cross_entropy(&output, &targets);
    }
    (&output - floats(batch.first, output.dim(0)?, &output.dims()[1..])?)?.sqr()?.mean_all()
}

/// Returns the loss and the gradients without sharding, as means over the ranks' batches.
fn gradients(weights: &BTreeMap<String, Tensor>, model: Model) -> Result<(f64, Gradients)> {
    let map = var_map(weights);
    let mut forward = model.build(VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu))?;
    let vars: Vec<_> = {
        let vars = map.data().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        vars.iter()
            .filter(|(name, _)| weights.contains_key(*name) && !name.contains(".running_"))
            .map(|(n, var)| (n.clone(), var.clone()))
            .collect()
    };
    let (mut mean, mut all) = (0., Gradients::new());
    for rank in 0..RANKS {
        let batch = Batch::of(rank, RANKS)?;
        let loss = (loss(&batch, &forward(&batch)?)? / RANKS as f64)?;
        let grads = loss.backward()?;
        mean += f64::from(loss.to_scalar::<f32>()?);
        for (name, var) in &vars {
            let Some(gradient) = grads.get(var) else { continue };
            let sum = all.get(name).map_or_else(|| Ok(gradient.clone()), |sum| sum + gradient)?;
            all.insert(name.clone(), sum);
        }
    }
    Ok((mean, all))
}

fn norm(tensor: &Tensor) -> f64 {
    square(tensor).sqrt()
}

/// The smallest norm to divide by.
fn least(gradients: &Gradients) -> f64 {
    LEAST * gradients.values().map(square).sum::<f64>().sqrt()
}

/// Compares the gradients of the original file, in plain Candle, with the gradients of the changed file.
fn original(weights: &BTreeMap<String, Tensor>, model: Model, loss: f64, ours: &Gradients) -> Value {
    let (their_loss, theirs) = match attempt(|| Ok(gradients(weights, model)?)) {
        Ok(found) => found,
        Err(error) => return json!({ "error": error }),
    };
    let least = least(ours);
    let (mut missing, mut wrong) = (vec![], vec![]);
    for (name, ours) in ours {
        match theirs.get(name) {
            None if norm(ours) > 0. => missing.push(name),
            Some(theirs) => match (ours - theirs).map(|difference| norm(&difference)) {
                Ok(apart) if apart <= ROUNDING * norm(ours).max(least) => {}
                _ => wrong.push(name),
            },
            None => {}
        }
    }
    let loss_apart = (loss - their_loss).abs() / loss.abs();
    json!({ "of": ours.len(), "missing": missing, "wrong": wrong, "loss_apart": loss_apart })
}

/// The modules that are units: those with a number, outermost first.
fn units(weights: &BTreeMap<String, Tensor>) -> BTreeSet<String> {
    let unit = |name: &String| {
        let parts: Vec<&str> = name.split('.').collect();
        let at = parts.iter().position(|part| part.parse::<usize>().is_ok())?;
        (at > 0 && at + 1 < parts.len()).then(|| format!("{}.*", parts[..at].join(".")))
    };
    weights.keys().filter_map(unit).collect()
}

/// Returns a unit with the loss's change by its gradient and by differences.
fn described(unit: &UnitGradient) -> String {
    format!("{} ({:.2e}, not {:.2e})", unit.unit, unit.analytic, unit.numeric)
}

/// Checks gradients and trains on two ranks.
fn sharded(
    weights: &BTreeMap<String, Tensor>,
    experts: bool,
    model: Model,
    unsharded: Option<&Gradients>,
) -> any::Result<Value> {
    let units = units(weights);
    let directions = if weights.values().map(Tensor::elem_count).sum::<usize>() < LARGE { 2 } else { 1 };
    let options = Options::default().with_timeout(Duration::from_secs(120));
    let ranks = local::run_with(RANKS, options, |group| {
        rank(&World::of(group), &units, experts, directions, model, unsharded).map_err(|error| error.to_string())
    });
    let ranks = ranks.into_iter().collect::<std::result::Result<Vec<_>, String>>()?;
    let mut squares: BTreeMap<&str, [f64; 2]> = BTreeMap::new();
    for (name, [difference, gradient]) in ranks.iter().flat_map(|(_, squares)| squares) {
        let sum = squares.entry(name).or_default();
        *sum = [sum[0] + difference, sum[1] + gradient];
    }
    let least = LEAST * squares.values().map(|[_, gradient]| gradient).sum::<f64>().sqrt();
    let apart = squares.values().map(|[difference, gradient]| difference.sqrt() / gradient.sqrt().max(least));
    let mut found = ranks[0].0.clone();
    found["apart"] = apart.fold(0., f64::max).into();
    Ok(found)
}

type Squares = Vec<(String, [f64; 2])>;

fn rank(
    world: &World,
    units: &BTreeSet<String>,
    experts: bool,
    directions: usize,
    model: Model,
    unsharded: Option<&Gradients>,
) -> any::Result<(Value, Squares)> {
    let (source, vars) = (model, vars_of(world));
    let opts = FullyShard::new(&vars);
    // `gradcheck` passes the model as `&`.
    let units: Vec<&str> = units.iter().map(String::as_str).collect();
    let model = shard(&opts, &units, vars.builder(DType::F32), |vb| source.build(vb).map(RefCell::new))?;
    model.set_reduce_scatter_unused_params(experts, Recurse::Yes);
    let batch = Batch::of(world.rank(), world.size())?;
    let loss = |model: &FsdpModule<RefCell<Forward>>| {
        let output = model.call(|m| (m.borrow_mut())(&batch))?;
        loss(&batch, &output)
    };
    let options = GradcheckOptions { directions, ..GradcheckOptions::default() };
    let wrong: Vec<String> = match gradcheck(&model, &options, loss) {
        Ok(_) => vec![],
        Err(Error::Gradcheck(mismatch)) => mismatch.wrong().map(described).collect(),
        Err(error) => return Err(error.into()),
    };
    let config = AdamWConfig { lr: RATE, weight_decay: 0., ..AdamWConfig::default() };
    let mut optim = AdamW::new(vars.trainable(), config)?;
    let (mut losses, mut without, mut squares) = (vec![], vec![], vec![]);
    for step in 0..STEPS {
        let loss = loss(&model)?;
        let grads = model.backward(&loss)?;
        if step == 0 {
            without = model.parameters_without_gradient();
            for param in vars.trainable().iter().filter(|param| !param.region().is_empty()) {
                let want = unsharded.and_then(|all| all.get(param.name()));
                let (Some(got), Some(want)) = (grads.get(param.var()), want) else { continue };
                let mut want = want.clone();
                for (dim, (&at, &len)) in param.region().offsets.iter().zip(&param.region().sizes).enumerate() {
                    want = want.narrow(dim, at, len)?;
                }
                squares.push((param.name().to_owned(), [square(&(got - &want)?), square(&want)]));
            }
        }
        optim.step(&grads)?;
        losses.push(world.all_reduce(&[f64::from(loss.to_scalar::<f32>()?)], ReduceOp::Avg)?[0]);
    }
    Ok((json!({ "units": model.units().len(), "wrong": wrong, "without": without, "losses": losses }), squares))
}
