//! The optimizer of a run: its parameter groups, learning rates and loss scale.

use std::sync::Arc;

use anyhow::{Context, ensure};
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use fsdp_candle::{
    AdamConfig, AdamW8bitConfig, AdamWConfig, ElementwiseOptimizer, ElementwiseRule, FsdpParam, GradScaler,
    GradScalerState, Muon, MuonConfig, NamePattern, Optimizers, SgdConfig, ShardedOptimizer, ShardedVarMap,
    StateOnDisk,
};
use fsdp_ckpt::TensorSource;
use fsdp_train::models::is_block_matrix;
use fsdp_train::schedule::Schedule;
use serde_json::{Map, Value};

use crate::args::{Args, MuonAdjustLr, OptimizerFlags, OptimizerKind};
use crate::flag_types::Switch;

type Params = Vec<Arc<FsdpParam>>;
/// Parameters with their weight decay.
type Groups = Vec<(Params, f64)>;

/// Default decay rates of Adam.
const BETAS: (f64, f64) = (0.9, 0.95);
/// Default epsilon of Adam.
const EPS: f64 = 1e-8;
/// Default for --min-8bit-size.
const MIN_8BIT_SIZE: usize = 4096;

/// The optimizer of a run with its learning rate schedules.
pub(crate) struct Optimizer {
    /// `None` while a step in backward has it.
    optim: Option<Box<dyn ShardedOptimizer>>,
    /// Schedule of each parameter group.
    schedules: Vec<Schedule>,
}

impl Optimizer {
    /// Creates one group for parameters with weight decay and one for --no-decay.
    pub(crate) fn new(args: &Args, vars: &ShardedVarMap) -> anyhow::Result<Self> {
        let flags = &args.optimizer;
        let groups = groups(flags, vars)?;
        let optim: Box<dyn ShardedOptimizer> = match flags.optimizer {
            OptimizerKind::Adamw => adamw(args, groups)?,
            OptimizerKind::Adam => {
                let AdamSettings { lr, betas, eps } = AdamSettings::of(flags);
                let config = |weight_decay| AdamConfig { lr, betas, eps, weight_decay };
                make(args, configured(groups, config))?
            }
            OptimizerKind::Adamw8bit => {
                let AdamSettings { lr, betas, eps } = AdamSettings::of(flags);
                let min_8bit_size = flags.min_8bit_size.unwrap_or(MIN_8BIT_SIZE);
                let config = |weight_decay| AdamW8bitConfig { lr, betas, eps, weight_decay, min_8bit_size };
                make(args, configured(groups, config))?
            }
            OptimizerKind::Sgd => {
                let config = |weight_decay| SgdConfig {
                    lr: flags.lr,
                    momentum: flags.momentum.unwrap_or(0.9),
                    dampening: flags.dampening.unwrap_or(0.),
                    weight_decay,
                    nesterov: flags.nesterov == Some(Switch::On),
                };
                make(args, configured(groups, config))?
            }
            OptimizerKind::Muon => muon(args, groups)?,
        };
        let peak = |group: fsdp_candle::ParamGroup| group.hyper["lr"].as_f64().unwrap_or(flags.lr);
        let schedule = |lr| Schedule::new(args.lr_schedule, lr, args.warmup_steps, args.steps);
        let schedules = optim.param_groups().into_iter().map(|group| schedule(peak(group))).collect();
        Ok(Optimizer { optim: Some(optim), schedules })
    }

    /// Sets the learning rates of a step, counted from 1. Returns that of the last group.
    pub(crate) fn set_learning_rates(&mut self, step: usize) -> f64 {
        let mut last = 0.;
        for (group, schedule) in self.schedules.iter().enumerate() {
            last = schedule.lr(step);
            self.optim.iter_mut().for_each(|optim| optim.set_group_learning_rate(group, last));
        }
        last
    }

    /// Takes the optimizer out, until [`Optimizer::give`].
    pub(crate) fn take(&mut self) -> Option<Box<dyn ShardedOptimizer>> {
        self.optim.take()
    }

