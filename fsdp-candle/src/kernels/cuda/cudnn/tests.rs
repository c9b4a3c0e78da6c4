//! Plans of attention: by the device's cuDNN, or by NVIDIA's without a GPU, for which `scripts/check-cudnn` passes the
//! properties of one. Results are compared by the tests of `nn::attention`, with `FSDP_ATTENTION_BACKEND=cudnn`.

use fsdp_core::DType;

use super::super::device::{candle_device, of_candle};
use super::Cudnn;
use super::attention::Shape;
use super::graph::Target;
use super::library::{Descriptor, Values, library};
use super::names::{Kind, Name};

/// The variable with properties of a device, as JSON.
const VARIABLE: &str = "FSDP_TESTS_CUDNN_DEVICE";

fn shape(dtype: DType, [batch, queries, keys, heads, kv_heads, dim]: [usize; 6]) -> Shape {
    let strides = [(queries, heads), (keys, kv_heads), (keys, kv_heads)];
    let strides = strides.map(|(positions, heads)| [positions * heads * dim, heads * dim]);
    let (is_causal, is_shifted, has_window) = (true, queries < keys, false);
    Shape { dtype, batch, queries, keys, heads, kv_heads, dim, strides, is_causal, is_shifted, has_window }
}

fn each_plan(target: Target<'_>, capability: (i32, i32)) {
    let library = library().unwrap();
    let mut shapes = vec![];
    for dtype in [DType::BF16, DType::F16] {
        for dim in [64, 80, 96, 128] {
            shapes.push(shape(dtype, [2, 600, 600, 4, 4, dim]));
            shapes.push(shape(dtype, [1, 2048, 8192, 32, 8, dim]));
        }
    }
    shapes.push(shape(DType::BF16, [1, 8192, 8192, 32, 8, 128]));
    let mut all = vec![];
    for shape in shapes {
        all.extend([
            Shape { has_window: true, ..shape.clone() },
            Shape { is_causal: false, is_shifted: false, ..shape.clone() },
            shape,
        ]);
    }
    for shape in all {
        let forward = shape.forward(library, target).unwrap_or_else(|error| panic!("{shape:?}: {error}"));
        let backward = shape.backward(library, target, capability).unwrap_or_else(|error| panic!("{shape:?}: {error}"));
        println!("{shape:?}: workspaces of {} and {} bytes", forward.workspace, backward.workspace);
    }
}

/// Runs if a device has cuDNN, or if there are properties of a device.
#[test]
fn cudnn_has_plans_for_every_shape() {
    if let Ok(device) = std::env::var(VARIABLE) {
        let mut properties = Descriptor::new(library().unwrap(), Kind::DeviceProp).unwrap();
        properties.set(Name::DevicePropJsonRepresentation, Values::Text(&device)).unwrap();
        let properties = properties.finalize().unwrap();
        let (_, version) = device.split_once("\"deviceVer\":").unwrap();
        let version: i32 = version.trim_start().split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap();
        return each_plan(Target::Properties(&properties), (version / 100, version % 100 / 10));
    }
    let Ok(device) = candle_device(0) else { return };
    match Cudnn::start(of_candle(device.as_cuda_device().unwrap()).unwrap(), 1).unwrap() {
        Ok(cudnn) => each_plan(Target::Handle(&cudnn.handle.lock()), cudnn.capability),
        Err(why) => println!("no plans: {why}"),
    }
}
