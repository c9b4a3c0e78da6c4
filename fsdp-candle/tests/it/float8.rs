//! Layers that compute in 8-bit floats train over ranks as on one.

use std::sync::Arc;

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::activation_checkpoint::checkpoint;
use fsdp_candle::{
    AdamW, AdamWConfig, ColwiseParallel, DataParallelMeshDims, Float8, Float8Recipe, FsdpModule, FullyShard,
    MixedPrecisionPolicy, ParallelPlan, RowwiseParallel, ShardedVarMap, World, fully_shard, get_model_state_dict,
    model_tensors, nn, parallelize,
};

use crate::common::{Gradients, dict_elements, full, input, ranks, refused, vars};

const WIDTH: usize = 32;
const HIDDEN: usize = 64;
const STEPS: usize = 4;
const RECIPES: [Float8Recipe; 3] = [Float8Recipe::Tensorwise, Float8Recipe::Rowwise, Float8Recipe::RowwiseWithGwHp];

struct Model {
    mlp: nn::SwiGlu,
    mix: nn::Gpt2Linear,
    head: nn::Linear,
    recomputes: bool,
}

impl Model {
    fn new(vb: VarBuilder, recomputes: bool) -> Result<Self> {
        let linear = |name, inputs, outputs| nn::linear_no_bias(inputs, outputs, vb.pp(name));
        let [gate, up] = [linear("gate", WIDTH, HIDDEN)?, linear("up", WIDTH, HIDDEN)?];
        Ok(Model {
            mlp: nn::SwiGlu::new(gate, up, linear("down", HIDDEN, WIDTH)?),
            mix: nn::gpt2_linear(WIDTH, WIDTH, vb.pp("mix"))?,
            head: nn::linear(WIDTH, 10, vb.pp("head"))?,
            recomputes,
        })
    }
}

impl Module for Model {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (mlp, mix) = (self.mlp.clone(), self.mix.clone());
        let body = move |x: Tensor| nn::gelu(&mix.forward(&(&x + mlp.forward(&x)?)?)?);
        self.head.forward(&if self.recomputes { checkpoint(body, x.clone())? } else { body(x.clone())? })
    }
}

/// A way to train the model.
#[derive(Clone, Copy)]
struct Way {
    recipe: Option<Float8Recipe>,
    dtype: DType,
    recomputes: bool,
    gathers_float8: bool,
    has_adapters: bool,
}

const PLAIN: Way =
    Way { recipe: None, dtype: DType::F32, recomputes: false, gathers_float8: false, has_adapters: false };

fn build(vars: &ShardedVarMap, way: Way) -> FsdpModule<Model> {
    if let Some(recipe) = way.recipe {
        vars.convert_to_float8_training(recipe, |layer| layer != "head").unwrap();
    }
    if way.has_adapters {
        vars.freeze(|name| !nn::is_adapter(name)).unwrap();
        vars.adapt(nn::LoraConfig { rank: 2, alpha: 4. }, |layer| layer != "head").unwrap();
    }
    let policy = MixedPrecisionPolicy {
        param_dtype: Some(way.dtype),
        reduce_dtype: Some(DType::F32),
        ..MixedPrecisionPolicy::default()
    };
    let gathered = move |name: &str| way.gathers_float8 && name.ends_with("weight");
    let opts = FullyShard::new(vars)
        .mp_policy(policy)
        .all_gather_extension(move |name| gathered(name).then(|| Arc::new(Float8) as _));
    let model = fully_shard(&opts, vars.builder(DType::F32), |vb| Model::new(vb, way.recomputes)).unwrap();
    let layers: &[&str] = if way.recipe.is_some() { &["gate", "up", "down", "mix"] } else { &[] };
    assert_eq!(vars.float8_layers(), layers);
    model
}

/// Trains on the same batch on all ranks. Returns the losses, and the final parameters of rank 0.
fn train(vars: &ShardedVarMap, model: &FsdpModule<Model>) -> (Vec<f32>, Gradients) {
    let mut optim = AdamW::new(vars.trainable(), AdamWConfig { lr: 1e-3, ..Default::default() }).unwrap();
    let losses = (0..STEPS).map(|step| {
        let y = model.forward(&(input(step, &[6, WIDTH]) * 4.).unwrap()).unwrap();
        let loss = (y.to_dtype(DType::F32).unwrap() - 0.5).unwrap().sqr().unwrap().mean_all().unwrap();
        optim.step(&model.backward(&loss).unwrap()).unwrap();
        loss.to_scalar().unwrap()
    });
    let losses = losses.collect();
    let state = get_model_state_dict(vars, &full()).unwrap();
    (losses, dict_elements(&state))
}