    pub(crate) fn give(&mut self, optim: Box<dyn ShardedOptimizer>) {
        self.optim = Some(optim);
    }

    pub(crate) fn get(&self) -> &dyn ShardedOptimizer {
        match &self.optim {
            Some(optim) => &**optim,
            None => unreachable!("{TAKEN}"),
        }
    }

    pub(crate) fn get_mut(&mut self) -> &mut dyn ShardedOptimizer {
        match &mut self.optim {
            Some(optim) => &mut **optim,
            None => unreachable!("{TAKEN}"),
        }
    }

    /// Returns the size of the state in this rank's memory in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.get().states().iter().map(|state| state.bytes()).sum()
    }

    /// Returns the size of the state on this rank's disk in bytes.
    pub(crate) fn bytes_on_disk(&self) -> u64 {
        self.get().states().iter().map(|state| state.bytes_on_disk()).sum()
    }
}

/// Message of a use of the optimizer inside a backward that steps it.
const TAKEN: &str = "the optimizer is taken by a step in backward";

/// Hyper-parameters of all variants of Adam.
struct AdamSettings {
    lr: f64,
    betas: (f64, f64),
    eps: f64,
}

impl AdamSettings {
    fn of(flags: &OptimizerFlags) -> Self {
        AdamSettings { lr: flags.lr, betas: flags.betas.unwrap_or(BETAS), eps: flags.eps.unwrap_or(EPS) }
    }
}

/// Splits the parameters into those with weight decay and those without.
fn groups(flags: &OptimizerFlags, vars: &ShardedVarMap) -> anyhow::Result<Groups> {
    let params = vars.trainable();
    if flags.no_decay.is_empty() {
        return Ok(vec![(params, flags.weight_decay)]);
    }
    let patterns = flags.no_decay.iter().map(|text| NamePattern::new(text));
    let patterns = patterns.collect::<Result<Vec<_>, _>>().context("--no-decay")?;
    for pattern in &patterns {
        ensure!(
            params.iter().any(|param| pattern.matches_end(param.name())),
            "--no-decay: `{pattern}` matches no trained parameter, such as {}",
            params.first().map_or("none", |param| param.name())
        );
    }
    // Several patterns may match one parameter.
    let (kept, decaying) =
        params.into_iter().partition(|param| patterns.iter().any(|pattern| pattern.matches_end(param.name())));
    Ok(vec![(decaying, flags.weight_decay), (kept, 0.)])
}

fn configured<C>(groups: Groups, config: impl Fn(f64) -> C) -> Vec<(Params, C)> {
    groups.into_iter().map(|(params, weight_decay)| (params, config(weight_decay))).collect()
}

/// Creates an elementwise optimizer, with its state in memory or on disk.
fn make<C>(args: &Args, groups: Vec<(Params, C)>) -> anyhow::Result<Box<dyn ShardedOptimizer>>
where
    C: ElementwiseRule + Send + 'static,
{
    Ok(Box::new(match args.offload.disk() {
        Some(dir) => ElementwiseOptimizer::on_disk(groups, &StateOnDisk::new(dir)).context("--offload")?,
        None => ElementwiseOptimizer::with_groups(groups)?,
    }))
}

fn adamw(args: &Args, groups: Groups) -> anyhow::Result<Box<dyn ShardedOptimizer>> {
    let AdamSettings { lr, betas, eps } = AdamSettings::of(&args.optimizer);
    make(args, configured(groups, |weight_decay| AdamWConfig { lr, betas, eps, weight_decay }))
}

