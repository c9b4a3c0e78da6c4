//! Image classifiers of `bench step`: ResNet with basic blocks, and ConvNeXt. Configurations and parameter names are those
//! of Hugging Face's `ResNetForImageClassification` and `ConvNextForImageClassification`.

use std::path::Path;

use anyhow::{Context, ensure};
use candle_core::{Device, Module, Result, Tensor};
use candle_nn::{Conv2dConfig, Init, VarBuilder};
use fsdp_candle::nn::{self, BatchNorm, Conv2d, LayerNorm, Linear};
use fsdp_candle::{FsdpModule, FullyShard, fully_shard};
use serde::Deserialize;

/// Epsilon of all norms but ConvNeXt's last one, as in transformers.
const BATCH_NORM_EPS: f64 = 1e-5;
const LAYER_NORM_EPS: f64 = 1e-6;

/// The fields of both configurations that are used.
#[derive(Deserialize)]
pub(crate) struct ImageConfig {
    model_type: String,
    pub(crate) num_channels: usize,
    /// Channels of each stage.
    hidden_sizes: Vec<usize>,
    /// Blocks of each stage.
    depths: Vec<usize>,
    hidden_act: String,
    /// Number of classes.
    pub(crate) num_labels: usize,
    /// ResNet: kind of the blocks.
    layer_type: Option<String>,
    /// ResNet: channels before the first stage.
    embedding_size: Option<usize>,
    /// ResNet: whether the first stage halves the image.
    downsample_in_first_stage: Option<bool>,
    /// ConvNeXt: kernel and stride of the first convolution.
    patch_size: Option<usize>,
    /// ConvNeXt: epsilon of the last norm.
    layer_norm_eps: Option<f64>,
    /// ConvNeXt: initial factor of a block's output.
    layer_scale_init_value: Option<f64>,
}

impl ImageConfig {
    /// Reads `config.json` in a model directory. Returns `None` if it describes a model of another type.
    pub(crate) fn from_dir(dir: &Path) -> anyhow::Result<Option<Self>> {
        let path = dir.join("config.json");
        // The reader of language models reports files that it can't read.
        let Ok(text) = std::fs::read_to_string(&path) else { return Ok(None) };
        let Ok(value) = serde_json::from_str::<serde_json::Value>(&text) else { return Ok(None) };
        if !["resnet", "convnext"].map(Into::into).contains(&value["model_type"]) {
            return Ok(None);
        }
        let config: ImageConfig = serde_json::from_value(value).with_context(|| format!("in {}", path.display()))?;
        config.check().with_context(|| format!("in {}", path.display()))?;
        Ok(Some(config))
    }

    fn is_resnet(&self) -> bool {
        self.model_type == "resnet"
    }

    fn check(&self) -> anyhow::Result<()> {
        for (field, sizes) in [
            ("num_channels", &[self.num_channels][..]),
            ("num_labels", &[self.num_labels]),
            ("embedding_size", self.embedding_size.as_slice()),
            ("patch_size", self.patch_size.as_slice()),
            ("hidden_sizes", &self.hidden_sizes),
            ("depths", &self.depths),
        ] {
            ensure!(!sizes.contains(&0), "{field} has a 0, expected at least 1");
        }
        let (stages, depths) = (self.hidden_sizes.len(), self.depths.len());
        ensure!(stages > 0 && stages == depths, "hidden_sizes has {stages} stages, depths has {depths}");
        let activation = if self.is_resnet() { "relu" } else { "gelu" };
        ensure!(
            self.hidden_act == activation,
            "hidden_act is \"{}\"; only \"{activation}\" is supported",
            self.hidden_act
        );
        if self.is_resnet() {
            let kind = self.layer_type.as_deref().unwrap_or("bottleneck");
            ensure!(kind == "basic", "layer_type is \"{kind}\"; only \"basic\" is supported");
            ensure!(self.downsample_in_first_stage != Some(true), "downsample_in_first_stage is not supported");
        }
        Ok(())
    }

