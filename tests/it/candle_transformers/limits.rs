//! The limits of the one changed line, which docs/from-candle.md lists.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Module, Result, Shape, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::{FsdpModule, FullyShard, GradcheckOptions, ShardedVarMap, World, gradcheck, nn, shard};
use fsdp_test_support::{read_text, workspace};

/// Returns whether the document has a message, without its backticks.
fn is_documented(message: &str) -> bool {
    let text = read_text(&workspace().join("docs/from-candle.md"));
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ").replace('`', "");
    text.contains(message)
}

/// Asserts that an error contains a message that the document has.
fn has_documented<T, E: std::fmt::Display>(result: std::result::Result<T, E>, message: &str) {
    let error = result.err().unwrap().to_string().replace('`', "");
    assert!(error.contains(message), "{message:?} is not in {error}");
    assert!(is_documented(message), "the document lacks {message:?}");
}

fn build<M>(
    build: impl FnOnce(VarBuilder<'static>) -> Result<M>,
) -> fsdp_candle::Result<(ShardedVarMap, FsdpModule<M>)> {
    let vars = ShardedVarMap::of_world(&World::single()?)?;
    let model = shard(&FullyShard::new(&vars), &[], vars.builder(DType::F32), build)?;
    Ok((vars, model))
}

fn ones(shape: (usize, usize)) -> Result<Tensor> {
    Tensor::ones(shape, DType::F32, &candle_core::Device::Cpu)
}

#[test]
fn values_are_not_read_in_new() {
    let normed = build(|vb| {
        let vb = vb.pp("conv");
        vb.get((4, 1), "weight_g")?.broadcast_mul(&vb.get((4, 2), "weight_v")?)
    });
    has_documented(normed.map(|_| ()), "a parameter was read after conv.weight_v was asked for");
}

#[test]
fn views_are_made_in_new() {
    let (vars, model) = build(|vb| vb.get((6, 4), "weight")?.narrow(0, 0, 3)?.t()).unwrap();
    let y = model.call(|weight| ones((2, 4))?.matmul(weight)).unwrap();
    assert_eq!(y.dims(), [2, 3]);
    let grads = model.backward(&y.sum_all().unwrap()).unwrap();
    let sums = grads.get(vars.params()[0].var()).unwrap().sum(1).unwrap();
    assert_eq!(sums.to_vec1::<f32>().unwrap(), [8., 8., 8., 0., 0., 0.]);
}

#[test]
fn shapes_are_needed() {
    let unchecked = build(|vb| vb.get_unchecked("w1")?.dim(1));
    has_documented(unchecked.map(|_| ()), "a sharded parameter needs its shape: ask with get instead of get_unchecked");
}

/// An operation without backward. It doubles its input.
struct Add3;

impl CustomOp1 for Add3 {
    fn name(&self) -> &'static str {
        "add3"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (from, to) = layout.contiguous_offsets().unwrap();
        let doubled = storage.as_slice::<f32>()?[from..to].iter().map(|x| 2. * x).collect();
        Ok((CpuStorage::F32(doubled), layout.shape().clone()))
    }
}

/// Two layers around the operation, which a residual path goes around.
struct Layers {
    before: nn::Linear,
    after: nn::Linear,
    is_residual: bool,
}

impl Layers {
    fn build(is_residual: bool) -> FsdpModule<Layers> {
        let layers = |vb: VarBuilder| {
            let (before, after) = (nn::linear(4, 4, vb.pp("before"))?, nn::linear(4, 2, vb.pp("after"))?);
            Ok(Layers { before, after, is_residual })
        };
        let (_, model) = build(layers).unwrap();
        model
    }

    fn loss(&self, op: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let x = self.before.forward(&ones((3, 4))?)?;
        let y = op(&x)?;
        self.after.forward(&if self.is_residual { (x + y)? } else { y })?.sqr()?.mean_all()
    }
}

#[test]
fn own_operations_need_a_backward() {
    let model = Layers::build(false);
    let loss = model.call(|layers| layers.loss(|x| x.apply_op1(Add3))).unwrap();
    has_documented(model.backward(&loss), "backward is not supported for add3");

    let model = Layers::build(false);
    let loss = model.call(|layers| layers.loss(|x| x.apply_op1_no_bwd(&Add3))).unwrap();
    model.backward(&loss).unwrap();
    assert_eq!(model.parameters_without_gradient(), ["before.bias", "before.weight"]);

    // Beside a residual path all parameters have a gradient, which is wrong for some.
    let model = Layers::build(true);
    let loss = |model: &FsdpModule<Layers>| model.call(|layers| layers.loss(|x| x.apply_op1_no_bwd(&Add3)));
    model.backward(&loss(&model).unwrap()).unwrap();
    assert!(model.parameters_without_gradient().is_empty());
    assert!(gradcheck(&model, &GradcheckOptions::default(), loss).is_err());
}

/// A folder like `mimi`, whose `mod.rs` exports candle_nn to its files.
mod exported {
    pub(super) use fsdp_candle::nn as candle_nn;

    pub(super) mod file {
        use super::candle_nn::{Linear, VarBuilder, linear};

        pub(in super::super) fn layer(vb: VarBuilder) -> candle_core::Result<Linear> {
            linear(2, 2, vb)
        }
    }
}

#[test]
fn a_folder_exports_our_layers() {
    let (_, model) = build(exported::file::layer).unwrap();
    let _: &nn::Linear = model.inner();
    assert!(is_documented("Write pub use fsdp_candle::nn as candle_nn; instead of both"));
}

/// A file with a module inside.
mod nested {
    use fsdp_candle::nn as candle_nn;

    pub(super) type Layers = (candle_nn::Linear, ::candle_nn::Linear);

    pub(super) fn layers(vb: candle_nn::VarBuilder) -> candle_core::Result<Layers> {
        Ok((candle_nn::linear(2, 2, vb.pp("outer"))?, inside::layer(vb.pp("inner"))?))
    }

    mod inside {
        pub(super) fn layer(vb: candle_nn::VarBuilder) -> candle_core::Result<candle_nn::Linear> {
            candle_nn::linear(2, 2, vb)
        }
    }
}

#[test]
fn modules_inside_a_file_use_candles_layers() {
    let vars = ShardedVarMap::of_world(&World::single().unwrap()).unwrap();
    let opts = FullyShard::new(&vars);
    let model = shard(&opts, &["outer", "inner"], vars.builder(DType::F32), nested::layers).unwrap();
    let names: Vec<_> = model.unmanaged_parameters().iter().map(|param| param.name()).collect();
    assert_eq!(names, ["inner.weight", "inner.bias"]);
}
