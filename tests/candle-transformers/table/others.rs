//! Diffusion, sound, and models of images and text.

use candle_core::{D, DType, Device, Module, Result, Tensor};

use super::models::*;
use super::{Batch, Case, Forward, MELS, MOST, PIXELS, VOCABULARY, case, config};

fn floats(batch: &Batch, dims: &[usize]) -> Result<Tensor> {
    super::floats(batch.first, batch.ids.dim(0)?, dims)
}

/// A sound of each row.
fn sounds(batch: &Batch) -> Result<Tensor> {
    floats(batch, &[1, 32])
}

/// Time steps of diffusion.
fn times(batch: &Batch) -> Result<Tensor> {
    floats(batch, &[1])?.squeeze(1)?.abs()
}

pub(super) fn cases() -> Vec<Case> {
    diffusion().into_iter().chain(sound()).chain(several()).collect()
}

fn diffusion() -> Vec<Case> {
    vec![
        case!(
            "stable_diffusion/unet_2d.rs", "stable_diffusion/unet_2d_blocks.rs", "stable_diffusion/resnet.rs",
            "stable_diffusion/attention.rs", "stable_diffusion/embeddings.rs", "stable_diffusion/utils.rs";
            |vb| {
                let block = |out_channels, use_cross_attn| stable_diffusion::unet_2d::BlockConfig {
                    out_channels, use_cross_attn, attention_head_dim: 2,
                };
                stable_diffusion::unet_2d::UNet2DConditionModel::new(
                    vb, 4, 4, false,
                    stable_diffusion::unet_2d::UNet2DConditionModelConfig {
                        blocks: vec![block(32, Some(1)), block(64, None)], layers_per_block: 1, norm_num_groups: 32,
                        cross_attention_dim: 16, ..Default::default()
                    },
                )?
            }, |m, b| m.forward(&floats(b, &[4, 8, 8])?, 3., &floats(b, &[5, 16])?)
        ),
        case!("stable_diffusion/vae.rs"; |vb| stable_diffusion::vae::AutoEncoderKL::new(
            vb, 3, 3,
            stable_diffusion::vae::AutoEncoderKLConfig {
                block_out_channels: vec![8, 16], layers_per_block: 1, latent_channels: 4, norm_num_groups: 4,
                use_quant_conv: true, use_post_quant_conv: true,
            },
        )?, |m, b| m.decode(&floats(b, &[4, 4, 4])?)),
        case!("flux/model.rs"; |vb| flux::model::Flux::new(&flux::model::Config {
            in_channels: 16, vec_in_dim: 8, context_in_dim: 16, hidden_size: 16, mlp_ratio: 2., num_heads: 2, depth: 1,
            depth_single_blocks: 1, axes_dim: vec![2, 2, 4], theta: 10_000, qkv_bias: true, guidance_embed: false,
        }, vb)?, |m, b| {
            let ids = |length: usize| floats(b, &[length, 3]);
            let (image, text) = (floats(b, &[4, 16])?, floats(b, &[5, 16])?);
            let out = flux::WithForward::forward(
                &m, &image, &ids(4)?, &text, &ids(5)?, &times(b)?, &floats(b, &[8])?, None,
            )?;
            out.unsqueeze(1)
        }),
        case!("flux/autoencoder.rs"; |vb| flux::autoencoder::AutoEncoder::new(&flux::autoencoder::Config {
            resolution: 16, in_channels: 3, ch: 32, out_ch: 3, ch_mult: vec![1, 2], num_res_blocks: 1, z_channels: 4,
            scale_factor: 0.5, shift_factor: 0.1,
        }, vb)?, |m, b| m.decode(&floats(b, &[4, 4, 4])?)),
        case!("mmdit/model.rs", "mmdit/blocks.rs", "mmdit/embedding.rs", "mmdit/projections.rs";
            |vb| mmdit::model::MMDiT::new(&mmdit::model::Config {
                patch_size: 2, in_channels: 4, out_channels: 4, depth: 2, head_size: 8, adm_in_channels: 8,
                pos_embed_max_size: 8, context_embed_size: 16, frequency_embedding_size: 16,
            }, false, vb)?,
            |m, b| m.forward(&floats(b, &[4, 8, 8])?, &times(b)?, &floats(b, &[8])?, &floats(b, &[5, 16])?, None)),
        case!("wuerstchen/prior.rs", "wuerstchen/common.rs", "wuerstchen/attention_processor.rs";
            |vb| wuerstchen::prior::WPrior::new(4, 16, 16, 8, 2, 2, false, vb)?,
            |m, b| m.forward(&floats(b, &[4, 4, 4])?, &times(b)?, &floats(b, &[5, 16])?)),
        case!("wuerstchen/paella_vq.rs"; |vb| wuerstchen::paella_vq::PaellaVQ::new(vb)?,
            |m, b| m.decode(&floats(b, &[4, 4, 4])?)),
        case!("z_image/vae.rs"; |vb| z_image::vae::AutoEncoderKL::new(&config!({
            "latent_channels": 4, "block_out_channels": [8, 16], "layers_per_block": 1, "norm_num_groups": 4
        }), vb)?, |m, b| m.decode(&floats(b, &[4, 4, 4])?)),
        case!("z_image/transformer.rs"; |vb| z_image::transformer::ZImageTransformer2DModel::new(&config!({
            "all_patch_size": [2], "all_f_patch_size": [1], "in_channels": 4, "dim": 32, "n_layers": 1,
            "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4, "cap_feat_dim": 16, "axes_dims": [2, 2, 4],
            "axes_lens": [64, 16, 16]
        }), vb)?, |m, b| {
            let mask = Tensor::ones((b.ids.dim(0)?, 5), DType::U8, &Device::Cpu)?;
            m.forward(&floats(b, &[4, 1, 4, 4])?, &times(b)?, &floats(b, &[5, 16])?, &mask)
        }),
    ]
}