    /// Builds the model. Every block is a unit.
    pub(crate) fn build(
        &self,
        opts: &FullyShard,
        vb: VarBuilder<'static>,
    ) -> fsdp_candle::Result<FsdpModule<Classifier>> {
        let first = if self.is_resnet() { self.embedding_size.unwrap_or(64) } else { self.hidden_sizes[0] };
        let mut inputs = first;
        let mut stages = vec![];
        for (stage, (&outputs, &depth)) in self.hidden_sizes.iter().zip(&self.depths).enumerate() {
            let block = |at: usize| {
                let vb = vb.pp(format!("{}.encoder.stages.{stage}.layers.{at}", self.model_type));
                let (inputs, stride) = if at == 0 { (inputs, if stage == 0 { 1 } else { 2 }) } else { (outputs, 1) };
                fully_shard(opts, vb, |vb| match self.is_resnet() {
                    true => Basic::new(inputs, outputs, stride, vb).map(Block::Basic),
                    false => Separable::new(outputs, self.layer_scale_init_value, vb).map(Block::Separable),
                })
            };
            stages.push((0..depth).map(block).collect::<fsdp_candle::Result<Vec<_>>>()?);
            inputs = outputs;
        }
        fully_shard(opts, vb, |vb| Classifier::new(self, first, stages, vb))
    }
}

/// Pseudo-random images `[batch, channels, size, size]` and their classes.
pub(crate) fn batch(
    config: &ImageConfig,
    (batch, size): (usize, usize),
    reader: usize,
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    let shape = (batch, config.num_channels, size, size);
    let pixel = |at: usize| ((at * 7919 + reader) % 1009) as f32 / 504.5 - 1.;
    let pixels = (0..batch * config.num_channels * size * size).map(pixel).collect();
    let classes = (0..batch).map(|at| ((at * 7919 + reader) % config.num_labels) as u32).collect();
    Ok((Tensor::from_vec(pixels, shape, device)?, Tensor::from_vec(classes, batch, &Device::Cpu)?))
}

/// A classifier of images `[batch, channels, height, width]`.
pub(crate) struct Classifier {
    stem: Stem,
    stages: Vec<Stage>,
    /// ConvNeXt's norm of the pooled image.
    norm: Option<LayerNorm>,
    head: Linear,
}

/// Layers before the first stage.
enum Stem {
    /// A convolution with stride 2 and pooling with stride 2.
    ResNet(ConvNorm),
    /// A convolution of patches that do not overlap.
    ConvNext(Conv2d, LayerNorm),
}

struct Stage {
    /// ConvNeXt's norm and convolution that halve the image.
    halve: Option<(LayerNorm, Conv2d)>,
    blocks: Vec<FsdpModule<Block>>,
}

impl Classifier {
    fn new(config: &ImageConfig, first: usize, stages: Vec<Vec<FsdpModule<Block>>>, vb: VarBuilder) -> Result<Self> {
        let (model, channels) = (vb.pp(&config.model_type), config.num_channels);
        let last = config.hidden_sizes[config.hidden_sizes.len() - 1];
        let (head, stem, norm) = if config.is_resnet() {
            let stem = ConvNorm::new([channels, first, 7, 2], model.pp("embedder.embedder"))?;
            (vb.pp("classifier.1"), Stem::ResNet(stem), None)
        } else {
            let (patches, patch) = (model.pp("embeddings"), config.patch_size.unwrap_or(4));
            let stem = Stem::ConvNext(
                nn::conv2d(channels, first, patch, strided(patch), patches.pp("patch_embeddings"))?,
                nn::layer_norm(first, LAYER_NORM_EPS, patches.pp("layernorm"))?,
            );
            let norm = nn::layer_norm(last, config.layer_norm_eps.unwrap_or(1e-12), model.pp("layernorm"))?;
            (vb.pp("classifier"), stem, Some(norm))
        };
        let stage = |(at, blocks): (usize, _)| {
            let vb = model.pp(format!("encoder.stages.{at}.downsampling_layer"));
            let halve = |outputs: usize| -> Result<_> {
                let inputs = config.hidden_sizes[at - 1];
                let norm = nn::layer_norm(inputs, LAYER_NORM_EPS, vb.pp(0))?;
                Ok((norm, nn::conv2d(inputs, outputs, 2, strided(2), vb.pp(1))?))
            };
            let has_norm = at > 0 && !config.is_resnet();
            let halve = has_norm.then(|| halve(config.hidden_sizes[at])).transpose()?;
            Ok(Stage { halve, blocks })
        };
        let stages = stages.into_iter().enumerate().map(stage).collect::<Result<_>>()?;
        Ok(Classifier { stem, stages, norm, head: nn::linear(last, config.num_labels, head)? })
    }
}

