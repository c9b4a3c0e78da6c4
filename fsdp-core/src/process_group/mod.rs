//! Process groups: how ranks exchange buffers.
//!
//! One object-safe trait, [`ProcessGroup`], and one file for each transport. Collectives take *lists* of buffers, so that the parameters of one
//! FSDP unit move in one collective; they are issued without blocking and return a [`Work`] to wait for; those of one group run in issue order.
//! Reductions sum in rank order, so that they give the same bits on every run.

mod engine;
pub mod local;
mod options;
pub mod shm;
mod signature;
mod work;

use std::sync::Arc;

pub use options::Options;
pub use signature::{Signature, Subject};
pub use work::{Completion, Work};

use crate::{Allocator, Buffer, Error, RankEnv, Readable, Result};

/// The name of the group of all ranks.
pub(crate) const WORLD: &str = "world";

/// How a reduction combines the ranks' elements. Half precision inputs are combined in single precision and rounded once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The sum divided by the number of ranks.
    Avg,
    /// The smallest.
    Min,
    /// The largest.
    Max,
    /// The product.
    Product,
}

impl std::fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "avg",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Product => "product",
        })
    }
}

/// One tensor of an all-gather.
pub struct GatherPart {
    /// What this rank contributes: `counts[rank]` elements.
    pub input: Arc<dyn Readable>,
    /// How many elements each rank contributes. The output is their concatenation in rank order.
    pub counts: Vec<usize>,
}

/// One tensor of a reduce-scatter.
pub struct ScatterPart {
    /// What this rank contributes for every rank: the concatenation, in rank order, of `counts[r]` elements for each rank `r`.
    pub input: Buffer,
    /// How many elements each rank receives.
    pub counts: Vec<usize>,
}

/// One tensor of an all-to-all.
pub struct ExchangePart {
    /// The concatenation, in rank order, of `send_counts[r]` elements for each rank `r`.
    pub input: Buffer,
    /// How many elements go to each rank.
    pub send_counts: Vec<usize>,
    /// How many elements come from each rank.
    pub recv_counts: Vec<usize>,
}

/// A group of ranks that run the same collectives in the same order.
///
/// Every collective carries a sequence number and a fingerprint; ranks that disagree all get [`crate::Error::Mismatch`]. Waiting ends with
/// [`crate::Error::Timeout`] after [`ProcessGroup::timeout`] without progress and with [`crate::Error::PeerLost`] soon after a peer died. After any of these the
/// group is unusable and every later collective returns the same error.
///
/// ```
/// use std::sync::Arc;
/// use fsdp_core::{Buffer, GatherPart, Heap, ReduceOp, ScatterPart, process_group::local};
///
/// local::run(2, |group| {
///     let rank = group.rank();
///     // One collective for two tensors; rank 1 holds nothing of the second.
///     let of = |values: Vec<f32>| Arc::new(Buffer::F32(values));
///     let parts = vec![
///         GatherPart { input: of(vec![rank as f32; 2]), counts: vec![2, 2] },
///         GatherPart { input: of(vec![7.; 1 - rank]), counts: vec![1, 0] },
///     ];
///     let gathered = group.all_gather(parts, Heap::shared());
///     // Issued behind it; neither waits for the other.
///     let part = ScatterPart { input: Buffer::F32(vec![1., 2., 3.]), counts: vec![2, 1] };
///     let reduced = group.reduce_scatter(vec![part], ReduceOp::Sum, Heap::shared());
///
///     assert_eq!(gathered.wait()?, [Buffer::F32(vec![0., 0., 1., 1.]), Buffer::F32(vec![7.])]);
///     assert_eq!(reduced.wait()?, [Buffer::F32(if rank == 0 { vec![2., 4.] } else { vec![6.] })]);
///
///     // Groups of some of the ranks: here each rank by itself.
///     let alone = group.split(rank, 0)?;
///     assert_eq!((alone.rank(), alone.size()), (0, 1));
///     Ok::<_, fsdp_core::Error>(())
/// })
/// .into_iter()
/// .collect::<Result<Vec<_>, _>>()?;
/// # Ok::<_, fsdp_core::Error>(())
/// ```
pub trait ProcessGroup: Send + Sync {
    /// This process's rank in the group.
    fn rank(&self) -> usize;
    /// The number of ranks in the group.
    fn size(&self) -> usize;
    /// A name for messages, the same on every rank.
    fn name(&self) -> &str;
    /// How long a collective may wait for its peers while none of them makes progress.
    fn timeout(&self) -> std::time::Duration;

