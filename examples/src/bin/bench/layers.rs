//! `bench layers`: forward and backward of layers, beside candle_nn's.

use candle_core::{D, DType, Device, Module, Result, Tensor, Var};
use candle_nn::{Conv1dConfig, Conv2dConfig, VarBuilder, VarMap};
use fsdp_candle::nn;
use serde::Serialize;

use crate::precision::Precision;
use crate::{count, passes, print};

/// Measures layers of language models and of models of images, in this process. Both libraries get the same inputs and
/// weights. `RAYON_NUM_THREADS` sets the threads. tests/interop/convolutions.py measures the convolutions in PyTorch.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Measure only layers with this text in their name.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    only: String,
    /// Dtype of inputs and weights.
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    dtype: Precision,
    /// Number of runs. The best counts.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Images of a batch.
    #[arg(long, default_value_t = 16, value_parser = count(1 << 12))]
    batch: usize,
    /// Print one JSON object a line.
    #[arg(long)]
    json: bool,
}

/// Milliseconds of a layer's forward and backward.
#[derive(Serialize)]
struct Times {
    name: String,
    ours: [f64; 2],
    /// `None` if candle_nn returns an error, for a layer or a dtype that it lacks.
    candle_nn: Option<[f64; 2]>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if !args.json {
        print(format_args!("{:<44} {:>9} {:>9} {:>9} {:>9}", "ms", "forward", "backward", "candle_nn", "backward"))?;
    }
    let layers = Layers { dtype: args.dtype.into(), batch: args.batch };
    let kept = |name: &str| name.contains(&args.only);
    let named = NAMED.iter().filter(|(name, _)| kept(name));
    let named =
        named.map(|(name, pair)| (name.to_string(), Box::new(|| pair(&layers)) as Box<dyn Fn() -> Result<Pair>>));
    let convolutions = CONVOLUTIONS.into_iter().map(|(name, sizes)| (format!("convolution, {name}"), sizes));
    let convolutions = convolutions.filter(|(name, _)| kept(name));
    let convolutions = convolutions
        .map(|(name, sizes)| (name, Box::new(move || layers.convolution(sizes)) as Box<dyn Fn() -> Result<Pair>>));
    for (name, pair) in named.chain(convolutions) {
        let [ours, theirs] = pair()?;
        let times =
            Times { name, ours: passes::best(args.runs, ours)?, candle_nn: passes::best(args.runs, theirs).ok() };
        match args.json {
            true => print(serde_json::to_string(&times)?)?,
            false => {
                let [forward, backward] = times.ours;
                let theirs = match times.candle_nn {
                    Some([forward, backward]) => format!("{forward:>9.2} {backward:>9.2}"),
                    None => format!("{:>9} {:>9}", "-", "-"),
                };
                print(format_args!("{:<44} {forward:>9.2} {backward:>9.2} {theirs}", times.name))?;
            }
        }
    }
    Ok(())
}

/// The forward of a layer, and of candle_nn's.
type Pair = [Box<dyn Fn() -> Result<Tensor>>; 2];

fn pair(ours: impl Fn() -> Result<Tensor> + 'static, theirs: impl Fn() -> Result<Tensor> + 'static) -> Result<Pair> {
    Ok([Box::new(ours), Box::new(theirs)])
}

#[derive(Clone, Copy)]
struct Layers {
    dtype: DType,
    batch: usize,
}

type Make = fn(&Layers) -> Result<Pair>;

