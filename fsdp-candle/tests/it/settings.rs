//! Settings changed during training, and options of one unit.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Module};
use candle_nn::VarBuilder;
use fsdp_candle::{AllGather, AllGatherExtension, Float8, FullyShard, Recurse, ReshardAfterForward, fully_shard, nn};
use fsdp_core::{Allocator, Buffer};

use crate::common::{
    Block, LAYERS, Model, Own, Parts, WIDTH, address, alone, assert_close, assert_contains, assert_part,
    assert_resharded, batch, built, gradients, gradients_of, loss_of, mean_square, memory, ranks, reference, sharded,
    vars,
};

#[test]
fn keeps_parameters_after_backward() {
    ranks(2, |world| {
        let want = reference(&world);
        let (vars, model) = built(&world, WIDTH);
        model.set_reshard_after_backward(false, Recurse::Yes);
        let x = batch(world.rank(), WIDTH);
        for _ in 0..2 {
            assert_close(&gradients_of(&vars, &model, &x), &want, 0.);
            assert!(vars.params().iter().all(|param| param.is_unsharded()));
        }
        model.set_reshard_after_backward(true, Recurse::Yes);
        let _grads = model.backward(&loss_of(&model, &x)).unwrap();
        assert_resharded(&vars);
    });
}

#[test]
fn changes_reshard_after_forward() {
    ranks(4, |world| {
        let want = reference(&world);
        let (vars, model) = built(&world, WIDTH);
        let x = batch(world.rank(), WIDTH);
        let policies = [ReshardAfterForward::Never, ReshardAfterForward::To(2), ReshardAfterForward::Always];
        for (policy, kept) in policies.into_iter().zip([true, false, false]) {
            model.set_reshard_after_forward(policy, Recurse::Yes).unwrap();
            let loss = loss_of(&model, &x);
            assert!(vars.params().iter().all(|param| param.is_unsharded() == kept), "{policy:?}");
            assert_close(&gradients(&vars, &model.backward(&loss).unwrap()), &want, 0.);
        }
        // An evaluation between steps leaves no stale values, whatever it keeps.
        model.set_reshard_after_forward(ReshardAfterForward::To(2), Recurse::Yes).unwrap();
        let before = loss_of(&model, &x).to_scalar::<f32>().unwrap();
        for param in vars.params().iter().filter(|param| param.region().elements() > 0) {
            param.var().set(&(param.var().as_tensor() * 0.5).unwrap()).unwrap();
        }
        assert_ne!(loss_of(&model, &x).to_scalar::<f32>().unwrap(), before);
    });
}

#[test]
fn backward_without_unshard() {
    ranks(2, |world| {
        let want = reference(&world);
        let vars = vars(&world);
        let opts = FullyShard::new(&vars).reshard_after_forward(ReshardAfterForward::Always);
        let model = sharded(&opts, &vars, WIDTH);
        let blocks = &model.inner().blocks;
        let x = batch(world.rank(), WIDTH);
        blocks.iter().for_each(|block| block.set_unshard_in_backward(false));
        let loss = loss_of(&model, &x);
        assert!(model.backward(&loss).is_err(), "the parameters were not there");
        let loss = loss_of(&model, &x);
        blocks.iter().for_each(|block| block.unshard().unwrap());
        assert_close(&gradients(&vars, &model.backward(&loss).unwrap()), &want, 0.);
    });
}

#[test]
fn limits_reductions_and_finalizes_asynchronously() {
    ranks(2, |world| {
        let want = reference(&world);
        let (vars, model) = built(&world, WIDTH);
        model.set_manual_backward_finalization(true);
        for max in [1, 2, 10] {
            model.set_reduce_scatter_max_input_buffers(max);
            let mut grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
            let end = model.finalize_backward_async();
            end.wait(&mut grads).unwrap();
            assert_close(&gradients(&vars, &grads), &want, 0.);
        }
    });
}

/// An allocator that counts the buffers in use.
struct Counted {
    memory: Arc<dyn Allocator>,
    taken: AtomicUsize,
    given: AtomicUsize,
}

impl Counted {
    fn on_this_device() -> Arc<Self> {
        Arc::new(Counted { memory: memory(), taken: AtomicUsize::new(0), given: AtomicUsize::new(0) })
    }
}

impl Allocator for Counted {
    fn take(&self, dtype: fsdp_core::DType, len: usize) -> fsdp_core::Result<Buffer> {
        self.taken.fetch_add(1, Ordering::Relaxed);
        self.memory.take(dtype, len)
    }
    fn give(&self, buffer: Buffer) {
        self.given.fetch_add(1, Ordering::Relaxed);
        self.memory.give(buffer);
    }
}

