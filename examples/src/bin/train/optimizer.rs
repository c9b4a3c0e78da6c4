//! The optimizer with the groups that the flags make.

use std::sync::Arc;

use anyhow::{Context, ensure};
use fsdp_candle::{
    Adam, AdamConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, FsdpParam, Muon, MuonConfig, NamePattern,
    Optimizers, SGD, SgdConfig, ShardedOptimizer, ShardedVarMap,
};
use fsdp_examples::models::is_block_matrix;
use fsdp_examples::schedule::Schedule;

use crate::args::Args;
use crate::optimizer_flags::{Adjust, Kind, OptimizerFlags};
use crate::values::Switch;

type Params = Vec<Arc<FsdpParam>>;
/// Parameters with their weight decay.
type Groups = Vec<(Params, f64)>;

/// Adam's decay rates.
const BETAS: (f64, f64) = (0.9, 0.95);
/// The epsilon that Adam adds to the denominator.
const EPS: f64 = 1e-8;
/// The fewest elements of a parameter whose moments are kept in 8 bits.
const MIN_8BIT_SIZE: usize = 4096;

/// The optimizer of a run, and how its learning rates go.
pub(crate) struct Optimizer {
    optim: Box<dyn ShardedOptimizer>,
    /// Of each group.
    schedules: Vec<Schedule>,
}

impl Optimizer {
    /// Parameters that decay are a group, and those that do not another.
    pub(crate) fn new(args: &Args, vars: &ShardedVarMap) -> anyhow::Result<Self> {
        let flags = &args.optimizer;
        let groups = groups(flags, vars)?;
        let optim: Box<dyn ShardedOptimizer> = match flags.optimizer {
            Kind::Adamw => Box::new(adamw(flags, groups)?),
            Kind::Adam => {
                let Rates { lr, betas, eps } = Rates::of(flags);
                let config = |weight_decay| AdamConfig { lr, betas, eps, weight_decay };
                Box::new(Adam::with_groups(configured(groups, config))?)
            }
            Kind::Adamw8bit => {
                let Rates { lr, betas, eps } = Rates::of(flags);
                let min_8bit_size = flags.min_8bit_size.unwrap_or(MIN_8BIT_SIZE);
                let config = |weight_decay| AdamW8bitConfig { lr, betas, eps, weight_decay, min_8bit_size };
                Box::new(AdamW8bit::with_groups(configured(groups, config))?)
            }
            Kind::Sgd => {
                let config = |weight_decay| SgdConfig {
                    lr: flags.lr,
                    momentum: flags.momentum.unwrap_or(0.9),
                    dampening: flags.dampening.unwrap_or(0.),
                    weight_decay,
                    nesterov: flags.nesterov == Some(Switch::On),
                };
                Box::new(SGD::with_groups(configured(groups, config))?)
            }
            Kind::Muon => muon(flags, groups)?,
        };
        let peak = |group: fsdp_candle::ParamGroup| group.hyper["lr"].as_f64().unwrap_or(flags.lr);
        let schedule = |lr| Schedule::new(args.lr_schedule, lr, args.warmup_steps, args.steps);
        let schedules = optim.param_groups().into_iter().map(|group| schedule(peak(group))).collect();
        Ok(Optimizer { optim, schedules })
    }

    /// Sets the learning rates of a step, counted from 1; tells that of the last group.
    pub(crate) fn begin(&mut self, step: usize) -> f64 {
        let mut last = 0.;
        for (group, schedule) in self.schedules.iter().enumerate() {
            last = schedule.lr(step);
            self.optim.set_group_learning_rate(group, last);
        }
        last
    }

    pub(crate) fn get(&self) -> &dyn ShardedOptimizer {
        &*self.optim
    }

    pub(crate) fn get_mut(&mut self) -> &mut dyn ShardedOptimizer {
        &mut *self.optim
    }

    /// Bytes of what it keeps on this rank.
    pub(crate) fn bytes(&self) -> usize {
        self.optim.states().iter().map(|state| state.bytes()).sum()
    }
}

/// Hyper-parameters of every kind of Adam.
struct Rates {
    lr: f64,
    betas: (f64, f64),
    eps: f64,
}

impl Rates {
    fn of(flags: &OptimizerFlags) -> Self {
        Rates { lr: flags.lr, betas: flags.betas.unwrap_or(BETAS), eps: flags.eps.unwrap_or(EPS) }
    }
}

/// The parameters that decay, and those that do not, where there are some.
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
            "--no-decay: `{pattern}` means no parameter that is trained, such as {}",
            params.first().map_or("none", |param| param.name())
        );
    }
    // A parameter may be meant by several.
    let (kept, decaying) =
        params.into_iter().partition(|param| patterns.iter().any(|pattern| pattern.matches_end(param.name())));
    Ok(vec![(decaying, flags.weight_decay), (kept, 0.)])
}

fn configured<C>(groups: Groups, config: impl Fn(f64) -> C) -> Vec<(Params, C)> {
    groups.into_iter().map(|(params, weight_decay)| (params, config(weight_decay))).collect()
}

fn adamw(flags: &OptimizerFlags, groups: Groups) -> anyhow::Result<AdamW> {
    let Rates { lr, betas, eps } = Rates::of(flags);
    Ok(AdamW::with_groups(configured(groups, |weight_decay| AdamWConfig { lr, betas, eps, weight_decay }))?)
}

/// Muon for the matrices of blocks, AdamW for the rest.
fn muon(flags: &OptimizerFlags, groups: Groups) -> anyhow::Result<Box<dyn ShardedOptimizer>> {
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
        adjust_lr: flags.muon_adjust_lr.unwrap_or(Adjust::MatchRmsAdamw).into(),
        ..MuonConfig::default()
    };
    let muon = Muon::with_groups(configured(matrices, config))?;
    Ok(Box::new(Optimizers::new(vec![Box::new(muon), Box::new(adamw(flags, rest)?)])?))
}