impl Module for Classifier {
    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let mut x = match &self.stem {
            Stem::ResNet(stem) => {
                // No value is below 0, so padding with 0 is padding with the least value.
                let x = stem.forward(images)?.relu()?.pad_with_zeros(2, 1, 1)?.pad_with_zeros(3, 1, 1)?;
                nn::max_pool2d_with_stride(&x, 3, 2)?
            }
            Stem::ConvNext(patches, norm) => norm_channels(norm, &patches.forward(images)?)?,
        };
        for Stage { halve, blocks } in &self.stages {
            if let Some((norm, conv)) = halve {
                x = conv.forward(&norm_channels(norm, &x)?)?;
            }
            x = blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        }
        let pooled = x.flatten_from(2)?.mean(2)?;
        let pooled = self.norm.as_ref().map_or(Ok(pooled.clone()), |norm| norm.forward(&pooled))?;
        self.head.forward(&pooled)
    }
}

/// A block of a stage.
pub(crate) enum Block {
    Basic(Basic),
    Separable(Separable),
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Block::Basic(block) => block.forward(x),
            Block::Separable(block) => block.forward(x),
        }
    }
}

/// ResNet's block: two convolutions beside a shortcut.
pub(crate) struct Basic {
    /// A convolution, if the block changes the image's shape.
    shortcut: Option<ConvNorm>,
    layers: [ConvNorm; 2],
}

impl Basic {
    fn new(inputs: usize, outputs: usize, stride: usize, vb: VarBuilder) -> Result<Self> {
        let shortcut = || ConvNorm::new([inputs, outputs, 1, stride], vb.pp("shortcut"));
        let shortcut = (inputs != outputs || stride != 1).then(shortcut).transpose()?;
        let first = ConvNorm::new([inputs, outputs, 3, stride], vb.pp("layer.0"))?;
        Ok(Basic { shortcut, layers: [first, ConvNorm::new([outputs, outputs, 3, 1], vb.pp("layer.1"))?] })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [first, second] = &self.layers;
        let y = second.forward(&first.forward(x)?.relu()?)?;
        let shortcut = self.shortcut.as_ref().map_or(Ok(x.clone()), |shortcut| shortcut.forward(x))?;
        nn::add(&y, &shortcut)?.relu()
    }
}

/// A convolution, and a normalization over the batch.
struct ConvNorm(Conv2d, BatchNorm);

impl ConvNorm {
    fn new([inputs, outputs, kernel, stride]: [usize; 4], vb: VarBuilder) -> Result<Self> {
        let config = Conv2dConfig { padding: kernel / 2, ..strided(stride) };
        let conv = nn::conv2d_no_bias(inputs, outputs, kernel, config, vb.pp("convolution"))?;
        Ok(ConvNorm(conv, nn::batch_norm(outputs, BATCH_NORM_EPS, vb.pp("normalization"))?))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.1.forward_train(&self.0.forward(x)?)
    }
}

/// ConvNeXt's block: a convolution of each channel, and an MLP at each position.
pub(crate) struct Separable {
    depthwise: Conv2d,
    norm: LayerNorm,
    up: Linear,
    down: Linear,
    scale: Option<Tensor>,
}