/// Returns the unit's own all-gather, with outputs in `memory`.
fn gathers_into(memory: &Arc<Counted>) -> Arc<dyn AllGather> {
    let memory = memory.clone();
    Own::in_memory(|_: Parts<'_>| None, move || memory.clone())
}

#[test]
fn custom_allocators_get_all_buffers_back() {
    ranks(2, |world| {
        let want = reference(&world);
        for reshard in [ReshardAfterForward::Always, ReshardAfterForward::Never] {
            let vars = vars(&world);
            let model = sharded(&FullyShard::new(&vars).reshard_after_forward(reshard), &vars, WIDTH);
            let memory = Counted::on_this_device();
            for block in &model.inner().blocks {
                block.set_custom_all_gather(Some(gathers_into(&memory)));
            }
            for _ in 0..2 {
                assert_close(&gradients_of(&vars, &model, &batch(world.rank(), WIDTH)), &want, 0.);
            }
            let (taken, given) = (memory.taken.load(Ordering::Relaxed), memory.given.load(Ordering::Relaxed));
            assert!(taken > 0 && taken == given, "{taken} taken, {given} given back");
        }
    });
}

#[test]
fn kept_storage_and_own_meshes_keep_gradients() {
    ranks(4, |world| {
        let want = reference(&world);
        let vars = vars(&world);
        let pairs = world.mesh(&[("replicate", 2), ("shard", 2)]).unwrap();
        let root = FullyShard::new(&vars);
        let blocks = root.clone().mesh(&pairs).unwrap();
        let vb = vars.builder(DType::F32);
        let block = |i| fully_shard(&blocks, vb.pp(format!("blocks.{i}")), |vb| Block::new(WIDTH, vb)).unwrap();
        let blocks = (0..LAYERS).map(block).collect();
        let build = |vb: VarBuilder<'static>| Ok(Model { blocks, head: nn::linear(WIDTH, 2, vb.pp("head"))? });
        let model = fully_shard(&root, vb.clone(), build).unwrap();
        assert_eq!(model.inner().blocks[0].params()[0].placements().len(), 2);
        model.set_keep_unsharded_storage(true, Recurse::Yes);
        for keep in [true, true, false] {
            model.set_keep_unsharded_storage(keep, Recurse::Yes);
            let grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
            for param in vars.trainable() {
                assert_part(&param, &grads, &want);
            }
        }
    });
}

#[test]
fn kept_storage_stays_with_its_parameter() {
    for size in 1..=3 {
        ranks(size, |world| {
            for custom in [false, true] {
                let vars = vars(&world);
                let float8: Arc<dyn AllGatherExtension> = Arc::new(Float8);
                let opts = FullyShard::new(&vars)
                    .reshard_after_forward(ReshardAfterForward::Always)
                    .shard_placement_fn(|name, _| name.starts_with("columns").then(|| 1.into()))
                    .all_gather_extension(move |name| name.starts_with("encoded").then(|| float8.clone()));
                // All of one size, used in a different order than they were built in.
                let names = ["a", "columns", "b", "encoded", "c"];
                let unit = fully_shard(&opts, vars.builder(DType::F32), |vb| {
                    names
                        .iter()
                        .map(|name| Ok(candle_nn::Linear::new(vb.get((WIDTH, WIDTH), name)?, None)))
                        .collect::<candle_core::Result<Vec<_>>>()
                })
                .unwrap();
                unit.set_keep_unsharded_storage(true, Recurse::Yes);
                if custom {
                    unit.set_custom_all_gather(Some(gathers_into(&Counted::on_this_device())));
                }
                let addresses = || unit.inner().iter().map(|layer| address(layer.weight())).collect::<Vec<_>>();
                let mut first = None;
                for step in 0..6usize {
                    // Buffers are freed in a different order in each step.
                    let mut seen = vec![];
                    let y = unit.call(|layers| {
                        seen = addresses();
                        (0..5)
                            .map(|i| &layers[(i * (step % 4 + 1) + step) % 5])
                            .try_fold(batch(world.rank(), WIDTH), |x, layer| layer.forward(&x))
                    });
                    assert_eq!(&seen, first.get_or_insert(seen.clone()), "forward of step {step}");
                    let _grads = unit.backward(&mean_square(&y.unwrap())).unwrap();
                    unit.unshard().unwrap();
                    assert_eq!(&addresses(), &seen, "by hand in step {step}");
                    unit.reshard().unwrap();
                }
            }
        });
    }
}

#[test]
fn settings_of_split_units_do_not_reach_siblings() {
    let world = alone();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars);
    let vb = vars.builder(DType::F32);
    let linear = |name: &str| fully_shard(&opts, vb.pp(name), |vb| nn::linear(4, 4, vb)).unwrap();
    let (block, adapter) = (linear("block"), linear("head.adapter"));
    let pair = fully_shard(&opts, vb.clone(), |vb| {
        Ok((nn::rms_norm(4, 1e-5, vb.pp("norm"))?, nn::linear(4, 4, vb.pp("head"))?))
    });
    let (norm, head) = pair.unwrap().into_parts();
    let root = fully_shard(&opts, vb.clone(), |vb| nn::linear(4, 4, vb.pp("embed"))).unwrap();
    let x = batch(0, 4);
    let run = || {
        let y = root.call(|embed| {
            let y = adapter.forward(&block.forward(&embed.forward(&x)?)?)?;
            head.forward(&norm.forward(&y)?)
        });
        let units = [block.params(), adapter.params(), norm.params(), root.params()];
        let kept = units.map(|params| params[0].is_unsharded());
        root.backward(&mean_square(&y.unwrap())).unwrap();
        kept
    };
    assert_eq!(run(), [false, false, false, true]);
    norm.set_reshard_after_forward(fsdp_candle::ReshardAfterForward::Never, Recurse::Yes).unwrap();
    assert_eq!(run(), [false, true, true, true]);
    root.set_reshard_after_forward(fsdp_candle::ReshardAfterForward::Always, Recurse::Yes).unwrap();
    assert_eq!(run(), [false; 4]);
    assert_contains(&root.to_string(), &["\n  block [", "\n  (root) [", "\n    head.adapter ["]);
}