fn sound() -> Vec<Case> {
    vec![
        case!("encodec.rs"; |vb| {
            let config = encodec::Config {
                hidden_size: 16, num_filters: 4, upsampling_ratios: vec![2, 2], codebook_size: 16, ..Default::default()
            };
            (encodec::Encoder::new(&config, vb.pp("encoder"))?, encodec::Decoder::new(&config, vb.pp("decoder"))?)
        }, |m, b| m.1.forward(&m.0.forward(&sounds(b)?)?)?.unsqueeze(1)),
        case!("dac.rs"; |vb| (
            dac::Encoder::new(8, &[2, 4], 16, vb.pp("encoder"))?,
            dac::Decoder::new(16, 16, &[4, 2], 1, vb.pp("decoder"))?,
        ), |m, b| m.1.forward(&m.0.forward(&sounds(b)?)?)?.unsqueeze(1)),
        case!("snac.rs"; |vb| snac::Model::new(&config!({
            "sampling_rate": 24_000, "encoder_dim": 8, "encoder_rates": [2, 2], "decoder_dim": 16,
            "decoder_rates": [2, 2], "attn_window_size": null, "codebook_size": 16, "codebook_dim": 4,
            "vq_strides": [1], "noise": false, "depthwise": true
        }), vb)?, |m, b| m.decoder.forward(&m.encoder.forward(&sounds(b)?)?)?.unsqueeze(1)),
        case!("mimi/encodec.rs", "mimi/conv.rs", "mimi/seanet.rs", "mimi/transformer.rs"; |vb| {
            let mut config = mimi::encodec::Config::v0_1(Some(2));
            config.seanet.dimension = 16;
            config.seanet.n_filters = 4;
            config.seanet.ratios = vec![2, 2];
            config.transformer.d_model = 16;
            config.transformer.num_heads = 2;
            config.transformer.num_layers = 2;
            config.transformer.dim_feedforward = 24;
            config.transformer.max_seq_len = 64;
            config.frame_rate = 3000.;
            config.quantizer_bins = 8;
            config.quantizer_dim = 8;
            mimi::encodec::Encodec::new(config, vb)?
        }, |m, b| {
            m.reset_state();
            m.encode_pre_quantize(&sounds(b)?)?.transpose(1, 2)
        }),
        case!("voxtral/model.rs"; |vb| voxtral::VoxtralEncoder::new(&voxtral::VoxtralEncoderConfig {
            vocab_size: VOCABULARY, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2,
            num_attention_heads: 4, num_key_value_heads: 4, head_dim: 4, num_mel_bins: MELS, max_source_positions: 7,
            ..Default::default()
        }, vb)?, |m, b| m.forward(&b.sounds)),
        case!("parler_tts.rs"; rows |vb| parler_tts::Decoder::new(&config!({
            "vocab_size": VOCABULARY, "max_position_embeddings": MOST, "num_hidden_layers": 2, "ffn_dim": 24,
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_cross_attention_key_value_heads": 2,
            "activation_function": "gelu", "hidden_size": 16, "scale_embedding": false, "num_codebooks": 2,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": false,
            "rope_embeddings": false, "rope_theta": 1e4
        }), vb)?, |m, b| {
            m.clear_kv_cache();
            let codes = Tensor::stack(&[&b.ids, &b.others], 1)?;
            let logits = m.forward(&codes, None, None, &floats(b, &[5, 16])?, None, 0)?;
            Tensor::stack(&logits, 1)?.flatten(1, 2)
        }),
    ]
}

