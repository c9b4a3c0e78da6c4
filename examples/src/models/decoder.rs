//! Decoders of the families that [`super::config::fields`] names, with the parameter names of Hugging Face's
//! `LlamaForCausalLM` and its like.
//!
//! In shapes, B is the batch, T the time, C the width of the residual stream.
//! One block: attention and MLP or experts, each behind a norm and beside a residual.
//! A block's attention.
//!
//! In shapes, B is the batch, T the time, C the width of the residual stream, H the heads and D their width.
//! Gated MLPs: `down(activation(gate(x)) * up(x))`.
//! Rotary embeddings of a model: tables that its blocks share.
//! Root-mean-square norms.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fsdp_candle::FsdpModule;
use fsdp_candle::nn::{self, AttentionOptions, Documents, Embedding, Linear, RmsNorm, Rotary, RotaryOptions};
use fsdp_core::ProcessGroup;

use crate::models::config::decoder::Norms;
use crate::models::config::rope::Rope;
use crate::models::config::{Activation, DecoderConfig};
use crate::models::experts::Experts;
use crate::models::language_model::Rows;
use crate::models::layers::{Drops, Layer, activate, linear};
use crate::models::parallel::TensorParallel;

/// How the model calls its blocks.
pub trait CallBlock {
    /// The residual stream behind the block, and what its experts say for the loss that keeps them equally busy.
    ///
    /// # Errors
    /// Those of the layers.
    fn call_block(&self, input: (Tensor, Rows)) -> Result<(Tensor, Option<Tensor>)>;
}

/// As it is: a unit by its name, or none.
impl CallBlock for Layer<Block> {
    fn call_block(&self, input: (Tensor, Rows)) -> Result<(Tensor, Option<Tensor>)> {
        self.run(input, Block::forward)
    }
}

/// As a unit.
impl CallBlock for FsdpModule<Layer<Block>> {
    fn call_block(&self, input: (Tensor, Rows)) -> Result<(Tensor, Option<Tensor>)> {
        self.call_with(input, Layer::call_block)
    }
}

/// The whole model around its blocks.
pub struct Decoder<B = FsdpModule<Layer<Block>>> {
    embedding: Embedding,
    embedding_scale: Option<f64>,
    blocks: Vec<B>,
    norm: Norm,
    head: Linear,
    logit_softcap: Option<f64>,
    /// The coefficient of the experts' loss.
    auxiliary: f64,
    drops: Drops,
    parallel: Option<TensorParallel>,
}

impl<B: CallBlock> Decoder<B> {
    /// Asks `vb` for the parameters outside the blocks, whose layers several ranks may compute together.
    ///
    /// # Errors
    /// When a parameter can't be initialised.
    pub fn new(
        config: &DecoderConfig,
        blocks: Vec<B>,
        drops: Drops,
        parallel: Option<&TensorParallel>,
        vb: VarBuilder,
    ) -> Result<Self> {
        let (width, stdev) = (config.width, config.initializer_range);
        let normal = Init::Randn { mean: 0., stdev };
        let embedding = vb.pp("model.embed_tokens").get_with_hints((config.vocabulary, width), "weight", normal)?;
        let head = match config.tied {
            true => Linear::new(embedding.clone(), None),
            false => linear(width, config.vocabulary, false, stdev, vb.pp("lm_head"))?,
        };
        Ok(Decoder {
            embedding: Embedding::new(embedding, width).with_padding_idx(config.padding)?,
            embedding_scale: config.embedding_scale,
            blocks,
            norm: Norm::new(width, config.norms, vb.pp("model.norm"))?,
            head,
            logit_softcap: config.logit_softcap,
            auxiliary: config.experts.as_ref().and_then(|experts| experts.auxiliary).unwrap_or(0.),
            drops,
            parallel: parallel.cloned(),
        })
    }

    pub(super) fn drops(&self) -> &Drops {
        &self.drops
    }

    /// The blocks, in forward order.
    pub fn blocks(&self) -> &[B] {
        &self.blocks
    }

    /// The ranks of which each has the logits of a part of the vocabulary, where there are such.
    pub fn vocabulary_group(&self) -> Option<&ProcessGroup> {
        self.parallel.as_ref().map(TensorParallel::group)
    }

