//! The tensors of each architecture: transformers' names, llama.cpp's names, and shapes.

use crate::gguf::config::{Architecture, Config};

/// A tensor, or one of each layer. `{}` in the names is the layer, and `{x}` the expert.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    /// Name in transformers.
    pub(super) from: &'static str,
    /// Name in llama.cpp.
    pub(super) to: &'static str,
    /// Shape in transformers, of one expert.
    pub(super) shape: &'static [Dim],
    pub(super) change: Change,
    /// Whether a model without this tensor is complete.
    pub(super) optional: bool,
}

/// Size of a dimension.
#[derive(Clone, Copy, Debug)]
pub(super) enum Dim {
    Vocabulary,
    Width,
    Positions,
    Segments,
    /// Queries of all heads.
    Queries,
    /// Keys, or values, of all heads.
    Keys,
    /// Queries, keys and values in one projection.
    Qkv,
    Head,
    Inner,
    /// Gate and up in one projection.
    GateUp,
    Experts,
    ExpertInner,
}

/// Difference between the tensors in transformers and in llama.cpp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    None,
    /// llama.cpp rotates neighbouring elements of a head, and transformers the two halves.
    RotatedQueries,
    RotatedKeys,
    /// Gemma's norms multiply by `1 + w`.
    PlusOne,
    /// GPT-2's matrices are [in, out].
    Transposed,
}

impl Dim {
    pub(super) fn size(self, config: &Config) -> usize {
        let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        match self {
            Dim::Vocabulary => config.vocabulary,
            Dim::Width => config.width,
            Dim::Positions => config.positions,
            Dim::Segments => config.segments,
            Dim::Queries => queries,
            Dim::Keys => keys,
            Dim::Qkv => queries + 2 * keys,
            Dim::Head => config.head_dim,
            Dim::Inner => config.inner,
            Dim::GateUp => 2 * config.inner,
            Dim::Experts => config.experts.map_or(0, |experts| experts.count),
            Dim::ExpertInner => config.experts.map_or(0, |experts| experts.inner),
        }
    }
}

impl Row {
    const fn new(from: &'static str, to: &'static str, shape: &'static [Dim]) -> Self {
        Row { from, to, shape, change: Change::None, optional: false }
    }

    const fn change(self, change: Change) -> Self {
        Row { change, ..self }
    }

    const fn optional(self) -> Self {
        Row { optional: true, ..self }
    }
}

use Change::{PlusOne, RotatedKeys, RotatedQueries, Transposed};
use Dim::{ExpertInner, Experts, GateUp, Head, Inner, Keys, Positions, Qkv, Queries, Segments, Vocabulary, Width};

/// Embedding and final norm of decoders.
const DECODER: &[Row] = &[
    Row::new("model.embed_tokens.weight", "token_embd.weight", &[Vocabulary, Width]),
    Row::new("model.norm.weight", "output_norm.weight", &[Width]),
];

const HEAD: &[Row] = &[Row::new("lm_head.weight", "output.weight", &[Vocabulary, Width])];

/// Norms before attention and MLP.
const NORMS: &[Row] = &[
    Row::new("model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight", &[Width]),
    Row::new("model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight", &[Width]),
];

const ATTENTION: &[Row] = &[
    Row::new("model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight", &[Queries, Width]),
    Row::new("model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight", &[Keys, Width]),
    Row::new("model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight", &[Keys, Width]),
    Row::new("model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight", &[Width, Queries]),
];

const ATTENTION_BIASES: &[Row] = &[
    Row::new("model.layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias", &[Queries]).optional(),
    Row::new("model.layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias", &[Keys]).optional(),
    Row::new("model.layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias", &[Keys]).optional(),
];

