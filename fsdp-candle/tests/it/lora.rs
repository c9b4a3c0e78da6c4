//! Low-rank adapters: a frozen base and trainable adapters in one FSDP unit.

use std::sync::{Arc, Mutex};

use crate::common::{Own, Parts, batch, ranks, refused, vars};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use fsdp_candle::{AdamW, AdamWConfig, FsdpModule, FullyShard, ShardedVarMap, fully_shard, nn};

const WIDTH: usize = 6;
const CONFIG: nn::LoraConfig = nn::LoraConfig { rank: 2, alpha: 3. };
const STEPS: usize = 4;
const LR: f64 = 0.02;

/// An adapted linear layer, a frozen one and an adapted `Conv1D`.
struct Model {
    first: nn::Lora<nn::Linear>,
    second: nn::Linear,
    third: nn::Lora<nn::Conv1D>,
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
    (y - 1.).unwrap().sqr().unwrap().mean_all().unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn build(vars: &ShardedVarMap) -> FsdpModule<Model> {
    vars.freeze(|name| !nn::is_adapter(name));
    fully_shard(&FullyShard::new(vars), vars.builder(DType::F32), Model::new).unwrap()
}

/// Name, shape and values of every parameter as a world of one draws it: the same as in any other.
fn initial() -> Vec<(String, Vec<usize>, Vec<f32>)> {
    ranks(1, |world| {
        let vars = vars(&world);
        let _model = build(&vars);
        vars.params().iter().map(|p| (p.name().to_string(), p.shape().dims().to_vec(), values(p.var()))).collect()
    })
    .swap_remove(0)
}

/// The losses of rank 0 and the trained adapters of plain Candle with the same AdamW, on the mean of `replicas`
/// batches.
fn train_plain(replicas: usize) -> (Vec<f32>, Vec<(String, Vec<f32>)>) {
    let map = VarMap::new();
    let model = Model::new(VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu)).unwrap();
    let data = map.data().lock().unwrap();
    for (name, shape, values) in initial() {
        data[&name].set(&Tensor::from_vec(values, shape, &Device::Cpu).unwrap()).unwrap();
    }
    let mut names: Vec<&String> = data.keys().filter(|name| nn::is_adapter(name)).collect();
    names.sort();
    let adapters = names.iter().map(|name| data[*name].clone()).collect();
    let params = candle_nn::ParamsAdamW { lr: LR, weight_decay: 0.01, ..Default::default() };
    let mut optim = candle_nn::AdamW::new(adapters, params).unwrap();
    let losses = (0..STEPS)
        .map(|_| {
            let losses: Vec<Tensor> =
                (0..replicas).map(|rank| loss(&model.forward(&batch(rank, WIDTH)).unwrap())).collect();
            let mean = (Tensor::stack(&losses, 0).unwrap().sum_all().unwrap() / replicas as f64).unwrap();
            optim.backward_step(&mean).unwrap();
            losses[0].to_scalar().unwrap()
        })
        .collect();
    (losses, names.into_iter().map(|name| (name.clone(), values(&data[name]))).collect())
}

fn close(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (a, b) in a.iter().zip(b) {
        assert!((a - b).abs() <= 2e-4 * b.abs().max(0.1), "{what}: {a} and {b}");
    }
}