/// Creates Muon for the blocks' matrices, and AdamW for the rest.
fn muon(args: &Args, groups: Groups) -> anyhow::Result<Box<dyn ShardedOptimizer>> {
    let flags = &args.optimizer;
    let (mut matrices, mut rest): (Groups, Groups) = (vec![], vec![]);
    for (params, weight_decay) in groups {
        let is_matrix = |param: &Arc<FsdpParam>| param.shape().rank() == 2 && is_block_matrix(param.name());
        let (own, others): (Params, Params) = params.into_iter().partition(is_matrix);
        for (groups, params) in [(&mut matrices, own), (&mut rest, others)] {
            if !params.is_empty() {
                groups.push((params, weight_decay));
            }
        }
    }
    ensure!(
        !matrices.is_empty(),
        "--optimizer muon is for the matrices of a model's blocks, and none is trained: use another optimizer"
    );
    let config = |weight_decay| MuonConfig {
        lr: flags.muon_lr.unwrap_or(flags.lr),
        weight_decay,
        momentum: flags.momentum.unwrap_or(0.95),
        nesterov: flags.nesterov != Some(Switch::Off),
        adjust_lr: flags.muon_adjust_lr.unwrap_or(MuonAdjustLr::MatchRmsAdamw).into(),
        ..MuonConfig::default()
    };
    let mut both: Vec<Box<dyn ShardedOptimizer>> = vec![Box::new(Muon::with_groups(configured(matrices, config))?)];
    if !rest.is_empty() {
        both.push(adamw(args, rest)?);
    }
    Ok(Box::new(Optimizers::new(both)?))
}

/// Smallest useful loss scale: gradients that overflow at 1 are too large for f16 itself.
const LEAST: f64 = 1.;
/// Names of the state in a checkpoint: those of PyTorch's `GradScaler.state_dict()`, saved as `scaler`.
const SCALE: &str = "scaler.scale";
const GROWTH_TRACKER: &str = "scaler._growth_tracker";

/// Loss scaling of a run in f16; without effect in other dtypes.
///
/// f16 covers 6e-8 to 65504. The loss is multiplied by the scale so that small gradients are not rounded to zero, and
/// the gradients are divided by it.
pub(crate) struct LossScale {
    scaler: Option<GradScaler>,
    /// Initial state, from the flags.
    first: GradScalerState,
}

impl LossScale {
    pub(crate) fn new(args: &Args) -> Self {
        let scaler = args.loss_scale.map_or_else(GradScaler::default, GradScaler::new);
        LossScale { first: scaler.state(), scaler: args.computes_in_f16().then_some(scaler) }
    }

    /// Restores the scale from a checkpoint, or resets it if it holds none.
    pub(crate) fn resume(&mut self, source: &dyn TensorSource) -> anyhow::Result<()> {
        let Some(scaler) = &mut self.scaler else { return Ok(()) };
        let [scale, tracker] = [SCALE, GROWTH_TRACKER].map(|name| source.values().get(name));
        let state = || {
            let growth_tracker = tracker?.as_u64()?.try_into().ok()?;
            Some(GradScalerState { scale: scale?.as_f64()?, growth_tracker, ..self.first })
        };
        let found = match (scale, tracker) {
            (None, None) => Ok(self.first),
            _ => state().context("expected a number and a count of steps"),
        };
        let loaded = found.and_then(|state| Ok(scaler.load_state(state)?));
        loaded.with_context(|| {
            let shown = |value: Option<&Value>| value.map_or("missing".into(), Value::to_string);
            let (path, scale, tracker) = (source.path().display(), shown(scale), shown(tracker));
            format!("{path}: {SCALE} is {scale} and {GROWTH_TRACKER} is {tracker}")
        })
    }

    /// Returns the values to save in a checkpoint.
    pub(crate) fn values(&self) -> Map<String, Value> {
        let state = self.scaler.as_ref().map(GradScaler::state);
        let values = state.map(|state| [(SCALE, state.scale.into()), (GROWTH_TRACKER, state.growth_tracker.into())]);
        values.into_iter().flatten().map(|(name, value): (&str, Value)| (name.to_owned(), value)).collect()
    }

    /// Returns the scale, if any.
    pub(crate) fn current(&self) -> Option<f64> {
        self.scaler.as_ref().map(GradScaler::current_scale)
    }

    /// Returns the loss to run backward on.
    pub(crate) fn scale(&self, loss: Tensor) -> anyhow::Result<Tensor> {
        Ok(match &self.scaler {
            Some(scaler) => scaler.scale(&loss)?,
            None => loss,
        })
    }

