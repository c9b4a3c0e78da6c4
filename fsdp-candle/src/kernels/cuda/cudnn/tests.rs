//! Plans of attention by NVIDIA's cuDNN without a GPU: `scripts/check-cuda --cudnn` runs this with the properties of a
//! device. Results are compared by the tests of `nn::attention`, with `FSDP_ATTENTION_BACKEND=cudnn`.

use fsdp_core::DType;

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

/// Runs if there are properties of a device.
#[test]
fn cudnn_has_plans_without_a_device() {
    let Ok(device) = std::env::var(VARIABLE) else { return };
    let library = library().unwrap();
    let mut properties = Descriptor::new(library, Kind::DeviceProp).unwrap();
    properties.set(Name::DevicePropJsonRepresentation, Values::Text(&device)).unwrap();
    let properties = properties.finalize().unwrap();
    let (_, version) = device.split_once("\"deviceVer\":").unwrap();
    let version: i32 = version.trim_start().split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap();
    let capability = (version / 100, version % 100 / 10);
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
        let target = Target::Properties(&properties);
        let forward = shape.forward(library, target).unwrap_or_else(|error| panic!("{shape:?}: {error}"));
        let backward = shape.backward(library, target, capability).unwrap_or_else(|error| panic!("{shape:?}: {error}"));
        println!("{shape:?}: workspaces of {} and {} bytes", forward.workspace, backward.workspace);
    }
}