/// Returns what rank 0 finds.
fn trained(size: usize, way: Way) -> (Vec<f32>, Gradients) {
    let run = |world: World| {
        let vars = vars(&world);
        train(&vars, &build(&vars, way))
    };
    ranks(size, run).remove(0)
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs() / b.abs().max(1e-3)).fold(0., f32::max)
}

#[test]
fn ranks_with_one_batch_have_the_bits_of_one_rank() {
    for recipe in RECIPES {
        for (dtype, has_adapters) in
            [(DType::F32, false), (DType::BF16, false), (DType::F16, false), (DType::F32, true)]
        {
            let way = Way { recipe: Some(recipe), dtype, has_adapters, ..PLAIN };
            let one = trained(1, way);
            // The mean over two or four equal gradients is exact.
            for size in [2, 4] {
                assert_eq!(trained(size, way), one, "{recipe:?} {dtype:?} {size} ranks");
            }
            assert_eq!(trained(2, Way { recomputes: true, ..way }), one, "{recipe:?} {dtype:?}: recomputed");
            let full = trained(1, Way { recipe: None, ..way });
            let from_full = distance(&one.0, &full.0);
            assert!(from_full > 1e-5 && from_full < 3e-2, "{recipe:?} {dtype:?}: {from_full} from {dtype:?}");
        }
    }
}

/// Ranks hold other shards, so that gathered weights have other scales.
#[test]
fn gathers_of_8_bits_compose_with_products_of_8_bits() {
    for recipe in RECIPES {
        let way = Way { recipe: Some(recipe), ..PLAIN };
        let (losses, _) = trained(3, Way { gathers_float8: true, ..way });
        let (without, _) = trained(1, way);
        let distance = distance(&losses, &without);
        assert!(distance > 1e-6 && distance < 3e-2, "{recipe:?}: {distance}");
    }
}

#[test]
fn parts_of_layers_compute_in_8_bits_too() {
    let plan = || {
        let plan = ParallelPlan::new();
        let plan = ["gate", "up"].into_iter().fold(plan, |plan, name| plan.module(name, ColwiseParallel::default()));
        plan.module("down", RowwiseParallel::default())
    };
    for recipe in RECIPES {
        let found = ranks(2, |world| {
            let mesh = world.mesh(&[("dp_shard", 1), ("tp", 2)]).unwrap();
            let dims = DataParallelMeshDims { shard: &["dp_shard"], replicate: &[] };
            let vars = ShardedVarMap::with_dp_mesh_dims(&mesh, &dims, world.device()).unwrap();
            parallelize(&vars, &vars.mesh().slice(&["tp"]).unwrap(), &plan()).unwrap();
            train(&vars, &build(&vars, Way { recipe: Some(recipe), ..PLAIN })).0
        });
        let (one, _) = trained(1, Way { recipe: Some(recipe), ..PLAIN });
        assert!(distance(&found[0], &one) < 3e-2, "{recipe:?}: {:?} and {one:?}", found[0]);
        assert_eq!(found[0], found[1]);
    }
}

#[test]
fn bad_uses_are_refused() {
    ranks(2, |world| {
        let late = vars(&world);
        build(&late, PLAIN);
        let refusal = late.convert_to_float8_training(Float8Recipe::Rowwise, |_| true);
        refused(refusal, &["convert_to_float8_training", "before the model is built"]);

        let all = vars(&world);
        all.convert_to_float8_training(Float8Recipe::Tensorwise, |_| true).unwrap();
        let opts = FullyShard::new(&all);
        let model = fully_shard(&opts, all.builder(DType::F32), |vb| Model::new(vb, false)).unwrap();
        refused(model.forward(&input(0, &[2, WIDTH])), &["`head.weight`", "[10, 32]", "multiples of 16"]);
        assert_eq!(model_tensors(&all).unwrap().len(), 7);
    });
}