const LLAMA_ATTENTION: &[Row] = &[
    Row::new("model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight", &[Queries, Width])
        .change(RotatedQueries),
    Row::new("model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight", &[Keys, Width]).change(RotatedKeys),
    Row::new("model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight", &[Keys, Width]),
    Row::new("model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight", &[Width, Queries]),
    Row::new("model.layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias", &[Queries])
        .change(RotatedQueries)
        .optional(),
    Row::new("model.layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias", &[Keys]).change(RotatedKeys).optional(),
    Row::new("model.layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias", &[Keys]).optional(),
    Row::new("model.layers.{}.self_attn.o_proj.bias", "blk.{}.attn_output.bias", &[Width]).optional(),
];

/// Norms of queries and keys.
const HEAD_NORMS: &[Row] = &[
    Row::new("model.layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight", &[Head]),
    Row::new("model.layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight", &[Head]),
];

const MLP: &[Row] = &[
    Row::new("model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight", &[Inner, Width]),
    Row::new("model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight", &[Inner, Width]),
    Row::new("model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight", &[Width, Inner]),
];

const MLP_BIASES: &[Row] = &[
    Row::new("model.layers.{}.mlp.gate_proj.bias", "blk.{}.ffn_gate.bias", &[Inner]).optional(),
    Row::new("model.layers.{}.mlp.up_proj.bias", "blk.{}.ffn_up.bias", &[Inner]).optional(),
    Row::new("model.layers.{}.mlp.down_proj.bias", "blk.{}.ffn_down.bias", &[Width]).optional(),
];

const MIXTRAL_EXPERTS: &[Row] = &[
    Row::new("model.layers.{}.block_sparse_moe.gate.weight", "blk.{}.ffn_gate_inp.weight", &[Experts, Width]),
    Row::new(
        "model.layers.{}.block_sparse_moe.experts.{x}.w1.weight",
        "blk.{}.ffn_gate_exps.weight",
        &[ExpertInner, Width],
    ),
    Row::new(
        "model.layers.{}.block_sparse_moe.experts.{x}.w3.weight",
        "blk.{}.ffn_up_exps.weight",
        &[ExpertInner, Width],
    ),
    Row::new(
        "model.layers.{}.block_sparse_moe.experts.{x}.w2.weight",
        "blk.{}.ffn_down_exps.weight",
        &[Width, ExpertInner],
    ),
];

const QWEN_EXPERTS: &[Row] = &[
    Row::new("model.layers.{}.mlp.gate.weight", "blk.{}.ffn_gate_inp.weight", &[Experts, Width]),
    Row::new("model.layers.{}.mlp.experts.{x}.gate_proj.weight", "blk.{}.ffn_gate_exps.weight", &[ExpertInner, Width]),
    Row::new("model.layers.{}.mlp.experts.{x}.up_proj.weight", "blk.{}.ffn_up_exps.weight", &[ExpertInner, Width]),
    Row::new("model.layers.{}.mlp.experts.{x}.down_proj.weight", "blk.{}.ffn_down_exps.weight", &[Width, ExpertInner]),
];

/// Norms before and after attention and MLP.
const GEMMA_NORMS: &[Row] = &[
    Row::new("model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight", &[Width]).change(PlusOne),
    Row::new("model.layers.{}.post_attention_layernorm.weight", "blk.{}.post_attention_norm.weight", &[Width])
        .change(PlusOne),
    Row::new("model.layers.{}.pre_feedforward_layernorm.weight", "blk.{}.ffn_norm.weight", &[Width]).change(PlusOne),
    Row::new("model.layers.{}.post_feedforward_layernorm.weight", "blk.{}.post_ffw_norm.weight", &[Width])
        .change(PlusOne),
];

const GEMMA_HEAD_NORMS: &[Row] = &[
    Row::new("model.layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight", &[Head]).change(PlusOne),
    Row::new("model.layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight", &[Head]).change(PlusOne),
];

const GEMMA: &[Row] = &[
    Row::new("model.embed_tokens.weight", "token_embd.weight", &[Vocabulary, Width]),
    Row::new("model.norm.weight", "output_norm.weight", &[Width]).change(PlusOne),
];

