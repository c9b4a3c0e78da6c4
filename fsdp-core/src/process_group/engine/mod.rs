//! The process group of ranks that share memory, be they threads or processes.
//!
//! Each rank has a thread that runs the issued collectives in order, a collective being a number of rounds over a [`segment`]. From the bottom up:
//! `segment` (the mapping and who may touch what), `failure` (telling peers why), `watch` (waiting), `call` (what ranks
//! compare) and `mismatch` (what differs), `stream` (lists of buffers as chunks), `reduce` and `copy` (kernels),
//! `output`, `rounds` (running one collective), a file for each collective, `runner` (the thread), and
//! here the group.

mod all_gather;
mod all_reduce;
mod all_to_all;
mod broadcast;
mod call;
mod check;
mod copy;
mod failure;
mod mismatch;
mod output;
mod reduce;
mod reduce_scatter;
mod rounds;
mod runner;
pub(crate) mod segment;
mod stream;
pub(crate) mod watch;

use std::{
    sync::{
        Arc,
        mpsc::{Sender, channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use all_gather::{AllGather, numbers};
use all_reduce::AllReduce;
use all_to_all::AllToAll;
use broadcast::Broadcast;
use call::Call;
use output::Slot;
use reduce_scatter::ReduceScatter;
use runner::{Job, Runner};
use segment::{Port, Segment};
use watch::{During, Watch};

use super::{ExchangePart, GatherPart, ProcessGroup, ReduceOp, ScatterPart, Signature, Work};
use crate::{Allocator, Buffer, Error, Heap, Result};

/// What a new group of some of a group's ranks is to be.
pub(crate) struct Subgroup<'a> {
    /// Its name, the same on every rank and that of no other group.
    pub(crate) name: String,
    /// This rank's rank in it.
    pub(crate) rank: usize,
    /// The number of its ranks.
    pub(crate) size: usize,
    /// Fails when a rank of the group that is being split is gone.
    pub(crate) all_well: &'a dyn Fn() -> Result<()>,
}

/// How the ranks of a new group come to share a segment: what tells backends apart.
pub(crate) trait Meet: Send + Sync {
    /// This rank's end of the new group's segment, and how to watch its peers.
    fn meet(&self, group: &Subgroup<'_>) -> Result<(Port, Watch, Arc<dyn Meet>)>;
}

/// A rank's handle of its group.
pub(crate) struct Group {
    ranks: Arc<Ranks>,
    /// What its collectives are about.
    signature: Option<Signature>,
}

/// What the handles of a group share.
struct Ranks {
    slot: Slot,
    segment: Arc<Segment>,
    watch: Arc<Watch>,
    meet: Arc<dyn Meet>,
    /// `None` only while being dropped.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Group {
    /// Starts the rank's thread.
    pub(crate) fn start(port: Port, watch: Watch, meet: Arc<dyn Meet>) -> Result<Self> {
        let slot = Slot { rank: port.rank(), ranks: port.ranks(), bytes: port.chunk() };
        let (segment, watch) = (port.segment().clone(), Arc::new(watch));
        let (sender, receiver) = channel();
        let runner = Runner::new(port, watch.clone());
        let thread = std::thread::Builder::new()
            .name(format!("fsdp {}:{}", watch.group, slot.rank))
            .spawn(move || runner.serve(receiver))
            .map_err(|source| Error::Os {
                rank: slot.rank,
                what: format!("starting the thread of group \"{}\"", watch.group),
                source: Arc::new(source),
            })?;
        let ranks = Ranks { slot, segment, watch, meet, jobs: Some(sender), thread: Some(thread) };
        Ok(Group { ranks: Arc::new(ranks), signature: None })
    }

    fn slot(&self) -> Slot {
        self.ranks.slot
    }

    fn send(&self, job: Job) {
        if let Some(jobs) = &self.ranks.jobs {
            // A thread that is gone drops the job, and with it the completion: the work then says so.
            let _ = jobs.send(job);
        }
    }

    /// Queues a collective, or the failure of the group where the arguments can't be.
    fn issue(
        &self,
        checked: Result<Call>,
        run: impl FnOnce(&mut Runner, &Call) -> Result<Vec<Buffer>> + Send + 'static,
    ) -> Work {
        let call = match checked {
            Ok(call) => match &self.signature {
                Some(signature) => call.signed(signature),
                None => call,
            },
            Err(error) => {
                // The peers are about to wait for this collective.
                self.send(Job::Fail(error.clone()));
                return Work::ready(Err(error));
            }
        };
        let (completion, work) = Work::pending(self.slot().rank);
        self.send(Job::Run { call, run: Box::new(run), completion });
        work
    }

    fn gather(&self, call: Call, parts: Vec<GatherPart>, memory: Arc<dyn Allocator>) -> Work {
        let slot = self.slot();
        self.issue(Ok(call), move |runner, call| {
            let mut collective = AllGather::new(parts, slot, &*memory)?;
            match slot.ranks {
                1 => collective.alone()?,
                _ => runner.run(call, &mut collective)?,
            }
            Ok(collective.outputs)
        })
    }
}

impl ProcessGroup for Group {
    fn rank(&self) -> usize {
        self.slot().rank
    }

    fn size(&self) -> usize {
        self.slot().ranks
    }

    fn name(&self) -> &str {
        &self.ranks.watch.group
    }

    fn timeout(&self) -> Duration {
        self.ranks.watch.timeout
    }

    fn signed(&self, signature: Signature) -> Arc<dyn ProcessGroup> {
        Arc::new(Group { ranks: self.ranks.clone(), signature: Some(signature) })
    }

    fn all_gather(&self, parts: Vec<GatherPart>, memory: Arc<dyn Allocator>) -> Work {
        match check::gather(&parts, self.slot()) {
            Ok(call) => self.gather(call, parts, memory),
            Err(error) => self.issue(Err(error), |_, _| Ok(Vec::new())),
        }
    }

    fn reduce_scatter(&self, parts: Vec<ScatterPart>, op: ReduceOp, memory: Arc<dyn Allocator>) -> Work {
        let slot = self.slot();
        self.issue(check::scatter(&parts, op, slot), move |runner, call| {
            if slot.ranks == 1 {
                return Ok(parts.into_iter().map(|part| part.input).collect());
            }
            let mut collective = ReduceScatter::new(parts, op, slot, &*memory)?;
            runner.run(call, &mut collective)?;
            Ok(collective.outputs)
        })
    }

    fn all_reduce(&self, buffers: Vec<Buffer>, op: ReduceOp) -> Work {
        let slot = self.slot();
        self.issue(check::reduce(&buffers, op, slot), move |runner, call| {
            if slot.ranks == 1 {
                return Ok(buffers);
            }
            let mut collective = AllReduce::new(buffers, op, slot);
            runner.run(call, &mut collective)?;
            Ok(collective.buffers)
        })
    }

    fn broadcast(&self, buffers: Vec<Buffer>, root: usize) -> Work {
        let slot = self.slot();
        self.issue(check::broadcast(&buffers, root, slot), move |runner, call| {
            if slot.ranks == 1 {
                return Ok(buffers);
            }
            let mut collective = Broadcast::new(buffers, root, slot);
            runner.run(call, &mut collective)?;
            Ok(collective.buffers)
        })
    }

    fn all_to_all(&self, parts: Vec<ExchangePart>, memory: Arc<dyn Allocator>) -> Work {
        let slot = self.slot();
        self.issue(check::exchange(&parts, slot), move |runner, call| {
            if slot.ranks == 1 {
                return Ok(parts.into_iter().map(|part| part.input).collect());
            }
            let mut collective = AllToAll::new(parts, slot, &*memory)?;
            runner.run(call, &mut collective)?;
            Ok(collective.outputs)
        })
    }

    fn barrier(&self) -> Work {
        let slot = self.slot();
        self.issue(Ok(Call::new("barrier", "", std::iter::empty())), move |runner, call| {
            if slot.ranks > 1 {
                runner.run(call, &mut AllGather::barrier(slot))?;
            }
            Ok(Vec::new())
        })
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn ProcessGroup>> {
        let slot = self.slot();
        let ranks = slot.ranks;
        // The sequence number of this collective gives the subgroups names of their own.
        let (tell, sequence) = channel();
        let parts = vec![numbers(&[color as i64, key as i64], ranks)];
        let call = Call::new("split", "", std::iter::empty());
        let gathered = self
            .issue(Ok(call), move |runner, call| {
                let mut collective = AllGather::new(parts, slot, &Heap)?;
                let _ = tell.send(runner.sequence());
                match ranks {
                    1 => collective.alone()?,
                    _ => runner.run(call, &mut collective)?,
                }
                Ok(collective.outputs)
            })
            .wait()?;
        let pairs: &[[i64; 2]] = match gathered.first() {
            Some(Buffer::I64(numbers)) => bytemuck::cast_slice(numbers),
            _ => &[],
        };
        let mut members: Vec<_> = pairs
            .iter()
            .enumerate()
            .filter(|(_, pair)| pair[0] == color as i64)
            .map(|(rank, pair)| (pair[1] as usize, rank))
            .collect();
        members.sort_unstable();
        let members: Vec<_> = members.into_iter().map(|(_, rank)| rank).collect();
        let sequence = sequence.recv().unwrap_or_default();
        let during = During { name: "split", sequence, end: 0 };
        let all_well = || self.ranks.watch.all_well(&self.ranks.segment, slot.rank, during, &members);
        let subgroup = Subgroup {
            name: format!("{}/{sequence}.{color}", self.ranks.watch.group),
            rank: members.iter().position(|&rank| rank == slot.rank).unwrap_or(0),
            size: members.len(),
            all_well: &all_well,
        };
        let started = self.ranks.meet.meet(&subgroup).and_then(|(port, watch, meet)| Group::start(port, watch, meet));
        match started {
            Ok(group) => Ok(Arc::new(group)),
            Err(error) => {
                self.send(Job::Fail(error.clone()));
                Err(error)
            }
        }
    }
}

impl Drop for Ranks {
    /// Lets the queued collectives finish and leaves the group.
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take()
            // The rank's own thread drops the group when a collective's buffers held the last reference.
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}
