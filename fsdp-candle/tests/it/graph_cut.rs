//! Layers without backward, under adapters and tied weights, are reported where they cut the graph, and only there.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fsdp_candle::activation_checkpoint::checkpoint;
use fsdp_candle::{FsdpModule, FullyShard, GraphCut, GraphCutKind, ShardedVarMap, World, fully_shard, nn};

use crate::common::{Draws, assert_contains, batch, mean_square, ranks, vars};

const WIDTH: usize = 6;
const BLOCKS: usize = 3;

/// The crate whose layers a block uses.
#[derive(Clone, Copy, PartialEq)]
enum Norms {
    Ours,
    CandleRms,
    CandleLayer,
}

type Layer = Box<dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync>;

fn boxed(module: impl Module + Send + Sync + 'static) -> Layer {
    Box::new(move |x| module.forward(x))
}

impl Norms {
    fn build(self, vb: VarBuilder) -> Result<Layer> {
        Ok(match self {
            Norms::Ours => boxed(nn::layer_norm(WIDTH, 1e-5, vb)?),
            Norms::CandleRms => boxed(candle_nn::rms_norm(WIDTH, 1e-5, vb)?),
            Norms::CandleLayer => boxed(candle_nn::layer_norm(WIDTH, 1e-5, vb)?),
        })
    }
}

/// A frozen linear layer of Candle's or ours, with an adapter.
fn adapted(inputs: usize, outputs: usize, candles: bool, vb: VarBuilder) -> Result<Layer> {
    if !candles {
        let config = nn::LoraConfig { rank: 2, alpha: 4. };
        return Ok(boxed(nn::lora(nn::linear(inputs, outputs, vb.clone())?, inputs, outputs, config, vb)?));
    }
    let base = candle_nn::linear(inputs, outputs, vb.clone())?;
    let down = candle_nn::linear_no_bias(inputs, 2, vb.pp("lora_A"))?;
    let up = candle_nn::linear_no_bias(2, outputs, vb.pp("lora_B"))?;
    Ok(Box::new(move |x| base.forward(x)? + up.forward(&down.forward(x)?)?))
}

/// Two residual branches of a norm and an adapted layer.
struct Block([(Layer, Layer, Layer); 2]);

impl Block {
    fn new(norms: Norms, candles: bool, vb: VarBuilder) -> Result<Self> {
        let branch = |i: usize| -> Result<(Layer, Layer, Layer)> {
            let vb = vb.pp(i);
            let up = adapted(WIDTH, 2 * WIDTH, candles, vb.pp("up"))?;
            Ok((norms.build(vb.pp("norm"))?, up, boxed(candle_nn::linear(2 * WIDTH, WIDTH, vb.pp("down"))?)))
        };
        Ok(Block([branch(0)?, branch(1)?]))
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, (norm, up, down)| &x + down(&up(&norm(&x)?)?.gelu()?)?)
    }
}

type Adapted = FsdpModule<(Vec<FsdpModule<Block>>, nn::Linear)>;

/// Blocks with frozen norms and bases, and a frozen head.
fn lora(vars: &ShardedVarMap, norms: Norms, candles: bool) -> Adapted {
    // Norms with different weights, as in a trained model.
    vars.init_with(Draws(0, |request| match request.name.contains("norm.") {
        true => Init::Uniform { lo: 0.5, up: 1.5 },
        false => request.init,
    }))
    .unwrap();
    vars.freeze(|name| !nn::is_adapter(name)).unwrap();
    let (opts, vb) = (FullyShard::new(vars), vars.builder(DType::F32));
    let block = |i: usize| fully_shard(&opts, vb.pp(i), |vb| Block::new(norms, candles, vb)).unwrap();
    let blocks = (0..BLOCKS).map(block).collect();
    fully_shard(&opts, vb.clone(), |vb| Ok((blocks, nn::linear(WIDTH, 3, vb.pp("head"))?))).unwrap()
}

fn step(model: &Adapted, x: &Tensor) {
    let loss = forward(model, x);
    model.backward(&loss).unwrap();
}

fn forward(model: &Adapted, x: &Tensor) -> Tensor {
    let y =
        model.call(|(blocks, head)| head.forward(&blocks.iter().try_fold(x.clone(), |x, block| block.forward(&x))?));
    mean_square(&y.unwrap())
}