const PHI3: &[Row] = &[
    Row::new("model.layers.{}.self_attn.qkv_proj.weight", "blk.{}.attn_qkv.weight", &[Qkv, Width]),
    Row::new("model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight", &[Width, Queries]),
    Row::new("model.layers.{}.mlp.gate_up_proj.weight", "blk.{}.ffn_up.weight", &[GateUp, Width]),
    Row::new("model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight", &[Width, Inner]),
];

const GPT2: &[Row] = &[
    Row::new("transformer.wte.weight", "token_embd.weight", &[Vocabulary, Width]),
    Row::new("transformer.wpe.weight", "position_embd.weight", &[Positions, Width]),
    Row::new("transformer.ln_f.weight", "output_norm.weight", &[Width]),
    Row::new("transformer.ln_f.bias", "output_norm.bias", &[Width]),
    Row::new("transformer.h.{}.ln_1.weight", "blk.{}.attn_norm.weight", &[Width]),
    Row::new("transformer.h.{}.ln_1.bias", "blk.{}.attn_norm.bias", &[Width]),
    Row::new("transformer.h.{}.attn.c_attn.weight", "blk.{}.attn_qkv.weight", &[Width, Qkv]).change(Transposed),
    Row::new("transformer.h.{}.attn.c_attn.bias", "blk.{}.attn_qkv.bias", &[Qkv]),
    Row::new("transformer.h.{}.attn.c_proj.weight", "blk.{}.attn_output.weight", &[Width, Width]).change(Transposed),
    Row::new("transformer.h.{}.attn.c_proj.bias", "blk.{}.attn_output.bias", &[Width]),
    Row::new("transformer.h.{}.ln_2.weight", "blk.{}.ffn_norm.weight", &[Width]),
    Row::new("transformer.h.{}.ln_2.bias", "blk.{}.ffn_norm.bias", &[Width]),
    Row::new("transformer.h.{}.mlp.c_fc.weight", "blk.{}.ffn_up.weight", &[Width, Inner]).change(Transposed),
    Row::new("transformer.h.{}.mlp.c_fc.bias", "blk.{}.ffn_up.bias", &[Inner]),
    Row::new("transformer.h.{}.mlp.c_proj.weight", "blk.{}.ffn_down.weight", &[Inner, Width]).change(Transposed),
    Row::new("transformer.h.{}.mlp.c_proj.bias", "blk.{}.ffn_down.bias", &[Width]),
];

