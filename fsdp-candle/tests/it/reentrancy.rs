//! User code that runs within a step may use the model: no lock is held meanwhile.

use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::Duration;

use candle_core::{DType, Module, Result, Tensor};
use fsdp_candle::{
    AllGather, AllGatherExtension, Float8, FsdpModule, FullyShard, ReshardAfterForward, ShardedVarMap, fully_shard, nn,
};
use fsdp_core::{Allocator, Buffer, GatherPart, Work};

use crate::common::{
    Own, Parts, WIDTH, alone, assert_close, batch, gradients_of, loss_of, memory, on_cuda, ranks, vars,
};

/// More time than any machine needs. On devices, ranks wait for their turn.
fn deadline() -> Duration {
    Duration::from_secs(if on_cuda() { 3600 } else { 120 })
}

/// Runs `f`, which could deadlock, on its own thread.
pub(crate) fn within_deadline(f: impl FnOnce() + Send + 'static) {
    let (done, wait) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        f();
        let _ = done.send(());
    });
    if wait.recv_timeout(deadline()) == Err(mpsc::RecvTimeoutError::Timeout) {
        panic!("the code that looks at the model waits for ever");
    }
    thread.join().unwrap();
}

#[derive(Clone, Debug)]
struct Chain(Vec<FsdpModule<nn::Linear>>);

impl Module for Chain {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, unit| unit.forward(&x))
    }
}

/// Prints the model and the map at every call, and records the caller.
struct Looks {
    model: OnceLock<(FsdpModule<Chain>, ShardedVarMap)>,
    from: Mutex<Vec<&'static str>>,
    memory: Arc<dyn Allocator>,
}

impl Looks {
    fn on_this_device() -> Arc<Self> {
        Arc::new(Looks { model: OnceLock::new(), from: Mutex::default(), memory: memory() })
    }

    /// Returns a collective that looks from `place`, and from `allocate` when an all-gather asks for memory.
    fn collective(self: &Arc<Self>, place: &'static str) -> Arc<Own<impl Fn(Parts<'_>) -> Option<Work> + use<>>> {
        let (looks, of_memory) = (self.clone(), self.clone());
        let look = move |_: Parts<'_>| {
            looks.look(place);
            None
        };
        Own::in_memory(look, move || {
            of_memory.look("allocate");
            of_memory.memory.clone()
        })
    }

    fn look(&self, from: &'static str) {
        let Some((model, vars)) = self.model.get() else { return };
        let (units, map, debug) = (model.to_string(), vars.to_string(), format!("{model:?}"));
        assert!(units.contains("(root)") && map.contains("blocks.1") && debug.contains("FsdpParam(blocks.1.weight"));
        assert!(model.inner().0.iter().any(|unit| unit.params().iter().any(|param| !param.is_unsharded())));
        self.from.lock().unwrap().push(from);
    }
}

struct Extension(Arc<Looks>);

impl AllGatherExtension for Extension {
    fn lengths(&self, elements: usize) -> Vec<usize> {
        Float8.lengths(elements)
    }

    fn pre_all_gather(&self, shard: &Tensor) -> Result<Vec<Buffer>> {
        self.0.look("encode");
        Float8.pre_all_gather(shard)
    }

    fn post_all_gather(&self, gathered: &[Buffer], counts: &[usize], full: &mut Buffer) -> Result<()> {
        self.0.look("decode");
        Float8.post_all_gather(gathered, counts, full)
    }
}

fn model(vars: &ShardedVarMap, extension: Option<Arc<Looks>>) -> FsdpModule<Chain> {
    let opts =
        FullyShard::new(vars).reshard_after_forward(ReshardAfterForward::Always).all_gather_extension(move |_| {
            extension.clone().map(|looks| Arc::new(Extension(looks)) as Arc<dyn AllGatherExtension>)
        });
    let vb = vars.builder(DType::F32);
    let units = (0..2).map(|i| fully_shard(&opts, vb.pp(format!("blocks.{i}")), |vb| nn::linear(WIDTH, WIDTH, vb)));
    let units = units.collect::<fsdp_candle::Result<Vec<_>>>().unwrap();
    fully_shard(&opts, vb, |_| Ok(Chain(units))).unwrap()
}