    /// Logits `[B, T, V]` for ids `[B, T]`, on every rank, for any T.
    ///
    /// # Errors
    /// Those of the layers.
    pub fn logits(&self, ids_bt: &Tensor) -> Result<Tensor> {
        let Some(parallel) = &self.parallel else { return Ok(self.forward(ids_bt, &Rows::default())?.0) };
        let steps = ids_bt.dim(1)?;
        // What comes later is not seen.
        let ids_bt = ids_bt.pad_with_zeros(1, 0, parallel.padded(steps) - steps)?;
        let logits = self.forward(&ids_bt, &Rows::default())?.0.narrow(1, 0, steps)?;
        parallel.whole_vocabulary(&logits)
    }

    /// Logits `[B, T, V]` for ids `[B, T]` in these rows, and what is to be added to their loss, where experts have
    /// one. Of ranks that compute layers together each has the logits of its part of the vocabulary, `[B, T, V / N]`.
    ///
    /// # Errors
    /// Those of the layers.
    pub fn forward(&self, ids_bt: &Tensor, rows: &Rows) -> Result<(Tensor, Option<Tensor>)> {
        let mut x_btc = self.embedding.forward(ids_bt)?;
        if let Some(scale) = self.embedding_scale {
            x_btc = (x_btc * scale)?;
        }
        let mut all_busy = vec![];
        for block in &self.blocks {
            let busy;
            (x_btc, busy) = block.call_block((x_btc, rows.clone()))?;
            all_busy.extend(busy);
        }
        let mut logits = self.head.forward(&self.norm.forward(&x_btc)?)?;
        if let Some(cap) = self.logit_softcap {
            logits = ((logits / cap)?.tanh()? * cap)?;
        }
        // Padding chooses experts, too, and is not counted.
        let tokens = rows.filled.as_ref().map_or(ids_bt.elem_count(), |filled| filled.iter().sum());
        let auxiliary = match crate::models::experts::balance(&all_busy, tokens)? {
            Some(loss) => Some((loss * self.auxiliary)?),
            None => None,
        };
        Ok((logits, auxiliary))
    }
}

/// One block.
pub struct Block {
    input_norm: Norm,
    attention: Attention,
    /// Behind the attention, where there are such.
    attention_norm: Option<Norm>,
    mlp_norm: Norm,
    mlp: Feed,
    /// Behind the MLP.
    output_norm: Option<Norm>,
}

enum Feed {
    Mlp(Mlp),
    Experts(Experts),
}

impl Block {
    /// Asks `vb` for the parameters of the block number `layer`; the rotary tables are shared by all blocks, whose
    /// layers several ranks may compute together.
    ///
    /// # Errors
    /// When a parameter can't be initialised.
    pub fn new(
        config: &DecoderConfig,
        layer: usize,
        rotary: &RotaryTables,
        drops: &Drops,
        parallel: Option<&TensorParallel>,
        vb: VarBuilder,
    ) -> Result<Self> {
        let norm = |name: &str| Norm::new(config.width, config.norms, vb.pp(name));
        let behind = |name: &str| config.norms.behind.then(|| norm(name)).transpose();
        // Gemma calls by this name what is behind the attention, the others what is before the MLP.
        let (after, before) = ("post_attention_layernorm", "pre_feedforward_layernorm");
        Ok(Block {
            input_norm: norm("input_layernorm")?,
            attention: Attention::new(config, layer, rotary, drops, vb.pp("self_attn"))?,
            attention_norm: behind(after)?,
            mlp_norm: norm(if config.norms.behind { before } else { after })?,
            mlp: match config.experts(layer) {
                Some(experts) => Feed::Experts(Experts::new(config, experts, parallel, vb.pp(experts.names.0))?),
                None => Feed::Mlp(Mlp::new(config, vb.pp("mlp"))?),
            },
            output_norm: behind("post_feedforward_layernorm")?,
        })
    }

    /// The residual stream `[B, T, C]` behind the block, and what its experts say for the
    /// loss that keeps them equally busy.
    ///
    /// # Errors
    /// Those of its layers.
    pub fn forward(&self, x_btc: &Tensor, rows: &Rows) -> Result<(Tensor, Option<Tensor>)> {
        let behind = |norm: &Option<Norm>, x: Tensor| match norm {
            Some(norm) => norm.forward(&x),
            None => Ok(x),
        };
        let attention = self.attention.forward(&self.input_norm.forward(x_btc)?, rows.documents.as_ref())?;
        let x_btc = (x_btc + behind(&self.attention_norm, attention)?)?;
        let normed = self.mlp_norm.forward(&x_btc)?;
        let (mlp, busy) = match &self.mlp {
            Feed::Mlp(mlp) => (mlp.forward(&normed)?, None),
            Feed::Experts(experts) => experts.forward(&normed, rows)?,
        };
        Ok(((x_btc + behind(&self.output_norm, mlp)?)?, busy))
    }
}