const BERT: &[Row] = &[
    Row::new("bert.embeddings.word_embeddings.weight", "token_embd.weight", &[Vocabulary, Width]),
    Row::new("bert.embeddings.position_embeddings.weight", "position_embd.weight", &[Positions, Width]),
    Row::new("bert.embeddings.token_type_embeddings.weight", "token_types.weight", &[Segments, Width]),
    Row::new("bert.embeddings.LayerNorm.weight", "token_embd_norm.weight", &[Width]),
    Row::new("bert.embeddings.LayerNorm.bias", "token_embd_norm.bias", &[Width]),
    Row::new("bert.encoder.layer.{}.attention.self.query.weight", "blk.{}.attn_q.weight", &[Queries, Width]),
    Row::new("bert.encoder.layer.{}.attention.self.query.bias", "blk.{}.attn_q.bias", &[Queries]),
    Row::new("bert.encoder.layer.{}.attention.self.key.weight", "blk.{}.attn_k.weight", &[Keys, Width]),
    Row::new("bert.encoder.layer.{}.attention.self.key.bias", "blk.{}.attn_k.bias", &[Keys]),
    Row::new("bert.encoder.layer.{}.attention.self.value.weight", "blk.{}.attn_v.weight", &[Keys, Width]),
    Row::new("bert.encoder.layer.{}.attention.self.value.bias", "blk.{}.attn_v.bias", &[Keys]),
    Row::new("bert.encoder.layer.{}.attention.output.dense.weight", "blk.{}.attn_output.weight", &[Width, Queries]),
    Row::new("bert.encoder.layer.{}.attention.output.dense.bias", "blk.{}.attn_output.bias", &[Width]),
    Row::new("bert.encoder.layer.{}.attention.output.LayerNorm.weight", "blk.{}.attn_output_norm.weight", &[Width]),
    Row::new("bert.encoder.layer.{}.attention.output.LayerNorm.bias", "blk.{}.attn_output_norm.bias", &[Width]),
    Row::new("bert.encoder.layer.{}.intermediate.dense.weight", "blk.{}.ffn_up.weight", &[Inner, Width]),
    Row::new("bert.encoder.layer.{}.intermediate.dense.bias", "blk.{}.ffn_up.bias", &[Inner]),
    Row::new("bert.encoder.layer.{}.output.dense.weight", "blk.{}.ffn_down.weight", &[Width, Inner]),
    Row::new("bert.encoder.layer.{}.output.dense.bias", "blk.{}.ffn_down.bias", &[Width]),
    Row::new("bert.encoder.layer.{}.output.LayerNorm.weight", "blk.{}.layer_output_norm.weight", &[Width]),
    Row::new("bert.encoder.layer.{}.output.LayerNorm.bias", "blk.{}.layer_output_norm.bias", &[Width]),
];

/// Returns the tensors of a model: first the ones outside layers, then the ones of each layer. `is_tied` is whether the
/// head shares the embedding's weights.
pub(super) fn rows(config: &Config, is_tied: bool) -> Vec<Row> {
    let head = if is_tied { &[] } else { HEAD };
    let parts: &[&[Row]] = match config.architecture {
        Architecture::Llama if config.experts.is_some() => &[DECODER, head, NORMS, LLAMA_ATTENTION, MIXTRAL_EXPERTS],
        Architecture::Llama => &[DECODER, head, NORMS, LLAMA_ATTENTION, MLP, MLP_BIASES],
        Architecture::Qwen2 => &[DECODER, head, NORMS, ATTENTION, ATTENTION_BIASES, MLP],
        Architecture::Qwen3 => &[DECODER, head, NORMS, ATTENTION, ATTENTION_BIASES, HEAD_NORMS, MLP],
        Architecture::Qwen3Moe => &[DECODER, head, NORMS, ATTENTION, ATTENTION_BIASES, HEAD_NORMS, QWEN_EXPERTS],
        Architecture::Gemma2 => &[GEMMA, GEMMA_NORMS, ATTENTION, MLP],
        Architecture::Gemma3 => &[GEMMA, GEMMA_NORMS, ATTENTION, GEMMA_HEAD_NORMS, MLP],
        Architecture::Phi3 => &[DECODER, head, NORMS, PHI3],
        Architecture::Gpt2 => &[GPT2],
        Architecture::Bert => &[BERT],
    };
    parts.concat()
}

/// Returns the prefix of names that models without a head lack.
pub(super) fn prefix(architecture: Architecture) -> &'static str {
    match architecture {
        Architecture::Gpt2 => "transformer.",
        Architecture::Bert => "bert.",
        _ => "model.",
    }
}

/// Returns whether llama.cpp has no use for a tensor of transformers. The name has the prefix.
pub(super) fn is_ignored(name: &str, config: &Config, is_tied: bool) -> bool {
    match config.architecture {
        // Buffers of old files: the causal mask.
        Architecture::Gpt2 => {
            (is_tied && name == "lm_head.weight") || name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias")
        }
        // llama.cpp computes embeddings, without a head.
        Architecture::Bert => {
            name.starts_with("cls.") || name.starts_with("bert.pooler.") || name == "bert.embeddings.position_ids"
        }
        _ => name.ends_with(".rotary_emb.inv_freq") || (is_tied && name == "lm_head.weight"),
    }
}
