//! Activation checkpointing changes memory and time, but no bit of the results.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{Block, Identity, Model, alone, assert_resharded, batch, elements, loss_of, ranks, refused, vars};
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::VarBuilder;
use fsdp_candle::activation_checkpoint::checkpoint;
use fsdp_candle::{FsdpModule, FullyShard, ReshardAfterForward, ShardedVarMap, fully_shard, nn};

const WIDTH: usize = 5; // odd: shards are uneven

/// The part of a block that is recomputed in backward.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Again {
    Nothing,
    Block,
    Mlp,
    Nested,
}

struct Mlp {
    up: candle_nn::Linear,
    down: nn::Linear,
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&nn::gelu(&self.up.forward(x)?)?)
    }
}

struct Residual {
    norm: nn::RmsNorm,
    mlp: Arc<Mlp>,
    again: Again,
}

impl Module for Residual {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let normed = self.norm.forward(x)?;
        let y = match self.again {
            Again::Mlp | Again::Nested => {
                let mlp = self.mlp.clone();
                checkpoint(move |x: Tensor| mlp.forward(&x), normed)?
            }
            _ => self.mlp.forward(&normed)?,
        };
        x + y
    }
}

struct Layer {
    block: Arc<Residual>,
    again: Again,
}

impl Layer {
    fn new(again: Again, vb: VarBuilder) -> Result<Self> {
        let mlp = Mlp {
            up: candle_nn::linear(WIDTH, 3 * WIDTH, vb.pp("up"))?,
            down: nn::linear(3 * WIDTH, WIDTH, vb.pp("down"))?,
        };
        let block = Residual { norm: nn::rms_norm(WIDTH, 1e-5, vb.pp("norm"))?, mlp: Arc::new(mlp), again };
        Ok(Layer { block: Arc::new(block), again })
    }
}

impl Module for Layer {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if matches!(self.again, Again::Block | Again::Nested) {
            let block = self.block.clone();
            checkpoint(move |x: Tensor| block.forward(&x), x.clone())
        } else {
            self.block.forward(x)
        }
    }
}

fn build(opts: &FullyShard, vars: &ShardedVarMap, again: Again) -> FsdpModule<Model<FsdpModule<Layer>>> {
    let vb = vars.builder(DType::F32);
    let blocks =
        (0..3).map(|i| fully_shard(opts, vb.pp(format!("blocks.{i}")), |vb| Layer::new(again, vb)).unwrap()).collect();
    fully_shard(opts, vb, |vb| Ok(Model { blocks, head: nn::linear(WIDTH, 2, vb.pp("head"))? })).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    elements::<f32>(tensor).into_iter().map(f32::to_bits).collect()
}

type Numbers = Vec<(String, Vec<u32>)>;

/// Each rank's losses and gradients in two steps.
fn numbers(world_size: usize, reshard: ReshardAfterForward, again: Again, frozen: &'static str) -> Vec<Numbers> {
    ranks(world_size, |world| {
        let vars = vars(&world);
        vars.freeze(move |name| !frozen.is_empty() && name.contains(frozen)).unwrap();
        let model = build(&FullyShard::new(&vars).reshard_after_forward(reshard), &vars, again);
        let mut numbers = vec![];
        for step in 0..2 {
            let loss = loss_of(&model, &batch(world.rank() + step, WIDTH));
            let grads = model.backward(&loss).unwrap();
            numbers.push(("loss".to_string(), bits(&loss)));
            for param in vars.params() {
                let wanted = param.trainable() && !param.region().is_empty();
                assert_eq!(grads.get(param.var()).is_some(), wanted, "{}", param.name());
                if let Some(grad) = grads.get(param.var()) {
                    numbers.push((param.name().to_string(), bits(grad)));
                }
            }
            assert_resharded(&vars);
        }
        assert!(model.parameters_without_gradient().is_empty());
        numbers
    })
}

#[test]
fn checkpoints_keep_the_bits() {
    for world_size in 1..=3 {
        for reshard in [ReshardAfterForward::Default, ReshardAfterForward::Always, ReshardAfterForward::Never] {
            let plain = numbers(world_size, reshard, Again::Nothing, "");
            for again in [Again::Block, Again::Mlp, Again::Nested] {
                assert_eq!(numbers(world_size, reshard, again, ""), plain, "{again:?} at {world_size} ranks");
            }
        }
    }
}

#[test]
fn frozen_parameters_stay_frozen() {
    for frozen in ["norm", "up", "down.bias", "blocks.1"] {
        let plain = numbers(2, ReshardAfterForward::Default, Again::Nothing, frozen);
        for again in [Again::Block, Again::Mlp, Again::Nested] {
            assert_eq!(numbers(2, ReshardAfterForward::Default, again, frozen), plain, "{again:?}, `{frozen}` frozen");
        }
    }
}

/// A tied weight, used in two checkpoints of one unit and outside them.
struct Tied {
    layer: Arc<nn::Linear>,
    again: bool,
}

