//! `gradcheck` names the units whose gradients are not those of the loss.

use candle_core::{DType, Module, Result, Tensor};
use fsdp_candle::{
    Error, FsdpModule, FullyShard, GradcheckOptions, GradientMismatch, MixedPrecisionPolicy, ShardedVarMap, World,
    fully_shard, gradcheck, nn, shard,
};

use crate::common::{
    Draws, Identity, WIDTH, assert_resharded, batch, elements, loss_of, on_cuda, one_of, ranks, refused, vars,
};

/// The error in the middle layer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wrong {
    Nothing,
    RmsNorm,
    LayerNorm,
    Gradient,
}

const LAYERS: usize = 4;
const BAD: usize = 2;

struct Block {
    norm: Box<dyn Module>,
    up: nn::Lora<nn::Linear>,
    down: nn::Lora<nn::Linear>,
    twice: bool,
}

impl Block {
    fn new(wrong: Wrong, vb: candle_nn::VarBuilder) -> Result<Self> {
        let config = nn::LoraConfig { rank: 2, alpha: 2. };
        let lora = |inputs, outputs, vb: candle_nn::VarBuilder| {
            nn::lora(nn::linear(inputs, outputs, vb.clone())?, inputs, outputs, config, vb)
        };
        let norm: Box<dyn Module> = match wrong {
            Wrong::RmsNorm => Box::new(candle_nn::rms_norm(WIDTH, 1e-5, vb.pp("norm"))?),
            Wrong::LayerNorm => Box::new(candle_nn::layer_norm(WIDTH, 1e-5, vb.pp("norm"))?),
            _ => Box::new(nn::layer_norm(WIDTH, 1e-5, vb.pp("norm"))?),
        };
        let (up, down) = (lora(WIDTH, 9, vb.pp("up"))?, lora(9, WIDTH, vb.pp("down"))?);
        Ok(Block { norm, up, down, twice: wrong == Wrong::Gradient })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.down.forward(&nn::gelu(&self.up.forward(&self.norm.forward(x)?)?)?)?;
        x + if self.twice { y.apply_op1(Identity(|grad: &Tensor| grad * 2.))? } else { y }
    }
}

struct Model<B>(Vec<B>);

impl<B: Module> Module for Model<B> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, block| block.forward(&x))
    }
}

/// Adapters on a frozen base, or everything trainable.
fn new_vars(world: &World, lora: bool) -> ShardedVarMap {
    let vars = vars(world);
    vars.init_with(Draws(3, |_| candle_nn::Init::Randn { mean: 0.1, stdev: 0.4 })).unwrap();
    if lora {
        vars.freeze(|name| !nn::is_adapter(name)).unwrap();
    }
    vars
}

fn wrong_in(wrong: Wrong, layer: usize) -> Wrong {
    if layer == BAD { wrong } else { Wrong::Nothing }
}

fn wrapped(vars: &ShardedVarMap, wrong: Wrong) -> FsdpModule<Model<FsdpModule<Block>>> {
    let (opts, vb) = (FullyShard::new(vars), vars.builder(DType::F32));
    let block = |i| fully_shard(&opts, vb.pp(format!("layers.{i}")), |vb| Block::new(wrong_in(wrong, i), vb)).unwrap();
    let blocks = (0..LAYERS).map(block).collect();
    fully_shard(&opts, vb, |_| Ok(Model(blocks))).unwrap()
}

fn by_name(vars: &ShardedVarMap, wrong: Wrong) -> FsdpModule<Model<Block>> {
    let opts = FullyShard::new(vars);
    shard(&opts, &["layers.*"], vars.builder(DType::F32), |vb| {
        let block = |i| Block::new(wrong_in(wrong, i), vb.pp(format!("layers.{i}")));
        Ok::<_, candle_core::Error>(Model((0..LAYERS).map(block).collect::<Result<_>>()?))
    })
    .unwrap()
}

