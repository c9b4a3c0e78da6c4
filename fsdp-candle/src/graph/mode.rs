//! Whether what runs keeps a graph for a backward.

use std::cell::Cell;

thread_local! {
    static NO_GRAD: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` without a graph, for evaluation: what [`FsdpModule`](crate::FsdpModule)s return has none, the layers of
/// [`nn`](crate::nn) use their weights as constants, and each unit frees its parameters when it is done with, whatever
/// its [`ReshardAfterForward`](crate::ReshardAfterForward). As `torch.no_grad()`, it holds for this thread, whatever
/// models `f` calls.
///
/// Candle itself always keeps a graph: what layers of other crates do with trainable parameters is kept until the call
/// around them ends.
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear(4, 2, vb))?;
/// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
/// let y = fsdp_candle::no_grad(|| model.forward(&x))?;
/// assert!(!y.track_op());
/// assert!(model.params().iter().all(|param| !param.is_unsharded())); // the root's are freed as well
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn no_grad<T>(f: impl FnOnce() -> T) -> T {
    set(true, f)
}

/// Runs `f`, which belongs to a backward, with a graph.
pub(crate) fn with_grad<T>(f: impl FnOnce() -> T) -> T {
    set(false, f)
}

pub(crate) fn keeps_graph() -> bool {
    !NO_GRAD.get()
}

fn set<T>(no_grad: bool, f: impl FnOnce() -> T) -> T {
    struct Guard(bool);
    impl Drop for Guard {
        fn drop(&mut self) {
            NO_GRAD.set(self.0);
        }
    }
    let _guard = Guard(NO_GRAD.replace(no_grad));
    f()
}
