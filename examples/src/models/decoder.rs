//! Decoders of the Llama, Mistral, Qwen, Gemma, Phi, Mixtral, DeepSeek and gpt-oss families, with the parameter names of
//! Hugging Face's `LlamaForCausalLM`.
//!
//! Shapes: batch B, time T, width C of the residual stream, H heads of width D.

use std::sync::{Mutex, PoisonError};

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fsdp_candle::nn::{self, CrossEntropyOptions, Documents, Embedding, Linear};
use fsdp_candle::{FsdpModule, FullyShard, Recurse, ReshardAfterForward, fully_shard};

use crate::models::attention::Attention;
use crate::models::config::DecoderConfig;
use crate::models::experts::Experts;
use crate::models::heads::{Head, Output};
use crate::models::latent_attention::LatentAttention;
use crate::models::layers::{Layer, ModelDropout, linear};
use crate::models::mlp::Mlp;
use crate::models::norm::Norm;
use crate::models::parallel::TensorParallel;
use crate::models::rotary::RotaryTables;
use crate::models::rows::Rows;

/// Calls a block, whether or not it is an FSDP unit.
pub trait CallBlock {
    /// Returns the residual stream after the block, and the auxiliary loss of its experts.
    fn call_block(&self, input: (Tensor, Rows)) -> Result<(Tensor, Option<Tensor>)>;
}

/// A block that is a unit by name, or no unit.
impl CallBlock for Layer<Block> {
    fn call_block(&self, input: (Tensor, Rows)) -> Result<(Tensor, Option<Tensor>)> {
        self.run(input, Block::forward)
    }
}

/// A block that is a unit.
impl CallBlock for FsdpModule<Layer<Block>> {
    fn call_block(&self, input: (Tensor, Rows)) -> Result<(Tensor, Option<Tensor>)> {
        self.call_with(input, Layer::call_block)
    }
}

/// A decoder: its blocks, and the layers around them.
pub struct Decoder<B = FsdpModule<Layer<Block>>> {
    pub(super) embedding: OwnUnit<Embedding>,
    embedding_scale: Option<f64>,
    pub(super) blocks: Vec<B>,
    pub(super) last: OwnUnit<LastLayers>,
    /// Coefficient of the experts' auxiliary loss, if they have one.
    auxiliary: Option<f64>,
    /// Tokens of each expert in the forwards that trained, `[layers with experts, E]`, if they are counted.
    expert_tokens: Option<Mutex<Option<Tensor>>>,
    pub(super) drops: ModelDropout,
    parallel: Option<TensorParallel>,
}

/// A module that is a unit of its own, or a part of the unit around it.
pub(super) enum OwnUnit<M> {
    Yes(FsdpModule<M>),
    No(M),
}

impl<M> OwnUnit<M> {
    /// Builds a module, as a unit if there are options.
    fn new(
        opts: Option<&FullyShard>,
        vb: VarBuilder<'static>,
        build: impl FnOnce(VarBuilder<'static>) -> Result<M>,
    ) -> Result<Self> {
        match opts {
            Some(opts) => Ok(OwnUnit::Yes(fully_shard(opts, vb, build)?)),
            None => Ok(OwnUnit::No(build(vb)?)),
        }
    }

    /// Returns the unit, if the module is one.
    pub(super) fn unit(&self) -> Option<&FsdpModule<M>> {
        match self {
            OwnUnit::Yes(unit) => Some(unit),
            OwnUnit::No(_) => None,
        }
    }

    fn inner(&self) -> &M {
        match self {
            OwnUnit::Yes(unit) => unit.inner(),
            OwnUnit::No(module) => module,
        }
    }

    /// Runs `forward` of the module.
    fn call_with(&self, x: Tensor, forward: impl FnOnce(&M, Tensor) -> Result<Tensor>) -> Result<Tensor> {
        match self {
            OwnUnit::Yes(unit) => unit.call_with(x, forward),
            OwnUnit::No(module) => forward(module, x),
        }
    }
}

/// The layers after the blocks.
pub(super) struct LastLayers {
    norm: Norm,
    output: Output,
    logit_softcap: Option<f64>,
}

impl LastLayers {
    /// Returns the outputs for the residual stream `[B, T, C]` after the blocks.
    fn forward(&self, x_btc: &Tensor, rows: &Rows) -> Result<Tensor> {
        let logits = self.output.forward(self.norm.forward(x_btc)?, rows)?;
        match self.logit_softcap {
            Some(cap) => (logits / cap)?.tanh()? * cap,
            None => Ok(logits),
        }
    }