/// `unit: layer` of the reported norms.
fn norms(cuts: &[GraphCut]) -> Vec<String> {
    let layer = |cut: &GraphCut| match &cut.cut {
        GraphCutKind::Norm { layers, .. } => format!("{}: {}", cut.unit, layers.join(" or ")),
        other => panic!("{other:?}"),
    };
    cuts.iter().map(layer).collect()
}

#[test]
fn names_candles_norms_in_adapted_blocks() {
    for (kind, candles) in
        [(Norms::CandleRms, false), (Norms::CandleRms, true), (Norms::CandleLayer, false), (Norms::CandleLayer, true)]
    {
        for dims in [vec![4, WIDTH], vec![2, 2, WIDTH]] {
            ranks(2, |world| {
                let vars = vars(&world);
                let model = lora(&vars, kind, candles);
                step(&model, &batch(world.rank(), WIDTH).reshape(dims.as_slice()).unwrap());
                let cuts = model.graph_cuts();
                // The input of the first norm has no graph, so it cuts nothing.
                let want = ["0: 0.1.norm", "1: 1.0.norm", "1: 1.1.norm", "2: 2.0.norm", "2: 2.1.norm"];
                assert_eq!(norms(&cuts), want, "{candles} {dims:?}");
                assert_eq!(cuts[0].before, ["0.0.up.lora_A.weight", "0.0.up.lora_B.weight"]);
                assert_eq!(cuts[4].before.len(), 10);
                assert!(model.parameters_without_gradient().is_empty());
                let text = cuts[0].to_string();
                assert!(text.contains(if kind == Norms::CandleRms { "RmsNorm" } else { "LayerNorm" }), "{text}");
            });
        }
    }
}

#[test]
fn does_not_report_intact_adapters() {
    for candles in [false, true] {
        ranks(2, |world| {
            let vars = vars(&world);
            let model = lora(&vars, Norms::Ours, candles);
            let x = batch(world.rank(), WIDTH);
            forward(&model, &x); // an evaluation
            for _ in 0..2 {
                step(&model, &x);
            }
            assert_eq!(model.graph_cuts(), []);
            assert!(model.parameters_without_gradient().is_empty());
        });
    }
}

#[test]
fn names_a_tied_embedding_before_a_cut() {
    let cuts = |ours: bool| {
        ranks(2, |world| {
            let vars = vars(&world);
            let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
            let block = fully_shard(&opts, vb.pp("block"), |vb| nn::linear(WIDTH, WIDTH, vb)).unwrap();
            let model = fully_shard(&opts, vb, |vb| {
                let tied = vb.get_with_hints((10, WIDTH), "wte.weight", Init::Randn { mean: 0., stdev: 1. })?;
                let norm: Layer = match ours {
                    true => boxed(nn::rms_norm(WIDTH, 1e-5, vb.pp("ln_f"))?),
                    false => boxed(candle_nn::rms_norm(WIDTH, 1e-5, vb.pp("ln_f"))?),
                };
                Ok((candle_nn::Embedding::new(tied.clone(), WIDTH), norm, candle_nn::Linear::new(tied, None)))
            })
            .unwrap();
            let ids = Tensor::new(&[[1u32, 2, 3], [4, 5, 6]], world.device()).unwrap();
            let logits = model.call(|(embed, norm, head)| {
                let h = embed.forward(&ids)?;
                head.forward(&norm(&(&h + block.forward(&h)?)?)?)
            });
            model.backward(&mean_square(&logits.unwrap())).unwrap();
            (model.graph_cuts(), model.parameters_without_gradient())
        })
        .swap_remove(0)
    };
    assert_eq!(cuts(true), (vec![], vec![]));
    let (cuts, without) = cuts(false);
    // It has a gradient as the head's weight, but not as the embedding's.
    assert_eq!(without, ["block.bias", "block.weight", "ln_f.weight"]);
    assert!(cuts.iter().any(|cut| cut.before.contains(&"wte.weight".into())), "{cuts:?}");
}

/// A unit whose output has a graph, a unit of frozen weights, and a head.
fn with_frozen<M>(
    world: &World,
    build: impl FnOnce(VarBuilder) -> Result<M>,
    run: impl FnOnce(&FsdpModule<M>, &Tensor) -> Result<Tensor>,
) -> (Vec<GraphCut>, Vec<String>) {
    let vars = vars(world);
    vars.freeze(|name| name.starts_with("frozen")).unwrap();
    let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
    let before = fully_shard(&opts, vb.pp("before"), |vb| nn::linear(WIDTH, WIDTH, vb)).unwrap();
    let frozen = fully_shard(&opts, vb.pp("frozen"), build).unwrap();
    let model = fully_shard(&opts, vb, |vb| nn::linear(WIDTH, 2, vb.pp("head"))).unwrap();
    let x = batch(world.rank(), WIDTH);
    let y = model.call(|head| head.forward(&run(&frozen, &before.forward(&x)?)?));
    model.backward(&mean_square(&y.unwrap())).unwrap();
    (model.graph_cuts(), model.parameters_without_gradient())
}

