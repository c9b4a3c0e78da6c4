//! Decoder families, which share one implementation: the defaults of absent keys in each family's `config.json`, and the
//! meaning of keys in which families differ. transformers' configuration classes and models define both.

use fsdp_ckpt::hf::ExpertNames;

use crate::models::config::fields::Fields;

/// A family of decoders.
#[derive(Clone, Copy, Debug)]
pub(super) struct Family {
    /// `model_type`.
    pub(super) name: &'static str,
    /// Default of `num_key_value_heads`; `None` is `num_attention_heads`.
    pub(super) kv_heads: Option<usize>,
    /// Default of `max_position_embeddings`.
    pub(super) positions: usize,
    /// Default of `head_dim`; `None` is `hidden_size / num_attention_heads`.
    pub(super) head_dim: Option<usize>,
    /// Default of `rms_norm_eps`.
    pub(super) eps: f64,
    /// Default of `rope_theta`.
    pub(super) theta: f64,
    /// Default of `rope_local_base_freq`, for families with a rotary embedding of their own in sliding-window layers.
    pub(super) local_theta: Option<f64>,
    /// Whether a rotary embedding without parameters is YaRN's, as gpt-oss has it.
    pub(super) is_yarn: bool,
    /// Whether each head has a score that no key has.
    pub(super) has_sinks: bool,
    /// Default of `pad_token_id`.
    pub(super) padding: Option<i64>,
    /// Whether the model is a Gemma: norms with weights `1 + w` before and after attention and MLP, scaled embeddings,
    /// the keys `hidden_activation` and `query_pre_attn_scalar`, and `tie_word_embeddings` by default.
    pub(super) is_gemma: bool,
    /// Whether each head's queries and keys have norms.
    pub(super) has_head_norms: bool,
    pub(super) biases: BiasKeys,
    /// Whether queries, keys and values are one projection, as are gate and up. Heads may be rotated in part then, and
    /// LongRoPE may have its names from older files.
    pub(super) is_phi3: bool,
    pub(super) caps: CapKeys,
    pub(super) window: WindowKeys,
    pub(super) layers: WindowLayers,
    pub(super) latent: Option<LatentKeys>,
    /// Whether files have `num_nextn_predict_layers` more layers, which predict further tokens.
    pub(super) predicts_more: bool,
    pub(super) experts: Option<ExpertKeys>,
}

/// Keys of latent attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct LatentKeys {
    /// Whether `rope_interleave` chooses the pairs that are rotated. Else they are neighbours.
    pub(super) chooses_pairs: bool,
}

/// Projections with biases, and the keys that add them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BiasKeys {
    /// No projection has a bias.
    None,
    /// `attention_bias` adds biases to all projections of attention.
    Attention,
    /// The same, and they have biases without it.
    UsuallyAttention,
    /// `attention_bias` as above, and `mlp_bias` adds biases to the MLP.
    AttentionAndMlp,
    /// Queries, keys and values have biases.
    AlwaysQkv,
}

/// Meaning of `attn_logit_softcapping` and `final_logit_softcapping`.
#[derive(Clone, Copy, Debug)]
pub(super) enum CapKeys {
    /// No effect.
    Unused,
    /// Caps of attention scores and logits, with their defaults.
    Both { scores: f64, logits: f64 },
    /// The cap of logits. transformers ignores the other.
    Logits,
}

/// Meaning of `sliding_window`.
#[derive(Clone, Copy, Debug)]
pub(super) enum WindowKeys {
    /// No effect.
    Unused,
    /// The window, with its default.
    Window(Option<usize>),
    /// The window, with its default, if `use_sliding_window` is true.
    Switched(usize),
}

/// Layers that have the window.
#[derive(Clone, Copy, Debug)]
pub(super) enum WindowLayers {
    All,
    /// The layers in `layer_types`, or the layers from `max_window_layers` on, with its default.
    ListedOrFrom(usize),
    /// The layers in `layer_types`, or all layers except every N-th.
    ListedOrAllBut(usize),
    /// The same, where `sliding_window_pattern` replaces N.
    ListedOrPattern(usize),
}