impl Tied {
    fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let layer = self.layer.clone();
        let f = move |x: Tensor| nn::gelu(&layer.forward(&x)?);
        if self.again { checkpoint(f, x.clone()) } else { f(x.clone()) }
    }
}

impl Module for Tied {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.layer.forward(&self.apply(&self.layer.forward(x)?)?)?;
        self.layer.forward(&self.apply(&x)?)
    }
}

#[test]
fn parameters_can_be_used_in_several_checkpoints() {
    let run = |again: bool| {
        ranks(2, move |world| {
            let vars = vars(&world);
            let build = |vb: VarBuilder| Ok(Tied { layer: Arc::new(nn::linear(WIDTH, WIDTH, vb)?), again });
            let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), build).unwrap();
            let loss = loss_of(&model, &batch(world.rank(), WIDTH));
            let grads = model.backward(&loss).unwrap();
            let bits: Vec<Vec<u32>> = vars.params().iter().map(|p| bits(grads.get(p.var()).unwrap())).collect();
            assert_resharded(&vars);
            (loss.to_scalar::<f32>().unwrap().to_bits(), bits)
        })
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn plain_variables_get_gradients() {
    let var = |seed: usize, shape: (usize, usize)| {
        let values = (0..shape.0 * shape.1).map(|i| ((i * 7 + seed) % 11) as f32 / 11. - 0.4).collect::<Vec<_>>();
        Var::from_tensor(&Tensor::from_vec(values, shape, &Device::Cpu).unwrap()).unwrap()
    };
    let (x, w, b) = (var(1, (4, 3)), var(2, (3, 3)), var(3, (4, 3)));
    let constant = Tensor::ones((4, 3), DType::F32, &Device::Cpu).unwrap();
    let run = |again: bool| {
        let w_inside = w.clone();
        let f = move |(x, b, c, ids): (Tensor, Tensor, Tensor, Tensor)| {
            let y = (x.matmul(&w_inside)? + (b * c)?)?.tanh()?;
            Ok((y.t()?, y.index_select(&ids, 0)?, vec![ids.clone(), y.sum_all()?]))
        };
        let ids = Tensor::new(&[2u32, 0, 2], &Device::Cpu).unwrap();
        let inputs = ((x.as_tensor() * 2.).unwrap(), b.as_tensor().clone(), constant.clone(), ids);
        // The second output reaches the loss and the last one does not. `w` and `x` are used outside as well.
        let (a, c, rest) = if again {
            checkpoint(
                move |((x, b), (c, ids)): ((Tensor, Tensor), (Tensor, Tensor))| f((x, b, c, ids)),
                ((inputs.0, inputs.1), (inputs.2, inputs.3)),
            )
        } else {
            f(inputs)
        }
        .unwrap();
        assert_eq!(rest[0].to_vec1::<u32>().unwrap(), [2, 0, 2]);
        let outside = x.matmul(&w).unwrap().sum_all().unwrap();
        let loss = (a.sqr().unwrap().sum_all().unwrap() + (c.sum_all().unwrap() * outside).unwrap()).unwrap();
        let grads = loss.backward().unwrap();
        (bits(&loss), [&x, &w, &b].map(|var| bits(grads.get(var).unwrap())))
    };
    assert_eq!(run(true).0, run(false).0);
    for (again, plain) in run(true).1.iter().zip(&run(false).1) {
        for (a, b) in again.iter().zip(plain) {
            let (a, b) = (f32::from_bits(*a), f32::from_bits(*b));
            assert!((a - b).abs() <= 1e-6 * b.abs().max(1.), "{a} and {b}");
        }
    }
}

#[test]
fn only_inputs_outlive_forward() {
    let x = Var::ones((4, 3), DType::F32, &Device::Cpu).unwrap();
    let runs = Arc::new(AtomicUsize::new(0));
    let inside = runs.clone();
    let f = move |x: Tensor| {
        inside.fetch_add(1, Ordering::Relaxed);
        let of_graph = inside.clone();
        let backward = move |grad: &Tensor| {
            let _held = &of_graph;
            Ok(grad.clone())
        };
        x.sqr()?.apply_op1(Identity(backward))?.sqr()
    };
    let y = checkpoint(f, x.as_tensor().clone()).unwrap();
    // One in this test and one in the closure, none in a graph.
    assert_eq!((runs.load(Ordering::Relaxed), Arc::strong_count(&runs)), (1, 2));
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert_eq!((runs.load(Ordering::Relaxed), Arc::strong_count(&runs)), (2, 2));
    assert_eq!(bits(grads.get(&x).unwrap()), [4f32.to_bits(); 12]);

    let frozen = checkpoint(|x: Tensor| x.sqr(), x.detach()).unwrap();
    assert!(!frozen.track_op(), "nothing in it has a gradient");
}

