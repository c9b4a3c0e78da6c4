//! Random models, meshes and steps, compared with the same model in plain Candle.
//!
//! A seed draws: units by name and wrapped units, frozen weights, units that run several times, several forwards before
//! one or two backwards, evaluations between them, losses that use different units on each rank, and every policy that
//! changes the order of collectives. `FSDP_RANDOM_MODELS` sets the number of models, `FSDP_RANDOM_SEED` the first seed.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Module, Result, Tensor, Var};
use candle_nn::VarBuilder;
use fsdp_candle::activation_checkpoint::checkpoint;
use fsdp_candle::{
    FsdpModule, FsdpParam, FullyShard, Recurse, ReshardAfterForward, ShardedVarMap, World, fully_shard, nn, no_grad,
    shard,
};
use fsdp_core::ReduceOp;

use crate::common::{Gradients, WIDTH, assert_close, batch, elements, one_of, ranks, scattered};

/// A pseudo-random number generator (splitmix64).
pub(crate) struct Draw(pub(crate) u64);

impl Draw {
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    pub(crate) fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// A model and its steps.
#[derive(Debug)]
struct Plan {
    mesh: [usize; 2],
    by_name: bool,
    /// For each unit: whether its weight and its bias are frozen, and whether it is checkpointed.
    units: Vec<(bool, bool, bool)>,
    /// Whether the root has a layer after the units.
    head: bool,
    policies: Vec<ReshardAfterForward>,
    prefetch: bool,
    reductions: usize,
    divided: bool,
    /// Whether the losses of ranks use different units.
    differ: bool,
    steps: Vec<Step>,
}

#[derive(Debug)]
struct Step {
    /// The units of each forward in order, and whether each one's output is the next one's input.
    forwards: Vec<(Vec<usize>, bool)>,
    evaluates: bool,
    backwards: usize,
    /// Whether the first of several backwards communicates.
    syncs: bool,
    seed: u64,
}

impl Plan {
    fn draw(seed: u64) -> Self {
        let mut draw = Draw(seed);
        let mesh = [[1, 1], [1, 2], [1, 2], [1, 3], [2, 1], [2, 2], [1, 4]][draw.below(7)];
        let units = (0..1 + draw.below(4)).map(|_| (draw.once_in(4), draw.once_in(4), draw.once_in(4)));
        let mut units: Vec<_> = units.collect();
        units[0].0 = false;
        let head = draw.once_in(2);
        if !head {
            // A loss that reaches no trainable parameter has no graph, which is an error.
            units.iter_mut().for_each(|(weight, bias, _)| *bias &= !*weight);
        }
        let by_name = draw.once_in(2);
        let differ = draw.once_in(2);
        let policies = [
            ReshardAfterForward::Default,
            ReshardAfterForward::Always,
            ReshardAfterForward::Never,
            if mesh[1] == 4 { ReshardAfterForward::To(2) } else { ReshardAfterForward::Default },
        ];
        let steps = (0..2).map(|_| {
            let forwards = (0..1 + draw.below(3)).map(|_| {
                let mut calls: Vec<usize> = (0..units.len()).collect();
                // If ranks differ, units by name run in the order of building.
                if !(by_name && differ) {
                    (0..draw.below(4)).for_each(|_| calls.insert(draw.below(calls.len() + 1), draw.below(units.len())));
                }
                (calls, !draw.once_in(3))
            });
            let forwards = forwards.collect();
            let (evaluates, backwards) = (draw.once_in(3), 1 + usize::from(draw.once_in(3)));
            Step { forwards, evaluates, backwards, syncs: !draw.once_in(3), seed: draw.below(1 << 20) as u64 }
        });
        let steps = steps.collect();
        Plan {
            mesh,
            by_name,
            head,
            policies: units.iter().map(|_| policies[draw.below(4)]).collect(),
            prefetch: !draw.once_in(3),
            reductions: 1 + draw.below(3),
            divided: draw.once_in(2),
            differ,
            steps,
            units,
        }
    }

    /// Whether this rank's loss uses the output of a call.
    fn reaches(&self, step: &Step, rank: usize, backward: usize, forward: usize, call: usize) -> bool {
        let rank = if self.differ { rank as u64 } else { 0 };
        let seed = step.seed ^ rank << 24 ^ (backward as u64) << 32 ^ (forward as u64) << 40 ^ (call as u64) << 48;
        !Draw(seed).once_in(3)
    }
}

/// A model of linear units, sharded or plain.
struct Model<U> {
    units: Vec<U>,
    head: Option<nn::Linear>,
}

/// A unit, which may be checkpointed.
#[derive(Clone)]
struct Unit {
    linear: nn::Linear,
    again: bool,
}

impl Unit {
    fn new(again: bool, vb: VarBuilder) -> Result<Self> {
        Ok(Unit { linear: nn::linear(WIDTH, WIDTH, vb)?, again })
    }
}

impl Module for Unit {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let linear = self.linear.clone();
        let f = move |x: Tensor| linear.forward(&x)?.tanh();
        if self.again { checkpoint(f, x.clone()) } else { f(x.clone()) }
    }
}