#[test]
fn adapters_train_as_in_plain_candle() {
    let (plain_losses, plain_adapters) = train_plain(2);
    let initial = initial();
    let runs = ranks(2, |world| {
        let vars = vars(&world);
        let model = build(&vars);
        let config = AdamWConfig { lr: LR, weight_decay: 0.01, ..Default::default() };
        let mut optim = AdamW::new(vars.trainable(), config).unwrap();
        let losses: Vec<f32> = (0..STEPS)
            .map(|_| {
                let loss = loss(&model.forward(&batch(world.rank(), WIDTH)).unwrap());
                let grads = model.backward(&loss).unwrap();
                for param in vars.params() {
                    assert_eq!(grads.get(param.var()).is_some(), nn::is_adapter(param.name()), "{}", param.name());
                }
                optim.step(&grads).unwrap();
                loss.to_scalar().unwrap()
            })
            .collect();
        let shards: Vec<(String, Vec<f32>)> =
            vars.params().iter().map(|p| (p.name().to_string(), values(p.var()))).collect();
        (losses, shards)
    });
    close(&runs[0].0, &plain_losses, "losses");
    assert!(plain_losses[STEPS - 1] < plain_losses[0]);
    for (name, _, before) in initial {
        // Shards of dimension 0, so the ranks' values in order are the full tensor.
        let after: Vec<f32> =
            runs.iter().flat_map(|run| run.1.iter().find(|(other, _)| *other == name).unwrap().1.clone()).collect();
        match plain_adapters.iter().find(|(other, _)| *other == name) {
            Some((_, plain)) => close(&after, plain, &name),
            None => assert_eq!(after, before, "{name} is frozen"),
        }
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
        model.set_custom_reduce_scatter(Some(Arc::new(Own(watch))));
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
        assert_eq!(values(&adapted), values(&base));
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
struct Plain {
    first: nn::Linear,
    second: nn::Linear,
    third: nn::Conv1D,
}

impl Plain {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Plain {
            first: nn::linear(WIDTH, WIDTH, vb.pp("first"))?,
            second: nn::linear(WIDTH, WIDTH, vb.pp("second"))?,
            third: nn::gpt2_linear(WIDTH, 3, vb.pp("third"))?,
        })
    }
}

impl Module for Plain {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.third.forward(&nn::gelu(&self.second.forward(&self.first.forward(x)?)?)?)
    }
}

#[test]
fn adapts_layers_by_name() {
    fn train<M: Module>(vars: &ShardedVarMap, model: &FsdpModule<M>, rank: usize) -> Vec<f32> {
        let mut optim = AdamW::new(vars.trainable(), AdamWConfig { lr: LR, ..Default::default() }).unwrap();
        let losses = (0..STEPS).map(|_| {
            let loss = loss(&model.forward(&batch(rank, WIDTH)).unwrap());
            optim.step(&model.backward(&loss).unwrap()).unwrap();
            loss.to_scalar().unwrap()
        });
        losses.collect()
    }
    ranks(2, |world| {
        let explicit = vars(&world);
        let losses = train(&explicit, &build(&explicit), world.rank());
        for units in [vec![], vec!["first", "third"]] {
            let vars = vars(&world);
            vars.freeze(|name| !nn::is_adapter(name));
            vars.adapt(CONFIG, |layer| ["first", "third"].contains(&layer));
            let opts = FullyShard::new(&vars);
            let model = match units.is_empty() {
                true => fully_shard(&opts, vars.builder(DType::F32), Plain::new).unwrap(),
                false => fsdp_candle::shard(&opts.units(units), vars.builder(DType::F32), Plain::new).unwrap(),
            };
            assert_eq!(vars.adapted(), ["first", "third"]);
            assert_eq!(train(&vars, &model, world.rank()), losses, "to the bit");
            for param in vars.params() {
                let same = explicit.get(param.name()).unwrap();
                assert_eq!(values(param.var()), values(same.var()), "{}", param.name());
            }
        }
        let none = vars(&world);
        none.adapt(CONFIG, |layer| layer == "First");
        fully_shard(&FullyShard::new(&none), none.builder(DType::F32), Plain::new).unwrap();
        assert!(none.adapted().is_empty() && none.params().len() == 6);
    });
}

#[test]
fn an_adapter_that_can_not_be_made_fails_the_model_by_name() {
    ranks(1, |world| {
        let vars = vars(&world);
        vars.adapt(nn::LoraConfig { rank: 0, alpha: 1. }, |layer| layer == "third");
        let built = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), Plain::new);
        refused(built, &["`third`", "at least 1"]);
    });
}
