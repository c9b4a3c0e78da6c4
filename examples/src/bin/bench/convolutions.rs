//! `bench convolutions`: forward and backward of convolutions, beside candle_nn's.

use candle_core::{Device, Module, Var};
use candle_nn::Conv2dConfig;
use serde::Serialize;

use crate::{passes, print};

/// Measures convolutions of ResNet-18 and ConvNeXt on images of 64 x 64, in this process. `RAYON_NUM_THREADS` sets the
/// threads. tests/interop/convolutions.py measures the same in PyTorch.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of runs. The best counts.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Images of a batch.
    #[arg(long, default_value_t = 16, value_parser = crate::count(1 << 12))]
    batch: usize,
    /// Print one JSON object a line.
    #[arg(long)]
    json: bool,
}

/// A convolution, and milliseconds of its forward and backward.
#[derive(Serialize)]
struct Times {
    name: &'static str,
    ours: [f64; 2],
    candle_nn: [f64; 2],
}

/// Name, channels in and out, size of the image, kernel, stride, padding and groups.
const CASES: [(&str, [usize; 7]); 9] = [
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

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if !args.json {
        print(format_args!("{:<38} {:>9} {:>9} {:>9} {:>9}", "ms", "forward", "backward", "candle_nn", "backward"))?;
    }
    for (name, [inputs, outputs, size, kernel, stride, padding, groups]) in CASES {
        let x = Var::randn(0f32, 1., (args.batch, inputs, size, size), &Device::Cpu)?;
        let weight = Var::randn(0f32, 1., (outputs, inputs / groups, kernel, kernel), &Device::Cpu)?;
        let config = Conv2dConfig { padding, stride, groups, ..Conv2dConfig::default() };
        let ours = fsdp_candle::nn::Conv2d::new(weight.as_tensor().clone(), None, config);
        let theirs = candle_nn::Conv2d::new(weight.as_tensor().clone(), None, config);
        let of = |layer: &dyn Module| passes::best(args.runs, || layer.forward(&x));
        let times = Times { name, ours: of(&ours)?, candle_nn: of(&theirs)? };
        match args.json {
            true => print(serde_json::to_string(&times)?)?,
            false => {
                let [a, b, c, d] = [times.ours[0], times.ours[1], times.candle_nn[0], times.candle_nn[1]];
                print(format_args!("{name:<38} {a:>9.2} {b:>9.2} {c:>9.2} {d:>9.2}"))?;
            }
        }
    }
    Ok(())
}
