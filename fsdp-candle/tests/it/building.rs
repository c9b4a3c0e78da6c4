//! Building units: Candle's own builders, errors inside the closure, impossible sizes, modules that are cloned and
//! printed.

use std::collections::HashMap;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fsdp_candle::initializer::Philox;
use fsdp_candle::{Error, FsdpModule, FullyShard, ShardedVarMap, StateOnDisk, World, fully_shard, nn};

use crate::common::{
    alone, assert_close, assert_contains, batch, gradients, gradients_of, loss_of, ranks, refused, times, vars,
};

#[test]
fn refuses_candles_own_builders() {
    let world = World::single().unwrap();
    let device = Device::Cpu;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.safetensors");
    let tensors = || {
        let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &device).unwrap();
        HashMap::from([("a.weight".to_string(), ones(&[4, 4])), ("a.bias".to_string(), ones(&[4]))])
    };
    candle_core::safetensors::save(&tensors(), &file).unwrap();
    // SAFETY: nothing changes the file while it is mapped.
    #[allow(unsafe_code)]
    let mapped = unsafe { VarBuilder::from_mmaped_safetensors(&[&file], DType::F32, &device) }.unwrap();
    let other = vars(&world);
    for (what, vb) in [
        ("varmap", VarBuilder::from_varmap(&VarMap::new(), DType::F32, &device)),
        ("file", mapped),
        ("tensors", VarBuilder::from_tensors(tensors(), DType::F32, &device)),
        ("zeros", VarBuilder::zeros(DType::F32, &device)),
    ] {
        let vars = vars(&world);
        let opts = FullyShard::new(&vars);
        println!("{what}");
        let unit = fully_shard(&opts, vb.pp("a"), |vb| candle_nn::linear(4, 4, vb));
        refused(unit, &["unit `a`", "vars.builder(dtype)", "Pretrained::open", "from_mmaped_safetensors"]);
        // The root fails too, when its units were built.
        let vb = (vars.builder(DType::F32), vb);
        let block = fully_shard(&opts, vb.0.pp("block"), |vb| nn::linear(4, 4, vb)).unwrap();
        refused(
            fully_shard(&opts, vb.1, |vb| Ok((block, candle_nn::linear(4, 4, vb.pp("a"))?))),
            &["unit `(root)`", "vars.builder(dtype)"],
        );
    }
    let vars = vars(&world);
    refused(fully_shard(&FullyShard::new(&vars), other.builder(DType::F32), |_| Ok(())), &["not of the ShardedVarMap"]);
}

#[test]
fn accepts_units_without_parameters() {
    let world = World::single().unwrap();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars).ignored_params(|name| name == "ignored");
    let vb = vars.builder(DType::F32);
    assert!(fully_shard(&opts, vb.pp("none"), |_| Ok(())).unwrap().params().is_empty());
    let renamed = vb.clone().rename_f(|name: &str| format!("model.{name}"));
    assert!(fully_shard(&opts, renamed.pp("renamed"), |_| Ok(())).unwrap().params().is_empty());
    let unit = fully_shard(&opts, renamed.pp("other"), |vb| nn::linear(2, 2, vb)).unwrap();
    assert_eq!(unit.params()[0].name(), "model.other.weight");
    fully_shard(&opts, vb, |vb| vb.get(3, "ignored")).unwrap();
}

#[test]
fn build_errors_have_unit_and_cause() {
    let world = World::single().unwrap();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars);
    let vb = vars.builder(DType::F32);
    let outer = fully_shard(&opts, vb.pp("model"), |vb| {
        let inner = fully_shard(&opts, vb.pp("block"), |_| Err::<(), _>(candle_core::Error::msg("no such layer")))?;
        Ok(inner)
    });
    let Err(Error::Build { unit, cause }) = outer else { panic!("an error of the build") };
    assert_eq!(unit, "model");
    assert_contains(&cause.to_string(), &["unit `model.block`", "no such layer"]);
}

