//! The backend for ranks that are threads of one process.
//!
//! It runs what the `shm` backend runs, on memory that is not shared with other processes: for tests, and for worlds of one.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    Options, ProcessGroup,
    engine::{
        Group, Meet, Subgroup,
        segment::{Port, Segment, Shape},
        watch::Watch,
    },
};
use crate::{Error, Result};

/// Segments by the name of their group, with how many ranks have not taken them yet.
type Segments = HashMap<String, (Arc<Segment>, usize)>;

/// How threads come to share a segment: the first to ask makes it.
#[derive(Clone)]
pub(super) struct Threads {
    options: Options,
    /// Those that some rank has not taken yet.
    segments: Arc<Mutex<Segments>>,
}

impl Threads {
    pub(super) fn new(options: Options) -> Self {
        Threads { options, segments: Arc::default() }
    }
}

impl Meet for Threads {
    fn meet(&self, group: &Subgroup<'_>) -> Result<(Port, Watch, Arc<dyn Meet>)> {
        let os = |source: rustix::io::Errno| Error::Os {
            rank: group.rank,
            what: format!("mapping the memory of group \"{}\"", group.name),
            source: Arc::new(source.into()),
        };
        let segment = {
            let mut segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
            let (segment, missing) = match segments.remove(&group.name) {
                Some(found) => found,
                None => {
                    let shape = Shape::new(group.size, self.options.chunk_bytes);
                    (Arc::new(Segment::anonymous(shape).map_err(os)?), group.size)
                }
            };
            if missing > 1 {
                segments.insert(group.name.clone(), (segment.clone(), missing - 1));
            }
            segment
        };
        let port = Port::claim(segment, group.rank).ok_or_else(|| Error::Rendezvous {
            rank: group.rank,
            message: format!("rank {} of group \"{}\" is taken", group.rank, group.name),
        })?;
        let watch = Watch::new(group.name.clone(), self.options.timeout, group.size, Vec::new());
        Ok((port, watch, Arc::new(self.clone())))
    }
}

/// A world of `size` ranks, one handle each, to be given to threads of this process.
///
/// # Errors
/// When `size` is 0 or the system refuses memory or threads.
pub fn world(size: usize, options: Options) -> Result<Vec<Arc<dyn ProcessGroup>>> {
    if size == 0 {
        return Err(Error::Rendezvous {
            rank: 0,
            message: "a world has at least one rank: its size can't be 0".into(),
        });
    }
    let threads = Threads::new(options);
    (0..size)
        .map(|rank| {
            let subgroup = Subgroup { name: super::WORLD.into(), rank, size, all_well: &|| Ok(()) };
            let (port, watch, meet) = threads.meet(&subgroup)?;
            Ok(Arc::new(Group::start(port, watch, meet)?) as Arc<dyn ProcessGroup>)
        })
        .collect()
}

/// Runs `rank` on a thread for each rank of a fresh world and returns what they return, in rank order. For tests.
///
/// # Panics
/// When a rank panics, with its number and message; and when the world can't be made.
///
/// ```
/// use fsdp_core::{Buffer, ReduceOp, process_group::local};
/// let sums = local::run(3, |group| {
///     group.all_reduce(vec![Buffer::F32(vec![group.rank() as f32; 2])], ReduceOp::Sum).wait().unwrap()
/// });
/// assert_eq!(sums[2], [Buffer::F32(vec![3.0, 3.0])]);
/// ```
pub fn run<T: Send>(size: usize, rank: impl Fn(Arc<dyn ProcessGroup>) -> T + Sync) -> Vec<T> {
    run_with(size, Options { timeout: std::time::Duration::from_secs(60), ..Options::default() }, rank)
}

/// [`run`] with options.
///
/// # Panics
/// As [`run`].
pub fn run_with<T: Send>(size: usize, options: Options, rank: impl Fn(Arc<dyn ProcessGroup>) -> T + Sync) -> Vec<T> {
    let groups = match world(size, options) {
        Ok(groups) => groups,
        Err(error) => panic!("{error}"),
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| rank(group))).collect();
        // Joined one and all before any panic goes on: the first to panic is rarely the first in rank order, and the others' messages tell more.
        let outcomes: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        let panics: Vec<_> = outcomes
            .iter()
            .enumerate()
            .filter_map(|(rank, outcome)| {
                let text = crate::text::of_panic(&**outcome.as_ref().err()?);
                Some(format!("rank {rank} panicked: {text}"))
            })
            .collect();
        assert!(panics.is_empty(), "{}", panics.join("\n"));
        outcomes.into_iter().flatten().collect()
    })
}