/// The closure captures tensors of its own unit and of an earlier one. Operations of `nn` or of Candle read them.
#[test]
fn captured_tensors_get_their_gradients() {
    ranks(2, |world| {
        let vars = vars(&world);
        let opts = FullyShard::new(&vars);
        let model = fully_shard(&opts, vars.builder(DType::F32), |vb| {
            let unit = |name: &str| {
                fully_shard(&opts, vb.pp(name), |vb| Ok(Arc::new(nn::linear(WIDTH, WIDTH, vb)?)))
                    .map_err(candle_core::Error::wrap)
            };
            Ok([unit("first")?, unit("second")?])
        });
        let model = model.unwrap();
        let x = batch(world.rank(), WIDTH);
        let gradients = |again: bool, by_candle: bool, keeps: bool| -> Result<Vec<Vec<u32>>> {
            let loss = model.call(|[first, second]| {
                let early = nn::silu(&first.call(|layer| layer.forward(&x))?)?;
                let y = second.call(|layer| {
                    let inside = nn::silu(&layer.forward(&early)?)?;
                    let (layer, early, captured) = (layer.clone(), early.clone(), inside.clone());
                    let f = move |x: Tensor| {
                        let y = nn::gelu_erf(&layer.forward(&x)?)?;
                        match by_candle {
                            true => (&y * &captured)? + &early,
                            false => nn::add(&nn::silu_mul(&y, &captured)?, &early),
                        }
                    };
                    if again { checkpoint(f, inside) } else { f(inside) }
                })?;
                y.sqr()?.mean_all()
            })?;
            let grads = if keeps { model.backward_retain_graph(&loss)? } else { model.backward(&loss)? };
            Ok(vars.params().iter().map(|param| bits(grads.get(param.var()).unwrap())).collect())
        };
        for (by_candle, keeps) in [(false, false), (false, true), (true, false), (true, true)] {
            let [again, once] = [true, false].map(|again| gradients(again, by_candle, keeps).unwrap());
            assert_eq!(again, once, "by Candle: {by_candle}, keeps the graph: {keeps}");
        }
    });
}

#[test]
fn refuses_nondeterministic_closures() {
    let x = Var::ones((4, 3), DType::F32, &Device::Cpu).unwrap();
    let w = Var::ones((4, 3), DType::F32, &Device::Cpu).unwrap();
    type Second = fn(&Tensor, &Tensor) -> Result<Tensor>;
    let cases: [(Second, &str); 3] = [
        (|x, w| x + w, "1 variables or sharded parameters"),
        (|x, _| x.narrow(0, 0, 2), "returned [([4, 3], F32)] in forward and [([2, 3], F32)] in backward"),
        (|_, _| Err(candle_core::Error::msg("out of luck")), "out of luck"),
    ];
    for (second, expected) in cases {
        let (runs, w) = (AtomicUsize::new(0), w.clone());
        let f = move |x: Tensor| if runs.fetch_add(1, Ordering::Relaxed) == 0 { x.sqr() } else { second(&x, &w) };
        let y = checkpoint(f, x.as_tensor().clone()).unwrap();
        refused(y.sum_all().unwrap().backward(), &[expected, "checkpointed closure"]);
    }
}

#[test]
fn trains_after_a_failed_recomputation() {
    let run = |fail: bool| {
        ranks(2, move |world| {
            let vars = vars(&world);
            let build = |vb: VarBuilder| Ok(Arc::new(Block::new(WIDTH, vb)?));
            let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), build).unwrap();
            let step = |fail: bool| {
                let y = model.call(|block| {
                    let (block, runs) = (block.clone(), AtomicUsize::new(0));
                    let f = move |x: Tensor| {
                        let y = block.forward(&x)?;
                        if fail && runs.fetch_add(1, Ordering::Relaxed) == 1 {
                            candle_core::bail!("out of luck")
                        }
                        Ok(y)
                    };
                    checkpoint(f, batch(world.rank(), WIDTH))
                })?;
                model.backward(&y.sqr()?.mean_all()?)
            };
            if fail {
                refused(step(true), &["out of luck"]);
            }
            let grads = step(false).unwrap();
            vars.params().iter().map(|p| bits(grads.get(p.var()).unwrap())).collect::<Vec<_>>()
        })
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn refuses_units_inside_checkpoints() {
    let world = alone();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars);
    let vb = vars.builder(DType::F32);
    let block = Arc::new(fully_shard(&opts, vb.pp("block"), |vb| nn::linear(WIDTH, WIDTH, vb)).unwrap());
    let root = fully_shard(&opts, vb, |vb| nn::linear(WIDTH, WIDTH, vb.pp("root"))).unwrap();
    let y = root.call(|root| {
        let block = block.clone();
        checkpoint(move |x: Tensor| block.forward(&x), root.forward(&batch(0, WIDTH))?)
    });
    refused(root.backward(&y.unwrap().mean_all().unwrap()), &["unit `block`", "checkpointed closure"]);
}
