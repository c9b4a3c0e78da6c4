//! Attention of decoders, with separate or fused projections.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fsdp_candle::nn::{AttentionOptions, Documents, Linear};

use crate::models::config::DecoderConfig;
use crate::models::layers::{ModelDropout, linear};
use crate::models::norm::Norm;
use crate::models::parallel::TensorParallel;
use crate::models::rotary::{RotaryEmbedding, RotaryTables};

pub(super) struct Attention {
    qkv: QkvProjection,
    head_norms: Option<[Norm; 2]>,
    output: Linear,
    /// The sink of each head of the model.
    sinks: Option<Tensor>,
    parallel: Option<TensorParallel>,
    rotary: RotaryEmbedding,
    options: AttentionOptions,
    head_dim: usize,
    drops: ModelDropout,
}

/// Projections to queries, keys and values.
enum QkvProjection {
    Separate([Linear; 3]),
    /// One projection, with the widths of queries and of keys.
    Fused(Linear, [usize; 2]),
}

impl Attention {
    pub(super) fn new(
        config: &DecoderConfig,
        layer: usize,
        rotary: &RotaryTables,
        drops: &ModelDropout,
        parallel: Option<&TensorParallel>,
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
        let normal = Init::Randn { mean: 0., stdev: config.initializer_range };
        let sinks = config.has_sinks.then(|| vb.get_with_hints(config.heads, "sinks", normal)).transpose()?;
        Ok(Attention {
            qkv,
            head_norms,
            output: linear(q_width, width, config.biases.output, config.initializer_range, vb.pp("o_proj"))?,
            sinks,
            parallel: parallel.cloned(),
            rotary: rotary.of(config.is_local(layer)).clone(),
            options: config.attention(layer),
            head_dim,
            drops: drops.clone(),
        })
    }

    pub(super) fn forward(&self, x_btc: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        // Heads stay merged, [B, T, H * D], as the fused operations expect. No transpose is needed.
        let (mut q, mut k, v) = match &self.qkv {
            QkvProjection::Separate([q, k, v]) => (q.forward(x_btc)?, k.forward(x_btc)?, v.forward(x_btc)?),
            QkvProjection::Fused(qkv, [q, kv]) => {
                let qkv = qkv.forward(x_btc)?;
                (qkv.narrow(2, 0, *q)?, qkv.narrow(2, *q, *kv)?, qkv.narrow(2, q + kv, *kv)?)
            }
        };
        // A tensor-parallel rank has a part of the heads.
        let (heads, kv_heads) = (q.dim(2)? / self.head_dim, k.dim(2)? / self.head_dim);
        if let Some([of_q, of_k]) = &self.head_norms {
            let (batch, steps, _) = q.dims3()?;
            q = of_q.forward(&q.reshape((batch, steps, heads, self.head_dim))?)?;
            k = of_k.forward(&k.reshape((batch, steps, kv_heads, self.head_dim))?)?;
        }
        let (q, k) = (self.rotary.apply(&q, documents)?, self.rotary.apply(&k, documents)?);
        let sinks = match (&self.sinks, &self.parallel) {
            (Some(sinks), Some(parallel)) => Some(parallel.own_heads(sinks)?),
            (sinks, _) => sinks.clone(),
        };
        let attended = self.drops.attend(&self.options, [&q, &k, &v], (heads, kv_heads), documents, sinks.as_ref())?;
        self.output.forward(&attended)
    }
}
