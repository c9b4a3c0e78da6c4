//! Tiny configurations of the models, with the code that a training program needs for each. Compiled twice: with the
//! changed files (`super::models`) and with the original ones.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;

use super::super::data::{Batch, Forward, MELS, MOST, PIXELS, VOCABULARY};
use super::models::{
    bert, deepseek2, distilbert, gemma, llama, mistral, mixtral, phi3, qwen2, qwen3, t5, vit, whisper,
};

/// The model of one file.
pub(crate) trait Model: Sized {
    /// The file, in candle-transformers' `src/models`.
    const FILE: &'static str;
    /// The modules that are units.
    const UNITS: &'static [&'static str] = &["model.layers.*"];
    /// Whether it has experts, of which ranks use different ones.
    const EXPERTS: bool = false;

    fn load(vb: VarBuilder<'_>) -> Result<Self>;

    /// Logits or features. The last dimension is the loss's classes.
    fn forward(&mut self, batch: &Batch) -> Result<Tensor>;
}

/// All models as one type, so that the training code is compiled once.
pub(crate) fn boxed<M: Model + 'static>(vb: VarBuilder<'static>) -> Result<Forward> {
    let mut model = M::load(vb)?;
    Ok(Box::new(move |batch| model.forward(batch)))
}

/// Parses a configuration in the format of `config.json`.
macro_rules! config {
    ($($json:tt)+) => {
        serde_json::from_value(serde_json::json!($($json)+)).expect("a configuration of the file's own")
    };
}

/// The fields of all decoders' configurations.
macro_rules! decoder {
    ($($key:literal: $value:expr),* $(,)?) => {
        config!({
            "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": MOST, "rms_norm_eps": 1e-5,
            "rope_theta": 1e4, "hidden_act": "silu", $($key: $value),*
        })
    };
}

pub(crate) struct Llama(llama::Llama, llama::Config);

impl Model for Llama {
    const FILE: &'static str = "llama.rs";

    fn load(vb: VarBuilder<'_>) -> Result<Self> {
        let config: llama::LlamaConfig = decoder! {};
        let config = config.into_config(false);
        Ok(Llama(llama::Llama::load(vb, &config)?, config))
    }

    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        // The caller passes the cache: a disabled one.
        let mut cache = llama::Cache::new(false, DType::F32, &self.1, &Device::Cpu)?;
        self.0.forward(&batch.ids, 0, &mut cache)
    }
}

pub(crate) struct Mistral(mistral::Model);

impl Model for Mistral {
    const FILE: &'static str = "mistral.rs";

    fn load(vb: VarBuilder<'_>) -> Result<Self> {
        let config: mistral::Config = decoder! { "sliding_window": 3 };
        Ok(Mistral(mistral::Model::new(&config, vb)?))
    }

    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        self.0.clear_kv_cache();
        self.0.forward(&batch.ids, 0)
    }
}

pub(crate) struct Qwen2(qwen2::ModelForCausalLM);

impl Model for Qwen2 {
    const FILE: &'static str = "qwen2.rs";

    fn load(vb: VarBuilder<'_>) -> Result<Self> {
        let config: qwen2::Config = decoder! {
            "sliding_window": MOST, "max_window_layers": 4, "tie_word_embeddings": true, "use_sliding_window": false
        };
        Ok(Qwen2(qwen2::ModelForCausalLM::new(&config, vb)?))
    }

    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        self.0.clear_kv_cache();
        self.0.forward(&batch.ids, 0)
    }
}

pub(crate) struct Qwen3(qwen3::ModelForCausalLM);

impl Model for Qwen3 {
    const FILE: &'static str = "qwen3.rs";

    fn load(vb: VarBuilder<'_>) -> Result<Self> {
        let config: qwen3::Config = decoder! {
            "head_dim": 4, "attention_bias": false, "max_window_layers": 4, "tie_word_embeddings": false,
            "use_sliding_window": false
        };
        Ok(Qwen3(qwen3::ModelForCausalLM::new(&config, vb)?))
    }

    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        self.0.clear_kv_cache();
        self.0.forward(&batch.ids, 0)
    }
}

pub(crate) struct Gemma(gemma::Model);

impl Model for Gemma {
    const FILE: &'static str = "gemma.rs";

    fn load(vb: VarBuilder<'_>) -> Result<Self> {
        let config: gemma::Config = decoder! { "head_dim": 4, "attention_bias": false };
        Ok(Gemma(gemma::Model::new(false, &config, vb)?))
    }

    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        self.0.clear_kv_cache();
        self.0.forward(&batch.ids, 0)
    }
}

pub(crate) struct Phi3(phi3::Model);

impl Model for Phi3 {
    const FILE: &'static str = "phi3.rs";

    fn load(vb: VarBuilder<'_>) -> Result<Self> {
        let config: phi3::Config = decoder! {};
        Ok(Phi3(phi3::Model::new(&config, vb)?))
    }

    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        self.0.clear_kv_cache();
        self.0.forward(&batch.ids, 0)
    }
}

pub(crate) struct Mixtral(mixtral::Model);

impl Model for Mixtral {
    const FILE: &'static str = "mixtral.rs";
    const EXPERTS: bool = true;

