//! Low-rank adapters: a frozen base and trainable adapters in one FSDP unit.

use std::sync::{Arc, Mutex};

use crate::common::{
    Gradients, Own, Parts, Plain, assert_close, batch, elements, mean, mean_square, ranks, refused, vars, weights,
};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Optimizer, VarBuilder};
use fsdp_candle::{AdamW, AdamWConfig, FsdpModule, FullyShard, ShardedVarMap, fully_shard, nn, no_grad};

const WIDTH: usize = 6;
const CONFIG: nn::LoraConfig = nn::LoraConfig { rank: 2, alpha: 3. };
const STEPS: usize = 4;
const LR: f64 = 0.02;

/// An adapted linear layer, a frozen one and an adapted `Gpt2Linear`.
struct Model {
    first: nn::Lora<nn::Linear>,
    second: nn::Linear,
    third: nn::Lora<nn::Gpt2Linear>,
}

impl Model {
    fn new(vb: VarBuilder) -> Result<Self> {
        let (first, third) = (vb.pp("first"), vb.pp("third"));
        Ok(Model {
            first: nn::lora(nn::linear(WIDTH, WIDTH, first.clone())?, WIDTH, WIDTH, CONFIG, first)?,
            second: nn::linear(WIDTH, WIDTH, vb.pp("second"))?,
            third: nn::lora(nn::gpt2_linear(WIDTH, 3, third.clone())?, WIDTH, 3, CONFIG, third)?,
        })
    }

    fn base(&self, x: &Tensor) -> Result<Tensor> {
        self.third.base().forward(&nn::gelu(&self.second.forward(&self.first.base().forward(x)?)?)?)
    }
}

impl Module for Model {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.third.forward(&nn::gelu(&self.second.forward(&self.first.forward(x)?)?)?)
    }
}

fn loss(y: &Tensor) -> Tensor {
    mean_square(&(y - 1.).unwrap())
}

/// The losses of some steps. Only adapters have gradients.
fn train<M: Module>(vars: &ShardedVarMap, model: &FsdpModule<M>, rank: usize) -> Vec<f32> {
    let config = AdamWConfig { lr: LR, weight_decay: 0.01, ..Default::default() };
    let mut optim = AdamW::new(vars.trainable(), config).unwrap();
    let losses = (0..STEPS).map(|_| {
        let loss = loss(&model.forward(&batch(rank, WIDTH)).unwrap());
        let grads = model.backward(&loss).unwrap();
        for param in vars.params() {
            assert_eq!(grads.get(param.var()).is_some(), nn::is_adapter(param.name()), "{}", param.name());
        }
        optim.step(&grads).unwrap();
        loss.to_scalar().unwrap()
    });
    losses.collect()
}

fn build(vars: &ShardedVarMap) -> FsdpModule<Model> {
    vars.freeze(|name| !nn::is_adapter(name)).unwrap();
    fully_shard(&FullyShard::new(vars), vars.builder(DType::F32), Model::new).unwrap()
}

/// The losses of rank 0 and the parameters of plain Candle after AdamW has trained the adapters, on the mean of
/// `replicas` batches.
fn train_plain(initial: &Gradients, replicas: usize) -> (Vec<f32>, Gradients) {
    let plain = Plain::new(initial, Model::new);
    let params = candle_nn::ParamsAdamW { lr: LR, weight_decay: 0.01, ..Default::default() };
    let mut optim = candle_nn::AdamW::new(plain.vars_of(nn::is_adapter), params).unwrap();
    let step = |_| {
        let of_rank = |rank| loss(&plain.model.forward(&batch(rank, WIDTH)).unwrap());
        let losses: Vec<Tensor> = (0..replicas).map(of_rank).collect();
        optim.backward_step(&mean(&losses)).unwrap();
        losses[0].to_scalar().unwrap()
    };
    let losses = (0..STEPS).map(step).collect();
    (losses, plain.values())
}

#[test]
fn adapters_train_as_in_plain_candle() {
    let runs = ranks(2, |world| {
        let vars = vars(&world);
        let model = build(&vars);
        let initial = weights(&vars);
        let losses = train(&vars, &model, world.rank());
        (initial, losses, weights(&vars))
    });
    let (initial, losses, trained) = &runs[0];
    let (plain_losses, plain) = train_plain(initial, 2);
    let named = |losses: &[f32]| vec![("losses".to_string(), losses.to_vec())];
    assert_close(&named(losses), &named(&plain_losses), 2e-4);
    assert!(plain_losses[STEPS - 1] < plain_losses[0]);
    assert_close(trained, &plain, 2e-4);
    for ((name, before), (_, after)) in initial.iter().zip(trained) {
        assert_eq!(before != after, nn::is_adapter(name), "{name}");
    }
}

#[test]
fn only_adapter_gradients_are_reduced() {
    ranks(2, |world| {
        let vars = vars(&world);
        let model = build(&vars);
        let seen: Arc<Mutex<Vec<usize>>> = Arc::default();
        let lengths = seen.clone();
        let watch = move |parts: Parts<'_>| {
            let Parts::Scatter(parts) = parts else { panic!("a reduce-scatter gathers") };
            lengths.lock().unwrap().extend(parts.iter().map(|part| part.input.len()));
            None
        };
        model.set_custom_reduce_scatter(Some(Own::new(watch)));
        model.backward(&loss(&model.forward(&batch(world.rank(), WIDTH)).unwrap())).unwrap();
        let adapters: Vec<usize> = vars.trainable().iter().map(|param| param.shape().elem_count()).collect();
        assert_eq!(adapters, [2 * WIDTH, 2 * WIDTH, 2 * WIDTH, 2 * 3]);
        assert_eq!(*seen.lock().unwrap(), adapters);
    });
}

