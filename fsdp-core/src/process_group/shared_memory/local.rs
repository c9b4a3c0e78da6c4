//! The backend for ranks that are threads of one process. It runs the code of the `shm` backend on private memory.

use std::{collections::HashMap, io, sync::Arc};

use parking_lot::Mutex;

use super::{
    super::{
        backend::Backend,
        group::ProcessGroup,
        options::{Membership, Options},
    },
    peer_monitor::Waiter,
    segment::{Port, Segment, Shape},
    shm_backend::{SegmentSource, SharedMemory},
};
use crate::{Error, Result, text};

/// Segments by group name, with the number of ranks that have yet to take them.
type Segments = HashMap<String, (Arc<Segment>, usize)>;

/// Creates segments for threads: the first rank to ask creates the segment.
#[derive(Clone)]
struct Threads {
    chunk_bytes: usize,
    /// Segments that some rank has yet to take.
    segments: Arc<Mutex<Segments>>,
}

impl SegmentSource for Threads {
    fn open(&self, group: &Membership, _: &dyn Fn() -> Result<()>) -> Result<(Port, Waiter)> {
        let os = |source: io::Error| {
            Error::os(group.rank, format!("mapping the memory of group \"{}\"", group.name), source)
        };
        let segment = {
            let mut segments = self.segments.lock();
            let (segment, missing) = match segments.remove(&group.name) {
                Some(found) => found,
                None => {
                    let shape = Shape::new(group.size, self.chunk_bytes);
                    (Arc::new(Segment::new(shape).map_err(os)?), group.size)
                }
            };
            if missing > 1 {
                segments.insert(group.name.clone(), (segment.clone(), missing - 1));
            }
            segment
        };
        let port = Port::claim(segment, group.rank).ok_or_else(|| Error::Rendezvous {
            rank: group.rank,
            message: format!("rank {} of group \"{}\" is already taken", group.rank, group.name),
        })?;
        Ok((port, Waiter::new(group.timeout, group.size, Vec::new())))
    }

    fn for_subgroup(&self) -> Box<dyn SegmentSource> {
        Box::new(self.clone())
    }
}

/// Creates a world of `size` ranks and returns a handle for each, to be passed to threads of this process.
///
/// # Errors
/// If `size` is 0, or the system refuses memory or threads.
pub fn world(size: usize, options: Options) -> Result<Vec<ProcessGroup>> {
    if size == 1 {
        return Ok(vec![ProcessGroup::single_rank(options.timeout)?]);
    }
    let member = |(rank, backend)| ProcessGroup::new(Membership::world(rank, size, options.timeout), backend);
    backends(size, &options)?.into_iter().enumerate().map(member).collect()
}

/// Returns the backends of [`world`], for callers that wrap them.
///
/// # Errors
/// If `size` is less than 2, or the system refuses memory.
///
/// ```
/// use std::time::Duration;
/// use fsdp_core::{ProcessGroup, process_group::{Membership, Options, local}};
/// let backends = local::backends(2, &Options::default())?;
/// let worlds = backends.into_iter().enumerate().map(|(rank, backend)| {
///     ProcessGroup::new(Membership::world(rank, 2, Duration::from_secs(60)), backend)
/// });
/// assert_eq!(worlds.collect::<Result<Vec<_>, _>>()?[1].rank(), 1);
/// # Ok::<_, fsdp_core::Error>(())
/// ```
pub fn backends(size: usize, options: &Options) -> Result<Vec<Box<dyn Backend>>> {
    if size < 2 {
        return Err(Error::Rendezvous {
            rank: 0,
            message: match size {
                0 => "a world of size 0: it needs at least one rank".into(),
                _ => "a world of one rank has no backend: create it by ProcessGroup::single_rank".into(),
            },
        });
    }
    let threads = Threads { chunk_bytes: options.chunk_bytes, segments: Arc::default() };
    let backend = |rank| {
        let group = Membership::world(rank, size, options.timeout);
        Ok(Box::new(SharedMemory::join(threads.for_subgroup(), &group, &|| Ok(()))?) as Box<dyn Backend>)
    };
    (0..size).map(backend).collect()
}

/// Runs `rank` on a thread for each rank of a new world and returns the results in rank order. For tests.
///
/// # Panics
/// If a rank panics, with its number and message, or the world cannot be created.
///
/// ```
/// use fsdp_core::{Buffer, ReduceOp, process_group::local};
/// let sums = local::run(3, |group| {
///     group.all_reduce(vec![Buffer::F32(vec![group.rank() as f32; 2])], ReduceOp::Sum).wait().unwrap()
/// });
/// assert_eq!(sums[2], [Buffer::F32(vec![3.0, 3.0])]);
/// ```
pub fn run<T: Send>(size: usize, rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    run_with(size, Options { timeout: std::time::Duration::from_secs(60), ..Options::default() }, rank)
}

/// As [`run`], for ranks that may fail. Returns the first error in rank order.
pub fn try_run<T: Send, E: Send>(size: usize, rank: impl Fn(ProcessGroup) -> Result<T, E> + Sync) -> Result<Vec<T>, E> {
    run(size, rank).into_iter().collect()
}

/// Runs [`run`] with options.
///
/// # Panics
/// See [`run`].
pub fn run_with<T: Send>(size: usize, options: Options, rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let groups = match world(size, options) {
        Ok(groups) => groups,
        Err(error) => panic!("{error}"),
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| rank(group))).collect();
        // Joins all threads before it panics: the first rank to panic is rarely the first in rank order.
        let outcomes: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        let panics: Vec<_> = outcomes
            .iter()
            .enumerate()
            .filter_map(|(rank, outcome)| {
                let text = text::of_panic(&**outcome.as_ref().err()?);
                Some(format!("rank {rank} panicked: {text}"))
            })
            .collect();
        assert!(panics.is_empty(), "{}", panics.join("\n"));
        outcomes.into_iter().flatten().collect()
    })
}