impl<U: Module> Model<U> {
    /// The loss of each call's output.
    fn forward(&self, x: &Tensor, calls: &[usize], chain: bool) -> Result<Vec<Tensor>> {
        let mut x = x.clone();
        let mut losses = vec![];
        for &unit in calls {
            let y = self.units[unit].forward(&x)?;
            if chain {
                x = (&x + &y)?;
            }
            let y = match &self.head {
                Some(head) => head.forward(&y)?,
                None => y,
            };
            losses.push(y.sqr()?.mean_all()?);
        }
        Ok(losses)
    }
}

/// The sum of the losses of this rank's backward, if there are any.
fn loss(plan: &Plan, step: &Step, rank: usize, backward: usize, losses: &[Vec<Tensor>]) -> Option<Tensor> {
    let all = losses.iter().enumerate().flat_map(|(forward, losses)| {
        let reached = losses.iter().enumerate().map(move |(call, loss)| (forward, call, loss));
        reached.filter(move |&(forward, call, _)| plan.reaches(step, rank, backward, forward, call))
    });
    all.map(|(_, _, loss)| loss.clone()).reduce(|a, b| (a + b).unwrap())
}

fn input(rank: usize, forward: usize) -> Tensor {
    batch(rank + 5 * forward, WIDTH)
}

/// The loss of a rank without terms. Candle drops a constant factor of 0 from the graph.
fn nothing(losses: &[Vec<Tensor>]) -> Tensor {
    (&losses[0][0] * losses[0][0].zeros_like().unwrap()).unwrap()
}

/// The gradients of each step.
fn run<U: Module>(
    plan: &Plan,
    world: &World,
    vars: &ShardedVarMap,
    model: &FsdpModule<Model<U>>,
) -> Result<Vec<Gradients>> {
    let mut all = vec![];
    for step in &plan.steps {
        let mut losses = vec![];
        for (forward, (calls, chain)) in step.forwards.iter().enumerate() {
            let x = input(world.rank(), forward);
            losses.push(model.call(|model| model.forward(&x, calls, *chain))?);
            if step.evaluates {
                no_grad(|| model.call(|model| model.forward(&x, calls, *chain)))?;
            }
        }
        for backward in 0..step.backwards {
            let is_last = backward + 1 == step.backwards;
            model.set_is_last_backward(is_last);
            model.set_requires_gradient_sync(is_last || step.syncs, Recurse::Yes);
            let loss = loss(plan, step, world.rank(), backward, &losses);
            let loss = loss.unwrap_or_else(|| nothing(&losses));
            let grads = if is_last { model.backward(&loss)? } else { model.backward_retain_graph(&loss)? };
            if is_last {
                all.push(gradients(world, vars, &grads));
            }
        }
        assert!(vars.params().iter().all(|param| !param.is_unsharded()), "something is gathered after the step");
    }
    Ok(all)
}

/// Gathers a tensor. A shard may be on one replica or on each.
pub(crate) fn whole(world: &World, param: &FsdpParam, shard: &Tensor) -> Vec<f32> {
    let values = elements::<f32>(shard);
    let held = scattered(param, vec![1.; values.len()]);
    let sum = |values| world.group().all_reduce_values(values, ReduceOp::Sum).unwrap();
    sum(scattered(param, values)).into_iter().zip(sum(held)).map(|(sum, held): (f32, f32)| sum / held).collect()
}

/// Returns whole gradients by name; zeros where no loss reached the parameter.
pub(crate) fn gradients(world: &World, vars: &ShardedVarMap, grads: &GradStore) -> Gradients {
    let zeros = |param: &FsdpParam| param.var().zeros_like().unwrap();
    let of = |param: &Arc<FsdpParam>| {
        let shard = grads.get(param.var()).cloned().unwrap_or_else(|| zeros(param));
        (param.name().to_string(), whole(world, param, &shard))
    };
    vars.trainable().iter().map(of).collect()
}