#[test]
fn names_frozen_units_that_lose_the_graph() {
    let world = World::single().unwrap();
    for (norms, residual) in
        [(Norms::CandleRms, false), (Norms::CandleLayer, true), (Norms::Ours, false), (Norms::Ours, true)]
    {
        let build = |vb: VarBuilder| {
            let norm = norms.build(vb.pp("norm"))?;
            let up = candle_nn::linear(WIDTH, 9, vb.pp("up"))?;
            let down = candle_nn::linear(9, WIDTH, vb.pp("down"))?;
            Ok::<Layer, candle_core::Error>(Box::new(move |x| {
                let y = down.forward(&up.forward(&norm(x)?)?.gelu()?)?;
                if residual { x + y } else { Ok(y) }
            }))
        };
        let (cuts, _) = with_frozen(&world, build, |unit, x| unit.call_with(x.clone(), |layer, x| layer(&x)));
        let seen: Vec<&GraphCutKind> = cuts.iter().map(|cut| &cut.cut).collect();
        match (norms == Norms::Ours, residual) {
            (true, _) => assert_eq!(cuts, []),
            (false, true) => {
                assert_eq!(
                    seen,
                    [&GraphCutKind::Weights(vec!["frozen.up.weight".into(), "frozen.down.weight".into()])]
                );
                assert!(cuts[0].to_string().contains("`frozen.up.weight`"), "{}", cuts[0]);
            }
            (false, false) => assert_eq!(seen, [&GraphCutKind::Input]),
        }
        assert!(cuts.iter().all(|cut| cut.before == ["before.bias", "before.weight"]), "{cuts:?}");
    }
    // The norm is its own unit.
    let build = |vb: VarBuilder| candle_nn::rms_norm(WIDTH, 1e-5, vb.pp("norm"));
    let (cuts, _) = with_frozen(&world, build, |unit, x| unit.forward(x));
    assert_eq!(norms(&cuts), ["frozen: frozen.norm"]);
}

#[test]
fn does_not_report_intended_detaching() {
    let world = World::single().unwrap();
    let none = (vec![], vec![]);
    let mlp = |vb: VarBuilder| {
        let norm = nn::rms_norm(WIDTH, 1e-5, vb.pp("norm"))?;
        let (up, down) = (nn::linear(WIDTH, 9, vb.pp("up"))?, nn::linear(9, WIDTH, vb.pp("down"))?);
        let forward = move |x: &Tensor| x + down.forward(&nn::gelu(&up.forward(&norm.forward(x)?)?)?)?;
        Ok::<Arc<Layer>, candle_core::Error>(Arc::new(Box::new(forward)))
    };
    // Operations inside a checkpoint are not recorded.
    let run = |unit: &FsdpModule<Arc<Layer>>, x: &Tensor| {
        unit.call_with(x.clone(), |layer, x| {
            let layer = layer.clone();
            checkpoint(move |x: Tensor| layer(&x), x)
        })
    };
    assert_eq!(with_frozen(&world, mlp, run), none);
    // Detached on purpose before a unit. The missing gradient is still an error.
    let (cuts, without) = with_frozen(&world, mlp, |unit, x| unit.call_with(x.detach(), |layer, x| layer(&x)));
    assert_eq!((cuts, without), (vec![], vec!["before.bias".into(), "before.weight".into()]));
    // A teacher model next to the model.
    let teacher = |unit: &FsdpModule<Arc<Layer>>, x: &Tensor| {
        unit.call(|layer| layer(x))? - unit.call_with(x.detach(), |layer, x| layer(&x))?.detach()
    };
    assert_eq!(with_frozen(&world, mlp, teacher), none);
    // Positions: a frozen table added to a tensor with a graph.
    let table = |vb: VarBuilder| nn::embedding(8, WIDTH, vb.pp("positions"));
    let positions = Tensor::new(&[0u32, 1, 2, 3], world.device()).unwrap();
    let add = |unit: &FsdpModule<nn::Embedding>, x: &Tensor| {
        unit.call_with(x.clone(), |table, x| &x + table.forward(&positions)?)
    };
    assert_eq!(with_frozen(&world, table, add), none);
}