    fn load(vb: VarBuilder<'_>) -> Result<Self> {
        let config: mixtral::Config = decoder! {
            "sliding_window": MOST, "num_experts_per_tok": 2, "num_local_experts": 4, "use_flash_attn": false
        };
        Ok(Mixtral(mixtral::Model::new(&config, vb)?))
    }

    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        // Its cache can't be cleared. A clone shares the weights but not the cache.
        self.0.clone().forward(&batch.ids, 0)
    }
}

pub(crate) struct DeepSeek2(deepseek2::DeepSeekV2);

impl Model for DeepSeek2 {
    const FILE: &'static str = "deepseek2.rs";
    const EXPERTS: bool = true;

    fn load(vb: VarBuilder<'_>) -> Result<Self> {
        let config: deepseek2::DeepSeekV2Config = decoder! {
            "moe_intermediate_size": 12, "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "first_k_dense_replace": 1, "attention_bias": false, "q_lora_rank": 8,
            "qk_rope_head_dim": 4, "kv_lora_rank": 8, "v_head_dim": 4, "qk_nope_head_dim": 4, "n_group": 1,
            "topk_group": 1
        };
        Ok(DeepSeek2(deepseek2::DeepSeekV2::new(&config, vb)?))
    }

    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        self.0.clear_kv_cache();
        self.0.forward(&batch.ids, 0)
    }
}

pub(crate) struct Bert(bert::BertForMaskedLM);

impl Model for Bert {
    const FILE: &'static str = "bert.rs";
    const UNITS: &'static [&'static str] = &["bert.encoder.layer.*"];

    fn load(vb: VarBuilder<'_>) -> Result<Self> {
        let config: bert::Config = config!({
            "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4,
            "intermediate_size": 24, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
            "max_position_embeddings": MOST, "type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-12,
            "pad_token_id": 0
        });
        Ok(Bert(bert::BertForMaskedLM::load(vb, &config)?))
    }

    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        self.0.forward(&batch.ids, &batch.ids.zeros_like()?, Some(&batch.there))
    }
}

pub(crate) struct DistilBert(distilbert::DistilBertForMaskedLM);

impl Model for DistilBert {
    const FILE: &'static str = "distilbert.rs";
    const UNITS: &'static [&'static str] = &["distilbert.transformer.layer.*"];

    fn load(vb: VarBuilder<'_>) -> Result<Self> {
        let config: distilbert::Config = config!({
            "vocab_size": VOCABULARY, "dim": 16, "n_layers": 4, "n_heads": 4, "hidden_dim": 24, "activation": "gelu",
            "max_position_embeddings": MOST, "initializer_range": 0.02, "pad_token_id": 0
        });
        Ok(DistilBert(distilbert::DistilBertForMaskedLM::load(vb, &config)?))
    }

    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        // This mask marks the positions to leave out.
        let out = batch.there.eq(0u32)?.unsqueeze(1)?.unsqueeze(1)?;
        self.0.forward(&batch.ids, &out)
    }
}

pub(crate) struct Vit(vit::Model);

impl Model for Vit {
    const FILE: &'static str = "vit.rs";
    const UNITS: &'static [&'static str] = &["vit.encoder.layer.*"];

    fn load(vb: VarBuilder<'_>) -> Result<Self> {
        let config: vit::Config = config!({
            "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 24,
            "hidden_act": "gelu", "layer_norm_eps": 1e-12, "image_size": PIXELS, "patch_size": 4, "num_channels": 3,
            "qkv_bias": true
        });
        Ok(Vit(vit::Model::new(&config, VOCABULARY, vb)?))
    }

    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        self.0.forward(&batch.images)
    }
}

pub(crate) struct T5(t5::T5ForConditionalGeneration);

impl Model for T5 {
    const FILE: &'static str = "t5.rs";
    const UNITS: &'static [&'static str] = &["encoder.block.*", "decoder.block.*"];

    fn load(vb: VarBuilder<'_>) -> Result<Self> {
        let config: t5::Config = config!({
            "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4,
            "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "dropout_rate": 0.1,
            "layer_norm_epsilon": 1e-6, "initializer_factor": 1.0, "feed_forward_proj": "gated-gelu",
            "is_encoder_decoder": true, "use_cache": false, "pad_token_id": 0, "eos_token_id": 1
        });
        Ok(T5(t5::T5ForConditionalGeneration::load(vb, &config)?))
    }

    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        self.0.forward(&batch.ids, &batch.others)
    }
}

pub(crate) struct Whisper(whisper::model::Whisper);

impl Model for Whisper {
    const FILE: &'static str = "whisper/model.rs";
    const UNITS: &'static [&'static str] = &["model.encoder.layers.*", "model.decoder.layers.*"];

    fn load(vb: VarBuilder<'_>) -> Result<Self> {
        let config: whisper::Config = config!({
            "num_mel_bins": MELS, "max_source_positions": MOST, "d_model": 16, "encoder_attention_heads": 4,
            "encoder_layers": 2, "vocab_size": VOCABULARY, "max_target_positions": MOST, "decoder_attention_heads": 4,
            "decoder_layers": 2
        });
        Ok(Whisper(whisper::model::Whisper::load(&vb, config)?))
    }

    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        let heard = self.0.encoder.forward(&batch.sounds, true)?;
        let said = self.0.decoder.forward(&batch.ids, &heard, true)?;
        self.0.decoder.final_linear(&said)
    }
}