#[test]
fn prints_from_callbacks() {
    within_deadline(|| {
        ranks(2, |world| {
            let (looks, vars) = (Looks::on_this_device(), vars(&world));
            let model = model(&vars, Some(looks.clone()));
            for unit in &model.inner().0 {
                unit.set_custom_all_gather(Some(looks.collective("all-gather")));
                unit.set_custom_reduce_scatter(Some(looks.collective("reduce-scatter")));
                let looks = looks.clone();
                unit.set_all_reduce_hook(Some(Arc::new(move |shards: Vec<Buffer>| {
                    looks.look("all-reduce hook");
                    Ok(shards)
                })));
            }
            assert!(looks.model.set((model.clone(), vars.clone())).is_ok());
            let _grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
            let from = looks.from.lock().unwrap();
            for place in ["all-gather", "allocate", "reduce-scatter", "encode", "decode", "all-reduce hook"] {
                assert!(from.contains(&place), "nobody looked from {place}");
            }
        });
    });
}

/// Returns an all-gather that completes after another thread has read the model.
fn waits(looks: Arc<Looks>) -> Arc<dyn AllGather> {
    Own::new(move |parts: Parts<'_>| {
        let Parts::Gather { ranks, parts, memory } = parts else { return None };
        let (completion, work) = Work::pending(ranks.rank());
        let parts = parts.iter().map(|part| GatherPart { input: part.input.clone(), counts: part.counts.clone() });
        let (parts, ranks, memory, looks) = (parts.collect(), ranks.clone(), memory.clone(), looks.clone());
        std::thread::spawn(move || {
            looks.look("another thread");
            completion.complete(ranks.all_gather(parts, memory).wait());
        });
        Some(work)
    })
}

#[test]
fn prints_during_a_collective() {
    within_deadline(|| {
        ranks(2, |world| {
            let reference = {
                let vars = vars(&world);
                let model = model(&vars, None);
                gradients_of(&vars, &model, &batch(world.rank(), WIDTH))
            };
            let (looks, vars) = (Looks::on_this_device(), vars(&world));
            let model = model(&vars, None);
            // One gather at a time: two threads' gathers would have no order.
            model.set_implicit_prefetch(false);
            assert!(looks.model.set((model.clone(), vars.clone())).is_ok());
            model.inner().0[1].set_custom_all_gather(Some(waits(looks.clone())));
            assert_close(&gradients_of(&vars, &model, &batch(world.rank(), WIDTH)), &reference, 0.);
            assert_eq!(*looks.from.lock().unwrap(), ["another thread"; 2]);
        });
    });
}

#[test]
fn refuses_gathering_a_unit_from_its_all_gather() {
    within_deadline(|| {
        ranks(2, |world| {
            let vars = vars(&world);
            let model = model(&vars, None);
            let unit = model.inner().0[0].clone();
            let refused: Arc<Mutex<Vec<String>>> = Arc::default();
            let errors = refused.clone();
            // An all-gather that gathers and frees its own unit.
            let nested = move |_: Parts<'_>| {
                let outcomes = [unit.unshard(), unit.reshard(), unit.unshard_async().map(drop)];
                errors.lock().unwrap().extend(outcomes.map(|outcome| outcome.unwrap_err().to_string()));
                None
            };
            model.inner().0[0].set_custom_all_gather(Some(Own::new(nested)));
            let _grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
            let errors = refused.lock().unwrap();
            assert_eq!(errors.len(), 6); // in forward and in backward
            for error in errors.iter() {
                assert!(
                    error.contains("FSDP unit `blocks.0`") && error.contains("must not unshard or reshard it"),
                    "{error}"
                );
            }
        });
    });
}

#[test]
fn two_threads_wait_for_one_unit() {
    within_deadline(|| {
        let world = alone();
        let vars = vars(&world);
        let model = model(&vars, None);
        let unit = &model.inner().0[0];
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| unit.unshard_async().unwrap().wait().unwrap());
            }
        });
        assert!(unit.params().iter().all(|param| param.is_unsharded()));
    });
}