/// Keys of experts, and their defaults.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertKeys {
    /// Names of the experts' parameters.
    pub(super) names: ExpertNames,
    /// Returns the number of experts.
    pub(super) count: fn(&Fields) -> usize,
    /// Default of `num_experts_per_tok`, if it has one.
    pub(super) per_token: Option<usize>,
    /// Name of the width inside an expert.
    pub(super) width_name: &'static str,
    /// Returns the width inside an expert, if it is known.
    pub(super) width: fn(&Fields) -> Option<usize>,
    /// Default of `n_shared_experts`, in families that have shared experts.
    pub(super) shared: Option<usize>,
    pub(super) router: RouterKeys,
    /// Whether `output_router_logits` adds the load-balancing loss.
    pub(super) has_auxiliary: bool,
    pub(super) layers: ExpertLayers,
    /// Whether routers and experts have biases, and `swiglu_alpha` and `swiglu_limit` limit the experts' projections.
    pub(super) is_gpt_oss: bool,
}

/// Keys of a router.
#[derive(Clone, Copy, Debug)]
pub(super) enum RouterKeys {
    /// A softmax. Whether the weights of the chosen experts sum up to 1; `None` is `norm_topk_prob`.
    Softmax { renormalized: Option<bool> },
    /// A softmax in f32, with `routed_scaling_factor`. `topk_method` may choose among groups.
    DeepseekV2,
    /// A sigmoid in f32 with biases and groups, `norm_topk_prob` and `routed_scaling_factor`.
    DeepseekV3,
}

/// Layers with experts.
#[derive(Clone, Copy, Debug)]
pub(super) enum ExpertLayers {
    All,
    /// `decoder_sparse_step` and `mlp_only_layers` choose them.
    Sparse,
    /// The layers from `first_k_dense_replace` on, with its default.
    From(usize),
}

const LLAMA: Family = Family {
    name: "llama",
    kv_heads: None,
    positions: 2048,
    head_dim: None,
    eps: 1e-6,
    theta: 1e4,
    local_theta: None,
    is_yarn: false,
    has_sinks: false,
    padding: None,
    is_gemma: false,
    has_head_norms: false,
    biases: BiasKeys::AttentionAndMlp,
    is_phi3: false,
    caps: CapKeys::Unused,
    window: WindowKeys::Unused,
    layers: WindowLayers::All,
    latent: None,
    predicts_more: false,
    experts: None,
};

const MISTRAL: Family = Family {
    name: "mistral",
    kv_heads: Some(8),
    positions: 131_072,
    biases: BiasKeys::None,
    window: WindowKeys::Window(Some(4096)),
    ..LLAMA
};

const QWEN2: Family = Family {
    name: "qwen2",
    kv_heads: Some(32),
    positions: 32768,
    biases: BiasKeys::AlwaysQkv,
    window: WindowKeys::Switched(4096),
    layers: WindowLayers::ListedOrFrom(28),
    ..LLAMA
};

const QWEN3: Family =
    Family { name: "qwen3", head_dim: Some(128), has_head_norms: true, biases: BiasKeys::Attention, ..QWEN2 };

const GEMMA2: Family = Family {
    name: "gemma2",
    kv_heads: Some(4),
    positions: 8192,
    head_dim: Some(256),
    padding: Some(0),
    is_gemma: true,
    biases: BiasKeys::Attention,
    caps: CapKeys::Both { scores: 50., logits: 30. },
    window: WindowKeys::Window(Some(4096)),
    layers: WindowLayers::ListedOrAllBut(2),
    ..LLAMA
};

const GEMMA3: Family = Family {
    name: "gemma3_text",
    positions: 131_072,
    theta: 1e6,
    local_theta: Some(1e4),
    has_head_norms: true,
    caps: CapKeys::Logits,
    layers: WindowLayers::ListedOrPattern(6),
    ..GEMMA2
};

const PHI3: Family = Family {
    name: "phi3",
    positions: 4096,
    eps: 1e-5,
    padding: Some(32000),
    biases: BiasKeys::None,
    is_phi3: true,
    window: WindowKeys::Window(None),
    ..LLAMA
};

