//! A small decoder without FSDP, the same decoder with wrapped layers, and records of collectives and memory.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fsdp_candle::activation_checkpoint::checkpoint;
use fsdp_candle::{FsdpModule, FullyShard, ShardedVarMap, World, fully_shard, nn, shard};
use tracing::Metadata;

use crate::common::{Draws, Gradients, device, gradients, sorted, vars};

pub(crate) const WIDTH: usize = 6;
pub(crate) const LAYERS: usize = 4;
const VOCABULARY: usize = 11;
const TIME: usize = 5;

/// The variants of the model.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Kind {
    /// Adapters on a frozen base.
    pub(crate) lora: bool,
    /// Each layer's output is multiplied by a parameter.
    pub(crate) scale: bool,
    /// Each layer is checkpointed.
    pub(crate) again: bool,
    /// Candle's own norms, without backward.
    pub(crate) candle_norms: bool,
    /// The head and the embedding share a weight.
    pub(crate) tied: bool,
}

pub(crate) enum Projection {
    Plain(nn::Linear),
    Adapted(nn::Lora<nn::Linear>),
}

impl Projection {
    fn new(inputs: usize, outputs: usize, kind: Kind, vb: VarBuilder) -> Result<Self> {
        let base = nn::linear(inputs, outputs, vb.clone())?;
        let config = nn::LoraConfig { rank: 2, alpha: 4. };
        Ok(match kind.lora {
            true => Projection::Adapted(nn::lora(base, inputs, outputs, config, vb)?),
            false => Projection::Plain(base),
        })
    }
}

impl Module for Projection {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Projection::Plain(linear) => linear.forward(x),
            Projection::Adapted(lora) => lora.forward(x),
        }
    }
}

enum Norm {
    Ours(nn::RmsNorm),
    Candles(candle_nn::RmsNorm),
}

impl Norm {
    fn new(kind: Kind, vb: VarBuilder) -> Result<Self> {
        Ok(match kind.candle_norms {
            true => Norm::Candles(candle_nn::rms_norm(WIDTH, 1e-5, vb)?),
            false => Norm::Ours(nn::rms_norm(WIDTH, 1e-5, vb)?),
        })
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Norm::Ours(norm) => norm.forward(x),
            Norm::Candles(norm) => norm.forward(x),
        }
    }
}

pub(crate) struct Mlp {
    gate: nn::Linear,
    up: nn::Linear,
    down: Projection,
}

impl Mlp {
    pub(crate) fn new(kind: Kind, vb: VarBuilder) -> Result<Self> {
        Ok(Mlp {
            gate: nn::linear_no_bias(WIDTH, 2 * WIDTH, vb.pp("gate"))?,
            up: nn::linear_no_bias(WIDTH, 2 * WIDTH, vb.pp("up"))?,
            down: Projection::new(2 * WIDTH, WIDTH, kind, vb.pp("down"))?,
        })
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&nn::silu_mul(&self.gate.forward(x)?, &self.up.forward(x)?)?)
    }
}

struct Inner<M> {
    norm: Norm,
    qkv: [Projection; 3],
    out: nn::Linear,
    mlp_norm: Norm,
    mlp: M,
    scale: Option<Tensor>,
}

impl<M: Module> Module for Inner<M> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let normed = self.norm.forward(x)?;
        let [q, k, v] = &self.qkv;
        let (q, k, v) = (q.forward(&normed)?, k.forward(&normed)?, v.forward(&normed)?);
        let x = (x + self.out.forward(&nn::causal_attention(&q, &k, &v, 2, 2, 0.5)?)?)?;
        let y = (&x + self.mlp.forward(&self.mlp_norm.forward(&x)?)?)?;
        match &self.scale {
            Some(scale) => y.broadcast_mul(scale),
            None => Ok(y),
        }
    }
}

/// A layer with any kind of MLP.
pub(crate) struct Layer<M> {
    inner: Arc<Inner<M>>,
    again: bool,
}

impl<M> Layer<M> {
    pub(crate) fn new(kind: Kind, mlp: impl FnOnce(VarBuilder) -> Result<M>, vb: VarBuilder) -> Result<Self> {
        let projection = |name| Projection::new(WIDTH, WIDTH, kind, vb.pp(name));
        let inner = Inner {
            qkv: [projection("q")?, projection("k")?, projection("v")?],
            out: nn::linear(WIDTH, WIDTH, vb.pp("out"))?,
            mlp: mlp(vb.pp("mlp"))?,
            norm: Norm::new(kind, vb.pp("norm"))?,
            mlp_norm: Norm::new(kind, vb.pp("mlp_norm"))?,
            scale: kind.scale.then(|| vb.get_with_hints(WIDTH, "scale", Init::Const(0.9))).transpose()?,
        };
        Ok(Layer { inner: Arc::new(inner), again: kind.again })
    }
}

impl<M: Module + Send + Sync + 'static> Module for Layer<M> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.again {
            true => {
                let inner = self.inner.clone();
                checkpoint(move |x: Tensor| inner.forward(&x), x.clone())
            }
            false => self.inner.forward(x),
        }
    }
}

