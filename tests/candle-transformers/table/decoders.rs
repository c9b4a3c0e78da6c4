//! Models that predict the next token.

use candle_core::{DType, Device};

use super::models::*;
use super::{Case, Forward, MOST, VOCABULARY, case, config, decoder};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case!("llama.rs"; |vb| {
            let config: llama::LlamaConfig = decoder! {};
            let config = config.into_config(false);
            (llama::Llama::load(vb, &config)?, config)
        }, |m, b| {
            let mut cache = llama::Cache::new(false, DType::F32, &m.1, &Device::Cpu)?;
            m.0.forward(&b.ids, 0, &mut cache)
        }),
        case!("llama2_c.rs"; |vb| {
            let config = llama2_c::Config {
                dim: 16, hidden_dim: 24, n_layers: 2, n_heads: 4, n_kv_heads: 2, vocab_size: VOCABULARY, seq_len: MOST,
                norm_eps: 1e-5,
            };
            // Without tables in a checkpoint, the cache computes them.
            let none = candle_nn::VarBuilder::from_tensors(Default::default(), DType::F32, &Device::Cpu);
            let cache = llama2_c::Cache::new(false, &config, none)?;
            (llama2_c::Llama::load(vb, config)?, cache)
        }, |m, b| m.0.forward(&b.ids, 0, &mut m.1.clone())),
        case!("mistral.rs"; |vb| mistral::Model::new(&decoder! { "sliding_window": 3 }, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids, 0)
        }),
        case!("mixtral.rs"; experts |vb| mixtral::Model::new(&decoder! {
            "sliding_window": MOST, "num_experts_per_tok": 2, "num_local_experts": 4, "use_flash_attn": false
        }, vb)?, |m, b| m.clone().forward(&b.ids, 0)),
        case!("qwen2.rs"; |vb| qwen2::ModelForCausalLM::new(&decoder! {
            "sliding_window": MOST, "max_window_layers": 4, "tie_word_embeddings": true, "use_sliding_window": false
        }, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids, 0)
        }),
        case!("qwen3.rs"; |vb| qwen3::ModelForCausalLM::new(&decoder! {
            "head_dim": 4, "max_window_layers": 4, "use_sliding_window": false
        }, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids, 0)
        }),
        case!("qwen2_moe.rs"; experts |vb| qwen2_moe::Model::new(&decoder! {
            "sliding_window": MOST, "max_window_layers": 4, "use_sliding_window": false, "decoder_sparse_step": 1,
            "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12, "num_experts_per_tok": 2,
            "num_experts": 4, "norm_topk_prob": true
        }, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids, 0)
        }),
        case!("qwen3_moe.rs"; experts |vb| qwen3_moe::ModelForCausalLM::new(&decoder! {
            "head_dim": 4, "max_window_layers": 4, "use_sliding_window": false, "decoder_sparse_step": 1,
            "moe_intermediate_size": 12, "num_experts_per_tok": 2, "num_experts": 4, "norm_topk_prob": true
        }, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids, 0)
        }),
        case!("gemma.rs"; |vb| gemma::Model::new(false, &decoder! { "head_dim": 4 }, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids, 0)
        }),
        case!("gemma2.rs"; |vb| gemma2::Model::new(false, &decoder! {
            "head_dim": 4, "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.,
            "attn_logit_softcapping": 50., "query_pre_attn_scalar": 4, "sliding_window": 4
        }, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids, 0)
        }),
        case!("gemma3.rs"; |vb| gemma3::Model::new(false, &decoder! {
            "head_dim": 4, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 4, "sliding_window": 4,
            "sliding_window_pattern": 2, "rope_local_base_freq": 1e4
        }, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids, 0)
        }),
        case!("gemma4/text.rs"; |vb| gemma4::text::TextModel::new(&decoder! {
            "head_dim": 4, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 4, "sliding_window": 4,
            "global_head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]
        }, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids, 0)
        }),
        case!("phi.rs"; |vb| phi::Model::new(&decoder! {
            "layer_norm_eps": 1e-5, "hidden_act": "gelu", "partial_rotary_factor": 0.5, "qk_layernorm": false
        }, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids)
        }),
        case!("phi3.rs"; |vb| phi3::Model::new(&decoder! {}, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids, 0)
        }),
        case!("mixformer.rs"; |vb| mixformer::MixFormerSequentialForCausalLM::new(&config!({
            "vocab_size": VOCABULARY, "n_positions": MOST, "n_embd": 16, "n_layer": 2, "n_inner": 24, "n_head": 4,
            "rotary_dim": 4, "activation_function": "gelu", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": false,
            "pad_vocab_size_multiple": 8
        }), vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids)
        }),
        case!("falcon.rs"; rows |vb| falcon::Falcon::load(vb, config!({
            "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
            "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "use_cache": false, "bos_token_id": 1,
            "eos_token_id": 2, "hidden_dropout": 0., "attention_dropout": 0., "alibi": false,
            "new_decoder_architecture": false, "multi_query": true, "parallel_attn": true, "bias": false
        }))?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids)
        }),
        case!("bigcode.rs"; |vb| bigcode::GPTBigCode::load(vb, bigcode::Config {
            vocab_size: VOCABULARY, max_position_embeddings: MOST, num_hidden_layers: 2, hidden_size: 16,
            layer_norm_epsilon: 1e-5, n_inner: Some(24), num_attention_heads: 4, multi_query: true, use_cache: false,
        })?, |m, b| m.forward(&b.ids, 0)),
        case!("starcoder2.rs"; |vb| starcoder2::Model::new(&decoder! {
            "norm_epsilon": 1e-5, "use_bias": true, "hidden_act": "gelu_pytorch_tanh"
        }, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids, 0)
        }),
        case!("stable_lm.rs"; |vb| stable_lm::Model::new(&decoder! {
            "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_cache": false
        }, vb)?, |m, b| m.forward(&b.ids, 0)),
        case!("olmo.rs"; |vb| olmo::Model::new(&decoder! {}, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids, 0)
        }),
        case!("olmo2.rs"; |vb| olmo2::Model::new(&decoder! {}, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids, 0)
        }),
        case!("granite.rs"; |vb| {
            let config: granite::GraniteConfig = decoder! {};
            let config = config.into_config(false);
            (granite::Granite::load(vb, &config)?, config)
        }, |m, b| {
            let mut cache = granite::Cache::new(false, DType::F32, &m.1, &Device::Cpu)?;
            m.0.forward(&b.ids, 0, &mut cache)
        }),
        case!("granitemoehybrid.rs"; |vb| {
            let config: granitemoehybrid::GraniteMoeHybridConfig = decoder! {
                "layer_types": ["attention", "attention"], "shared_intermediate_size": 24,
                "attention_multiplier": 0.5, "logits_scaling": 1.
            };
            let config = config.into_config(false);
            (granitemoehybrid::GraniteMoeHybrid::load(vb, &config)?, config)
        }, |m, b| {
            let mut cache = granitemoehybrid::GraniteMoeHybridCache::new(false, DType::F32, &m.1, &Device::Cpu)?;
            m.0.forward(&b.ids, 0, &mut cache)
        }),
        case!("helium.rs"; |vb| helium::Model::new(&decoder! {
            "bos_token_id": 1, "eos_token_id": 2, "head_dim": 4, "mlp_bias": false
        }, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids, 0)
        }),
        case!("smol/smollm3.rs"; |vb| smol::smollm3::ModelForCausalLM::new(&decoder! {
            "no_rope_layer_interval": 2
        }, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids, 0)
        }),
        case!("lfm2.rs"; |vb| {
            let config: lfm2::Lfm2Config = decoder! {
                "layer_types": ["conv", "full_attention"], "norm_eps": 1e-5, "block_multiple_of": 8
            };
            let config = config.into_config(false);
            (lfm2::Model::new(&config, vb)?, config)
        }, |m, b| {
            let mut cache = lfm2::Cache::new(false, DType::F32, &m.1, &Device::Cpu)?;
            m.0.forward(&b.ids, 0, &mut cache)
        }),
        case!("chatglm.rs"; |vb| chatglm::Model::new(&chatglm::Config {
            num_layers: 2, padded_vocab_size: VOCABULARY, hidden_size: 16, ffn_hidden_size: 24, kv_channels: 4,
            num_attention_heads: 4, seq_length: MOST, layernorm_epsilon: 1e-5, rmsnorm: true,
            apply_residual_connection_post_layernorm: false, post_layer_norm: true, add_bias_linear: false,
            add_qkv_bias: true, bias_dropout_fusion: true, multi_query_attention: true, multi_query_group_num: 2,
            apply_query_key_layer_scaling: true, attention_softmax_in_fp32: true, fp32_residual_connection: false,
        }, vb)?, |m, b| {
            m.reset_kv_cache();
            m.forward(&b.ids)
        }),
        case!("codegeex4_9b.rs"; |vb| codegeex4_9b::Model::new(&glm(), vb)?, |m, b| {
            m.reset_kv_cache();
            m.forward(&b.ids)
        }),
        case!("glm4.rs"; |vb| glm4::Model::new(&glm(), vb)?, |m, b| {
            m.reset_kv_cache();
            m.forward(&b.ids)
        }),
        case!("glm4_new.rs"; rows |vb| glm4_new::ModelForCausalLM::new(&decoder! {
            "head_dim": 4, "partial_rotary_factor": 0.5
        }, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids, 0)
        }),
        case!("deepseek2.rs"; experts |vb| deepseek2::DeepSeekV2::new(&decoder! {
            "moe_intermediate_size": 12, "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "first_k_dense_replace": 1, "q_lora_rank": 8, "qk_rope_head_dim": 4, "kv_lora_rank": 8, "v_head_dim": 4,
            "qk_nope_head_dim": 4, "n_group": 1, "topk_group": 1
        }, vb)?, |m, b| {
            m.clear_kv_cache();
            m.forward(&b.ids, 0)
        }),
        case!("mamba.rs"; rows |vb| {
            let config: mamba::Config = config!({
                "d_model": 16, "n_layer": 2, "vocab_size": VOCABULARY, "pad_vocab_size_multiple": 8
            });
            (mamba::Model::new(&config, vb.pp("backbone"))?, config)
        }, |m, b| {
            let (rows, time) = b.ids.dims2()?;
            let mut state = mamba::State::new(rows, &m.1, DType::F32, &Device::Cpu)?;
            let mut last = None;
            for at in 0..time {
                last = Some(m.0.forward(&b.ids.narrow(1, at, 1)?.squeeze(1)?, &mut state)?);
            }
            Ok(last.expect("a sequence has tokens"))
        }),
        case!("mamba2.rs"; |vb| {
            let config: mamba2::Config = config!({
                "d_model": 16, "n_layer": 2, "vocab_size": VOCABULARY, "pad_vocab_size_multiple": 8, "d_state": 8,
                "headdim": 8
            });
            (mamba2::Model::new(&config, vb.pp("backbone"))?, config)
        }, |m, b| {
            let mut state = mamba2::State::new(b.ids.dim(0)?, &m.1, DType::F32, &Device::Cpu)?;
            m.0.forward_prefill(&b.ids, &mut state, 4)
        }),
        case!("rwkv_v5.rs"; rows |vb| {
            let config: rwkv_v5::Config = rwkv();
            (rwkv_v5::Model::new(&config, vb)?, config)
        }, |m, b| {
            let (rows, time) = b.ids.dims2()?;
            let mut state = rwkv_v5::State::new(rows, &m.1, &Device::Cpu)?;
            let step = |at| m.0.forward(&b.ids.narrow(1, at, 1)?, &mut state);
            let steps = (0..time).map(step).collect::<candle_core::Result<Vec<_>>>()?;
            candle_core::Tensor::cat(&steps, 1)
        }),
        case!("rwkv_v6.rs"; rows |vb| {
            let config: rwkv_v6::Config = rwkv();
            (rwkv_v6::Model::new(&config, vb)?, config)
        }, |m, b| {
            let (rows, time) = b.ids.dims2()?;
            let mut state = rwkv_v6::State::new(rows, &m.1, &Device::Cpu)?;
            let step = |at| m.0.forward(&b.ids.narrow(1, at, 1)?, &mut state);
            let steps = (0..time).map(step).collect::<candle_core::Result<Vec<_>>>()?;
            candle_core::Tensor::cat(&steps, 1)
        }),
        case!("rwkv_v7.rs"; |vb| {
            let config: rwkv_v7::Config = config!({
                "version": "V7", "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "head_size": 8
            });
            (rwkv_v7::Model::new(&config, vb)?, config)
        }, |m, b| {
            let rows: Vec<Vec<u32>> = b.ids.to_vec2()?;
            let last = |row: &Vec<u32>| {
                let mut state = rwkv_v7::State::new(&m.1, &Device::Cpu)?;
                m.0.forward_seq(row, &mut state)?.reshape((1, VOCABULARY))
            };
            let rows = rows.iter().map(last).collect::<candle_core::Result<Vec<_>>>()?;
            candle_core::Tensor::cat(&rows, 0)
        }),
        case!("recurrent_gemma.rs"; |vb| recurrent_gemma::Model::new(&decoder! {
            "head_dim": 4, "lru_width": 16, "attention_window_size": 4, "conv1d_width": 4, "logits_soft_cap": 30.,
            "hidden_activation": "gelu_pytorch_tanh", "partial_rotary_factor": 0.5,
            "block_types": ["recurrent", "attention"], "num_key_value_heads": 1
        }, vb)?, |m, b| m.clone().forward(&b.ids, 0)),
        case!("based.rs"; |vb| based::Model::new(&config!({
            "vocab_size": VOCABULARY, "n_embd": 16, "n_inner": 32, "n_layer": 2, "n_head": 4,
            "layer_norm_epsilon": 1e-5, "alt_mixer_layers": [0], "alt_mixer_2_layers": [1],
            "alt_mixer": { "num_heads": 4, "feature_dim": 4, "feature_map": { "input_dim": 4 } },
            "alt_mixer_2": { "num_heads": 4, "window_size": 4 }
        }), vb)?, |m, b| m.clone().forward(&b.ids, 0)),
        case!("voxtral/voxtral_llama.rs"; |vb| {
            let config: voxtral::voxtral_llama::VoxtralLlamaConfig = decoder! { "head_dim": 4, "use_flash_attn": false };
            (voxtral::voxtral_llama::VoxtralLlama::load(vb, &config)?, config)
        }, |m, b| {
            let mut cache = voxtral::voxtral_llama::VoxtralLlamaCache::new(false, DType::F32, &m.1, &Device::Cpu)?;
            m.0.forward(&b.ids, 0, &mut cache)
        }),
        case!("z_image/text_encoder.rs"; |vb| z_image::text_encoder::ZImageTextEncoder::new(&decoder! {
            "head_dim": 4
        }, vb)?, |m, b| m.forward(&b.ids)),
    ]
}

fn glm<T: serde::de::DeserializeOwned>() -> T {
    config!({
        "num_layers": 2, "padded_vocab_size": VOCABULARY, "hidden_size": 16, "ffn_hidden_size": 24, "kv_channels": 4,
        "num_attention_heads": 4, "seq_length": MOST, "layernorm_epsilon": 1e-5, "rmsnorm": true,
        "apply_residual_connection_post_layernorm": false, "post_layer_norm": true, "add_bias_linear": false,
        "add_qkv_bias": true, "bias_dropout_fusion": true, "multi_query_attention": true, "multi_query_group_num": 2,
        "apply_query_key_layer_scaling": true, "attention_softmax_in_fp32": true, "fp32_residual_connection": false
    })
}

fn rwkv<T: serde::de::DeserializeOwned>() -> T {
    config!({
        "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16,
        "num_attention_heads": 4, "head_size": 4, "intermediate_size": 24, "layer_norm_epsilon": 1e-5,
        "rescale_every": 6
    })
}