/// Keys of experts without more keys than Mixtral's.
const EXPERTS: ExpertKeys = ExpertKeys {
    names: ExpertNames::QWEN3_MOE,
    count: |fields| fields.num_experts.or(fields.num_local_experts).unwrap_or(8),
    per_token: None,
    width_name: "moe_intermediate_size",
    width: |fields| fields.moe_intermediate_size,
    shared: None,
    router: RouterKeys::Softmax { renormalized: Some(true) },
    has_auxiliary: true,
    layers: ExpertLayers::All,
    is_gpt_oss: false,
};

// Where a file has the names of both families for the number of experts, transformers takes the other family's.
const MIXTRAL: Family = Family {
    name: "mixtral",
    eps: 1e-5,
    theta: 1e6,
    window: WindowKeys::Window(None),
    experts: Some(ExpertKeys {
        names: ExpertNames::MIXTRAL,
        per_token: Some(2),
        width_name: "intermediate_size",
        width: |fields| Some(fields.intermediate_size),
        ..EXPERTS
    }),
    ..MISTRAL
};

const QWEN3_MOE: Family = Family {
    name: "qwen3_moe",
    kv_heads: Some(4),
    head_dim: None,
    layers: WindowLayers::All,
    experts: Some(ExpertKeys {
        count: |fields| fields.num_local_experts.or(fields.num_experts).unwrap_or(128),
        per_token: Some(8),
        router: RouterKeys::Softmax { renormalized: None },
        layers: ExpertLayers::Sparse,
        ..EXPERTS
    }),
    ..QWEN3
};

// `num_experts` and `num_local_experts` are transformers' other names of `n_routed_experts`.
const DEEPSEEK_V2: Family = Family {
    name: "deepseek_v2",
    latent: Some(LatentKeys { chooses_pairs: false }),
    experts: Some(ExpertKeys {
        count: |fields| fields.num_experts.or(fields.n_routed_experts).unwrap_or(64),
        width: |fields| Some(fields.moe_intermediate_size.unwrap_or(1407)),
        shared: Some(2),
        router: RouterKeys::DeepseekV2,
        has_auxiliary: false,
        layers: ExpertLayers::From(0),
        ..EXPERTS
    }),
    ..LLAMA
};

const DEEPSEEK_V3: Family = Family {
    name: "deepseek_v3",
    kv_heads: Some(128),
    positions: 4096,
    biases: BiasKeys::Attention,
    latent: Some(LatentKeys { chooses_pairs: true }),
    predicts_more: true,
    experts: Some(ExpertKeys {
        count: |fields| fields.num_local_experts.or(fields.n_routed_experts).unwrap_or(256),
        per_token: Some(8),
        width: |fields| Some(fields.moe_intermediate_size.unwrap_or(2048)),
        shared: Some(1),
        router: RouterKeys::DeepseekV3,
        has_auxiliary: false,
        layers: ExpertLayers::From(3),
        ..EXPERTS
    }),
    ..LLAMA
};

// transformers takes `num_experts` where a file has both names.
const GPT_OSS: Family = Family {
    name: "gpt_oss",
    kv_heads: Some(8),
    positions: 131_072,
    head_dim: Some(64),
    eps: 1e-5,
    theta: 1.5e5,
    is_yarn: true,
    has_sinks: true,
    biases: BiasKeys::UsuallyAttention,
    window: WindowKeys::Window(Some(128)),
    layers: WindowLayers::ListedOrAllBut(2),
    experts: Some(ExpertKeys {
        names: ExpertNames::GPT_OSS,
        count: |fields| fields.num_experts.or(fields.num_local_experts).unwrap_or(128),
        per_token: Some(4),
        width_name: "intermediate_size",
        width: |fields| Some(fields.intermediate_size),
        is_gpt_oss: true,
        ..EXPERTS
    }),
    ..LLAMA
};

/// All families.
pub(super) const FAMILIES: [Family; 12] =
    [LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, MIXTRAL, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS];
