//! BERT with its masked language model head, with the parameter names of Hugging Face's `BertForMaskedLM`.
//!
//! Shapes: batch B, time T, width C of the residual stream, vocabulary V.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fsdp_candle::FsdpModule;
use fsdp_candle::nn::{self, AttentionOptions, Documents, Embedding, LayerNorm, Linear};

use crate::models::config::{Activation, BertConfig};
use crate::models::language_model::Rows;
use crate::models::layers::{Layer, ModelDropout, activate, linear};

/// A block: attention and MLP, each added to the residual stream before a norm. Attention is bidirectional.
pub struct Block {
    query: Linear,
    key: Linear,
    value: Linear,
    attention_output: Linear,
    attention_norm: LayerNorm,
    up: Linear,
    down: Linear,
    norm: LayerNorm,
    heads: usize,
    options: AttentionOptions,
    activation: Activation,
    drops: ModelDropout,
}

impl Block {
    /// Creates a block.
    pub fn new(config: &BertConfig, drops: &ModelDropout, vb: VarBuilder) -> Result<Self> {
        let (width, inner, stdev) = (config.hidden_size, config.intermediate_size, config.initializer_range);
        let own = vb.pp("attention.self");
        let square = |name: &str| linear(width, width, true, stdev, own.pp(name));
        let norm = |name: &str| nn::layer_norm(width, config.layer_norm_eps, vb.pp(name));
        let head_width = width / config.num_attention_heads;
        Ok(Block {
            query: square("query")?,
            key: square("key")?,
            value: square("value")?,
            attention_output: linear(width, width, true, stdev, vb.pp("attention.output.dense"))?,
            attention_norm: norm("attention.output.LayerNorm")?,
            up: linear(width, inner, true, stdev, vb.pp("intermediate.dense"))?,
            down: linear(inner, width, true, stdev, vb.pp("output.dense"))?,
            norm: norm("output.LayerNorm")?,
            heads: config.num_attention_heads,
            options: AttentionOptions::bidirectional(1. / (head_width as f64).sqrt()),
            activation: config.activation,
            drops: drops.clone(),
        })
    }

    fn attention(&self, x_btc: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        let (q, k, v) = (self.query.forward(x_btc)?, self.key.forward(x_btc)?, self.value.forward(x_btc)?);
        let heads = self.heads;
        let x = self.drops.attention(&self.options, |options| match documents {
            Some(documents) => nn::attention_in_documents(&q, &k, &v, heads, heads, options, documents),
            None => nn::attention(&q, &k, &v, heads, heads, options),
        })?;
        let x = self.attention_output.forward(&x)?;
        self.drops.hidden(&x)
    }

    fn mlp(&self, x_btc: &Tensor) -> Result<Tensor> {
        self.drops.hidden(&self.down.forward(&activate(self.activation, &self.up.forward(x_btc)?)?)?)
    }

    /// Returns the residual stream after the block.
    fn forward(&self, x_btc: &Tensor, rows: &Rows) -> Result<Tensor> {
        let documents = rows.documents.as_ref();
        let x_btc = self.attention_norm.forward(&(self.attention(x_btc, documents)? + x_btc)?)?;
        self.norm.forward(&(self.mlp(&x_btc)? + &x_btc)?)
    }
}

/// BERT: its blocks, and the layers around them.
pub struct Bert {
    tokens: Embedding,
    positions: Embedding,
    types: Embedding,
    norm: LayerNorm,
    pub(super) blocks: Vec<FsdpModule<Layer<Block>>>,
    transform: Linear,
    transform_norm: LayerNorm,
    activation: Activation,
    head: Linear,
    pub(super) drops: ModelDropout,
}

impl Bert {
    /// Creates the layers outside the blocks.
    pub fn new(
        config: &BertConfig,
        blocks: Vec<FsdpModule<Layer<Block>>>,
        drops: ModelDropout,
        vb: VarBuilder,
    ) -> Result<Self> {
        let (width, vocabulary, stdev) = (config.hidden_size, config.vocab_size, config.initializer_range);
        let (embeddings, predictions) = (vb.pp("bert.embeddings"), vb.pp("cls.predictions"));
        let table = |name: &str, rows: usize| {
            embeddings.pp(name).get_with_hints((rows, width), "weight", Init::Randn { mean: 0., stdev })
        };
        let norm = |vb: VarBuilder| nn::layer_norm(width, config.layer_norm_eps, vb.pp("LayerNorm"));
        let tokens = table("word_embeddings", vocabulary)?;
        let bias = predictions.get_with_hints(vocabulary, "bias", Init::Const(0.))?;
        Ok(Bert {
            head: Linear::new(tokens.clone(), Some(bias)),
            tokens: Embedding::new(tokens, width).with_padding_idx(config.padding)?,
            positions: Embedding::new(table("position_embeddings", config.max_position_embeddings)?, width),
            types: Embedding::new(table("token_type_embeddings", config.type_vocab_size)?, width),
            norm: norm(embeddings.clone())?,
            blocks,
            transform: linear(width, width, true, stdev, predictions.pp("transform.dense"))?,
            transform_norm: norm(predictions.pp("transform"))?,
            activation: config.activation,
            drops,
        })
    }

    /// Returns logits `[B, T, V]` for ids `[B, T]`.
    pub fn forward(&self, ids_bt: &Tensor, rows: &Rows) -> Result<Tensor> {
        let (_, t) = ids_bt.dims2()?;
        let places = match &rows.documents {
            Some(documents) => documents.position_ids(ids_bt.device())?,
            None => Tensor::arange(0u32, t as u32, ids_bt.device())?,
        };
        let same = (self.positions.forward(&places)? + self.types.forward(&places.zeros_like()?)?)?;
        let x_btc = self.norm.forward(&self.tokens.forward(ids_bt)?.broadcast_add(&same)?)?;
        let x_btc = self.drops.embedding(&x_btc)?;
        let x_btc = self.blocks.iter().try_fold(x_btc, |x_btc, block| {
            block.call_with((x_btc, rows.clone()), |layer, input| layer.run(input, Block::forward))
        })?;
        let x_btc = activate(self.activation, &self.transform.forward(&x_btc)?)?;
        self.head.forward(&self.transform_norm.forward(&x_btc)?)
    }
}