/// Where candle_nn has no backward pass for a fused operation, the chain of operations that has one.
const NAMED: [(&str, Make); 24] = [
    ("linear, 768 to 2048", |of| {
        let [x, w, b] = of.vars([&[TOKENS, 768], &[2048, 768], &[2048]])?;
        let (ours, theirs) = (nn::Linear::new(w.clone(), Some(b.clone())), candle_nn::Linear::new(w, Some(b)));
        let again = x.clone();
        pair(move || ours.forward(&x), move || theirs.forward(&again))
    }),
    ("linear without bias, 2048 to 768", |of| {
        let [x, w] = of.vars([&[TOKENS, 2048], &[768, 2048]])?;
        let (ours, theirs) = (nn::Linear::new(w.clone(), None), candle_nn::Linear::new(w, None));
        let again = x.clone();
        pair(move || ours.forward(&x), move || theirs.forward(&again))
    }),
    ("embedding, 32,000 x 768", |of| {
        let [table] = of.vars([&[VOCABULARY, 768]])?;
        let ids = ids(VOCABULARY)?;
        let (ours, theirs) = (nn::Embedding::new(table.clone(), 768), candle_nn::Embedding::new(table, 768));
        let again = ids.clone();
        pair(move || ours.forward(&ids), move || theirs.forward(&again))
    }),
    ("layer norm, 768", |of| {
        let [x, w, b] = of.vars([&[TOKENS, 768], &[768], &[768]])?;
        let ours = nn::LayerNorm::new(w.clone(), b.clone(), 1e-5);
        let again = x.clone();
        pair(move || ours.forward(&x), move || candle_nn::ops::layer_norm_slow(&again, &w, &b, 1e-5))
    }),
    ("RMS norm, 768", |of| {
        let [x, w] = of.vars([&[TOKENS, 768], &[768]])?;
        let ours = nn::RmsNorm::new(w.clone(), 1e-5);
        let again = x.clone();
        pair(move || ours.forward(&x), move || candle_nn::ops::rms_norm_slow(&again, &w, 1e-5))
    }),
    ("group norm, 32 groups, 128 x 16 x 16", |of| {
        let [x, w, b] = of.vars([&[of.batch, 128, 16, 16], &[128], &[128]])?;
        let ours = nn::GroupNorm::new(w.clone(), b.clone(), 128, 32, 1e-5)?;
        let theirs = candle_nn::GroupNorm::new(w, b, 128, 32, 1e-5)?;
        let again = x.clone();
        pair(move || ours.forward(&x), move || theirs.forward(&again))
    }),
    ("batch norm, 64 x 16 x 16", |of| {
        let [x, w, b] = of.vars([&[of.batch, 64, 16, 16], &[64], &[64]])?;
        let [mean, var] = of.vars([&[64], &[64]])?;
        let var = var.sqr()?;
        let ours = nn::BatchNorm::new(64, mean.clone(), var.clone(), w.clone(), b.clone(), 1e-5)?;
        let theirs = candle_nn::BatchNorm::new(64, mean, var, w, b, 1e-5)?;
        let again = x.clone();
        pair(move || ours.forward_train(&x), move || theirs.forward_train(&again))
    }),
    ("GELU, 512 x 3072", |of| of.unary(&[TOKENS, 3072], nn::gelu, Tensor::gelu)),
    ("GELU by erf, 512 x 3072", |of| of.unary(&[TOKENS, 3072], nn::gelu_erf, Tensor::gelu_erf)),
    ("SiLU, 512 x 3072", |of| of.unary(&[TOKENS, 3072], nn::silu, Tensor::silu)),
    ("ReLU, 512 x 3072", |of| of.unary(&[TOKENS, 3072], |x| nn::Activation::Relu.forward(x), Tensor::relu)),
    ("SiLU of a gate, 512 x 2048", |of| {
        let [gate, up] = of.vars([&[TOKENS, 2048], &[TOKENS, 2048]])?;
        let again = [gate.clone(), up.clone()];
        pair(move || nn::silu_mul(&gate, &up), move || again[0].silu()? * &again[1])
    }),
    ("PReLU, 64 x 16 x 16", |of| {
        let [x, w] = of.vars([&[of.batch, 64, 16, 16], &[64]])?;
        let (ours, theirs) = (nn::PReLU::new(w.clone(), false), candle_nn::PReLU::new(w, false));
        let again = x.clone();
        pair(move || ours.forward(&x), move || theirs.forward(&again))
    }),
    ("softmax, 12 x 256 x 256", |of| {
        of.unary(&[12, 256, 256], |x| nn::ops::softmax(x, D::Minus1), |x| candle_nn::ops::softmax(x, D::Minus1))
    }),
    ("dropout, 512 x 768", |of| {
        of.unary(&[TOKENS, 768], |x| nn::ops::dropout(x, 0.1), |x| candle_nn::ops::dropout(x, 0.1))
    }),
    ("sum, 512 x 768", |of| {
        let [x, y] = of.vars([&[TOKENS, 768], &[TOKENS, 768]])?;
        let again = [x.clone(), y.clone()];
        pair(move || nn::add(&x, &y), move || &again[0] + &again[1])
    }),
    ("cross-entropy, 512 x 32,000", |of| {
        let [x] = of.vars([&[TOKENS, VOCABULARY]])?;
        let ids = ids(VOCABULARY)?;
        let again = [x.clone(), ids.clone()];
        pair(move || nn::cross_entropy(&x, &ids), move || candle_nn::loss::cross_entropy(&again[0], &again[1]))
    }),
    ("rotary embedding, 12 heads of 64", |of| {
        let [x] = of.vars([&[2, 12, 256, 64]])?;
        let [cos, sin] = of.vars([&[256, 32], &[256, 32]])?.map(|it| it.detach());
        let again = [x.clone(), cos.clone(), sin.clone()];
        pair(
            move || nn::rotary_emb::rope(&x, &cos, &sin),
            move || candle_nn::rotary_emb::rope_slow(&again[0], &again[1], &again[2]),
        )
    }),
    ("causal attention, 12 heads of 64", |of| {
        let qkv = of.vars([&[2, 256, 768]; 3])?;
        let again = qkv.clone();
        let dtype = of.dtype;
        pair(move || nn::causal_attention(&qkv[0], &qkv[1], &qkv[2], 12, 12, 0.125), move || attention(&again, dtype))
    }),
    ("convolution of 1 dimension, 3, 80 to 256", |of| {
        let [x, w] = of.vars([&[2, 80, 512], &[256, 80, 3]])?;
        let config = Conv1dConfig { padding: 1, ..Conv1dConfig::default() };
        let (ours, theirs) = (nn::Conv1d::new(w.clone(), None, config), candle_nn::Conv1d::new(w, None, config));
        let again = x.clone();
        pair(move || ours.forward(&x), move || theirs.forward(&again))
    }),
    ("max pooling, 2 x 2, 64 x 16 x 16", |of| {
        of.unary(&[of.batch, 64, 16, 16], |x| nn::max_pool2d(x, 2), |x| x.max_pool2d(2))
    }),
    ("average pooling, 2 x 2, 64 x 16 x 16", |of| {
        of.unary(&[of.batch, 64, 16, 16], |x| nn::avg_pool2d(x, 2), |x| x.avg_pool2d(2))
    }),
    ("LSTM, 128, 32 steps", |of| {
        let (x, vb) = of.steps()?;
        let again = x.clone();
        let ours = nn::lstm(128, 128, nn::LSTMConfig::default(), vb.clone())?;
        let theirs = candle_nn::lstm(128, 128, candle_nn::LSTMConfig::default(), vb)?;
        pair(
            move || nn::RNN::states_to_tensor(&ours, &nn::RNN::seq(&ours, &x)?),
            move || candle_nn::RNN::states_to_tensor(&theirs, &candle_nn::RNN::seq(&theirs, &again)?),
        )
    }),
    ("GRU, 128, 32 steps", |of| {
        let (x, vb) = of.steps()?;
        let again = x.clone();
        let ours = nn::gru(128, 128, nn::GRUConfig::default(), vb.clone())?;
        let theirs = candle_nn::gru(128, 128, candle_nn::GRUConfig::default(), vb)?;
        pair(
            move || nn::RNN::states_to_tensor(&ours, &nn::RNN::seq(&ours, &x)?),
            move || candle_nn::RNN::states_to_tensor(&theirs, &candle_nn::RNN::seq(&theirs, &again)?),
        )
    }),
];

