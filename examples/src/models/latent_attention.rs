//! Multi-head latent attention (DeepSeek-V2, 2024, arXiv:2405.04434, section 2.1): keys and values are products with a
//! narrow latent tensor, and the rotated part of the keys is the same in all heads.
//!
//! Training computes keys and values whole. Heads of queries and keys have plain elements, then rotated ones.

use candle_core::{D, Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::nn::{AttentionOptions, Documents, Linear};

use crate::models::config::DecoderConfig;
use crate::models::config::decoder::Norms;
use crate::models::config::latent::LatentConfig;
use crate::models::layers::{ModelDropout, linear};
use crate::models::norm::Norm;
use crate::models::parallel::TensorParallel;
use crate::models::rotary::{RotaryEmbedding, RotaryTables};

/// Epsilon of the latent norms, whatever that of the others is.
const EPS: f64 = 1e-6;

pub(super) struct LatentAttention {
    query: Query,
    /// Latent keys and values, then the rotated elements of the keys.
    key_value: Linear,
    key_value_norm: Norm,
    /// For each head the plain elements of the keys, then the values.
    key_value_heads: Linear,
    output: Linear,
    rotary: RotaryEmbedding,
    options: AttentionOptions,
    sizes: LatentConfig,
    drops: ModelDropout,
    parallel: Option<TensorParallel>,
}

/// The projection to queries.
enum Query {
    Whole(Linear),
    Latent { down: Linear, norm: Norm, up: Linear },
}

impl LatentAttention {
    pub(super) fn new(
        config: &DecoderConfig,
        sizes: LatentConfig,
        layer: usize,
        rotary: &RotaryTables,
        drops: &ModelDropout,
        parallel: Option<&TensorParallel>,
        vb: VarBuilder,
    ) -> Result<Self> {
        let (width, heads) = (config.width, config.heads);
        let LatentConfig { rank, plain, rotated, value, .. } = sizes;
        let make =
            |name: &str, inputs, outputs, bias| linear(inputs, outputs, bias, config.initializer_range, vb.pp(name));
        let norm = |name: &str, width| Norm::new(width, Norms { eps: EPS, ..config.norms }, vb.pp(name));
        let (bias, queries) = (config.biases.qkv, heads * sizes.head_dim());
        let query = match sizes.query_rank {
            None => Query::Whole(make("q_proj", width, queries, false)?),
            Some(rank) => Query::Latent {
                down: make("q_a_proj", width, rank, bias)?,
                norm: norm("q_a_layernorm", rank)?,
                up: make("q_b_proj", rank, queries, false)?,
            },
        };
        Ok(LatentAttention {
            query,
            key_value: make("kv_a_proj_with_mqa", width, rank + rotated, bias)?,
            key_value_norm: norm("kv_a_layernorm", rank)?,
            key_value_heads: make("kv_b_proj", rank, heads * (plain + value), false)?,
            output: make("o_proj", heads * value, width, config.biases.output)?,
            rotary: rotary.of(config.is_local(layer)).clone(),
            options: config.attention(layer),
            sizes,
            drops: drops.clone(),
            parallel: parallel.cloned(),
        })
    }

    pub(super) fn forward(&self, x_btc: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        let LatentConfig { rank, plain, rotated, value, .. } = self.sizes;
        let q = match &self.query {
            Query::Whole(layer) => layer.forward(x_btc)?,
            Query::Latent { down, norm, up } => up.forward(&norm.forward(&down.forward(x_btc)?)?)?,
        };
        let (batch, steps, width) = q.dims3()?;
        // A tensor-parallel rank has a part of the heads.
        let heads = width / (plain + rotated);
        let of_heads = |x: &Tensor| x.reshape((batch, steps, heads, ()));

        let latent = self.key_value.forward(x_btc)?;
        let of_kv = self.key_value_norm.forward(&latent.narrow(2, 0, rank)?.contiguous()?)?;
        let of_kv = of_heads(&self.key_value_heads.forward(&of_kv)?)?;
        let shared_key = latent.narrow(2, rank, rotated)?.contiguous()?;
        let shared_key = match &self.parallel {
            Some(parallel) => parallel.for_own_heads(&shared_key)?,
            None => shared_key,
        };
        let shared_key = self.rotate(&shared_key.unsqueeze(2)?, documents)?;
        let shared_key = shared_key.broadcast_as((batch, steps, heads, rotated))?;

        let q = of_heads(&q)?;
        let rotated_q = self.rotate(&q.narrow(3, plain, rotated)?.contiguous()?, documents)?;
        let q = Tensor::cat(&[&q.narrow(3, 0, plain)?, &rotated_q], D::Minus1)?;
        let k = Tensor::cat(&[&of_kv.narrow(3, 0, plain)?, &shared_key], D::Minus1)?;
        let v = of_kv.narrow(3, plain, value)?;

        // The fused operation has heads of one width. Zeros change no score.
        let widest = value.max(plain + rotated);
        let padded = |x: Tensor| {
            let missing = widest - x.dim(3)?;
            if missing > 0 { x.pad_with_zeros(3, 0, missing) } else { x.contiguous() }
        };
        let (q, k, v) = (padded(q)?, padded(k)?, padded(v)?);
        let out = self.drops.attend(&self.options, [&q, &k, &v], (heads, heads), documents, None)?;
        let out = of_heads(&out)?.narrow(3, 0, value)?.contiguous()?.reshape((batch, steps, heads * value))?;
        self.output.forward(&out)
    }

    /// Rotates the elements of `x`, `[B, T, H, rotated]`.
    fn rotate(&self, x: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        if !self.sizes.interleaved {
            return self.rotary.apply(x, documents);
        }
        // The same order of queries and keys changes no score.
        let (batch, steps, heads, rotated) = x.dims4()?;
        let halves = x.reshape((batch, steps, heads, rotated / 2, 2))?.transpose(3, 4)?.contiguous()?;
        self.rotary.apply(&halves.reshape((batch, steps, heads, rotated))?, documents)
    }
}