#[test]
fn values_read_while_building_name_unit_and_parameter() {
    let world = World::single().unwrap();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars);
    let vb = vars.builder(DType::F32);
    let normed = |vb: VarBuilder<'static>| {
        let (gain, direction) = (vb.get((4, 1), "weight_g")?, vb.get((4, 2), "weight_v")?);
        gain.broadcast_mul(&direction.broadcast_div(&direction.sqr()?.sum_keepdim(1)?.sqrt()?)?)
    };
    let parts = ["unit `conv`", "read after `conv.weight_v` was asked for", "compute on them in forward"];
    refused(fully_shard(&opts, vb.pp("conv"), normed), &parts);
    let number = |vb: VarBuilder<'static>| vb.get(1, "scale")?.to_vec1::<f32>();
    refused(fully_shard(&opts, vb.pp("scaled"), number), &["unit `scaled`", "read after `scaled.scale` was asked for"]);
    // A tied weight that is asked for again, after other parameters.
    refused(
        fully_shard(&opts, vb.pp("tied"), |vb| {
            let _layers = (vb.get((2, 2), "embed")?, nn::linear(2, 2, vb.pp("mlp"))?);
            vb.get((2, 2), "embed")?.t()?.contiguous()
        }),
        &["unit `tied`", "read after `tied.embed` was asked for"],
    );
    // The inner unit was built. The outer one reads its parameter.
    refused(
        fully_shard(&opts, vb.pp("outer"), |vb| {
            let inner = fully_shard(&opts, vb.pp("inner"), |vb| nn::linear(2, 2, vb))?;
            inner.inner().weight().sqr()
        }),
        &["unit `outer`", "read after `outer.inner.bias` was asked for"],
    );
    // A layer of `nn` knows its parameter.
    refused(
        fully_shard(&opts, vb.pp("probed"), |vb| nn::linear(2, 2, vb.pp("fc"))?.forward(&batch(0, 2))),
        &["unit `probed`", "parameter `probed.fc.weight`: a layer computed with it while the model is built"],
    );
    assert!(vars.params().is_empty());
    // An ignored parameter has values.
    let opts = opts.ignored_params(|name| name.ends_with("scale"));
    let scale = fully_shard(&opts, vb.pp("scaled"), number).unwrap();
    assert_eq!(vars.ignored()[0].1.to_vec1::<f32>().unwrap(), *scale.inner());
}

#[test]
fn refuses_adapters_larger_than_memory() {
    let world = World::single().unwrap();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars);
    let vb = vars.builder(DType::F32);
    for rank in [usize::MAX, 1 << 61, 1 << 58] {
        let config = nn::LoraConfig { rank, alpha: 1. };
        let lora = |vb: VarBuilder<'static>| nn::lora(nn::linear(8, 6, vb.clone())?, 8, 6, config, vb);
        refused(fully_shard(&opts, vb.pp("q_proj"), lora), &[&format!("rank {rank}"), "`q_proj`"]);
    }
    assert!(vars.params().is_empty());
}

/// The usual derives of a Candle model.
#[derive(Clone, Debug)]
struct Model {
    blocks: Vec<FsdpModule<nn::Linear>>,
    head: nn::Linear,
}

impl Module for Model {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.head.forward(&self.blocks.iter().try_fold(x.clone(), |x, block| nn::gelu(&block.forward(&x)?))?)
    }
}

#[test]
fn clones_share_one_model() {
    ranks(2, |world| {
        let vars = vars(&world);
        let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
        let blocks = (0..2).map(|i| fully_shard(&opts, vb.pp(i), |vb| nn::linear(5, 5, vb)).unwrap()).collect();
        let model = fully_shard(&opts, vb, |vb| Ok(Model { blocks, head: nn::linear(5, 2, vb.pp("head"))? })).unwrap();
        let x = batch(world.rank(), 5);
        let want = gradients_of(&vars, &model, &x);

        assert_contains(&format!("{model:?}"), &["(root)", "FsdpParam(head.weight [2, 5]", "FsdpParam(1.bias [5]"]);
        let clone = model.clone();
        assert_close(&gradients(&vars, &clone.backward(&loss_of(&clone, &x)).unwrap()), &want, 0.);
        // Both in one loss: the gradients of all uses are added.
        let both = (loss_of(&model, &x) + loss_of(&clone, &x)).unwrap();
        assert_close(&gradients(&vars, &model.backward(&both).unwrap()), &times(&want, 2.), 1e-5);
        drop(model);
        assert_close(&gradients(&vars, &clone.backward(&loss_of(&clone, &x)).unwrap()), &want, 0.);
    });
}