#[test]
fn does_not_report_a_frozen_head() {
    let world = World::single().unwrap();
    let vars = vars(&world);
    vars.freeze(|name| name.starts_with("head")).unwrap();
    let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
    let before = fully_shard(&opts, vb.pp("before"), |vb| nn::linear(WIDTH, WIDTH, vb)).unwrap();
    let head = fully_shard(&opts, vb.pp("head"), |vb| {
        Ok((nn::rms_norm(WIDTH, 1e-5, vb.pp("norm"))?, vb.get((11, WIDTH), "weight")?))
    })
    .unwrap();
    let targets = Tensor::new(&[1u32, 2, 3, 4], world.device()).unwrap();
    let x = before.forward(&batch(0, WIDTH)).unwrap();
    let loss = head.call_with(x, |(norm, weight), x| nn::linear_cross_entropy(&norm.forward(&x)?, weight, &targets));
    head.backward(&loss.unwrap()).unwrap();
    assert_eq!((head.graph_cuts(), head.parameters_without_gradient()), (vec![], vec![]));
}

#[test]
fn does_not_report_detached_adapters() {
    let world = World::single().unwrap();
    let vars = vars(&world);
    vars.freeze(|name| name.starts_with("unit.base")).unwrap();
    let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
    let before = fully_shard(&opts, vb.pp("before"), |vb| nn::linear(WIDTH, WIDTH, vb)).unwrap();
    let unit = fully_shard(&opts, vb.pp("unit"), |vb| {
        Ok((nn::rms_norm(WIDTH, 1e-5, vb.pp("base.norm"))?, nn::linear(WIDTH, 3, vb.pp("probe"))?))
    });
    let unit = unit.unwrap();
    let x = before.forward(&batch(0, WIDTH)).unwrap();
    let y = unit.call_with(x, |(norm, probe), x| {
        let h = norm.forward(&x)?;
        Ok::<_, candle_core::Error>((h.clone(), probe.forward(&h.detach())?))
    });
    let (h, probe) = y.unwrap();
    let loss = (mean_square(&h) + mean_square(&probe)).unwrap();
    unit.backward(&loss).unwrap();
    assert_eq!(unit.graph_cuts(), []);
}

#[test]
fn warns_once_on_the_first_rank() {
    let said = ranks(3, |world| {
        let warnings: Arc<Mutex<Vec<String>>> = Arc::default();
        let said = warnings.clone();
        let on_event = move |event: &tracing::Metadata<'_>, text: String| {
            if *event.level() == tracing::Level::WARN {
                said.lock().unwrap().push(text);
            }
        };
        fsdp_test_support::observed(on_event, || {
            let vars = vars(&world);
            let model = lora(&vars, Norms::CandleRms, false);
            for _ in 0..3 {
                step(&model, &batch(world.rank(), WIDTH));
            }
            assert_eq!(model.graph_cuts().len(), 5);
        });
        std::mem::take(&mut *warnings.lock().unwrap())
    });
    assert_eq!([said[0].len(), said[1].len(), said[2].len()], [1, 0, 0], "{said:?}");
    let text = &said[0][0];
    let words = [
        "`0.1.norm` is candle_nn's RmsNorm, which has no backward",
        "10 parameters before these: `0.0.up.lora_A.weight`",
        "use those of fsdp_candle::nn",
    ];
    assert_contains(text, &words);
    assert!(text.lines().count() >= 8, "{text}");
}

#[test]
fn finds_cuts_between_blocks_of_one_unit() {
    let world = World::single().unwrap();
    let vars = vars(&world);
    vars.freeze(|name| !nn::is_adapter(name)).unwrap();
    let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
        (0..2).map(|i| Block::new(Norms::CandleRms, false, vb.pp(i))).collect::<Result<Vec<_>>>()
    });
    let model = model.unwrap();
    let x = batch(0, WIDTH);
    let y = model.call(|blocks| blocks.iter().try_fold(x.clone(), |x, block| block.forward(&x)));
    model.backward(&mean_square(&y.unwrap())).unwrap();
    // Norms whose weights are all ones are indistinguishable, so the one before any graph is reported too.
    assert_eq!(norms(&model.graph_cuts()), ["(root): 0.0.norm or 0.1.norm or 1.0.norm or 1.1.norm"]);
    assert_eq!(model.graph_cuts()[0].before.len(), 6);
}