/// Tokens of a batch.
const TOKENS: usize = 512;
const VOCABULARY: usize = 32_000;

/// The convolutions of ResNet-18 and ConvNeXt on images of 64 x 64: channels in and out, size of the image, kernel,
/// stride, padding and groups.
const CONVOLUTIONS: [(&str, [usize; 7]); 9] = [
    ("7 x 7, stride 2, 3 to 64, 64 x 64", [3, 64, 64, 7, 2, 3, 1]),
    ("3 x 3, 64, 16 x 16", [64, 64, 16, 3, 1, 1, 1]),
    ("3 x 3, 128, 8 x 8", [128, 128, 8, 3, 1, 1, 1]),
    ("3 x 3, 256, 4 x 4", [256, 256, 4, 3, 1, 1, 1]),
    ("3 x 3, 512, 2 x 2", [512, 512, 2, 3, 1, 1, 1]),
    ("1 x 1, stride 2, 64 to 128, 16 x 16", [64, 128, 16, 1, 2, 0, 1]),
    ("4 x 4, stride 4, 3 to 96, 64 x 64", [3, 96, 64, 4, 4, 0, 1]),
    ("7 x 7, 96 groups of 1, 16 x 16", [96, 96, 16, 7, 1, 3, 96]),
    ("2 x 2, stride 2, 96 to 192, 16 x 16", [96, 192, 16, 2, 2, 0, 1]),
];