#[test]
fn units_inside_a_models_own_constructor_equal_units_made_before_it() {
    ranks(2, |world| {
        let outcome = |inside: bool| {
            let vars = vars(&world);
            let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
            let blocks =
                || (0..2).map(|i| fully_shard(&opts, vb.pp(i), |vb| nn::linear(5, 5, vb)).unwrap()).collect::<Vec<_>>();
            let before = (!inside).then(blocks);
            let model = fully_shard(&opts, vb.clone(), |vb| {
                Ok(Model { blocks: before.unwrap_or_else(blocks), head: nn::linear(5, 2, vb.pp("head"))? })
            });
            let model = model.unwrap();
            let names: Vec<_> = model.inner().blocks[1].params().iter().map(|p| p.name().to_owned()).collect();
            assert_eq!(names, ["1.weight", "1.bias"]);
            gradients_of(&vars, &model, &batch(world.rank(), 5))
        };
        assert_close(&outcome(true), &outcome(false), 0.);
    });
}

#[test]
fn refuses_parameters_of_another_unit() {
    let world = alone();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars);
    let vb = vars.builder(DType::F32);
    let _first = fully_shard(&opts, vb.pp("a"), |vb| nn::linear(4, 4, vb)).unwrap();
    refused(
        fully_shard(&opts, vb.pp("a"), |vb| nn::linear(4, 4, vb)),
        &["`a.weight`", "already belongs to FSDP unit `a`"],
    );
    refused(fully_shard(&opts, vb.clone(), |vb| nn::linear(4, 4, vb.pp("a"))), &["unit `(root)`"]);
    refused(vb.pp("b").get((4, 4), "weight"), &["outside fully_shard"]);
    refused(fully_shard(&opts, vb.pp("c"), |vb| vb.get((), "scale")), &["shape [1]"]);
}

#[test]
fn a_failed_build_leaves_no_parameters() {
    let world = alone();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars);
    let vb = vars.builder(DType::F32);
    refused(
        fully_shard(&opts, vb.pp("a"), |vb| {
            nn::linear(4, 4, vb)?;
            Err::<(), _>(candle_core::Error::msg("no"))
        }),
        &["no"],
    );
    assert!(vars.params().is_empty());
    fully_shard(&opts, vb.pp("a"), |vb| nn::linear(4, 4, vb)).unwrap();
}

#[test]
fn ignored_parameters_have_one_shape_and_dtype() {
    let world = alone();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars).ignored_params(|name| name == "scale");
    let ask = |shape: usize, dtype: DType| {
        fully_shard(&opts, vars.builder(DType::F32), |vb| {
            vb.get(4, "scale")?;
            vb.get_with_hints_dtype(shape, "scale", candle_nn::Init::Const(0.), dtype)
        })
    };
    refused(ask(5, DType::F32), &["parameter `scale`", "[4] F32", "[5] F32"]);
    refused(ask(4, DType::F64), &["[4] F64"]);
    ask(4, DType::F32).unwrap();
}

#[test]
fn settings_after_building_name_the_call_that_works() {
    ranks(2, |world| {
        let [vars, other] = [(); 2].map(|()| vars(&world));
        let layer = |vars: &ShardedVarMap, name| {
            fully_shard(&FullyShard::new(vars), vars.builder(DType::F32).pp(name), |vb| nn::linear(4, 4, vb)).unwrap()
        };
        let (model, foreign) = (layer(&vars, "first"), layer(&other, "second"));
        let late = ["before the model is built", "2 are built (`first.weight` was the first)"];
        let cases = [
            (vars.freeze(|_| true), "ShardedVarMap::freeze", "set_requires_grad"),
            (vars.init_with(Philox::new(1)), "ShardedVarMap::init_with", "load_model"),
            (vars.adapt(nn::LoraConfig { rank: 1, alpha: 1. }, |_| true), "ShardedVarMap::adapt", "a map of its own"),
            (vars.store_on_disk(&StateOnDisk::new(".")), "ShardedVarMap::store_on_disk", "a map of its own"),
        ];
        for (result, setting, way_out) in cases {
            refused(result, &[late[0], late[1], setting, way_out]);
        }
        let units = [model.unit(), foreign.unit()];
        refused(model.set_modules_to_forward_prefetch(&units), &["unit `first`", "unit `second`", "own model"]);
        refused(model.set_modules_to_backward_prefetch(&units), &["unit `first`", "unit `second`", "own model"]);
        assert_eq!(vars.trainable().len(), 2);
    });
}