/// The same in plain Candle: each rank's gradients, and their mean.
fn plain(plan: &Plan, world: &World, vars: &ShardedVarMap) -> Vec<Gradients> {
    let made: Vec<(String, bool, Var)> = vars
        .params()
        .iter()
        .map(|param| {
            let values = whole(world, param, param.var());
            let tensor = Tensor::from_vec(values, param.shape(), &crate::common::device()).unwrap();
            (param.name().to_string(), param.trainable(), Var::from_tensor(&tensor).unwrap())
        })
        .collect();
    let get = |name: &str| made.iter().find(|(other, ..)| other == name).unwrap().2.as_tensor().clone();
    let linear = |path: &str| nn::Linear::new(get(&format!("{path}.weight")), Some(get(&format!("{path}.bias"))));
    let units = plan
        .units
        .iter()
        .enumerate()
        .map(|(unit, &(_, _, again))| Unit { linear: linear(&format!("unit.{unit}")), again });
    let model = Model { units: units.collect(), head: plan.head.then(|| linear("head")) };
    let step = |step: &Step| {
        let losses: Vec<_> = (step.forwards.iter().enumerate())
            .map(|(forward, (calls, chain))| model.forward(&input(world.rank(), forward), calls, *chain).unwrap())
            .collect();
        let mut sums: Vec<Option<Tensor>> = vec![None; made.len()];
        for backward in 0..step.backwards {
            let Some(loss) = loss(plan, step, world.rank(), backward, &losses) else { continue };
            let grads = loss.backward().unwrap();
            for (sum, (_, _, var)) in sums.iter_mut().zip(&made) {
                if let Some(grad) = grads.get(var) {
                    *sum = Some(sum.take().map_or(grad.clone(), |sum| (sum + grad).unwrap()));
                }
            }
        }
        let mean = |(sum, (name, trainable, var)): (Option<Tensor>, &(String, bool, Var))| {
            let own = sum.map_or(vec![0.; var.elem_count()], |sum| elements::<f32>(&sum));
            let mean = world.group().all_reduce_values(own, ReduceOp::Avg).unwrap();
            trainable.then(|| (name.clone(), mean))
        };
        sums.into_iter().zip(&made).filter_map(mean).collect()
    };
    plan.steps.iter().map(step).collect()
}

fn check(seed: u64) {
    let plan = Plan::draw(seed);
    let plan = &plan;
    let outcome = std::panic::catch_unwind(|| ranks(plan.mesh[0] * plan.mesh[1], |world| on_rank(plan, &world)));
    assert!(outcome.is_ok(), "FSDP_RANDOM_SEED={seed} FSDP_RANDOM_MODELS=1: {plan:#?}");
}

fn on_rank(plan: &Plan, world: &World) {
    let mesh = world.mesh(&[("replicate", plan.mesh[0]), ("shard", plan.mesh[1])]).unwrap();
    let vars = ShardedVarMap::new(&mesh, world.device());
    let opts = FullyShard::new(&vars).shard_optimizer_over_replicas(plan.divided && plan.mesh[0] > 1);
    let frozen = (plan.units.iter().enumerate()).flat_map(|(unit, &(weight, bias, _))| {
        [weight.then(|| format!("unit.{unit}.weight")), bias.then(|| format!("unit.{unit}.bias"))]
    });
    let frozen: Vec<String> = frozen.flatten().collect();
    vars.freeze(move |name| frozen.iter().any(|frozen| frozen == name)).unwrap();
    let vb = vars.builder(DType::F32);
    let head = |vb: &VarBuilder| plan.head.then(|| nn::linear(WIDTH, 2, vb.pp("head"))).transpose();
    let units = plan.units.iter().enumerate();
    let got = if plan.by_name {
        let opts = opts.reshard_after_forward(plan.policies[0]);
        let model = shard(&opts, &["unit.*"], vb, |vb| {
            let units = units.map(|(unit, &(_, _, again))| Unit::new(again, vb.pp(format!("unit.{unit}"))));
            Ok::<_, candle_core::Error>(Model { units: units.collect::<Result<Vec<_>>>()?, head: head(&vb)? })
        });
        let model = model.unwrap();
        set(plan, &model);
        run(plan, world, &vars, &model)
    } else {
        let units = units.map(|(unit, &(_, _, again))| {
            let opts = opts.clone().reshard_after_forward(plan.policies[unit]);
            fully_shard(&opts, vb.pp(format!("unit.{unit}")), |vb| Unit::new(again, vb))
        });
        let units = units.collect::<fsdp_candle::Result<Vec<_>>>().unwrap();
        let model = fully_shard(&opts, vb, |vb| Ok(Model { units, head: head(&vb)? })).unwrap();
        set(plan, &model);
        run(plan, world, &vars, &model)
    };
    let want = plain(plan, world, &vars);
    for (got, want) in got.unwrap().iter().zip(&want) {
        // A fault is a missing or repeated term, as large as the gradient.
        assert_close(got, want, 1e-4);
    }
}

fn set<M>(plan: &Plan, model: &FsdpModule<M>) {
    model.set_implicit_prefetch(plan.prefetch);
    model.set_reduce_scatter_max_input_buffers(plan.reductions);
    model.set_reduce_scatter_unused_params(plan.differ, Recurse::Yes);
}

pub(crate) fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name}={value} is not a number")))
}

#[test]
fn random_models_match_plain_candle() {
    let first = number("FSDP_RANDOM_SEED").unwrap_or(1);
    let models = number("FSDP_RANDOM_MODELS").unwrap_or(200);
    (first..first + models).step_by(one_of(10)).for_each(check);
    println!("{models} random models from seed {first}");
}