impl Layers {
    /// Returns random variables.
    fn vars<const N: usize>(&self, shapes: [&[usize]; N]) -> Result<[Tensor; N]> {
        let var = |shape: &[usize]| {
            let values = Tensor::randn(0f32, 1., shape, &Device::Cpu)?.to_dtype(self.dtype)?;
            Ok(Var::from_tensor(&values)?.as_tensor().clone())
        };
        let vars = shapes.iter().map(|shape| var(shape)).collect::<Result<Vec<_>>>()?;
        vars.try_into().map_err(|_| candle_core::Error::msg("another number of variables"))
    }

    /// Returns layers of one input without weights.
    fn unary(
        &self,
        shape: &[usize],
        ours: impl Fn(&Tensor) -> Result<Tensor> + 'static,
        theirs: impl Fn(&Tensor) -> Result<Tensor> + 'static,
    ) -> Result<Pair> {
        let [x] = self.vars([shape])?;
        let again = x.clone();
        pair(move || ours(&x), move || theirs(&again))
    }

    /// Returns the input of a recurrent layer, and the builder of its weights.
    fn steps(&self) -> Result<(Tensor, VarBuilder<'static>)> {
        let [x] = self.vars([&[16, 32, 128]])?;
        Ok((x, VarBuilder::from_varmap(&VarMap::new(), self.dtype, &Device::Cpu)))
    }

    fn convolution(&self, [inputs, outputs, size, kernel, stride, padding, groups]: [usize; 7]) -> Result<Pair> {
        let [x, w] = self.vars([&[self.batch, inputs, size, size], &[outputs, inputs / groups, kernel, kernel]])?;
        let config = Conv2dConfig { padding, stride, groups, ..Conv2dConfig::default() };
        let (ours, theirs) = (nn::Conv2d::new(w.clone(), None, config), candle_nn::Conv2d::new(w, None, config));
        let again = x.clone();
        pair(move || ours.forward(&x), move || theirs.forward(&again))
    }
}

/// Returns ids below `bound`.
fn ids(bound: usize) -> Result<Tensor> {
    let ids: Vec<u32> = (0..TOKENS).map(|i| (i * 7919 % bound) as u32).collect();
    Tensor::new(ids, &Device::Cpu)
}

/// Causal attention of 12 heads of 64, as models of candle-transformers compute it.
fn attention(qkv: &[Tensor; 3], dtype: DType) -> Result<Tensor> {
    let (batch, tokens, width) = qkv[0].dims3()?;
    let heads = |x: &Tensor| x.reshape((batch, tokens, 12, 64))?.transpose(1, 2)?.contiguous();
    let (q, k, v) = (heads(&qkv[0])?, heads(&qkv[1])?, heads(&qkv[2])?);
    let hidden: Vec<f32> =
        (0..tokens * tokens).map(|i| if i % tokens > i / tokens { f32::NEG_INFINITY } else { 0. }).collect();
    let hidden = Tensor::from_vec(hidden, (1, 1, tokens, tokens), &Device::Cpu)?.to_dtype(dtype)?;
    let scores = (q.matmul(&k.t()?)? * 0.125)?.broadcast_add(&hidden)?;
    let y = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&v)?;
    y.transpose(1, 2)?.reshape((batch, tokens, width))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same computation is measured in both libraries. Dropout drops other elements.
    #[test]
    fn layers_are_those_of_candle_nn() {
        let layers = Layers { dtype: DType::F32, batch: 2 };
        let named = NAMED.iter().filter(|(name, _)| !name.starts_with("dropout"));
        let named = named.map(|(name, pair)| (*name, pair(&layers)));
        let convolutions = CONVOLUTIONS.into_iter().map(|(name, sizes)| (name, layers.convolution(sizes)));
        for (name, pair) in named.chain(convolutions) {
            let [ours, theirs] = pair.unwrap().map(|layer| layer().unwrap());
            ours.sum_all().unwrap().backward().unwrap();
            let largest = |x: &Tensor| x.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
            let (apart, most) = (largest(&(&ours - &theirs).unwrap()).unwrap(), largest(&theirs).unwrap());
            assert!(apart <= 1e-4 * most, "{name}: {apart} apart, at most {most}");
        }
    }
}