pub(super) struct Attention {
    qkv: QkvProjection,
    head_norms: Option<[Norm; 2]>,
    output: Linear,
    rotary: RotaryEmbedding,
    options: AttentionOptions,
    head_dim: usize,
    drops: Drops,
}

/// The projections to queries, keys and values.
enum QkvProjection {
    Separate([Linear; 3]),
    /// With the widths of the first two.
    Fused(Linear, [usize; 2]),
}

impl Attention {
    pub(super) fn new(
        config: &DecoderConfig,
        layer: usize,
        rotary: &RotaryTables,
        drops: &Drops,
        vb: VarBuilder,
    ) -> Result<Self> {
        let (width, head_dim) = (config.width, config.head_dim);
        let (q_width, kv_width) = (config.heads * head_dim, config.kv_heads * head_dim);
        let projection = |name: &str, outputs: usize| {
            linear(width, outputs, config.biases.qkv, config.initializer_range, vb.pp(name))
        };
        let qkv = match config.fused {
            true => QkvProjection::Fused(projection("qkv_proj", q_width + 2 * kv_width)?, [q_width, kv_width]),
            false => QkvProjection::Separate([
                projection("q_proj", q_width)?,
                projection("k_proj", kv_width)?,
                projection("v_proj", kv_width)?,
            ]),
        };
        let head_norm = |name: &str| Norm::new(head_dim, config.norms, vb.pp(name));
        let head_norms = match config.norms.heads {
            true => Some([head_norm("q_norm")?, head_norm("k_norm")?]),
            false => None,
        };
        Ok(Attention {
            qkv,
            head_norms,
            output: linear(q_width, width, config.biases.output, config.initializer_range, vb.pp("o_proj"))?,
            rotary: rotary.of(config.is_local(layer)).clone(),
            options: config.attention(layer),
            head_dim,
            drops: drops.clone(),
        })
    }

    pub(super) fn forward(&self, x_btc: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        // Heads stay merged, [B, T, H * D]: the fused operations find them there without a transpose.
        let (mut q, mut k, v) = match &self.qkv {
            QkvProjection::Separate([q, k, v]) => (q.forward(x_btc)?, k.forward(x_btc)?, v.forward(x_btc)?),
            QkvProjection::Fused(qkv, [q, kv]) => {
                let qkv = qkv.forward(x_btc)?;
                (qkv.narrow(2, 0, *q)?, qkv.narrow(2, *q, *kv)?, qkv.narrow(2, q + kv, *kv)?)
            }
        };
        // Under tensor parallelism a rank has a part of the heads: as many as it has got, whatever the configuration.
        let (heads, kv_heads) = (q.dim(2)? / self.head_dim, k.dim(2)? / self.head_dim);
        if let Some([of_q, of_k]) = &self.head_norms {
            let (batch, steps, _) = q.dims3()?;
            q = of_q.forward(&q.reshape((batch, steps, heads, self.head_dim))?)?;
            k = of_k.forward(&k.reshape((batch, steps, kv_heads, self.head_dim))?)?;
        }
        let (q, k) = (self.rotary.apply(&q, documents)?, self.rotary.apply(&k, documents)?);
        self.output.forward(&self.drops.attention(&self.options, |options| match documents {
            Some(documents) => nn::attention_in_documents(&q, &k, &v, heads, kv_heads, options, documents),
            None => nn::attention(&q, &k, &v, heads, kv_heads, options),
        })?)
    }
}

pub(super) struct Mlp {
    gate_up: GateUpProjection,
    down: Linear,
    activation: Activation,
}

enum GateUpProjection {
    Separate {
        gate: Linear,
        up: Linear,
    },
    /// Gate, then up.
    Fused(Linear, usize),
}

impl Mlp {
    pub(super) fn new(config: &DecoderConfig, vb: VarBuilder) -> Result<Self> {
        let make = |name: &str, inputs, outputs| {
            linear(inputs, outputs, config.biases.mlp, config.initializer_range, vb.pp(name))
        };
        let (width, inner) = (config.width, config.inner);
        let gate_up = match config.fused {
            true => GateUpProjection::Fused(make("gate_up_proj", width, 2 * inner)?, inner),
            false => GateUpProjection::Separate {
                gate: make("gate_proj", width, inner)?,
                up: make("up_proj", width, inner)?,
            },
        };
        Ok(Mlp { gate_up, down: make("down_proj", inner, width)?, activation: config.activation })
    }

