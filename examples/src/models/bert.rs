//! BERT with the parameter names of Hugging Face's `BertForMaskedLM` and `BertForSequenceClassification`.
//!
//! Shapes: batch B, time T, width C of the residual stream, vocabulary V.

use candle_core::{Device, Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fsdp_candle::nn::{self, AttentionOptions, Documents, Embedding, LayerNorm, Linear};
use fsdp_candle::{FsdpModule, upload};

use crate::models::config::{Activation, BertConfig};
use crate::models::heads::{Head, POOLER, Pooling, first_token, no_vocabulary};
use crate::models::layers::{Layer, ModelDropout, activate, linear};
use crate::models::rows::Rows;

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
        let x = self.drops.attend(&self.options, [&q, &k, &v], (heads, heads), documents, None)?;
        let x = self.attention_output.forward(&x)?;
        self.drops.hidden(&x)
    }

    fn mlp(&self, x_btc: &Tensor) -> Result<Tensor> {
        self.drops.hidden(&self.down.forward(&activate(self.activation, &self.up.forward(x_btc)?)?)?)
    }

    /// Returns the residual stream after the block.
    fn forward(&self, x_btc: &Tensor, rows: &Rows) -> Result<Tensor> {
        let documents = rows.documents.as_ref();
        let x_btc = self.attention_norm.forward(&nn::add(&self.attention(x_btc, documents)?, x_btc)?)?;
        self.norm.forward(&nn::add(&self.mlp(&x_btc)?, &x_btc)?)
    }
}

/// BERT: its blocks, and the layers around them.
pub struct Bert {
    tokens: Embedding,
    positions: Embedding,
    types: Embedding,
    norm: LayerNorm,
    pub(super) blocks: Vec<FsdpModule<Layer<Block>>>,
    pub(super) output: BertOutput,
    pub(super) drops: ModelDropout,
}

/// Last layers of BERT.
pub(super) enum BertOutput {
    /// Logits over the vocabulary.
    Vocabulary { transform: Linear, norm: LayerNorm, activation: Activation, head: Linear },
    /// Logits over classes, from the first token.
    Classes { pooler: Linear, classifier: Linear },
    /// Embeddings. The pooler is part of exports only.
    Embedding { pooling: Pooling, _pooler: Option<Linear> },
}

impl BertOutput {
    fn new(config: &BertConfig, head: Head, tokens: &Tensor, vb: &VarBuilder) -> Result<Self> {
        let (width, stdev) = (config.hidden_size, config.initializer_range);
        let dense = vb.pp(POOLER.trim_end_matches('.')).pp("dense");
        Ok(match head {
            Head::Vocabulary => {
                let predictions = vb.pp("cls.predictions");
                let transform = predictions.pp("transform");
                let bias = predictions.get_with_hints(config.vocab_size, "bias", Init::Const(0.))?;
                BertOutput::Vocabulary {
                    head: Linear::new(tokens.clone(), Some(bias)),
                    transform: linear(width, width, true, stdev, transform.pp("dense"))?,
                    norm: nn::layer_norm(width, config.layer_norm_eps, transform.pp("LayerNorm"))?,
                    activation: config.activation,
                }
            }
            Head::Classes(classes) => BertOutput::Classes {
                pooler: linear(width, width, true, stdev, dense)?,
                classifier: linear(width, classes, true, stdev, vb.pp("classifier"))?,
            },
            Head::Embedding(pooling) => {
                let has_pooler = vb.contains_tensor(&format!("{POOLER}dense.weight"));
                let pooler = || -> Result<Linear> {
                    Ok(Linear::new(dense.get((width, width), "weight")?, Some(dense.get(width, "bias")?)))
                };
                BertOutput::Embedding { pooling, _pooler: has_pooler.then(pooler).transpose()? }
            }
        })
    }

    fn forward(&self, x_btc: Tensor, rows: &Rows, drops: &ModelDropout) -> Result<Tensor> {
        match self {
            BertOutput::Vocabulary { .. } => {
                let (head, input_btc) = self.head(&x_btc)?;
                head.forward(&input_btc)
            }
            BertOutput::Classes { pooler, classifier } => {
                let pooled = pooler.forward(&first_token(&rows.whole(x_btc)?)?.contiguous()?)?.tanh()?;
                classifier.forward(&drops.hidden(&pooled)?)
            }
            BertOutput::Embedding { pooling, .. } => pooling.pool(&rows.whole(x_btc)?, rows),
        }
    }

    /// Returns the head over the vocabulary, and its input for hidden states `[B, T, C]`.
    pub(super) fn head(&self, x_btc: &Tensor) -> Result<(&Linear, Tensor)> {
        match self {
            BertOutput::Vocabulary { transform, norm, activation, head } => {
                Ok((head, norm.forward(&activate(*activation, &transform.forward(x_btc)?)?)?))
            }
            BertOutput::Classes { .. } | BertOutput::Embedding { .. } => Err(no_vocabulary()),
        }
    }
}

impl Bert {
    /// Creates the layers outside the blocks.
    pub fn new(
        config: &BertConfig,
        blocks: Vec<FsdpModule<Layer<Block>>>,
        drops: ModelDropout,
        head: Head,
        vb: VarBuilder,
    ) -> Result<Self> {
        let (width, vocabulary, stdev) = (config.hidden_size, config.vocab_size, config.initializer_range);
        let embeddings = vb.pp("bert.embeddings");
        let table = |name: &str, rows: usize| {
            embeddings.pp(name).get_with_hints((rows, width), "weight", Init::Randn { mean: 0., stdev })
        };
        let tokens = table("word_embeddings", vocabulary)?;
        Ok(Bert {
            output: BertOutput::new(config, head, &tokens, &vb)?,
            tokens: Embedding::new(tokens, width).with_padding_idx(config.padding)?,
            positions: Embedding::new(table("position_embeddings", config.max_position_embeddings)?, width),
            types: Embedding::new(table("token_type_embeddings", config.type_vocab_size)?, width),
            norm: nn::layer_norm(width, config.layer_norm_eps, embeddings.pp("LayerNorm"))?,
            blocks,
            drops,
        })
    }

    /// Returns logits `[B, T, V]` for ids `[B, T]`, or classes or embeddings of each row.
    pub fn forward(&self, ids_bt: &Tensor, rows: &Rows) -> Result<Tensor> {
        self.output.forward(self.hidden(ids_bt, rows)?, rows, &self.drops)
    }

    /// Returns hidden states `[B, T, C]`.
    pub(super) fn hidden(&self, ids_bt: &Tensor, rows: &Rows) -> Result<Tensor> {
        rows.run(|| self.hidden_of_part(ids_bt, rows))
    }

    fn hidden_of_part(&self, ids_bt: &Tensor, rows: &Rows) -> Result<Tensor> {
        let (batch, steps) = ids_bt.dims2()?;
        let places = rows.position_ids(steps, ids_bt.device())?;
        let types = match &rows.types {
            Some(types) => {
                let types = Tensor::from_slice(types, (batch, steps * rows.ranks()), &Device::Cpu)?;
                upload(&rows.own(&types, 1)?, ids_bt.device())?
            }
            None => places.zeros_like()?,
        };
        let same = self.positions.forward(&places)?.broadcast_add(&self.types.forward(&types)?)?;
        let x_btc = self.norm.forward(&self.tokens.forward(ids_bt)?.broadcast_add(&same)?)?;
        let x_btc = self.drops.embedding(&x_btc)?;
        self.blocks.iter().try_fold(x_btc, |x_btc, block| {
            block.call_with((x_btc, rows.clone()), |layer, input| layer.run(input, Block::forward))
        })
    }
}
