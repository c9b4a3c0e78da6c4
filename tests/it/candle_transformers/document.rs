//! The code and the diffs of `docs/from-candle.md`.

use std::path::Path;

use anyhow::Context;
use candle_core::{DType, Device, IndexOp, Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::{
    AdamW, FsdpModule, FullyShard, GradcheckOptions, ShardedVarMap, UnitGradient, World, fully_shard, gradcheck, nn,
    shard,
};
use fsdp_core::process_group::local;
use fsdp_test_support::{code_blocks, read_text, without_layout, workspace};
use fsdp_tests_candle_transformers::diff;
use fsdp_tests_candle_transformers::models::{mistral, qwen2};

use super::data::VOCABULARY;
use super::file;

const DOCUMENT: &str = "docs/from-candle.md";

/// The files after the document's diffs.
mod my_models {
    pub(super) use fsdp_tests_candle_transformers::documented::llama;
}

struct Qwen2 {
    base: qwen2::Model,
    head: nn::Linear,
}

impl Qwen2 {
    fn new(config: &qwen2::Config, vb: VarBuilder) -> Result<Self> {
        let head = nn::linear_no_bias(config.hidden_size, config.vocab_size, vb.pp("lm_head"))?;
        Ok(Qwen2 { base: qwen2::Model::new(config, vb)?, head })
    }

    fn forward(&mut self, ids: &Tensor) -> Result<Tensor> {
        self.base.clear_kv_cache();
        self.head.forward(&self.base.forward(ids, 0, None)?)
    }
}

use my_models::llama::{Cache, Config, Llama}; // the file, with its two lines

fn train(config: &Config, data: Vec<Tensor>) -> anyhow::Result<Vec<f32>> {
    let world = fsdp_candle::init()?;
    let vars = ShardedVarMap::of_world(&world)?;
    let opts = FullyShard::new(&vars);
    let model = shard(&opts, &["model.layers.*"], vars.builder(DType::F32), |vb| Llama::load(vb, config))?;

    let mut optim = AdamW::new_lr(vars.trainable(), 1e-3)?;
    let mut losses = vec![];
    for ids in data {
        let time = ids.dim(1)? - 1; // of [batch, time + 1]
        let mut cache = Cache::new(false, DType::F32, config, world.device())?;
        let logits = model.call(|m| m.forward(&ids.narrow(1, 0, time)?, 0, &mut cache))?;
        let loss = nn::cross_entropy(&logits, &ids.narrow(1, 1, time)?)?;
        optim.backward_step(&loss)?;
        losses.push(world.mean(&loss)?);
    }
    Ok(losses)
}

fn epoch(model: &FsdpModule<nn::Linear>, optim: &mut AdamW, (x, y): (&Tensor, &Tensor), world: &World) -> Result<f32> {
    let (rows, batch, mut last) = (x.dim(0)?, 32, 0.);
    for own in world.batches(rows, batch)? {
        let (x, y) = (x.i(own.clone())?, y.i(own)?);
        let loss = nn::loss::mse(&model.forward(&x)?, &y)?;
        optim.backward_step(&loss)?;
        last = world.mean(&loss)?;
    }
    Ok(last)
}

fn edit(vars: &ShardedVarMap, file: &Path) -> anyhow::Result<Tensor> {
    vars.load(file)?; // every rank calls all of these
    let head = vars.get("head.weight").context("the model has no head")?;
    head.set_full(&head.dtensor()?.full_tensor()?.zeros_like()?)?; // `set_one`, with the whole tensor
    vars.save(file)?;
    Ok(head.dtensor()?.full_tensor()?) // of `data`, the whole tensor
}

fn check(model: &FsdpModule<mistral::Model>, ids: &Tensor, next: &Tensor) -> fsdp_candle::Result<Vec<UnitGradient>> {
    gradcheck(model, &GradcheckOptions::default(), |model| {
        let logits = model.clone().call_mut(|m| {
            m.clear_kv_cache();
            m.forward(ids, 0)
        })?;
        nn::cross_entropy(&logits.squeeze(1)?, next)
    })
}

fn forward(model: &mut FsdpModule<mistral::Model>, ids: &Tensor) -> Result<Tensor> {
    model.call_mut(|m| {
        m.clear_kv_cache();
        m.forward(ids, 0)
    })
}

struct Gan {
    generator: FsdpModule<nn::Linear>,
    critic: FsdpModule<nn::Linear>,
    optimizers: [AdamW; 2],
}

impl Gan {
    fn new(vars: &ShardedVarMap) -> fsdp_candle::Result<Self> {
        let (opts, vb) = (FullyShard::new(vars), vars.builder(DType::F32));
        let generator = fully_shard(&opts, vb.pp("generator"), |vb| nn::linear(8, 16, vb))?;
        let critic = fully_shard(&opts, vb.pp("critic"), |vb| nn::linear(16, 1, vb))?;
        let optimizer = |model: &FsdpModule<nn::Linear>| AdamW::new_lr(model.trainable(), 1e-3);
        Ok(Gan { optimizers: [optimizer(&generator)?, optimizer(&critic)?], generator, critic })
    }

    fn step(&mut self, real: &Tensor, noise: &Tensor) -> fsdp_candle::Result<()> {
        let [of_generator, of_critic] = &mut self.optimizers;
        let fake = self.generator.forward(noise)?;
        let loss = (self.critic.forward(&fake.detach())?.mean_all()? - self.critic.forward(real)?.mean_all()?)?;
        of_critic.backward_step(&loss)?;
        let loss = self.critic.forward(&fake)?.mean_all()?.neg()?;
        of_generator.backward_step(&loss)?;
        Ok(())
    }
}

struct WeightNormed {
    gain: Tensor,
    direction: Tensor,
}

impl WeightNormed {
    fn new(inputs: usize, outputs: usize, vb: VarBuilder) -> Result<Self> {
        let (gain, direction) = (vb.get((outputs, 1), "weight_g")?, vb.get((outputs, inputs), "weight_v")?);
        Ok(WeightNormed { gain, direction })
    }
}

impl Module for WeightNormed {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let norm = self.direction.sqr()?.sum_keepdim(1)?.sqrt()?;
        let weight = self.direction.broadcast_mul(&self.gain)?.broadcast_div(&norm)?;
        x.matmul(&weight.t()?)
    }
}