fn several() -> Vec<Case> {
    vec![
        case!("blip.rs"; rows |vb| blip::BlipForConditionalGeneration::new(&config!({
            "text_config": {
                "vocab_size": VOCABULARY, "hidden_size": 16, "encoder_hidden_size": 16, "intermediate_size": 24,
                "projection_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
                "max_position_embeddings": MOST, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "is_decoder": true
            },
            "vision_config": {
                "hidden_size": 16, "intermediate_size": 24, "projection_dim": 16, "num_hidden_layers": 2,
                "num_attention_heads": 4, "image_size": PIXELS, "patch_size": 4, "hidden_act": "gelu",
                "layer_norm_eps": 1e-5
            },
            "projection_dim": 16, "image_text_hidden_size": 16
        }), vb)?, |m, b| {
            m.reset_kv_cache();
            let seen = b.images.apply(m.vision_model())?;
            m.text_decoder().forward(&b.ids, &seen)
        }),
        case!("trocr.rs"; |vb| trocr::TrOCRModel::new(&config!({
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
            "hidden_act": "gelu", "layer_norm_eps": 1e-12, "image_size": PIXELS, "patch_size": 4, "num_channels": 3,
            "qkv_bias": true
        }), &trocr::TrOCRConfig {
            vocab_size: VOCABULARY, d_model: 16, cross_attention_hidden_size: 16, decoder_layers: 2,
            decoder_attention_heads: 4, decoder_ffn_dim: 24, max_position_embeddings: MOST, ..Default::default()
        }, vb)?, |m, b| {
            m.reset_kv_cache();
            let seen = m.encoder().forward(&b.images)?;
            m.decode(&b.ids.narrow(1, 0, 1)?, &seen, 0)
        }),
        case!("moondream.rs"; rows |vb| moondream::Model::new(&config!({
            "phi_config": {
                "vocab_size": VOCABULARY, "n_positions": MOST, "n_embd": 16, "n_layer": 1, "n_inner": 24, "n_head": 4,
                "rotary_dim": 4, "activation_function": "gelu", "layer_norm_epsilon": 1e-5,
                "tie_word_embeddings": false, "pad_vocab_size_multiple": 8
            },
            "vision_config": {
                "image_embedding_dim": 1152, "model_dim": 16, "hidden_dim": 24, "hidden_features": 24, "embed_len": 4,
                "embed_dim": 1152, "num_blocks": 1, "num_heads": 16, "act": "gelu_pytorch_tanh"
            }
        }), vb)?, |m, b| {
            let seen = m.vision_encoder().forward(&floats(b, &[3, 28, 28])?)?;
            m.text_model().clear_kv_cache();
            let first = b.ids.narrow(D::Minus1, 0, 1)?;
            m.text_model().forward_with_img(&first, &b.ids, &seen)
        }),
        case!("paligemma.rs"; |vb| paligemma::Model::new(&paligemma(), vb)?, |m, b| {
            m.clear_kv_cache();
            m.setup(&b.images, &b.ids)
        }),
        case!("colpali.rs"; |vb| colpali::Model::new(&paligemma(), vb)?, |m, b| m.forward_images(&b.images, &b.ids)),
        case!("pixtral/llava.rs"; |vb| pixtral::llava::Model::new(&config!({
            "projector_hidden_act": "gelu", "image_token_index": 3, "image_seq_length": 4,
            "text_config": {
                "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": MOST,
                "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu"
            },
            "vision_config": {
                "hidden_size": 16, "image_size": PIXELS, "patch_size": 4, "rope_theta": 1e4, "intermediate_size": 24,
                "num_hidden_layers": 2, "num_attention_heads": 2
            }
        }), vb)?, |m, b| {
            m.clear_kv_cache();
            let seen = m.encode_image(&b.images.narrow(0, 0, 1)?)?;
            m.lm_forward_embeds(&seen)
        }),
        case!("chinese_clip/mod.rs"; |vb| chinese_clip::ChineseClipModel::new(vb, &chinese_clip::ChineseClipConfig {
            text_config: chinese_clip::text_model::ChineseClipTextConfig {
                vocab_size: VOCABULARY, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 4,
                intermediate_size: 24, max_position_embeddings: MOST, ..Default::default()
            },
            vision_config: chinese_clip::vision_model::ChineseClipVisionConfig {
                hidden_size: 16, intermediate_size: 24, projection_dim: 16, num_hidden_layers: 2,
                num_attention_heads: 4, image_size: PIXELS, patch_size: 4, ..Default::default()
            },
            projection_dim: 16,
            logit_scale_init_value: 2.6592,
            image_size: PIXELS,
        })?, |m, b| Ok(m.forward(&b.images, &b.ids, None, None)?.1)),
    ]
}

fn paligemma() -> paligemma::Config {
    paligemma::Config {
        vision_config: config!({
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": PIXELS, "patch_size": 4
        }),
        text_config: config!({
            "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
            "rope_theta": 1e4, "hidden_act": "gelu", "head_dim": 4, "attention_bias": false
        }),
        projection_dim: 16,
    }
}
