//! Ranks that use different units: with `set_reduce_scatter_unused_params` their collectives still match.

use candle_core::{DType, Module, Result, Tensor};
use fsdp_candle::{FsdpModule, FullyShard, Recurse, ReshardAfterForward, ShardedVarMap, World, fully_shard, nn};

use crate::common::{
    Gradients, WIDTH, assert_close, assert_resharded, batch, gradients, journal, ranks, vars, vars_on,
};

const UNITS: usize = 4;

type Model = FsdpModule<Vec<FsdpModule<nn::Linear>>>;

/// Units of different sizes, and a root with or without a parameter.
fn model(opts: &FullyShard, vars: &ShardedVarMap) -> Model {
    let vb = vars.builder(DType::F32);
    let units =
        (0..UNITS).map(|i| fully_shard(opts, vb.pp(format!("unit.{i}")), |vb| nn::linear(WIDTH, WIDTH + i, vb)));
    let units = units.collect::<fsdp_candle::Result<Vec<_>>>().unwrap();
    fully_shard(opts, vb, |_| Ok(units)).unwrap()
}

/// The sum of squares of each unit's output.
fn outputs(units: &[FsdpModule<nn::Linear>], x: &Tensor, chain: bool) -> Result<Vec<Tensor>> {
    let mut x = x.clone();
    let mut losses = vec![];
    for unit in units {
        let y = unit.forward(&x)?;
        if chain {
            x = y.narrow(1, 0, WIDTH)?.contiguous()?;
        }
        losses.push(y.sqr()?.mean_all()?);
    }
    Ok(losses)
}

/// The units whose outputs a rank's loss uses.
fn used(rank: usize, step: usize) -> impl Fn(usize) -> bool {
    move |unit| [0b0001u32, 0b1000, 0b0110, 0b0101][(rank + step) % 4] & (1 << unit) != 0
}

/// One step. With `all`, the loss has the outputs that a rank does not use with a factor of 0.
fn step(world: &World, vars: &ShardedVarMap, model: &Model, step: usize, chain: bool, all: bool) -> Gradients {
    let used = used(world.rank(), step);
    let loss = model.call(|units| {
        let losses = outputs(units, &batch(world.rank(), WIDTH), chain)?;
        let chosen = losses.iter().enumerate().filter_map(|(i, loss)| match (used(i), all) {
            (true, _) => Some(Ok(loss.clone())),
            (false, true) => Some(loss.zeros_like().and_then(|zero| loss * zero)),
            (false, false) => None,
        });
        chosen.reduce(|a, b| a? + b?).unwrap()
    });
    gradients(vars, &model.backward(&loss.unwrap()).unwrap())
}

#[test]
fn units_reach_the_loss_on_some_ranks() {
    use ReshardAfterForward::{Always, Default, Never, To};
    let worlds = [
        (1, vec![("s", 1)]),
        (2, vec![("s", 2)]),
        (3, vec![("s", 3)]),
        (4, vec![("s", 4)]),
        (4, vec![("r", 2), ("s", 2)]),
    ];
    for (size, mesh) in worlds {
        ranks(size, |world| {
            for reshard in [Default, Always, Never, To(2)] {
                if (reshard == To(2)) != (mesh[0] == ("s", 4)) {
                    continue;
                }
                for (chain, prefetch, max) in [(true, true, 1), (false, true, 2), (true, false, 1), (false, false, 3)] {
                    let make = || {
                        let vars = vars_on(&world, &mesh);
                        let model = model(&FullyShard::new(&vars).reshard_after_forward(reshard), &vars);
                        model.set_implicit_prefetch(prefetch);
                        model.set_reduce_scatter_max_input_buffers(max);
                        (vars, model)
                    };
                    let ((all_vars, all), (vars, some)) = (make(), make());
                    some.set_reduce_scatter_unused_params(true, Recurse::Yes);
                    if reshard == To(2) {
                        some.inner()[3].set_modules_to_backward_prefetch(&[some.inner()[1].unit()]).unwrap();
                    }
                    for i in 0..4 {
                        let want = step(&world, &all_vars, &all, i, chain, true);
                        assert_close(&step(&world, &vars, &some, i, chain, false), &want, 1e-6);
                        assert_resharded(&vars);
                    }
                }
            }
        });
    }
}

#[test]
fn units_run_on_some_ranks() {
    for size in 1..=4 {
        ranks(size, |world| {
            let vars = vars(&world);
            let model = model(&FullyShard::new(&vars).reshard_after_forward(ReshardAfterForward::Never), &vars);
            model.set_reduce_scatter_unused_params(true, Recurse::Yes);
            let x = batch(world.rank(), WIDTH);
            for step in 0..3 {
                // Every rank gathers all of them, and calls those that it uses in its own order.
                model.inner().iter().for_each(|unit| unit.unshard().unwrap());
                let mut mine: Vec<usize> = (0..UNITS).filter(|&unit| used(world.rank(), step)(unit)).collect();
                if world.rank() % 2 == 1 {
                    mine.reverse();
                }
                let loss = model.call(|units| {
                    let losses = mine.iter().map(|&i| units[i].forward(&x)?.sqr()?.mean_all());
                    losses.reduce(|a, b| a? + b?).unwrap()
                });
                let grads = gradients(&vars, &model.backward(&loss.unwrap()).unwrap());
                for (name, grad) in grads {
                    let unit: usize = name.split('.').nth(1).unwrap().parse().unwrap();
                    let somewhere = (0..size).any(|rank| used(rank, step)(unit));
                    assert_eq!(grad.iter().any(|v| *v != 0.), somewhere, "{name} of {size} ranks in step {step}");
                }
            }
        });
    }
}

/// A rank whose loss has no graph contributes zeros.
#[test]
fn a_rank_without_a_graph_takes_part() {
    ranks(2, |world| {
        let vars = vars(&world);
        let model = model(&FullyShard::new(&vars), &vars);
        model.set_reduce_scatter_unused_params(true, Recurse::Yes);
        let losses = model.call(|units| outputs(units, &batch(0, WIDTH), true)).unwrap();
        let loss = &losses[UNITS - 1];
        let loss = if world.rank() == 0 { loss.detach() } else { loss.clone() };
        let grads = gradients(&vars, &model.backward(&loss).unwrap());
        assert!(grads.iter().all(|(_, grad)| grad.iter().any(|v| *v != 0.)));
    });
}

#[test]
fn reductions_overlap_backward() {
    ranks(2, |world| {
        let vars = vars(&world);
        let model = model(&FullyShard::new(&vars), &vars);
        model.set_reduce_scatter_unused_params(true, Recurse::Yes);
        let entries: std::sync::Arc<std::sync::Mutex<Vec<String>>> = Default::default();
        for (i, unit) in model.inner().iter().enumerate() {
            unit.set_custom_all_gather(Some(journal(format!("gather {i}"), &entries)));
            unit.set_custom_reduce_scatter(Some(journal(format!("reduce {i}"), &entries)));
        }
        let losses = model.call(|units| outputs(units, &batch(0, WIDTH), true)).unwrap();
        entries.lock().unwrap().clear();
        let _grads = model.backward(&losses[UNITS - 1]).unwrap();
        let want = ["gather 3", "gather 2", "reduce 3", "gather 1", "reduce 2", "gather 0", "reduce 1", "reduce 0"];
        assert_eq!(*entries.lock().unwrap(), want);
    });
}