#[test]
fn weights_computed_in_forward_are_trained() {
    let (vars, model) = on_one_rank(|vb| WeightNormed::new(3, 2, vb.pp("model.layers.0")));
    let x = Tensor::new(&[[1f32, 2., -1.], [0.5, 0., 3.]], &Device::Cpu).unwrap();
    for param in vars.params() {
        let values = (0..param.shape().elem_count()).map(|i| (i + 1) as f32);
        let values = Tensor::from_iter(values, &Device::Cpu).unwrap();
        param.var().set(&values.reshape(param.shape()).unwrap()).unwrap();
    }
    let loss = |model: &FsdpModule<WeightNormed>| model.forward(&x)?.sqr()?.mean_all();
    gradcheck(&model, &GradcheckOptions::default(), loss).unwrap();
    let grads = model.backward(&loss(&model).unwrap()).unwrap();
    assert!(vars.params().len() == 2 && vars.params().iter().all(|param| grads.get(param.var()).is_some()));
}

#[test]
fn the_gan_trains_both_models() {
    let world = World::single().unwrap();
    let vars = ShardedVarMap::of_world(&world).unwrap();
    let mut gan = Gan::new(&vars).unwrap();
    let values = || {
        let values = |model: &FsdpModule<nn::Linear>| model.params()[0].var().flatten_all().unwrap().to_vec1().unwrap();
        [values(&gan.generator), values(&gan.critic)]
    };
    let before: [Vec<f32>; 2] = values();
    let ones = |width: usize| Tensor::ones((4, width), DType::F32, world.device()).unwrap();
    gan.step(&ones(16), &ones(8)).unwrap();
    let after = [&gan.generator, &gan.critic].map(|model| model.params()[0].var().flatten_all().unwrap());
    for (before, after) in before.iter().zip(after) {
        assert_ne!(before, &after.to_vec1::<f32>().unwrap());
    }
}

#[test]
fn an_epoch_takes_each_ranks_rows() {
    for size in 1..=3 {
        local::run(size, |group| {
            let world = World::of(group);
            let vars = ShardedVarMap::of_world(&world).unwrap();
            let vb = vars.builder(DType::F32);
            let model = fully_shard(&FullyShard::new(&vars), vb, |vb| nn::linear(3, 1, vb)).unwrap();
            let mut optim = AdamW::new_lr(vars.trainable(), 0.02).unwrap();
            let ones = |width| Tensor::ones((67, width), DType::F32, &Device::Cpu).unwrap();
            let losses: Vec<f32> =
                (0..20).map(|_| epoch(&model, &mut optim, (&ones(3), &ones(1)), &world).unwrap()).collect();
            assert!(losses[19] < losses[0], "{losses:?}");
        });
    }
}