/// The model with any kind of layer.
pub(crate) struct Model<L> {
    embed: nn::Embedding,
    pub(crate) layers: Vec<L>,
    norm: Norm,
    head: nn::Linear,
}

impl<L> Model<L> {
    pub(crate) fn new(kind: Kind, layers: Vec<L>, vb: VarBuilder) -> Result<Self> {
        let embed = nn::embedding(VOCABULARY, WIDTH, vb.pp("model.embed"))?;
        let head = match kind.tied {
            true => nn::Linear::new(embed.embeddings().clone(), None),
            false => nn::linear_no_bias(WIDTH, VOCABULARY, vb.pp("head"))?,
        };
        Ok(Model { embed, layers, norm: Norm::new(kind, vb.pp("model.norm"))?, head })
    }
}

impl<L: Module> Module for Model<L> {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let x = self.layers.iter().try_fold(self.embed.forward(ids)?, |x, layer| layer.forward(&x))?;
        self.head.forward(&self.norm.forward(&x)?)
    }
}

pub(crate) type Untouched = Model<Layer<Mlp>>;

/// The model of a program without FSDP.
pub(crate) fn untouched(kind: Kind, vb: VarBuilder) -> Result<Untouched> {
    let layer = |i| Layer::new(kind, |vb| Mlp::new(kind, vb), vb.pp(format!("model.layers.{i}")));
    let layers = (0..LAYERS).map(layer).collect::<Result<_>>()?;
    Model::new(kind, layers, vb)
}

/// With units by name.
pub(crate) fn by_name(opts: &FullyShard, vars: &ShardedVarMap, kind: Kind, names: &[&str]) -> FsdpModule<Untouched> {
    shard(opts, names, vars.builder(DType::F32), |vb| untouched(kind, vb)).unwrap()
}

/// With a unit for each layer.
pub(crate) fn wrapped(
    opts: &FullyShard,
    vars: &ShardedVarMap,
    kind: Kind,
) -> FsdpModule<Model<FsdpModule<Layer<Mlp>>>> {
    let vb = vars.builder(DType::F32);
    let layer =
        |i| fully_shard(opts, vb.pp(format!("model.layers.{i}")), |vb| Layer::new(kind, |vb| Mlp::new(kind, vb), vb));
    let layers = (0..LAYERS).map(layer).collect::<fsdp_candle::Result<Vec<_>>>().unwrap();
    fully_shard(opts, vb, |vb| Model::new(kind, layers, vb)).unwrap()
}

/// The trainable parameters: the adapters, in a model with adapters.
pub(crate) fn vars_of(world: &World, kind: Kind) -> ShardedVarMap {
    let vars = vars(world);
    if kind.lora {
        vars.freeze(|name| !nn::is_adapter(name)).unwrap();
        // No adapter is zero.
        vars.init_with(Draws(1, |request| Init::Randn {
            mean: if request.shape.len() == 1 { 1. } else { 0. },
            stdev: 0.3,
        }))
        .unwrap();
    }
    vars
}

pub(crate) fn ids(rank: usize, step: usize) -> Tensor {
    let ids: Vec<u32> = (0..2 * TIME).map(|i| ((i * 7 + rank * 3 + step * 5) % VOCABULARY) as u32).collect();
    Tensor::from_vec(ids, (2, TIME), &device()).unwrap()
}

pub(crate) fn loss_of(model: &impl Module, ids: &Tensor) -> Tensor {
    let logits = model.forward(ids).unwrap().to_dtype(DType::F32).unwrap();
    nn::cross_entropy(&logits, ids).unwrap()
}

/// The full gradients of [`loss_of`], sorted by name.
pub(crate) fn gradients_of<M: Module>(vars: &ShardedVarMap, model: &FsdpModule<M>, ids: &Tensor) -> Gradients {
    sorted(gradients(vars, &model.backward(&loss_of(model, ids)).unwrap()))
}

/// Runs `f`, and returns its collectives and the largest number of elements that were gathered at one of them.
pub(crate) fn watched<T>(vars: &ShardedVarMap, f: impl FnOnce() -> T) -> (T, Vec<String>, usize) {
    let seen: Arc<Mutex<(Vec<String>, usize)>> = Arc::default();
    let (params, see) = (vars.params(), seen.clone());
    let on_event = move |event: &Metadata<'_>, text: String| {
        let is_collective = ["unshard", "reduce-scatter", "all-reduce"].iter().any(|what| text.starts_with(what));
        if is_collective && event.target().starts_with("fsdp_candle") {
            let gathered = params.iter().filter(|param| param.is_unsharded());
            let gathered: usize = gathered.map(|param| param.shape().elem_count()).sum();
            let mut seen = see.lock().unwrap();
            seen.0.push(text);
            seen.1 = seen.1.max(gathered);
        }
    };
    let out = fsdp_test_support::observed(on_event, f);
    let (collectives, most) = std::mem::take(&mut *seen.lock().unwrap());
    (out, collectives, most)
}