fn check<M: Module>(world: &World, vars: &ShardedVarMap, model: &FsdpModule<M>) -> std::result::Result<(), Error> {
    let values = || vars.params().iter().map(|param| elements::<f32>(param.var())).collect::<Vec<_>>();
    let before = values();
    let x = batch(world.rank(), WIDTH);
    let outcome = gradcheck(model, &GradcheckOptions::default(), |model| (model.forward(&x)? - 1.)?.sqr()?.mean_all());
    assert_eq!(values(), before, "parameters are as they were");
    assert_resharded(vars);
    // Training goes on.
    model.backward(&loss_of(model, &x)).unwrap();
    outcome.map(drop)
}

fn mismatch(outcome: std::result::Result<(), Error>) -> GradientMismatch {
    match outcome {
        Err(Error::Gradcheck(mismatch)) => mismatch,
        other => panic!("{other:?}"),
    }
}

#[test]
fn passes_right_and_names_wrong_gradients() {
    for size in [3, 2, 1].into_iter().step_by(one_of(2)) {
        for lora in [true, false] {
            for wrong in [Wrong::Nothing, Wrong::RmsNorm, Wrong::LayerNorm, Wrong::Gradient] {
                ranks(size, |world| {
                    let vars = new_vars(&world, lora);
                    let wrapped = check(&world, &vars, &wrapped(&vars, wrong));
                    let vars = new_vars(&world, lora);
                    let by_name = check(&world, &vars, &by_name(&vars, wrong));
                    let what = format!("{size} ranks, lora {lora}, {wrong:?}");
                    for outcome in [wrapped, by_name] {
                        if wrong == Wrong::Nothing {
                            outcome.unwrap_or_else(|error| panic!("{what}: {error}"));
                            continue;
                        }
                        let mismatch = mismatch(outcome);
                        let names: Vec<&str> = mismatch.wrong().map(|unit| unit.unit.as_str()).collect();
                        let lost: Vec<&str> = mismatch.lost_in().iter().map(|unit| unit.unit.as_str()).collect();
                        assert!(lost.contains(&"layers.2"), "{what}: {lost:?}, {mismatch}");
                        assert!(names.contains(&"layers.0") && names.contains(&"layers.1"), "{what}: {mismatch}");
                        assert!(!names.contains(&"layers.3"), "{what}: {mismatch}");
                        assert!(mismatch.to_string().contains("`layers.2`"), "{mismatch}");
                    }
                });
            }
        }
    }
}

/// Three layers; the middle one is Candle's: a linear layer on a view, or a convolution.
fn three_layers(
    vars: &ShardedVarMap,
    candles: bool,
    convolution: bool,
) -> FsdpModule<Vec<FsdpModule<Box<dyn Module>>>> {
    let (opts, vb) = (FullyShard::new(vars), vars.builder(DType::F32));
    let layer = |i: usize| {
        fully_shard(&opts, vb.pp(format!("layers.{i}")), |vb| -> Result<Box<dyn Module>> {
            Ok(match (i, candles, convolution) {
                (1, true, true) => Box::new(candle_nn::conv1d(WIDTH, WIDTH, 3, Default::default(), vb)?),
                (1, true, false) => Box::new(candle_nn::linear(WIDTH, WIDTH, vb)?),
                (1, false, true) => Box::new(nn::conv1d(WIDTH, WIDTH, 3, Default::default(), vb)?),
                _ => Box::new(nn::linear(WIDTH, WIDTH, vb)?),
            })
        })
    };
    let layers = (0..3).map(|i| layer(i).unwrap()).collect();
    fully_shard(&opts, vb, |_| Ok(layers)).unwrap()
}

