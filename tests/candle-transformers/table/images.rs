//! Models of images.

use candle_core::Module;

use super::models::*;
use super::{Batch, Case, Forward, PIXELS, VOCABULARY, case, config};

/// Pixels of a side for convolutional networks, which halve it five times.
const SIDE: usize = 32;

fn images(batch: &Batch, side: usize) -> candle_core::Result<candle_core::Tensor> {
    super::floats(batch.first, batch.ids.dim(0)?, &[3, side, side])
}

pub(super) fn cases() -> Vec<Case> {
    vec![
        case!("vit.rs"; |vb| vit::Model::new(&vit(), VOCABULARY, vb)?, |m, b| m.forward(&b.images)),
        case!("clip/vision_model.rs"; |vb| clip::vision_model::ClipVisionTransformer::new(vb, &clip_vision())?,
            |m, b| m.forward(&b.images)),
        case!("clip/mod.rs"; |vb| clip::ClipModel::new(vb, &clip::ClipConfig {
            text_config: super::encoders::clip_text(), vision_config: clip_vision(), logit_scale_init_value: 2.6592,
            image_size: PIXELS,
        })?, |m, b| Ok(m.forward(&b.images, &b.ids)?.1)),
        case!("chinese_clip/vision_model.rs"; |vb| chinese_clip::vision_model::ChineseClipVisionTransformer::new(
            vb,
            &chinese_clip::vision_model::ChineseClipVisionConfig {
                hidden_size: 16, intermediate_size: 24, projection_dim: 16, num_hidden_layers: 2,
                num_attention_heads: 4, image_size: PIXELS, patch_size: 4, ..Default::default()
            },
        )?, |m, b| m.forward(&b.images)),
        case!("dinov2.rs"; rows |vb| dinov2::DinoVisionTransformer::new(vb, 2, 16, 4)?, |m, b| m.forward(&images(b, 28)?)),
        case!("dinov2reg4.rs"; rows |vb| dinov2reg4::DinoVisionTransformer::new(vb, 1, 8, 2)?, |m, b| {
            m.forward(&images(b, 518)?)
        }),
        case!("beit.rs"; rows |vb| beit::BeitVisionTransformer::new(vb, 1, 8, 2)?, |m, b| m.forward(&images(b, 384)?)),
        case!("eva2.rs"; rows |vb| eva2::EVA2VisionTransformer::new(vb, 1, 8, 2)?, |m, b| m.forward(&images(b, 448)?)),
        case!("depth_anything_v2.rs"; rows |vb| {
            let dino = dinov2::DinoVisionTransformer::new(vb.pp("pretrained"), 4, 16, 4)?;
            let config = depth_anything_v2::DepthAnythingV2Config::new(
                [8, 8, 8, 8], 16, 8, false, false, vec![0, 1, 2, 3], 28, 2,
            );
            depth_anything_v2::DepthAnythingV2::new(dino.into(), config, vb)?
        }, |m, b| m.forward(&images(b, 28)?)),
        case!("convnext.rs"; |vb| convnext::convnext(&convnext::Config::atto(), VOCABULARY, vb)?, |m, b| {
            m.forward(&images(b, SIDE)?)
        }),
        case!("resnet.rs"; |vb| resnet::resnet18(VOCABULARY, vb)?, |m, b| m.forward(&images(b, SIDE)?)),
        case!("efficientnet.rs"; |vb| {
            efficientnet::EfficientNet::new(vb, efficientnet::MBConvConfig::b0(), VOCABULARY)?
        }, |m, b| m.forward(&images(b, SIDE)?)),
        case!("efficientvit.rs"; |vb| efficientvit::efficientvit(&efficientvit::Config::m0(), VOCABULARY, vb)?,
            |m, b| m.forward(&images(b, 224)?)),
        case!("fastvit.rs"; |vb| fastvit::fastvit(&fastvit::Config {
            in_channels: 16, blocks: [1, 1, 1, 1], ..fastvit::Config::t8()
        }, VOCABULARY, vb)?, |m, b| m.forward(&images(b, SIDE)?)),
        case!("mobilenetv4.rs"; |vb| mobilenetv4::mobilenetv4(&mobilenetv4::Config::small(), VOCABULARY, vb)?,
            |m, b| m.forward(&images(b, SIDE)?)),
        case!("mobileone.rs"; |vb| mobileone::mobileone(&mobileone::Config::s0(), VOCABULARY, vb)?,
            |m, b| m.forward(&images(b, SIDE)?)),
        case!("repvgg.rs"; |vb| repvgg::repvgg(&repvgg::Config::a0(), VOCABULARY, vb)?,
            |m, b| m.forward(&images(b, SIDE)?)),
        case!("segformer.rs"; |vb| segformer::SemanticSegmentationModel::new(&config!({
            "num_channels": 3, "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2], "hidden_act": "gelu", "layer_norm_eps": 1e-6, "decoder_hidden_size": 16
        }), 4, vb)?, |m, b| m.forward(&images(b, SIDE)?)),
        case!("segment_anything/image_encoder.rs"; rows |vb| segment_anything::image_encoder::ImageEncoderViT::new(
            SIDE, 8, 3, 16, 2, 4, 8, true, true, true, 2, &[1], vb,
        )?, |m, b| m.forward(&images(b, SIDE)?)),
        case!("pixtral/vision_model.rs"; |vb| pixtral::vision_model::Model::new(&config!({
            "hidden_size": 16, "image_size": 8, "patch_size": 4, "rope_theta": 1e4, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 2
        }), vb)?, |m, b| m.forward(&b.images)),
    ]
}

fn vit() -> vit::Config {
    config!({
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
        "hidden_act": "gelu", "layer_norm_eps": 1e-12, "image_size": PIXELS, "patch_size": 4, "num_channels": 3,
        "qkv_bias": true
    })
}

fn clip_vision() -> clip::vision_model::ClipVisionConfig {
    clip::vision_model::ClipVisionConfig {
        embed_dim: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        projection_dim: 16,
        image_size: PIXELS,
        patch_size: 4,
        ..clip::vision_model::ClipVisionConfig::vit_base_patch32()
    }
}