    /// Returns the cross-entropy of targets `[B, T]` for the residual stream `[B, T, C]`.
    fn cross_entropy(&self, x_btc: &Tensor, targets_bt: &Tensor, options: &CrossEntropyOptions) -> Result<Tensor> {
        let options = CrossEntropyOptions { softcap: self.logit_softcap, ..*options };
        self.output.head()?.cross_entropy(&self.norm.forward(x_btc)?, targets_bt, &options)
    }
}

impl<B: CallBlock> Decoder<B> {
    /// Creates the layers outside the blocks, possibly tensor-parallel.
    ///
    /// With `opts`, the embedding is a unit, and so is the head with the last norm. The head is then gathered while the
    /// last block computes, and reduced while backward computes the blocks. A head that shares the embedding's weight
    /// leaves both in the unit around them, since their gradient is complete at the end of backward only.
    pub fn new(
        config: &DecoderConfig,
        blocks: Vec<B>,
        drops: ModelDropout,
        parallel: Option<&TensorParallel>,
        head: Head,
        opts: Option<&FullyShard>,
        vb: VarBuilder<'static>,
    ) -> Result<Self> {
        let (width, stdev) = (config.width, config.initializer_range);
        let is_tied = config.tied && head == Head::Vocabulary;
        let opts = opts.filter(|_| !is_tied);
        let embedding = OwnUnit::new(opts, vb.pp("model.embed_tokens"), |vb| {
            let normal = Init::Randn { mean: 0., stdev };
            let weight = vb.get_with_hints((config.vocabulary, width), "weight", normal)?;
            Embedding::new(weight, width).with_padding_idx(config.padding)
        })?;
        if let Some(unit) = embedding.unit() {
            // The gradient of a lookup does not depend on the table.
            unit.set_unshard_in_backward(false);
        }
        let last = OwnUnit::new(opts, vb.pp(head.module()), |_| {
            let output = Output::new(head, (width, stdev), &vb, || match is_tied {
                true => Ok(Linear::new(embedding.inner().embeddings().clone(), None)),
                false => linear(width, config.vocabulary, false, stdev, vb.pp(head.module())),
            })?;
            let norm = Norm::new(width, config.norms, vb.pp("model.norm"))?;
            let logit_softcap = config.logit_softcap.filter(|_| head == Head::Vocabulary);
            Ok(LastLayers { norm, output, logit_softcap })
        })?;
        if let Some(unit) = last.unit() {
            // Backward needs it at once.
            unit.set_reshard_after_forward(ReshardAfterForward::Never, Recurse::No)?;
        }
        Ok(Decoder {
            embedding,
            embedding_scale: config.embedding_scale,
            blocks,
            last,
            auxiliary: config.experts.as_ref().and_then(|experts| experts.auxiliary),
            expert_tokens: config.experts.as_ref().filter(|experts| experts.counted).map(|_| Mutex::default()),
            drops,
            parallel: parallel.cloned(),
        })
    }

    /// Returns logits `[B, T, V]` for ids `[B, T]` on every rank, for any T.
    pub fn logits(&self, ids_bt: &Tensor) -> Result<Tensor> {
        let Some(parallel) = &self.parallel else { return Ok(self.forward(ids_bt, &Rows::default())?.0) };
        let steps = ids_bt.dim(1)?;
        // Attention is causal, so padding at the end changes nothing.
        let ids_bt = ids_bt.pad_with_zeros(1, 0, parallel.padded(steps) - steps)?;
        let logits = self.forward(&ids_bt, &Rows::default())?.0.narrow(1, 0, steps)?;
        parallel.whole_vocabulary(&logits)
    }

    /// Returns logits `[B, T, V]` for ids `[B, T]`, or classes or embeddings of each row, and the experts' auxiliary
    /// loss, if any. Each tensor-parallel rank has the logits of its part of the vocabulary, `[B, T, V / N]`.
    pub fn forward(&self, ids_bt: &Tensor, rows: &Rows) -> Result<(Tensor, Option<Tensor>)> {
        let (x_btc, auxiliary) = self.residual(ids_bt, rows)?;
        Ok((self.last.call_with(x_btc, |last, x_btc| last.forward(&x_btc, rows))?, auxiliary))
    }

    /// Returns the cross-entropy of targets `[B, T]` for ids `[B, T]`, and the experts' auxiliary loss, if any. The
    /// logits never exist whole. The softcap of `options` is replaced by the model's.
    pub fn cross_entropy(
        &self,
        ids_bt: &Tensor,
        rows: &Rows,
        targets_bt: &Tensor,
        options: &CrossEntropyOptions,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (x_btc, auxiliary) = self.residual(ids_bt, rows)?;
        let loss = self.last.call_with(x_btc, |last, x_btc| last.cross_entropy(&x_btc, targets_bt, options))?;
        Ok((loss, auxiliary))
    }

    /// Returns the residual stream `[B, T, C]` after the blocks, and the experts' auxiliary loss.
    fn residual(&self, ids_bt: &Tensor, rows: &Rows) -> Result<(Tensor, Option<Tensor>)> {
        rows.run(|| self.residual_of_part(ids_bt, rows))
    }

