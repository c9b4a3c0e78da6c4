//! Random graphs of this library's and of Candle's operations, compared with the same graphs in f64 by Candle's operations
//! alone.
//!
//! A seed draws the operations, checkpoints that capture tensors, and backwards over one graph: some fail, and some run
//! at the same time in two threads. `FSDP_RANDOM_GRAPHS` sets the number of graphs, `FSDP_RANDOM_SEED` the first seed.

use std::sync::{Arc, Barrier};

use candle_core::{DType, Module, Result, Tensor, Var};
use fsdp_candle::activation_checkpoint::checkpoint;
use fsdp_candle::{FsdpModule, FullyShard, ReshardAfterForward, ShardedVarMap, World, fully_shard, nn};
use fsdp_core::ReduceOp;

use crate::common::{Gradients, WIDTH, assert_close, batch, device, elements, ranks};
use crate::random_models::{Draw, gradients, number, whole};

const UNITS: usize = 2;

/// An operation on earlier results. Results 0 and 1 are the units' outputs for the input.
#[derive(Clone, Copy, Debug)]
enum Op {
    Linear {
        unit: usize,
        x: usize,
    },
    Silu(usize),
    CandleTanh(usize),
    Softmax(usize),
    Add(usize, usize),
    CandleAdd(usize, usize),
    CandleMul(usize, usize),
    /// A checkpointed closure of a unit, which captures `captured` and maybe runs the unit's layer.
    Checkpoint {
        unit: usize,
        x: usize,
        captured: usize,
        runs_layer: bool,
        by_candle: bool,
        nested: bool,
    },
}

/// A graph and its backwards.
#[derive(Debug)]
struct Plan {
    ranks: usize,
    reshard: bool,
    ops: Vec<Op>,
    backwards: Vec<Backward>,
}

/// A backward of the losses of some results.
#[derive(Debug)]
struct Backward {
    results: Vec<usize>,
    /// The result whose operation without a backward makes it fail, and whether that loss is the sum's first term.
    fails: Option<(usize, bool)>,
}

impl Plan {
    fn draw(seed: u64) -> Self {
        let mut draw = Draw(seed);
        let ranks = 1 + draw.below(3);
        let count = 3 + draw.below(10);
        let ops = (0..count).map(|at| {
            let known = UNITS + at;
            let mut of = || if draw.once_in(2) { known - 1 } else { draw.below(known) };
            let (x, y) = (of(), of());
            let unit = draw.below(UNITS);
            match draw.below(10) {
                0 => Op::Linear { unit, x },
                1 => Op::Silu(x),
                2 => Op::CandleTanh(x),
                3 => Op::Softmax(x),
                4 | 5 => Op::Add(x, y),
                6 => Op::CandleAdd(x, y),
                7 => Op::CandleMul(x, y),
                _ => Op::Checkpoint {
                    unit,
                    x,
                    captured: y,
                    runs_layer: draw.once_in(2),
                    by_candle: draw.once_in(2),
                    nested: draw.once_in(3),
                },
            }
        });
        let ops: Vec<Op> = ops.collect();
        let known = UNITS + count;
        let backwards = (0..2 + draw.below(3)).map(|_| {
            let result = |draw: &mut Draw| if draw.once_in(2) { known - 1 } else { draw.below(known) };
            let results = (0..1 + draw.below(3)).map(|_| result(&mut draw)).collect();
            Backward { results, fails: draw.once_in(3).then(|| (result(&mut draw), draw.once_in(2))) }
        });
        let mut backwards: Vec<Backward> = backwards.collect();
        if let Some(last) = backwards.last_mut() {
            last.fails = None;
        }
        Plan { ranks, reshard: draw.once_in(2), ops, backwards }
    }
}

fn loss_of(result: &Tensor) -> Result<Tensor> {
    result.sqr()?.mean_all()
}

impl Backward {
    fn loss(&self, results: &[Tensor], with_failure: bool) -> Result<Tensor> {
        let terms = self.results.iter().map(|&result| loss_of(&results[result]));
        let mut terms = terms.collect::<Result<Vec<_>>>()?;
        if let Some((result, is_first)) = self.fails.filter(|_| with_failure) {
            // Candle's backward of it needs a stride of the kernel's size.
            let image = results[result].contiguous()?.unsqueeze(0)?.unsqueeze(0)?;
            let fails = image.max_pool2d_with_stride(1, 2)?.mean_all()?;
            terms.insert(if is_first { 0 } else { terms.len() }, fails);
        }
        let first = terms.remove(0);
        terms.iter().try_fold(first, |sum, term| sum + term)
    }
}