#[test]
fn a_map_is_edited_as_a_var_map() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("model.safetensors");
    let build = |vb: VarBuilder<'static>| nn::linear(4, 3, vb.pp("head"));
    local::run(2, |group| {
        let vars = ShardedVarMap::of_world(&World::of(group)).unwrap();
        let _model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), build).unwrap();
        vars.save(&file).unwrap();
        let head = edit(&vars, &file).unwrap();
        assert_eq!(head.to_vec2::<f32>().unwrap(), [[0.; 4]; 3]);
    });
    let saved = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    assert_eq!(saved["head.weight"].to_vec2::<f32>().unwrap(), [[0.; 4]; 3]);
    assert_eq!(saved.len(), 2);
}

#[test]
fn documented_code_is_this_code() {
    let source = without_layout(include_str!("document.rs"));
    let blocks = code_blocks(DOCUMENT, "rust");
    assert_eq!(blocks.len(), 8);
    for block in blocks {
        assert!(source.contains(&without_layout(&block)), "not in this file:\n{block}");
    }
}

/// The first diff adds the line that every file needs.
#[test]
fn documented_diffs_apply() {
    let llama = file("models/llama.rs");
    let diffs = diff::of_document(&read_text(&workspace().join(DOCUMENT)));
    assert_eq!(diffs.len(), 2);
    assert!(diffs.iter().all(|diff| diff.file == format!("candle-transformers/src/{}", llama.name)));
    assert_eq!(diffs[0].apply(llama.original).unwrap(), llama.changed);
    let second = diffs[1].apply(llama.changed).unwrap();
    assert_eq!(second.lines().count(), llama.original.lines().count());
    // A diff that matches no place or two places is an error.
    let twice = format!("{0}{0}", llama.original);
    for (text, diff) in [(second.as_str(), &diffs[1]), (twice.as_str(), &diffs[0])] {
        assert!(diff.apply(text).unwrap_err().contains("do not stand in one place"));
    }
}

fn decoder<T: FromJson>() -> T {
    T::from_json(
        r#"{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "rms_norm_eps": 1e-5,
            "rope_theta": 1e4, "hidden_act": "silu", "sliding_window": 16, "max_window_layers": 3,
            "tie_word_embeddings": false, "use_sliding_window": false}"#,
    )
}

/// The configurations of the files.
trait FromJson {
    fn from_json(text: &str) -> Self;
}

macro_rules! from_json {
    ($($config:ty),*) => {
        $(impl FromJson for $config {
            fn from_json(text: &str) -> Self {
                serde_json::from_str(text).unwrap()
            }
        })*
    };
}

from_json!(my_models::llama::LlamaConfig, mistral::Config, qwen2::Config);

fn ids(time: usize) -> Tensor {
    let id = |i: usize| ((i * i * 7 + i * 3) % VOCABULARY) as u32;
    Tensor::from_iter((0..2 * time).map(id), &Device::Cpu).unwrap().reshape((2, time)).unwrap()
}

#[test]
fn the_documented_program_trains() {
    let config = decoder::<my_models::llama::LlamaConfig>().into_config(false);
    let losses = train(&config, vec![ids(7); 20]).unwrap();
    assert!(losses[19] < losses[0], "{losses:?}");
}

fn on_one_rank<M>(build: impl FnOnce(VarBuilder<'static>) -> Result<M>) -> (ShardedVarMap, FsdpModule<M>) {
    let world = World::single().unwrap();
    let vars = ShardedVarMap::of_world(&world).unwrap();
    let opts = FullyShard::new(&vars);
    let model = shard(&opts, &["model.layers.*"], vars.builder(DType::F32), build).unwrap();
    (vars, model)
}

#[test]
fn an_own_head_sees_all_positions() {
    let (vars, mut model) = on_one_rank(|vb| Qwen2::new(&decoder(), vb));
    for _ in 0..2 {
        let logits = model.call_mut(|m| m.forward(&ids(7))).unwrap();
        assert_eq!(logits.dims(), [2, 7, VOCABULARY]);
        model.backward(&nn::cross_entropy(&logits, &ids(7)).unwrap()).unwrap();
    }
    assert!(model.parameters_without_gradient().is_empty());
    assert!(vars.get("lm_head.weight").is_some() && model.units().len() == 4);
}

#[test]
fn a_cleared_cache_separates_steps() {
    let (_vars, mut model) = on_one_rank(|vb| mistral::Model::new(&decoder(), vb));
    let logits = |model: &mut FsdpModule<mistral::Model>| {
        forward(model, &ids(7)).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    assert_eq!(logits(&mut model), logits(&mut model));
    // With the cache, the shapes of the second step's mask and keys differ.
    assert!(model.call_mut(|m| m.forward(&ids(7), 0)).is_err());
    let checked = check(&model, &ids(7), &ids(1).flatten_all().unwrap()).unwrap();
    assert_eq!(checked.len(), 4);
}