impl Separable {
    fn new(width: usize, scale: Option<f64>, vb: VarBuilder) -> Result<Self> {
        let config = Conv2dConfig { padding: 3, groups: width, ..Default::default() };
        let scale = scale.filter(|scale| *scale > 0.);
        let scale = scale.map(|scale| vb.get_with_hints(width, "layer_scale_parameter", Init::Const(scale)));
        Ok(Separable {
            depthwise: nn::conv2d(width, width, 7, config, vb.pp("dwconv"))?,
            norm: nn::layer_norm(width, LAYER_NORM_EPS, vb.pp("layernorm"))?,
            up: nn::linear(width, 4 * width, vb.pp("pwconv1"))?,
            down: nn::linear(4 * width, width, vb.pp("pwconv2"))?,
            scale: scale.transpose()?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.norm.forward(&channels_last(&self.depthwise.forward(x)?)?)?;
        let mut y = self.down.forward(&nn::gelu_erf(&self.up.forward(&y)?)?)?;
        if let Some(scale) = &self.scale {
            y = y.broadcast_mul(scale)?;
        }
        nn::add(&channels_first(&y)?, x)
    }
}

fn strided(stride: usize) -> Conv2dConfig {
    Conv2dConfig { stride, ..Conv2dConfig::default() }
}

fn channels_last(x: &Tensor) -> Result<Tensor> {
    x.permute((0, 2, 3, 1))?.contiguous()
}

fn channels_first(x: &Tensor) -> Result<Tensor> {
    x.permute((0, 3, 1, 2))?.contiguous()
}

/// Normalizes the channels at each position of `[batch, channels, height, width]`.
fn norm_channels(norm: &LayerNorm, x: &Tensor) -> Result<Tensor> {
    channels_first(&norm.forward(&channels_last(x)?)?)
}

#[cfg(test)]
mod tests {
    use candle_core::DType;
    use fsdp_candle::initializer::Philox;
    use fsdp_candle::{ShardedVarMap, World};

    use super::*;

    fn of(name: &str) -> ImageConfig {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs").join(name);
        ImageConfig::from_dir(&dir).unwrap().unwrap()
    }

    /// The numbers are those of transformers' models.
    #[test]
    fn models_have_the_parameters_of_transformers_and_all_get_gradients() {
        for (name, expected) in [("resnet-18", 11_227_812), ("convnext-tiny", 27_897_028)] {
            let world = World::single().unwrap();
            let vars = ShardedVarMap::of_world(&world).unwrap();
            vars.init_with(Philox::new(0)).unwrap();
            let config = of(name);
            let model = config.build(&FullyShard::new(&vars), vars.builder(DType::F32)).unwrap();
            let params = vars.params();
            assert_eq!(params.iter().map(|param| param.shape().elem_count()).sum::<usize>(), expected, "{name}");
            let (images, classes) = batch(&config, (2, 32), 0, world.device()).unwrap();
            let logits = model.forward(&images).unwrap();
            let loss = nn::cross_entropy(&logits, &classes).unwrap();
            model.backward(&loss).unwrap();
            assert_eq!(model.parameters_without_gradient(), [""; 0], "{name}");
            let loss = loss.to_scalar::<f32>().unwrap();
            assert!((1. ..10.).contains(&loss), "{name}: {loss}");
        }
    }

    #[test]
    fn other_models_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let read = |text: &str| {
            std::fs::write(dir.path().join("config.json"), text).unwrap();
            ImageConfig::from_dir(dir.path()).map(|config| config.is_some()).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(read(r#"{"model_type": "llama"}"#), Ok(false));
        let common = r#""num_channels": 3, "hidden_sizes": [8], "depths": [1], "num_labels": 2"#;
        for (text, expected) in [
            (r#""model_type": "resnet", "hidden_act": "gelu""#, r#"hidden_act is "gelu"; only "relu""#),
            (r#""model_type": "resnet", "hidden_act": "relu""#, r#"layer_type is "bottleneck"; only "basic""#),
            (r#""model_type": "convnext", "hidden_act": "relu""#, r#"hidden_act is "relu"; only "gelu""#),
            (r#""model_type": "convnext", "hidden_act": "gelu", "patch_size": 0"#, "patch_size has a 0"),
        ] {
            let error = read(&format!("{{{text}, {common}}}")).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
