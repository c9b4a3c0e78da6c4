//! Llama, with the parameter names of Hugging Face's `LlamaForCausalLM`.
//!
//! In shapes, B is the batch, T the time, C the width of the residual stream, H the heads and D their width.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fsdp_candle::FsdpModule;
use fsdp_candle::nn::{self, Embedding, Linear, LoraConfig, RmsNorm, Rotary};

use super::config::LlamaConfig;
use super::layer::{Layer, Projection};

/// One block: attention and MLP, each behind a norm and beside a residual.
pub struct Block {
    input_norm: RmsNorm,
    query: Projection<Linear>,
    key: Linear,
    value: Projection<Linear>,
    output: Linear,
    post_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
    heads: usize,
    kv_heads: usize,
    scale: f64,
    rotary: Rotary,
}

fn linear(inputs: usize, outputs: usize, bias: bool, config: &LlamaConfig, vb: VarBuilder) -> Result<Linear> {
    let normal = Init::Randn { mean: 0., stdev: config.initializer_range };
    let weight = vb.get_with_hints((outputs, inputs), "weight", normal)?;
    let bias = bias.then(|| vb.get_with_hints(outputs, "bias", Init::Const(0.))).transpose()?;
    Ok(Linear::new(weight, bias))
}

impl Block {
    /// Asks `vb` for the block's parameters; the rotary tables are shared by all blocks.
    ///
    /// # Errors
    /// When a parameter can't be initialised.
    pub fn new(config: &LlamaConfig, rotary: &Rotary, lora: Option<LoraConfig>, vb: VarBuilder) -> Result<Self> {
        let (width, inner, head_dim) = (config.hidden_size, config.intermediate_size, config.head_dim());
        let (q_width, kv_width) = (config.num_attention_heads * head_dim, config.kv_heads() * head_dim);
        let (attention, mlp) = (vb.pp("self_attn"), vb.pp("mlp"));
        let (attention_bias, mlp_bias) = (config.attention_bias, config.mlp_bias);
        let adapted = |outputs: usize, vb: VarBuilder| {
            Projection::new(linear(width, outputs, attention_bias, config, vb.clone())?, width, outputs, lora, vb)
        };
        Ok(Block {
            input_norm: nn::rms_norm(width, config.rms_norm_eps, vb.pp("input_layernorm"))?,
            query: adapted(q_width, attention.pp("q_proj"))?,
            key: linear(width, kv_width, attention_bias, config, attention.pp("k_proj"))?,
            value: adapted(kv_width, attention.pp("v_proj"))?,
            output: linear(q_width, width, attention_bias, config, attention.pp("o_proj"))?,
            post_norm: nn::rms_norm(width, config.rms_norm_eps, vb.pp("post_attention_layernorm"))?,
            gate: linear(width, inner, mlp_bias, config, mlp.pp("gate_proj"))?,
            up: linear(width, inner, mlp_bias, config, mlp.pp("up_proj"))?,
            down: linear(inner, width, mlp_bias, config, mlp.pp("down_proj"))?,
            heads: config.num_attention_heads,
            kv_heads: config.kv_heads(),
            scale: 1. / (head_dim as f64).sqrt(),
            rotary: rotary.clone(),
        })
    }

    fn attention(&self, x_btc: &Tensor) -> Result<Tensor> {
        // Heads stay merged, [B, T, H * D]: the fused operations find them there without a transpose.
        let q = self.rotary.apply(&self.query.forward(x_btc)?, 0)?;
        let k = self.rotary.apply(&self.key.forward(x_btc)?, 0)?;
        let v = self.value.forward(x_btc)?;
        self.output.forward(&nn::causal_attention(&q, &k, &v, self.heads, self.kv_heads, self.scale)?)
    }

    fn mlp(&self, x_btc: &Tensor) -> Result<Tensor> {
        self.down.forward(&nn::silu_mul(&self.gate.forward(x_btc)?, &self.up.forward(x_btc)?)?)
    }
}

impl Module for Block {
    fn forward(&self, x_btc: &Tensor) -> Result<Tensor> {
        let x_btc = (x_btc + self.attention(&self.input_norm.forward(x_btc)?)?)?;
        let mlp = self.mlp(&self.post_norm.forward(&x_btc)?)?;
        x_btc + mlp
    }
}

/// The whole model around its blocks.
pub struct Llama {
    embedding: Embedding,
    blocks: Vec<FsdpModule<Layer<Block>>>,
    norm: RmsNorm,
    head: Linear,
}

impl Llama {
    /// Asks `vb` for the parameters outside the blocks.
    ///
    /// # Errors
    /// When a parameter can't be initialised.
    pub fn new(config: &LlamaConfig, blocks: Vec<FsdpModule<Layer<Block>>>, vb: VarBuilder) -> Result<Self> {
        let width = config.hidden_size;
        let normal = Init::Randn { mean: 0., stdev: config.initializer_range };
        let embedding = vb.pp("model.embed_tokens").get_with_hints((config.vocab_size, width), "weight", normal)?;
        let head = if config.tie_word_embeddings {
            Linear::new(embedding.clone(), None)
        } else {
            linear(width, config.vocab_size, false, config, vb.pp("lm_head"))?
        };
        Ok(Llama {
            embedding: Embedding::new(embedding, width),
            blocks,
            norm: nn::rms_norm(width, config.rms_norm_eps, vb.pp("model.norm"))?,
            head,
        })
    }

    /// The units, in forward order.
    pub fn blocks(&self) -> &[FsdpModule<Layer<Block>>] {
        &self.blocks
    }
}

impl Module for Llama {
    fn forward(&self, ids_bt: &Tensor) -> Result<Tensor> {
        let x_btc = self.embedding.forward(ids_bt)?;
        let x_btc = self.blocks.iter().try_fold(x_btc, |x_btc, block| block.forward(&x_btc))?;
        self.head.forward(&self.norm.forward(&x_btc)?)
    }
}
