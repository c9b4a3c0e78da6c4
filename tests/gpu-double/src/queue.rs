//! Streams as queues. Nothing here decides which one goes on.

use std::{
    collections::VecDeque,
    sync::{Arc, OnceLock},
    time::Instant,
};

use crate::{clock::Clock, operation::Progress};

/// The end of an operation: number `number` of stream `stream`, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) stream: usize,
    pub(crate) number: u64,
}

pub(crate) type Run = Box<dyn FnMut() -> Progress + Send>;

/// An operation in a queue.
pub(crate) struct Entry {
    pub(crate) what: Arc<str>,
    /// Ends of other streams' operations that it begins after.
    pub(crate) after: Vec<Point>,
    /// Nothing while it runs.
    pub(crate) run: Option<Run>,
    /// It was asked, and waits for other processes.
    pub(crate) waits: bool,
    /// Memory, with its length, that nobody uses when this has run.
    pub(crate) retires: Option<(u64, usize)>,
}

/// What an event recorded.
#[derive(Clone)]
pub(crate) struct Record {
    pub(crate) point: Point,
    /// What comes before whoever waits for the event.
    pub(crate) clock: Clock,
    /// When the stream came to it.
    pub(crate) time: Arc<OnceLock<Instant>>,
}

pub(crate) struct Event {
    pub(crate) context: usize,
    pub(crate) timing: bool,
    /// Nothing before the first record: then it counts as reached.
    pub(crate) record: Option<Record>,
}

/// Which of a context's streams it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The legacy default stream, and streams that wait for it and that it waits for, of the same context.
    Legacy,
    Blocking,
    NonBlocking,
}

pub(crate) struct Stream {
    pub(crate) context: usize,
    pub(crate) role: Role,
    pub(crate) name: String,
    pub(crate) priority: i32,
    /// Not destroyed yet.
    pub(crate) live: bool,
    /// What comes before the next operation.
    pub(crate) clock: Clock,
    /// The number of the last operation that was queued, and of the last that ended.
    pub(crate) queued: u64,
    pub(crate) done: u64,
    pub(crate) queue: VecDeque<Entry>,
}

/// All streams that there ever were: they are known by their place.
#[derive(Default)]
pub(crate) struct Streams(Vec<Stream>);

impl Streams {
    pub(crate) fn create(&mut self, context: usize, role: Role, name: String) -> usize {
        let (clock, queue) = (Clock::default(), VecDeque::new());
        self.0.push(Stream { context, role, name, priority: 0, live: true, clock, queued: 0, done: 0, queue });
        self.0.len() - 1
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn get(&self, stream: usize) -> &Stream {
        &self.0[stream]
    }

    pub(crate) fn get_mut(&mut self, stream: usize) -> &mut Stream {
        &mut self.0[stream]
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (usize, &Stream)> {
        self.0.iter().enumerate()
    }

    /// The end of what is queued on a stream now.
    pub(crate) fn end(&self, stream: usize) -> Point {
        Point { stream, number: self.0[stream].queued }
    }

    pub(crate) fn reached(&self, point: Point) -> bool {
        self.0[point.stream].done >= point.number
    }

    /// Streams that a stream's next operation waits for by CUDA's rules, without an event.
    pub(crate) fn implied(&self, stream: usize) -> Vec<Point> {
        let this = &self.0[stream];
        let other = match this.role {
            Role::Legacy => Role::Blocking,
            Role::Blocking => Role::Legacy,
            Role::NonBlocking => return Vec::new(),
        };
        let of = self.all().filter(|(_, one)| one.context == this.context && one.role == other);
        of.map(|(place, _)| self.end(place)).collect()
    }

    /// Streams whose first operation could begin or be asked again.
    pub(crate) fn ready(&self) -> Vec<usize> {
        self.all().filter(|(place, _)| self.can_begin(*place)).map(|(place, _)| place).collect()
    }

    fn can_begin(&self, stream: usize) -> bool {
        let first = self.0[stream].queue.front();
        first.is_some_and(|entry| entry.run.is_some() && entry.after.iter().all(|point| self.reached(*point)))
    }

    /// Those of [`ready`](Self::ready) without which `goals` are not reached.
    pub(crate) fn ready_for(&self, goals: &[Point]) -> Vec<usize> {
        let mut open: Vec<Point> = goals.to_vec();
        let (mut seen, mut ready) = (Vec::new(), Vec::new());
        while let Some(point) = open.pop() {
            if self.reached(point) || seen.contains(&point.stream) {
                continue;
            }
            seen.push(point.stream);
            if self.can_begin(point.stream) {
                ready.push(point.stream);
            } else if let Some(first) = self.0[point.stream].queue.front() {
                open.extend(first.after.iter().filter(|after| !self.reached(**after)));
            }
        }
        ready
    }
}
