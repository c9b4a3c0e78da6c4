//! Failing collectives: nothing stays in flight, nothing leaks, and the next step is correct.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use candle_core::{DType, Module, Tensor};
use fsdp_candle::{FullyShard, ReduceScatter, ShardMesh, ShardPlacement, ShardedVarMap, fully_shard, nn};
use fsdp_core::{Allocator, Buffer, ProcessGroup, ReduceOp, ScatterPart, Work};

use crate::common::{
    Identity, Own, Parts, WIDTH, assert_close, assert_resharded, batch, built, gradients, gradients_of, loss_of,
    mean_square, ranks, reference, refused,
};

#[test]
fn trains_after_an_error_in_backward() {
    ranks(2, |world| {
        let want = reference(&world);
        let (vars, model) = built(&world, WIDTH);
        let backward = |fails: bool| {
            let fragile = move |grad: &Tensor| match fails {
                true => candle_core::bail!("injected into backward"),
                false => Ok(grad.clone()),
            };
            let y = model.call(|m| {
                let x = m.blocks[0].forward(&batch(world.rank(), WIDTH))?.apply_op1(Identity(fragile))?;
                m.head.forward(&m.blocks[1..].iter().try_fold(x, |x, block| block.forward(&x))?)
            });
            model.backward(&mean_square(&y.unwrap()))
        };
        for _ in 0..2 {
            refused(backward(true), &["injected into backward"]);
            assert_resharded(&vars);
            assert_close(&gradients(&vars, &backward(false).unwrap()), &want, 0.);
        }
    });
}

/// A reduce-scatter that fails, or one that is slow and reports when it is done.
struct Late(Option<Arc<AtomicBool>>);

impl ReduceScatter for Late {
    fn reduce_scatter(
        &self,
        ranks: &ProcessGroup,
        parts: Vec<ScatterPart>,
        op: ReduceOp,
        memory: Arc<dyn Allocator>,
    ) -> Work {
        let Some(over) = self.0.clone() else {
            return Work::ready(Err(fsdp_core::Error::Argument { rank: 0, message: "injected".into() }));
        };
        let (completion, work) = Work::pending(ranks.rank());
        let ranks = ranks.clone();
        std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(200));
            let outcome = ranks.reduce_scatter(parts, op, memory).wait();
            over.store(true, Ordering::SeqCst);
            completion.complete(outcome);
        });
        work
    }
}

#[test]
fn trains_after_a_failed_reduction() {
    ranks(2, |world| {
        let want = reference(&world);
        let (vars, model) = built(&world, WIDTH);
        model.set_reduce_scatter_max_input_buffers(2);
        let over = Arc::new(AtomicBool::new(false));
        let blocks = &model.inner().blocks;
        blocks[2].set_custom_reduce_scatter(Some(Arc::new(Late(None))));
        blocks[1].set_custom_reduce_scatter(Some(Arc::new(Late(Some(over.clone())))));
        refused(model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))), &["injected"]);
        assert!(over.load(Ordering::SeqCst), "a reduction was in flight when backward had failed");
        blocks[2].set_custom_reduce_scatter(None);
        assert_close(&gradients_of(&vars, &model, &batch(world.rank(), WIDTH)), &want, 0.);
    });
}

#[test]
fn recovers_from_a_failed_gather() {
    ranks(4, |world| {
        // Two of a unit's parameters are on one mesh and two on another, so it has two all-gathers.
        let grid = world.mesh(&[("replicate", 2), ("shard", 2)]).unwrap();
        let vars = ShardedVarMap::new(&grid.slice(&["shard"]).unwrap(), world.device());
        let all = ShardMesh::new(&world.mesh(&[("all", 4)]).unwrap()).unwrap();
        let on_all = move |name: &str, _: &[usize]| {
            name.starts_with("b.").then(|| ShardPlacement { dim: 0, mesh: Some(all.clone()) })
        };
        let opts = FullyShard::new(&vars).shard_placement_fn(on_all);
        let unit = fully_shard(&opts, vars.builder(DType::F32), |vb| {
            Ok((nn::linear(WIDTH, WIDTH, vb.pp("a"))?, nn::linear(WIDTH, WIDTH, vb.pp("b"))?))
        })
        .unwrap();
        let x = batch(world.rank(), WIDTH);
        let forward = || unit.call(|(a, b)| b.forward(&a.forward(&x)?));
        let want = forward().unwrap().to_vec2::<f32>().unwrap();
        unit.reset_iter_state();
        unit.reshard().unwrap();

        // The first fails; the second is slow, and the unit waits for it.
        let (calls, over) = (AtomicUsize::new(0), Arc::new(AtomicBool::new(false)));
        let is_over = over.clone();
        let one_of_two = move |_: Parts<'_>| {
            if calls.fetch_add(1, Ordering::Relaxed) == 0 {
                let injected = fsdp_core::Error::Argument { rank: 0, message: "injected".into() };
                return Some(Work::ready(Err(injected)));
            }
            let (completion, work) = Work::pending(0);
            let over = over.clone();
            std::thread::spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(200));
                over.store(true, Ordering::SeqCst);
                completion.complete(Ok(vec![]));
            });
            Some(work)
        };
        unit.set_custom_all_gather(Some(Own::new(one_of_two)));
        refused(forward(), &["injected"]);
        assert!(is_over.load(Ordering::SeqCst), "an all-gather was in flight when forward had failed");

        // The result of a custom all-gather is checked.
        unit.reset_iter_state();
        unit.set_custom_all_gather(Some(Own::new(|_: Parts<'_>| Some(Work::ready(Ok(vec![]))))));
        refused(forward(), &["the all-gather returned too few buffers"]);
        let wrong = |parts: Parts<'_>| {
            let Parts::Gather { parts, .. } = parts else { return None };
            Some(Work::ready(Ok(parts.iter().map(|_| Buffer::F32(vec![0.; 1])).collect())))
        };
        unit.reset_iter_state();
        unit.set_custom_all_gather(Some(Own::new(wrong)));
        refused(forward(), &["the all-gather returned 1 elements of F32 of parameter `a.weight`"]);

        unit.reset_iter_state();
        unit.set_custom_all_gather(None);
        assert_eq!(forward().unwrap().to_vec2::<f32>().unwrap(), want);
        unit.reset_iter_state();
    });
}
