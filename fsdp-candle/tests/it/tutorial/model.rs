//! The model of the tutorial's example.

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::nn;

pub(super) struct ModelArgs {
    pub(super) n_layers: usize,
    pub(super) vocab_size: usize,
    pub(super) max_seq_len: usize,
    pub(super) dim: usize,
    pub(super) n_heads: usize,
}

impl Default for ModelArgs {
    fn default() -> Self {
        ModelArgs { n_layers: 3, vocab_size: 9, max_seq_len: 8, dim: 8, n_heads: 2 }
    }
}

pub(super) struct TransformerBlock {
    attention_norm: nn::LayerNorm,
    qkv: nn::Linear,
    out: nn::Linear,
    ffn_norm: nn::LayerNorm,
    up: nn::Linear,
    down: nn::Linear,
    n_heads: usize,
    scale: f64,
}

impl TransformerBlock {
    pub(super) fn new(args: &ModelArgs, vb: VarBuilder) -> Result<Self> {
        let dim = args.dim;
        Ok(TransformerBlock {
            attention_norm: nn::layer_norm(dim, 1e-5, vb.pp("attention_norm"))?,
            qkv: nn::linear_no_bias(dim, 3 * dim, vb.pp("attention.qkv"))?,
            out: nn::linear_no_bias(dim, dim, vb.pp("attention.out"))?,
            ffn_norm: nn::layer_norm(dim, 1e-5, vb.pp("ffn_norm"))?,
            up: nn::linear(dim, 4 * dim, vb.pp("feed_forward.up"))?,
            down: nn::linear(4 * dim, dim, vb.pp("feed_forward.down"))?,
            n_heads: args.n_heads,
            scale: ((dim / args.n_heads) as f64).powf(-0.5),
        })
    }
}

impl Module for TransformerBlock {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let qkv = self.qkv.forward(&self.attention_norm.forward(x)?)?;
        let attended = nn::causal_attention_qkv(&qkv, self.n_heads, self.n_heads, self.scale)?;
        let h = (x + self.out.forward(&attended)?)?;
        &h + self.down.forward(&nn::gelu(&self.up.forward(&self.ffn_norm.forward(&h)?)?)?)?
    }
}

pub(super) struct Transformer<B> {
    tok_embeddings: nn::Embedding,
    pos_embeddings: nn::Embedding,
    pub(super) layers: Vec<B>,
    norm: nn::LayerNorm,
    output: nn::Linear,
}

impl<B: Module> Transformer<B> {
    pub(super) fn new(args: &ModelArgs, layers: Vec<B>, vb: VarBuilder) -> Result<Self> {
        Ok(Transformer {
            tok_embeddings: nn::embedding(args.vocab_size, args.dim, vb.pp("tok_embeddings"))?,
            pos_embeddings: nn::embedding(args.max_seq_len, args.dim, vb.pp("pos_embeddings"))?,
            layers,
            norm: nn::layer_norm(args.dim, 1e-5, vb.pp("norm"))?,
            output: nn::linear_no_bias(args.dim, args.vocab_size, vb.pp("output"))?,
        })
    }
}

impl<B: Module> Module for Transformer<B> {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let positions = Tensor::arange(0u32, tokens.dim(1)? as u32, tokens.device())?;
        let positions = self.pos_embeddings.forward(&positions)?;
        let h = self.tok_embeddings.forward(tokens)?.broadcast_add(&positions)?;
        let h = self.layers.iter().try_fold(h, |h, layer| layer.forward(&h))?;
        self.output.forward(&self.norm.forward(&h)?)
    }
}