/// On the host, Candle's `Linear` misreads a 3-D view, and the gradients of its `conv1d` are wrong.
#[test]
fn names_candles_wrong_gradients() {
    for size in [1, 2] {
        for (candles, convolution) in [(true, false), (true, true), (false, false), (false, true)] {
            ranks(size, |world| {
                let vars = new_vars(&world, false);
                let model = three_layers(&vars, candles, convolution);
                let x = batch(world.rank(), 15).reshape((2, 5, WIDTH)).unwrap();
                let checked = gradcheck(&model, &GradcheckOptions::default(), |model| {
                    let y = model.call(|layers| {
                        let layer = |i: usize, x: &Tensor| layers[i].call(|layer| layer.forward(x));
                        let channels = layer(0, &x)?.transpose(1, 2)?.contiguous()?;
                        let y = match convolution {
                            true => layer(1, &channels)?.transpose(1, 2)?,
                            false => layer(1, &channels.transpose(1, 2)?)?,
                        };
                        layer(2, &y.contiguous()?)
                    })?;
                    (y - 1.)?.sqr()?.mean_all()
                });
                let what = format!("{size} ranks, Candle's own {candles}, a convolution {convolution}");
                let checked = checked.map(drop);
                // Candle's CUDA backend reads the view correctly.
                if !candles || (on_cuda() && !convolution) {
                    return checked.unwrap_or_else(|error| panic!("{what}: {error}"));
                }
                let mismatch = mismatch(checked);
                let wrong: Vec<&str> = mismatch.wrong().map(|unit| unit.unit.as_str()).collect();
                // Earlier units have their gradients through it, which are correct on CUDA.
                let before = if on_cuda() { 1 } else { 0 };
                assert_eq!(wrong, ["layers.0", "layers.1"][before..], "{what}: {mismatch}");
                assert_eq!(mismatch.lost_in()[0].unit, "layers.1");
            });
        }
    }
}

#[test]
fn refuses_uncheckable_models() {
    ranks(2, |world| {
        let build = |dtype: Option<DType>| {
            let vars = vars(&world);
            let policy = MixedPrecisionPolicy { param_dtype: dtype, ..MixedPrecisionPolicy::default() };
            let opts = FullyShard::new(&vars).mp_policy(policy);
            (fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear(WIDTH, 2, vb)).unwrap(), vars)
        };
        let x = batch(0, WIDTH);
        let options = GradcheckOptions::default();
        let (model, _vars) = build(Some(DType::BF16));
        refused(gradcheck(&model, &options, |m| m.forward(&x)?.sum_all()), &["`weight` is BF16, expected F32 or F64"]);
        let (model, _vars) = build(None);
        let mut calls = 0.;
        let random = gradcheck(&model, &options, |m| {
            calls += 1.;
            m.forward(&x)?.sum_all()? * calls
        });
        refused(random, &["with the same parameters: seed random"]);
        let vars = vars(&world);
        vars.freeze(|_| true).unwrap();
        let model =
            fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear(WIDTH, 2, vb)).unwrap();
        refused(gradcheck(&model, &options, |m| m.forward(&x)?.sum_all()), &["the model has no trainable parameter"]);
    });
}

/// As the choice of a router does.
#[test]
fn accepts_nearby_jumps() {
    ranks(2, |world| {
        let vars = vars(&world);
        let build = |vb| nn::linear_no_bias(WIDTH, 3, vb);
        let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), build).unwrap();
        let x = batch(0, WIDTH);
        let smooth = model.forward(&x).unwrap().sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
        model.reset_iter_state();
        // The first step changes the loss by 2 %; the jump comes within 1 %.
        let edge = f64::from(smooth) * 1.008;
        for (factor, is_right) in [(1., true), (1.5, false)] {
            let checked = gradcheck(&model, &GradcheckOptions::default(), |model| {
                let loss = model.forward(&x)?.sqr()?.sum_all()?;
                let jump = loss.gt(edge)?.to_dtype(DType::F32)?;
                // A detached tensor has no gradient, so a term is missing.
                let lost = (loss.detach() * (factor - 1.))?;
                (loss + jump)? + lost
            });
            assert_eq!(checked.is_ok(), is_right, "{checked:?}");
        }
    });
}