    /// Divides the gradients by the scale. Returns whether they overflowed on any rank and a smaller scale may help.
    /// Collective.
    pub(crate) fn unscale(&mut self, vars: &ShardedVarMap, grads: &mut GradStore) -> anyhow::Result<bool> {
        let Some(scaler) = &mut self.scaler else { return Ok(false) };
        Ok(scaler.unscale(vars, grads)? && scaler.current_scale() > LEAST)
    }

    /// Takes the step by the gradients times `factor` unless they overflowed. In that case, returns a description and
    /// lowers the scale.
    pub(crate) fn step(
        &mut self,
        optim: &mut dyn ShardedOptimizer,
        grads: &GradStore,
        factor: f64,
    ) -> anyhow::Result<Option<String>> {
        let Some(scaler) = &mut self.scaler else {
            optim.step_scaled(grads, factor)?;
            return Ok(None);
        };
        let scale = scaler.current_scale();
        let stepped = scaler.step_scaled(optim, grads, factor)?;
        scaler.update()?;
        let next = scaler.current_scale();
        Ok((!stepped).then(|| {
            format!("skipped, for its gradients overflow f16 at a loss scale of {scale}; the next one is {next}")
        }))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use fsdp_ckpt::SaveState;
    use fsdp_core::MeshLayout;
    use fsdp_core::process_group::local;

    use super::*;

    fn of(flags: &[&str]) -> LossScale {
        LossScale::new(&Args::parse_from([&["train"], flags].concat()))
    }

    #[test]
    fn only_f16_has_a_loss_scale() {
        for flags in [&[][..], &["--param-dtype", "bf16", "--reduce-dtype", "bf16"]] {
            let none = of(flags);
            assert_eq!((none.current(), none.values().len()), (None, 0));
        }
        assert_eq!(of(&["--param-dtype", "f16"]).current(), Some(65536.));
        let some = of(&["--reduce-dtype", "f16", "--loss-scale", "3"]);
        let values = serde_json::json!({ "scaler.scale": 3.0, "scaler._growth_tracker": 0 });
        assert_eq!((some.current(), Value::from(some.values())), (Some(3.), values));
    }

    #[test]
    fn loss_scale_is_restored() {
        let dir = tempfile::tempdir().unwrap();
        let resumed = |name: &str, values: Value| {
            let mut scale = of(&["--param-dtype", "f16", "--loss-scale", "8"]);
            let (path, Value::Object(values)) = (dir.path().join(name), values) else { panic!() };
            let state = SaveState { mesh: MeshLayout::new(&[("dp_shard", 1)]).unwrap(), tensors: vec![], values };
            local::run(1, |group| fsdp_ckpt::save(&path, &group, &state).unwrap());
            scale.resume(&*fsdp_ckpt::open(&path).unwrap()).map(|()| scale)
        };
        let saved = serde_json::json!({ "scaler.scale": 512.0, "scaler._growth_tracker": 77, "step": 3 });
        let same = resumed("same", saved.clone()).unwrap();
        assert_eq!((same.current(), &same.values()[GROWTH_TRACKER]), (Some(512.), &saved[GROWTH_TRACKER]));
        assert_eq!(resumed("none", serde_json::json!({})).unwrap().current(), Some(8.));
        for (number, (scale, tracker)) in [
            (Value::from(0.), Value::from(1)),
            (512.0.into(), Value::Null),
            ("8".into(), 1.into()),
            (8.0.into(), (-1).into()),
        ]
        .into_iter()
        .enumerate()
        {
            let name = format!("bad-{number}");
            let values = serde_json::json!({ SCALE: scale, GROWTH_TRACKER: tracker });
            let error = format!("{:#}", resumed(&name, values).err().unwrap());
            let parts =
                [&format!("{name}: scaler.scale is {scale} and scaler._growth_tracker is {tracker}: "), "expected"];
            assert!(parts.iter().all(|part| error.contains(*part)), "{error}");
        }
    }
}