    /// The same group, whose collectives are about something: ranks that issue them with different signatures all get
    /// [`crate::Error::Mismatch`], which names what differs. It travels with the fingerprint: no data, no wait.
    fn signed(&self, signature: Signature) -> Arc<dyn ProcessGroup>;

    /// Every rank gets the concatenation of every rank's input, for each part. Outputs are taken from `memory` when the collective starts.
    fn all_gather(&self, parts: Vec<GatherPart>, memory: Arc<dyn Allocator>) -> Work;

    /// Rank `r` gets the reduction over ranks of their elements for `r`, for each part. Outputs are taken from `memory`, inputs given to it as soon as
    /// they are consumed.
    fn reduce_scatter(&self, parts: Vec<ScatterPart>, op: ReduceOp, memory: Arc<dyn Allocator>) -> Work;

    /// Every rank gets the reduction over ranks, in place.
    fn all_reduce(&self, buffers: Vec<Buffer>, op: ReduceOp) -> Work;

    /// Every rank gets what rank `root` passed, in place.
    fn broadcast(&self, buffers: Vec<Buffer>, root: usize) -> Work;

    /// Rank `r` gets what every rank sent it, concatenated in rank order, for each part.
    fn all_to_all(&self, parts: Vec<ExchangePart>, memory: Arc<dyn Allocator>) -> Work;

    /// Nobody goes on before everybody is here.
    fn barrier(&self) -> Work;

    /// Groups of the ranks that pass the same `color`, ordered by `key` and then by rank. Collective over this group; blocks.
    ///
    /// # Errors
    /// As a collective's.
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn ProcessGroup>>;
}

/// Makes the process group of all ranks, as the environment of this process wants it: `FSDP_BACKEND` names the backend (by default `local` for a world of one
/// and `shm` otherwise), `FSDP_TIMEOUT_S` overrides [`Options::timeout`]. Starts this process's [heartbeat](crate::heartbeat) as well.
///
/// # Errors
/// [`Error::Env`] when a variable can't be understood or names a backend that can't serve this world; those of [`shm::connect`].
pub fn init(env: &RankEnv, options: Options) -> Result<Arc<dyn ProcessGroup>> {
    crate::heartbeat::start();
    init_with(env, options, |name| std::env::var(name).ok())
}

fn init_with(env: &RankEnv, options: Options, var: impl Fn(&str) -> Option<String>) -> Result<Arc<dyn ProcessGroup>> {
    let options = options.overridden_by(&var)?;
    let default = if env.world_size == 1 { "local" } else { "shm" };
    match var("FSDP_BACKEND").as_deref().unwrap_or(default) {
        "local" if env.world_size == 1 => {
            local::world(1, options)?.pop().ok_or_else(|| Error::Env("a world of one has one rank".into()))
        }
        "local" => Err(Error::Env(format!(
            "FSDP_BACKEND=local serves one process, but WORLD_SIZE={}: choose shm",
            env.world_size
        ))),
        "shm" => shm::connect(env, options),
        other => {
            Err(Error::Env(format!("FSDP_BACKEND={other:?} is no backend of this build: choose one of local, shm")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_backend_is_chosen_by_name_and_an_unknown_one_lists_those_there_are() {
        let init = |size: usize, backend: Option<&str>| {
            let env = RankEnv { world_size: size, ..RankEnv::single() };
            init_with(&env, Options::default(), |name| (name == "FSDP_BACKEND").then(|| backend.map(str::to_string))?)
        };
        for backend in [None, Some("local"), Some("shm")] {
            assert_eq!(init(1, backend).unwrap().size(), 1);
        }
        for (size, backend, part) in [(2, "local", "choose shm"), (1, "gloo", "one of local, shm")] {
            let Err(error) = init(size, Some(backend)) else { panic!("{backend} was taken") };
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