#[test]
fn an_untrained_adapter_has_no_effect() {
    ranks(2, |world| {
        let vars = vars(&world);
        let model = build(&vars);
        let x = batch(world.rank(), WIDTH);
        let (adapted, base) = (model.forward(&x).unwrap(), model.call(|model| model.base(&x)).unwrap());
        assert_eq!(elements::<f32>(&adapted), elements::<f32>(&base));
    });
}

#[test]
fn an_adapter_without_rank_is_refused() {
    let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    for config in [nn::LoraConfig { rank: 0, alpha: 1. }, nn::LoraConfig { rank: 2, alpha: f64::NAN }] {
        let base = nn::linear(4, 4, vb.clone()).unwrap();
        refused(nn::lora(base, 4, 4, config, vb.pp("q_proj")), &["`q_proj`", "at least 1"]);
    }
}

#[test]
fn recognizes_adapter_names() {
    assert!(nn::is_adapter("model.layers.0.self_attn.q_proj.lora_A.weight") && nn::is_adapter("lora_B.weight"));
    assert!(!nn::is_adapter("q_proj.weight") && !nn::is_adapter("explora_A.weight") && !nn::is_adapter("lora_A.bias"));
}

/// The same layers without adapters.
struct Bare {
    first: nn::Linear,
    second: nn::Linear,
    third: nn::Gpt2Linear,
}

impl Bare {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Bare {
            first: nn::linear(WIDTH, WIDTH, vb.pp("first"))?,
            second: nn::linear(WIDTH, WIDTH, vb.pp("second"))?,
            third: nn::gpt2_linear(WIDTH, 3, vb.pp("third"))?,
        })
    }
}

impl Module for Bare {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.third.forward(&nn::gelu(&self.second.forward(&self.first.forward(x)?)?)?)
    }
}

#[test]
fn adapts_layers_by_name() {
    ranks(2, |world| {
        let explicit = vars(&world);
        let losses = train(&explicit, &build(&explicit), world.rank());
        for units in [&[][..], &["first", "third"]] {
            let vars = vars(&world);
            vars.freeze(|name| !nn::is_adapter(name)).unwrap();
            vars.adapt(CONFIG, |layer| ["first", "third"].contains(&layer)).unwrap();
            let opts = FullyShard::new(&vars);
            let model = match units.is_empty() {
                true => fully_shard(&opts, vars.builder(DType::F32), Bare::new).unwrap(),
                false => fsdp_candle::shard(&opts, units, vars.builder(DType::F32), Bare::new).unwrap(),
            };
            assert_eq!(vars.adapted(), ["first", "third"]);
            assert_eq!(train(&vars, &model, world.rank()), losses, "to the bit");
            for param in vars.params() {
                let same = explicit.get(param.name()).unwrap();
                assert_eq!(elements::<f32>(param.var()), elements::<f32>(same.var()), "{}", param.name());
            }
        }
        let none = vars(&world);
        none.adapt(CONFIG, |layer| layer == "First").unwrap();
        fully_shard(&FullyShard::new(&none), none.builder(DType::F32), Bare::new).unwrap();
        assert!(none.adapted().is_empty() && none.params().len() == 6);
    });
}

#[test]
fn the_loss_of_an_adapted_head_is_that_of_its_outputs() {
    ranks(2, |world| {
        let run = |of: fn(&nn::Linear, &Tensor, &Tensor) -> Result<Tensor>| {
            let vars = vars(&world);
            vars.freeze(|name| !nn::is_adapter(name)).unwrap();
            vars.adapt(CONFIG, |layer| layer == "head").unwrap();
            let build = |vb: VarBuilder| nn::linear(WIDTH, 5, vb.pp("head"));
            let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), build).unwrap();
            let up = vars.get("head.lora_B.weight").unwrap();
            up.var().set(&up.var().ones_like().unwrap()).unwrap();
            let hidden = batch(world.rank(), WIDTH);
            let targets = Tensor::from_iter((0..hidden.dims()[0] as u32).map(|row| row % 5), &Device::Cpu).unwrap();
            let loss = model.call(|head| of(head, &hidden, &targets)).unwrap();
            let grads = model.backward(&loss).unwrap();
            (elements::<f32>(&loss), elements::<f32>(grads.get(up.var()).unwrap()))
        };
        let found = run(|head, hidden, targets| head.cross_entropy(hidden, targets, &Default::default()));
        let expected = run(|head, hidden, targets| nn::cross_entropy(&head.forward(hidden)?, targets));
        assert_eq!(found, expected);
    });
}

#[test]
fn an_adapter_that_can_not_be_made_fails_the_model_by_name() {
    ranks(1, |world| {
        let vars = vars(&world);
        vars.adapt(nn::LoraConfig { rank: 0, alpha: 1. }, |layer| layer == "third").unwrap();
        let built = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), Bare::new);
        refused(built, &["`third`", "at least 1"]);
    });
}

#[test]
fn forwards_without_adapters_are_the_base() {
    ranks(2, |world| {
        let vars = vars(&world);
        let model = build(&vars);
        let x = batch(world.rank(), WIDTH);
        let values = |y: Result<Tensor>| y.unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let tuned = || values(no_grad(|| model.forward(&x)));
        // New adapters add nothing.
        let first = tuned();
        train(&vars, &model, world.rank());
        let after = tuned();
        assert_ne!(after, first);
        let base = nn::without_adapters(|| model.forward(&x)).unwrap();
        assert!(!base.track_op());
        assert_eq!(values(Ok(base)), first);
        assert_eq!(tuned(), after);
    });
}
