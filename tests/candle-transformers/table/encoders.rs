//! Encoders of text, and encoders with decoders.

use super::models::*;
use super::{Case, Forward, MELS, MOST, VOCABULARY, case, config, decoder, floats};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case!("bert.rs"; |vb| bert::BertForMaskedLM::load(vb, &bert())?, |m, b| {
            m.forward(&b.ids, &b.ids.zeros_like()?, Some(&b.there))
        }),
        case!("distilbert.rs"; |vb| distilbert::DistilBertForMaskedLM::load(vb, &config!({
            "vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24, "activation": "gelu",
            "max_position_embeddings": MOST, "initializer_range": 0.02, "pad_token_id": 0
        }))?, |m, b| m.forward(&b.ids, &b.there.eq(0u32)?.unsqueeze(1)?.unsqueeze(1)?)),
        case!("xlm_roberta.rs"; |vb| xlm_roberta::XLMRobertaForMaskedLM::new(&config!({
            "hidden_size": 16, "layer_norm_eps": 1e-5, "attention_probs_dropout_prob": 0., "hidden_dropout_prob": 0.,
            "num_attention_heads": 4, "position_embedding_type": "absolute", "intermediate_size": 24,
            "hidden_act": "gelu", "num_hidden_layers": 2, "vocab_size": VOCABULARY, "max_position_embeddings": MOST,
            "type_vocab_size": 1, "pad_token_id": 1
        }), vb)?, |m, b| m.forward(&b.ids, &b.there, &b.ids.zeros_like()?, None, None, None)),
        case!("modernbert.rs"; |vb| modernbert::ModernBertForMaskedLM::load(vb, &config!({
            "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 24, "max_position_embeddings": MOST, "layer_norm_eps": 1e-5, "pad_token_id": 0,
            "global_attn_every_n_layers": 2, "global_rope_theta": 1e4, "local_attention": 4, "local_rope_theta": 1e4
        }))?, |m, b| m.forward(&b.ids, &b.there)),
        case!("nomic_bert.rs"; |vb| nomic_bert::NomicBertModel::load(vb, &config!({
            "vocab_size": VOCABULARY, "n_embd": 16, "n_head": 4, "n_layer": 2, "n_inner": 24, "n_positions": MOST,
            "type_vocab_size": 2, "layer_norm_epsilon": 1e-5, "rotary_emb_fraction": 1., "rotary_emb_base": 1e3,
            "rotary_emb_interleaved": false, "qkv_proj_bias": false, "mlp_fc1_bias": false, "mlp_fc2_bias": false,
            "activation_function": "swiglu", "prenorm": false
        }))?, |m, b| m.forward(&b.ids, None, Some(&b.there))),
        case!("jina_bert.rs"; |vb| jina_bert::BertModel::new(vb, &jina_bert::Config::new(
            VOCABULARY, 16, 2, 4, 24, candle_nn::Activation::Gelu.into(), MOST, 2, 0.02, 1e-5, 0,
            jina_bert::PositionEmbeddingType::Alibi,
        ))?, |m, b| candle_core::Module::forward(&m, &b.ids)),
        case!("debertav2.rs"; |vb| debertav2::DebertaV2NERModel::load(vb, &config!({
            "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 24, "hidden_act": "gelu", "hidden_dropout_prob": 0.,
            "attention_probs_dropout_prob": 0., "max_position_embeddings": MOST, "type_vocab_size": 0,
            "initializer_range": 0.02, "layer_norm_eps": 1e-5, "relative_attention": true,
            "max_relative_positions": -1, "pad_token_id": 0, "position_biased_input": false,
            "pos_att_type": ["p2c", "c2p"], "position_buckets": 4, "share_att_key": true,
            "norm_rel_ebd": "layer_norm", "id2label": { "0": "a", "1": "b", "2": "c" }
        }), None)?, |m, b| m.forward(&b.ids, None, Some(b.there.clone()))),
        case!("stella_en_v5.rs"; |vb| stella_en_v5::EmbeddingModel::new(&config!({
            "variant": "Large", "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": MOST, "rope_theta": 1e4,
            "embed_head": { "in_features": 16, "out_features": 8 }, "norm_eps": 1e-5, "activation_fn": "silu",
            "num_key_value_heads": 2, "type_vocab_size": 2, "scaling_factor": 1.
        }), vb.clone(), vb.pp("embed"))?, |m, b| m.forward(&b.ids, &b.there)),
        case!("t5.rs"; |vb| t5::T5ForConditionalGeneration::load(vb, &config!({
            "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4,
            "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "dropout_rate": 0.1,
            "layer_norm_epsilon": 1e-6, "initializer_factor": 1.0, "feed_forward_proj": "gated-gelu",
            "is_encoder_decoder": true, "use_cache": false, "pad_token_id": 0, "eos_token_id": 1
        }))?, |m, b| m.forward(&b.ids, &b.others)),
        case!("marian.rs"; |vb| marian::MTModel::new(&config!({
            "vocab_size": VOCABULARY, "max_position_embeddings": MOST, "encoder_layers": 2, "encoder_ffn_dim": 24,
            "encoder_attention_heads": 4, "decoder_layers": 2, "decoder_ffn_dim": 24, "decoder_attention_heads": 4,
            "use_cache": false, "is_encoder_decoder": true, "activation_function": "swish", "d_model": 16,
            "decoder_start_token_id": 0, "scale_embedding": true, "pad_token_id": 0, "eos_token_id": 1,
            "forced_eos_token_id": 1, "share_encoder_decoder_embeddings": true
        }), vb)?, |m, b| {
            m.reset_kv_cache();
            let read = m.encoder().forward(&b.ids, 0)?;
            m.decode(&b.others, &read, 0)
        }),
        case!("whisper/model.rs"; |vb| whisper::model::Whisper::load(&vb, config!({
            "num_mel_bins": MELS, "max_source_positions": MOST, "d_model": 16, "encoder_attention_heads": 4,
            "encoder_layers": 2, "vocab_size": VOCABULARY, "max_target_positions": MOST, "decoder_attention_heads": 4,
            "decoder_layers": 2
        }))?, |m, b| {
            let heard = m.encoder.forward(&b.sounds, true)?;
            let said = m.decoder.forward(&b.ids, &heard, true)?;
            m.decoder.final_linear(&said)
        }),
        case!("blip_text.rs"; rows |vb| blip_text::TextLMHeadModel::new(&blip_text(), vb)?, |m, b| {
            m.reset_kv_cache();
            m.forward(&b.ids, &floats(b.first, b.ids.dim(0)?, &[5, 16])?)
        }),
        case!("clip/text_model.rs"; |vb| clip::text_model::ClipTextTransformer::new(vb, &clip_text())?, |m, b| {
            candle_core::Module::forward(&m, &b.ids)
        }),
        case!("chinese_clip/text_model.rs"; |vb| chinese_clip::text_model::ChineseClipTextTransformer::new(
            vb,
            &chinese_clip::text_model::ChineseClipTextConfig {
                vocab_size: VOCABULARY, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 4,
                intermediate_size: 24, max_position_embeddings: MOST, ..Default::default()
            },
        )?, |m, b| m.forward(&b.ids, None, None)),
        case!("openclip/text_model.rs"; |vb| openclip::text_model::OpenClipTextTransformer::new(
            vb,
            &openclip::text_model::Config {
                vocab_size: VOCABULARY, embed_dim: 16, intermediate_size: 24, max_position_embeddings: MOST,
                pad_with: None, num_hidden_layers: 2, num_attention_heads: 4, projection_dim: 16,
            },
        )?, |m, b| m.forward(&b.ids)),
        case!("siglip.rs"; |vb| siglip::Model::new(&config!({
            "text_config": { "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24,
                "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": MOST },
            "vision_config": { "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
                "num_attention_heads": 4, "image_size": 8, "patch_size": 4 }
        }), vb)?, |m, b| Ok(m.forward(&b.images, &b.ids)?.1)),
    ]
}

fn bert() -> bert::Config {
    config!({
        "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 24, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "max_position_embeddings": MOST,
        "type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-12, "pad_token_id": 0
    })
}

fn blip_text() -> blip_text::Config {
    decoder! {
        "encoder_hidden_size": 16, "projection_dim": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
        "is_decoder": true
    }
}

pub(super) fn clip_text() -> clip::text_model::ClipTextConfig {
    clip::text_model::ClipTextConfig {
        vocab_size: VOCABULARY,
        embed_dim: 16,
        intermediate_size: 24,
        max_position_embeddings: MOST,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        projection_dim: 16,
        ..clip::text_model::ClipTextConfig::vit_base_patch32()
    }
}