    /// An expert of `inner` elements, whose projections have these names.
    pub(super) fn expert(
        config: &DecoderConfig,
        inner: usize,
        [gate, up, down]: [&str; 3],
        vb: VarBuilder,
    ) -> Result<Self> {
        let make = |name: &str, inputs, outputs| linear(inputs, outputs, false, config.initializer_range, vb.pp(name));
        let gate_up =
            GateUpProjection::Separate { gate: make(gate, config.width, inner)?, up: make(up, config.width, inner)? };
        Ok(Mlp { gate_up, down: make(down, inner, config.width)?, activation: config.activation })
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (gate, up) = match &self.gate_up {
            GateUpProjection::Separate { gate, up } => (gate.forward(x)?, up.forward(x)?),
            GateUpProjection::Fused(both, inner) => {
                let both = both.forward(x)?;
                let last = both.rank() - 1;
                (both.narrow(last, 0, *inner)?, both.narrow(last, *inner, *inner)?)
            }
        };
        let x = match self.activation {
            Activation::Silu => nn::silu_mul(&gate, &up)?,
            other => (activate(other, &gate)? * up)?,
        };
        self.down.forward(&x)
    }
}

/// A rotary embedding, which may be another one for long sequences.
#[derive(Clone)]
pub(super) struct RotaryEmbedding {
    usual: Rotary,
    /// For sequences of more than so many positions.
    long: Option<(usize, Rotary)>,
}

impl RotaryEmbedding {
    pub(super) fn new(rope: &Rope, head_dim: usize, positions: usize, device: &Device) -> Result<Self> {
        let (frequencies, factor, long) = rope.frequencies();
        let options = RotaryOptions { head_dim: Some(head_dim), factor };
        let tables = |frequencies: &[f32]| Rotary::with_options(frequencies, options, positions, device);
        let long = match long {
            Some((above, frequencies)) => Some((above, tables(&frequencies)?)),
            None => None,
        };
        Ok(RotaryEmbedding { usual: tables(&frequencies)?, long })
    }

    /// RotaryTables the heads of `x`, `[B, T, H * D]` or `[B, T, H, D]`, in which documents may lie packed.
    pub(super) fn apply(&self, x: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        let longest = documents.map_or(x.dim(1)?, Documents::longest);
        let rotary = match &self.long {
            Some((above, rotary)) if longest > *above => rotary,
            _ => &self.usual,
        };
        match documents {
            Some(documents) => rotary.apply_in_documents(x, documents),
            None => rotary.apply(x, 0),
        }
    }
}

/// The rotary embeddings of all layers.
pub struct RotaryTables {
    full: RotaryEmbedding,
    local: Option<RotaryEmbedding>,
}

impl RotaryTables {
    /// Tables for heads of `head_dim` elements at `positions` positions; `local` is of layers with a window.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(full: &Rope, local: Option<&Rope>, head_dim: usize, positions: usize, device: &Device) -> Result<Self> {
        let of = |rope| RotaryEmbedding::new(rope, head_dim, positions, device);
        Ok(RotaryTables { full: of(full)?, local: local.map(of).transpose()? })
    }

    pub(super) fn of(&self, local: bool) -> &RotaryEmbedding {
        self.local.as_ref().filter(|_| local).unwrap_or(&self.full)
    }
}

/// A norm over the last dimension.
pub(super) enum Norm {
    /// As in Llama.
    Plain(RmsNorm),
    /// As in Gemma: the weight `w` stands for `1 + w`, and all is computed in 32 bits.
    FromOne { weight: Tensor, eps: f64 },
}

impl Norm {
    pub(super) fn new(width: usize, norms: Norms, vb: VarBuilder) -> Result<Self> {
        let start = if norms.from_one { 0. } else { 1. };
        let weight = vb.get_with_hints(width, "weight", Init::Const(start))?;
        Ok(match norms.from_one {
            true => Norm::FromOne { weight, eps: norms.eps },
            false => Norm::Plain(RmsNorm::new(weight, norms.eps)),
        })
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Norm::Plain(norm) => norm.forward(x),
            Norm::FromOne { weight, eps } => {
                let weight = (weight.to_dtype(DType::F32)? + 1.)?;
                RmsNorm::new(weight, *eps).forward(&x.to_dtype(DType::F32)?)?.to_dtype(x.dtype())
            }
        }
    }
}
