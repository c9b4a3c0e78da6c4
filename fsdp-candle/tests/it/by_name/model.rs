//! A small decoder without FSDP, the same decoder with wrapped layers, and records of collectives and memory.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::activation_checkpoint::checkpoint;
use fsdp_candle::{FsdpModule, FsdpParam, FullyShard, ShardedVarMap, World, fully_shard, nn, shard};

use crate::common::{device, vars};

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
            scale: kind.scale.then(|| vb.get_with_hints(WIDTH, "scale", candle_nn::Init::Const(0.9))).transpose()?,
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
    let opts = opts.clone().units(names.iter().copied());
    shard(&opts, vars.builder(DType::F32), |vb| untouched(kind, vb)).unwrap()
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
        vars.freeze(|name| !nn::is_adapter(name));
        vars.init_with(Spread);
    }
    vars
}

/// Values with which no adapter is zero.
struct Spread;

impl fsdp_candle::initializer::Initializer for Spread {
    fn fill(&self, request: &fsdp_candle::initializer::ShardRequest<'_>, shard: &mut [u8]) -> fsdp_candle::Result<()> {
        let init = candle_nn::Init::Randn { mean: if request.shape.len() == 1 { 1. } else { 0. }, stdev: 0.3 };
        let request = fsdp_candle::initializer::ShardRequest { init, ..*request };
        fsdp_candle::initializer::Philox::new(1).fill(&request, shard)
    }
}

pub(crate) fn ids(rank: usize, step: usize) -> Tensor {
    let ids: Vec<u32> = (0..2 * TIME).map(|i| ((i * 7 + rank * 3 + step * 5) % VOCABULARY) as u32).collect();
    Tensor::from_vec(ids, (2, TIME), &device()).unwrap()
}

pub(crate) fn loss_of(model: &impl Module, ids: &Tensor) -> Tensor {
    let logits = model.forward(ids).unwrap().to_dtype(DType::F32).unwrap();
    nn::cross_entropy(&logits, ids).unwrap()
}

/// The collectives of a thread's rank, and how many elements were gathered at each.
#[derive(Clone, Default)]
pub(crate) struct Seen(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    params: Vec<Arc<FsdpParam>>,
    collectives: Vec<String>,
    most: usize,
}

impl Seen {
    /// Runs `f`, and returns its collectives and the largest number of elements that were gathered at one of them.
    pub(crate) fn while_running<T>(vars: &ShardedVarMap, f: impl FnOnce() -> T) -> (T, Vec<String>, usize) {
        let seen = Seen::default();
        seen.0.lock().unwrap().params = vars.params();
        let out = fsdp_test_support::observed(seen.clone(), f);
        let state = std::mem::take(&mut *seen.0.lock().unwrap());
        (out, state.collectives, state.most)
    }
}

impl tracing::Subscriber for Seen {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_event() && metadata.target().starts_with("fsdp_candle")
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{value:?} ");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        if ["unshard", "reduce-scatter", "all-reduce"].iter().any(|what| text.0.starts_with(what)) {
            let mut state = self.0.lock().unwrap();
            state.collectives.push(text.0);
            let there = state.params.iter().filter(|param| param.is_unsharded());
            let there: usize = there.map(|param| param.shape().elem_count()).sum();
            state.most = state.most.max(there);
        }
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}