/// The results of a graph of this library's operations. `unit` runs a closure with the layer of a unit.
fn results(plan: &Plan, x: &Tensor, unit: &dyn Fn(usize, &Closure<'_>) -> Result<Tensor>) -> Result<Vec<Tensor>> {
    let mut known = (0..UNITS).map(|at| unit(at, &|layer| layer.forward(x))).collect::<Result<Vec<_>>>()?;
    for op in &plan.ops {
        let result = match *op {
            Op::Linear { unit: at, x } => unit(at, &|layer| layer.forward(&known[x]))?,
            Op::Silu(x) => nn::silu(&known[x])?,
            Op::CandleTanh(x) => known[x].tanh()?,
            Op::Softmax(x) => nn::ops::softmax_last_dim(&known[x])?,
            Op::Add(x, y) => (nn::add(&known[x], &known[y])? * 0.5)?,
            Op::CandleAdd(x, y) => ((&known[x] + &known[y])? * 0.5)?,
            Op::CandleMul(x, y) => (&known[x] * known[y].tanh()?)?,
            Op::Checkpoint { unit: at, x, captured, runs_layer, by_candle, nested } => unit(at, &|layer| {
                let (layer, captured) = (layer.clone(), known[captured].clone());
                let inner = move |x: Tensor| -> Result<Tensor> {
                    let x = if runs_layer { layer.forward(&x)? } else { nn::silu(&x)? };
                    if by_candle { (&x + &captured)? * 0.5 } else { nn::add(&x, &captured)? * 0.5 }
                };
                match nested {
                    true => {
                        let inner = Arc::new(inner);
                        let outer = move |x: Tensor| {
                            let inner = inner.clone();
                            nn::silu(&checkpoint(move |x: Tensor| inner(x), x)?)
                        };
                        checkpoint(outer, known[x].clone())
                    }
                    false => checkpoint(inner, known[x].clone()),
                }
            })?,
        };
        known.push(result);
    }
    Ok(known)
}

type Closure<'a> = dyn Fn(&Arc<nn::Linear>) -> Result<Tensor> + 'a;

/// The same results by Candle's operations.
fn reference(plan: &Plan, x: &Tensor, layers: &[(Tensor, Tensor)]) -> Result<Vec<Tensor>> {
    let linear = |unit: usize, x: &Tensor| {
        let (weight, bias) = &layers[unit];
        x.matmul(&weight.t()?)?.broadcast_add(bias)
    };
    let mut known = (0..UNITS).map(|unit| linear(unit, x)).collect::<Result<Vec<_>>>()?;
    for op in &plan.ops {
        let result = match *op {
            Op::Linear { unit, x } => linear(unit, &known[x])?,
            Op::Silu(x) => known[x].silu()?,
            Op::CandleTanh(x) => known[x].tanh()?,
            Op::Softmax(x) => candle_nn::ops::softmax(&known[x], candle_core::D::Minus1)?,
            Op::Add(x, y) | Op::CandleAdd(x, y) => ((&known[x] + &known[y])? * 0.5)?,
            Op::CandleMul(x, y) => (&known[x] * known[y].tanh()?)?,
            Op::Checkpoint { unit, x, captured, runs_layer, nested, .. } => {
                let inner = if runs_layer { linear(unit, &known[x])? } else { known[x].silu()? };
                let inner = ((inner + &known[captured])? * 0.5)?;
                if nested { inner.silu()? } else { inner }
            }
        };
        known.push(result);
    }
    Ok(known)
}

/// Asserts the gradients of the backwards of a sharded model.
fn sharded(plan: &Plan, world: &World) {
    let vars = ShardedVarMap::of_world(world).unwrap();
    let policy = if plan.reshard { ReshardAfterForward::Always } else { ReshardAfterForward::Never };
    let opts = FullyShard::new(&vars).reshard_after_forward(policy);
    let model = fully_shard(&opts, vars.builder(DType::F32), |vb| {
        (0..UNITS)
            .map(|unit| {
                let vb = vb.pp(format!("unit.{unit}"));
                fully_shard(&opts, vb, |vb| Ok(Arc::new(nn::linear(WIDTH, WIDTH, vb)?)))
                    .map_err(candle_core::Error::wrap)
            })
            .collect::<Result<Vec<FsdpModule<Arc<nn::Linear>>>>>()
    });
    let model = model.unwrap();
    // Each parameter in whole, in f64.
    let params = vars.params();
    let wholes = params.iter().map(|param| {
        let values = whole(world, param, param.var()).into_iter().map(f64::from).collect();
        let tensor = Tensor::from_vec::<_, f64>(values, param.shape(), &device()).unwrap();
        (param.name().to_string(), Var::from_tensor(&tensor).unwrap())
    });
    let wholes: Vec<(String, Var)> = wholes.collect();
    let of = |name: String| wholes.iter().find(|(other, _)| *other == name).unwrap().1.as_tensor().clone();
    let layers = (0..UNITS).map(|unit| (of(format!("unit.{unit}.weight")), of(format!("unit.{unit}.bias"))));
    let layers: Vec<_> = layers.collect();
    let x = batch(world.rank(), WIDTH);
    let expected = reference(plan, &x.to_dtype(DType::F64).unwrap(), &layers).unwrap();
    let found = model.call(|units| results(plan, &x, &|at, closure| units[at].call(|layer| closure(layer)))).unwrap();
    for (at, backward) in plan.backwards.iter().enumerate() {
        let loss = backward.loss(&found, true).unwrap();
        let outcome = match at + 1 == plan.backwards.len() {
            true => model.backward(&loss),
            false => model.backward_retain_graph(&loss),
        };
        assert_eq!(outcome.is_err(), backward.fails.is_some(), "backward {at}: {:?}", outcome.err());
        let Ok(grads) = outcome else { continue };
        let of_reference = backward.loss(&expected, false).unwrap().backward().unwrap();
        let mean = |(name, var): &(String, Var)| {
            let own = of_reference
                .get(var)
                .map_or(vec![0.; var.elem_count()], |grad| elements::<f32>(&grad.to_dtype(DType::F32).unwrap()));
            (name.clone(), world.group().all_reduce_values(own, ReduceOp::Avg).unwrap())
        };
        let mut want: Gradients = wholes.iter().map(mean).collect();
        let mut got = gradients(world, &vars, &grads);
        want.sort_by(|a, b| a.0.cmp(&b.0));
        got.sort_by(|a, b| a.0.cmp(&b.0));
        // A fault is a missing or repeated term, as large as the gradient.
        assert_close(&got, &want, 1e-3);
    }
}

/// Asserts the gradients of the same backwards without sharding, in this thread and then each in two threads.
fn plain(plan: &Plan) {
    let var = |seed: usize, shape: &[usize]| {
        let values = (0..shape.iter().product()).map(|at: usize| ((at * 37 + seed * 101) % 63) as f32 / 64. - 0.5);
        Var::from_tensor(&Tensor::from_vec(values.collect::<Vec<_>>(), shape, &device()).unwrap()).unwrap()
    };
    let vars: Vec<(Var, Var)> = (0..UNITS).map(|unit| (var(unit, &[WIDTH, WIDTH]), var(9 + unit, &[WIDTH]))).collect();
    let wide = |var: &Var| Var::from_tensor(&var.to_dtype(DType::F64).unwrap()).unwrap();
    let wide: Vec<(Var, Var)> = vars.iter().map(|(weight, bias)| (wide(weight), wide(bias))).collect();
    let layers = vars
        .iter()
        .map(|(weight, bias)| Arc::new(nn::Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()))));
    let layers: Vec<_> = layers.collect();
    let x = batch(0, WIDTH);
    let found = results(plan, &x, &|at, closure| closure(&layers[at])).unwrap();
    let of_layers: Vec<_> = wide.iter().map(|(w, b)| (w.as_tensor().clone(), b.as_tensor().clone())).collect();
    let expected = reference(plan, &x.to_dtype(DType::F64).unwrap(), &of_layers).unwrap();
    let of = |vars: &[(Var, Var)], loss: &Tensor| -> Option<Gradients> {
        let grads = loss.backward().ok()?;
        let of = |var: &Var| {
            let grad = grads.get(var).cloned().unwrap_or_else(|| var.zeros_like().unwrap());
            elements::<f32>(&grad.to_dtype(DType::F32).unwrap())
        };
        let both = vars.iter().enumerate();
        Some(both.flat_map(|(at, (w, b))| [(format!("{at}.weight"), of(w)), (format!("{at}.bias"), of(b))]).collect())
    };
    let check = |backward: &Backward, got: Option<Gradients>| {
        assert_eq!(got.is_none(), backward.fails.is_some());
        if let Some(got) = got {
            assert_close(&got, &of(&wide, &backward.loss(&expected, false).unwrap()).unwrap(), 1e-3);
        }
    };
    for backward in &plan.backwards {
        check(backward, of(&vars, &backward.loss(&found, true).unwrap()));
    }
    for pair in plan.backwards.windows(2) {
        let losses = [&pair[0], &pair[1]].map(|backward| backward.loss(&found, true).unwrap());
        let start = Barrier::new(2);
        let got = std::thread::scope(|threads| {
            let run = |loss| {
                let (start, vars, of) = (&start, &vars, &of);
                threads.spawn(move || {
                    start.wait();
                    of(vars, loss)
                })
            };
            let threads = [run(&losses[0]), run(&losses[1])];
            threads.map(|thread| thread.join().unwrap())
        });
        let [first, second] = got;
        check(&pair[0], first);
        check(&pair[1], second);
    }
}

#[test]
fn random_graphs_match_candle() {
    let first = number("FSDP_RANDOM_SEED").unwrap_or(1);
    let graphs = number("FSDP_RANDOM_GRAPHS").unwrap_or(300);
    for seed in first..first + graphs {
        let plan = &Plan::draw(seed);
        let outcome = std::panic::catch_unwind(|| {
            plain(plan);
            ranks(plan.ranks, |world| sharded(plan, &world))
        });
        assert!(outcome.is_ok(), "FSDP_RANDOM_SEED={seed} FSDP_RANDOM_GRAPHS=1: {plan:#?}");
    }
    println!("{graphs} random graphs from seed {first}");
}