    fn residual_of_part(&self, ids_bt: &Tensor, rows: &Rows) -> Result<(Tensor, Option<Tensor>)> {
        let mut x_btc = self.embedding.call_with(ids_bt.clone(), |embedding, ids_bt| embedding.forward(&ids_bt))?;
        if let Some(scale) = self.embedding_scale {
            x_btc = (x_btc * scale)?;
        }
        let mut loads = vec![];
        for block in &self.blocks {
            let load;
            (x_btc, load) = block.call_block((x_btc, rows.clone()))?;
            loads.extend(load);
        }
        self.count(&loads)?;
        let Some(coefficient) = self.auxiliary else { return Ok((x_btc, None)) };
        // Padding also chooses experts, but is not counted.
        let all = ids_bt.elem_count() * rows.ranks();
        let tokens = rows.filled.as_ref().map_or(all, |filled| filled.iter().sum());
        let auxiliary = match crate::models::experts::balance(&loads, tokens, rows)? {
            Some(loss) => Some((loss * coefficient)?),
            None => None,
        };
        Ok((x_btc, auxiliary))
    }

    /// Adds the loads of a forward that trains to the tokens of each expert.
    fn count(&self, loads: &[Tensor]) -> Result<()> {
        let Some(sum) = self.expert_tokens.as_ref().filter(|_| self.drops.is_training() && !loads.is_empty()) else {
            return Ok(());
        };
        let tokens = loads.iter().map(|load| load.detach().get(0)).collect::<Result<Vec<_>>>()?;
        let mut tokens = Tensor::stack(&tokens, 0)?;
        let mut sum = sum.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = &*sum {
            tokens = (tokens + before)?;
        }
        *sum = Some(tokens);
        Ok(())
    }

    /// See [`LanguageModel::take_expert_tokens`](crate::models::LanguageModel::take_expert_tokens).
    pub(super) fn take_expert_tokens(&self) -> Option<Tensor> {
        self.expert_tokens.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A block: attention, then an MLP or experts, each after a norm and added to the residual stream.
pub struct Block {
    input_norm: Norm,
    attention: SelfAttention,
    /// Norm after attention, in some families.
    attention_norm: Option<Norm>,
    mlp_norm: Norm,
    mlp: Feed,
    /// Norm after the MLP, in some families.
    output_norm: Option<Norm>,
}

enum SelfAttention {
    Usual(Attention),
    Latent(LatentAttention),
}

impl SelfAttention {
    fn forward(&self, x_btc: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        match self {
            SelfAttention::Usual(attention) => attention.forward(x_btc, documents),
            SelfAttention::Latent(attention) => attention.forward(x_btc, documents),
        }
    }
}

enum Feed {
    Mlp(Mlp),
    Experts(Experts),
}

impl Block {
    /// Creates block number `layer`. All blocks share the rotary tables.
    pub fn new(
        config: &DecoderConfig,
        layer: usize,
        rotary: &RotaryTables,
        drops: &ModelDropout,
        parallel: Option<&TensorParallel>,
        vb: VarBuilder,
    ) -> Result<Self> {
        let norm = |name: &str| Norm::new(config.width, config.norms, vb.pp(name));
        let post_norm = |name: &str| config.norms.post.then(|| norm(name)).transpose();
        // This name means the norm after attention in Gemma, and the norm before the MLP in other families.
        let (after, before) = ("post_attention_layernorm", "pre_feedforward_layernorm");
        let input_norm = norm("input_layernorm")?;
        let own = vb.pp("self_attn");
        let attention = match config.latent {
            None => SelfAttention::Usual(Attention::new(config, layer, rotary, drops, parallel, own)?),
            Some(sizes) => {
                SelfAttention::Latent(LatentAttention::new(config, sizes, layer, rotary, drops, parallel, own)?)
            }
        };
        Ok(Block {
            input_norm,
            attention,
            attention_norm: post_norm(after)?,
            mlp_norm: norm(if config.norms.post { before } else { after })?,
            mlp: match config.experts(layer) {
                Some(experts) => Feed::Experts(Experts::new(config, experts, parallel, vb.pp(experts.names.module))?),
                None => Feed::Mlp(Mlp::new(config, config.inner, vb.pp("mlp"))?),
            },
            output_norm: post_norm("post_feedforward_layernorm")?,
        })
    }

    /// Returns the residual stream `[B, T, C]` after the block, and the auxiliary loss of its experts.
    pub fn forward(&self, x_btc: &Tensor, rows: &Rows) -> Result<(Tensor, Option<Tensor>)> {
        let post_norm = |norm: &Option<Norm>, x: Tensor| match norm {
            Some(norm) => norm.forward(&x),
            None => Ok(x),
        };
        let attention = self.attention.forward(&self.input_norm.forward(x_btc)?, rows.documents.as_ref())?;
        let x_btc = nn::add(x_btc, &post_norm(&self.attention_norm, attention)?)?;
        let normed = self.mlp_norm.forward(&x_btc)?;
        let (mlp, load) = match &self.mlp {
            Feed::Mlp(mlp) => (mlp.forward(&normed)?, None),
            Feed::Experts(experts) => experts.forward(&normed, rows)?,
        };
        Ok((nn::add(&x_btc, &post_norm(&self.output_norm, mlp)?)?, load))
    }
}
