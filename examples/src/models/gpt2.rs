//! GPT-2, with the parameter names of Hugging Face's `GPT2LMHeadModel`: weights of `Gpt2Linear` are `[in, out]`, and the head
//! is the token embedding.
//!
//! Shapes: batch B, time T, width C of the residual stream, H heads of width D.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fsdp_candle::FsdpModule;
use fsdp_candle::nn::{self, AttentionOptions, Documents, Embedding, Gpt2Linear, LayerNorm, Linear};

use crate::models::config::Gpt2Config;
use crate::models::heads::{Head, Output};
use crate::models::layers::{Layer, ModelDropout};
use crate::models::rows::Rows;

/// A block: attention and MLP, each after a norm and added to the residual stream.
pub struct Block {
    norm_1: LayerNorm,
    qkv: Gpt2Linear,
    attention_output: Gpt2Linear,
    norm_2: LayerNorm,
    up: Gpt2Linear,
    down: Gpt2Linear,
    heads: usize,
    options: AttentionOptions,
    exact_gelu: bool,
    drops: ModelDropout,
}

fn gpt2_linear(inputs: usize, outputs: usize, stdev: f64, vb: VarBuilder) -> Result<Gpt2Linear> {
    let weight = vb.get_with_hints((inputs, outputs), "weight", Init::Randn { mean: 0., stdev })?;
    let bias = vb.get_with_hints(outputs, "bias", Init::Const(0.))?;
    Gpt2Linear::new(weight, Some(bias)).with_adapter(vb)
}

impl Block {
    /// Creates a block.
    pub fn new(config: &Gpt2Config, drops: &ModelDropout, vb: VarBuilder) -> Result<Self> {
        let width = config.n_embd;
        let inner = config.inner();
        let stdev = config.initializer_range;
        // Projections into the residual stream have smaller initial weights, as in the GPT-2 paper.
        let residual = stdev / (2. * config.n_layer as f64).sqrt();
        let (attention, mlp) = (vb.pp("attn"), vb.pp("mlp"));
        Ok(Block {
            norm_1: nn::layer_norm(width, config.layer_norm_epsilon, vb.pp("ln_1"))?,
            qkv: gpt2_linear(width, 3 * width, stdev, attention.pp("c_attn"))?,
            attention_output: gpt2_linear(width, width, residual, attention.pp("c_proj"))?,
            norm_2: nn::layer_norm(width, config.layer_norm_epsilon, vb.pp("ln_2"))?,
            up: gpt2_linear(width, inner, stdev, mlp.pp("c_fc"))?,
            down: gpt2_linear(inner, width, residual, mlp.pp("c_proj"))?,
            heads: config.n_head,
            options: AttentionOptions::causal(1. / ((width / config.n_head) as f64).sqrt()),
            exact_gelu: config.activation_function == "gelu",
            drops: drops.clone(),
        })
    }

    fn attention(&self, x_btc: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        let (qkv, heads) = (self.qkv.forward(x_btc)?, self.heads);
        let x = self.drops.attention(&self.options, |options| match documents {
            Some(documents) => nn::attention_qkv_in_documents(&qkv, heads, heads, options, documents),
            None => nn::attention_qkv(&qkv, heads, heads, options),
        })?;
        let x = self.attention_output.forward(&x)?;
        self.drops.hidden(&x)
    }

    fn mlp(&self, x_btc: &Tensor) -> Result<Tensor> {
        let x = self.up.forward(x_btc)?;
        let x = self.down.forward(&if self.exact_gelu { nn::gelu_erf(&x)? } else { nn::gelu(&x)? })?;
        self.drops.hidden(&x)
    }

    /// Returns the residual stream after the block.
    fn forward(&self, x_btc: &Tensor, rows: &Rows) -> Result<Tensor> {
        let documents = rows.documents.as_ref();
        let x_btc = nn::add(x_btc, &self.attention(&self.norm_1.forward(x_btc)?, documents)?)?;
        let mlp = self.mlp(&self.norm_2.forward(&x_btc)?)?;
        nn::add(&x_btc, &mlp)
    }
}

/// GPT-2: its blocks, and the layers around them.
pub struct Gpt2 {
    tokens: Embedding,
    positions: Embedding,
    pub(super) blocks: Vec<FsdpModule<Layer<Block>>>,
    norm: LayerNorm,
    pub(super) output: Output,
    pub(super) drops: ModelDropout,
}

impl Gpt2 {
    /// Creates the layers outside the blocks, whose names start with `prefix`.
    pub fn new(
        config: &Gpt2Config,
        prefix: &str,
        blocks: Vec<FsdpModule<Layer<Block>>>,
        drops: ModelDropout,
        head: Head,
        vb: VarBuilder,
    ) -> Result<Self> {
        let width = config.n_embd;
        let normal = Init::Randn { mean: 0., stdev: config.initializer_range };
        let tokens = vb.pp(format!("{prefix}wte")).get_with_hints((config.vocab_size, width), "weight", normal)?;
        let positions = vb.pp(format!("{prefix}wpe")).get_with_hints((config.n_positions, width), "weight", normal)?;
        let vocabulary = || Ok(Linear::new(tokens.clone(), None));
        Ok(Gpt2 {
            output: Output::new(head, (width, config.initializer_range), &vb, vocabulary)?,
            tokens: Embedding::new(tokens, width),
            positions: Embedding::new(positions, width),
            blocks,
            norm: nn::layer_norm(width, config.layer_norm_epsilon, vb.pp(format!("{prefix}ln_f")))?,
            drops,
        })
    }

    /// Returns logits `[B, T, V]` for ids `[B, T]`, or classes or embeddings of each row.
    pub fn forward(&self, ids_bt: &Tensor, rows: &Rows) -> Result<Tensor> {
        self.output.forward(self.hidden(ids_bt, rows)?, rows)
    }

    /// Returns normalized hidden states `[B, T, C]`.
    pub(super) fn hidden(&self, ids_bt: &Tensor, rows: &Rows) -> Result<Tensor> {
        rows.run(|| self.hidden_of_part(ids_bt, rows))
    }

    fn hidden_of_part(&self, ids_bt: &Tensor, rows: &Rows) -> Result<Tensor> {
        let positions = rows.position_ids(ids_bt.dim(1)?, ids_bt.device())?;
        let x_btc = self.tokens.forward(ids_bt)?.broadcast_add(&self.positions.forward(&positions)?)?;
        let x_btc = self.drops.embedding(&x_btc)?;
        let x_btc = self.blocks.iter().try_fold(x_btc, |x_btc, block| {
            block.call_with((x_btc, rows.clone()), |layer, input| layer.run(input, Block::forward))
        })?;
        self.norm.forward(&x_btc)
    }
}
