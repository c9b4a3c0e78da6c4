//! The backend over shared memory: a collective is a number of rounds over a segment.
//! How the ranks of a group come to share a segment.

//! Whether each rank of a group has a core of its own.

use std::{
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
};

use rustix::{
    process::Pid,
    thread::{CpuSet, sched_getaffinity},
};

use super::{
    super::{
        backend::{Backend, CollectiveOutput, Guarantees, PeerMonitor},
        collective::{Collective, Failure},
        op::Op,
        options::Membership,
    },
    collectives::{self, AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter, Rounds, Seat},
    peer_monitor::{During, Sight, Watch},
    segment::Port,
};
use crate::{DeviceId, Result};

/// One rank's end.
pub(super) struct SharedMemory {
    port: Port,
    watch: Arc<Watch>,
    meet: Box<dyn Meet>,
}

impl SharedMemory {
    /// Meets the other ranks of a group of at least two. `all_well` fails when one that is to come is gone.
    pub(super) fn join(meet: Box<dyn Meet>, group: &Membership, all_well: &dyn Fn() -> Result<()>) -> Result<Self> {
        let (port, watch) = meet.meet(group, all_well)?;
        Ok(SharedMemory { port, watch: Arc::new(watch), meet })
    }

    fn sight(&self) -> Sight {
        Sight { segment: self.port.segment().clone(), watch: self.watch.clone(), rank: self.port.rank() }
    }

    fn rounds(&mut self, collective: &Collective<'_>, this: &mut dyn Rounds) -> Result<()> {
        collectives::run(&mut self.port, &self.watch, collective, this)
    }
}

impl Backend for SharedMemory {
    fn device(&self) -> DeviceId {
        DeviceId::Host
    }

    fn guarantees(&self) -> Guarantees {
        Guarantees { detects_death: self.watch.detects_death(), ..Guarantees::ALL }
    }

    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput> {
        let seat = Seat { rank: self.port.rank(), ranks: self.port.ranks(), bytes: self.port.chunk() };
        match op {
            Op::AllGather { parts, memory } => {
                let mut this = AllGather::new(parts, seat, &*memory)?;
                self.rounds(collective, &mut this)?;
                Ok(this.outputs.into())
            }
            Op::ReduceScatter { parts, op, memory } => {
                let mut this = ReduceScatter::new(parts, op, seat, &*memory)?;
                self.rounds(collective, &mut this)?;
                Ok(this.outputs.into())
            }
            Op::AllReduce { buffers, op } => {
                let mut this = AllReduce::new(buffers, op, seat);
                self.rounds(collective, &mut this)?;
                Ok(this.buffers.into())
            }
            Op::Broadcast { buffers, root } => {
                let mut this = Broadcast::new(buffers, root, seat);
                self.rounds(collective, &mut this)?;
                Ok(this.buffers.into())
            }
            Op::AllToAll { parts, memory } => {
                let mut this = AllToAll::new(parts, seat, &*memory)?;
                self.rounds(collective, &mut this)?;
                Ok(this.outputs.into())
            }
            Op::Barrier => {
                self.rounds(collective, &mut AllGather::barrier(seat))?;
                Ok(CollectiveOutput::default())
            }
        }
    }

    fn split(&mut self, collective: &Collective<'_>, ranks: &[usize], group: &Membership) -> Result<Box<dyn Backend>> {
        let during = During { collective, end: 0 };
        let all_well = || self.watch.all_well(&self.port, during, ranks);
        Ok(Box::new(SharedMemory::join(self.meet.again(), group, &all_well)?))
    }

    fn fail(&mut self, why: &Failure) {
        self.sight().fail(why);
    }

    fn peer_monitor(&self) -> Option<Arc<dyn PeerMonitor>> {
        Some(Arc::new(self.sight()))
    }
}

/// What tells threads and processes apart.
pub(super) trait Meet: Send {
    /// This rank's end of a new group's segment, and how to watch its peers. `all_well` fails when a rank that is to
    /// come is gone.
    fn meet(&self, group: &Membership, all_well: &dyn Fn() -> Result<()>) -> Result<(Port, Watch)>;

    /// The same for the groups within the new one.
    fn again(&self) -> Box<dyn Meet>;
}

/// Whether the ranks have as many cores as they are. `processes` has a pidfd for each; none when they are threads.
///
/// Launchers bind each rank to cores of its own, so what one rank may use says nothing of all.
pub(super) fn suffice(ranks: usize, processes: &[OwnedFd]) -> bool {
    // A share of the cores' time that a container has counts here, and not in the set.
    let own = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let is_bound_only = sched_getaffinity(None).is_ok_and(|set| set.count() as usize <= own);
    let together = || {
        let sets = processes.iter().map(|process| sched_getaffinity(Some(pid(process)?)).ok());
        sets.collect::<Option<Vec<CpuSet>>>().map(|sets| count_together(&sets))
    };
    let cores = if is_bound_only { together().unwrap_or(own).max(own) } else { own };
    ranks <= cores
}

fn count_together(sets: &[CpuSet]) -> usize {
    (0..CpuSet::MAX_CPU).filter(|&cpu| sets.iter().any(|set| set.is_set(cpu))).count()
}

/// `None` for a process that has ended, and one that this process's namespace does not know.
fn pid(process: &OwnedFd) -> Option<Pid> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", process.as_raw_fd())).ok()?;
    let number = info.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    number.trim().parse().ok().filter(|&number| number > 0).and_then(Pid::from_raw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    #[test]
    fn what_ranks_are_bound_to_counts_together() {
        let set = |cpus: &[usize]| {
            let mut set = CpuSet::new();
            cpus.iter().for_each(|&cpu| set.set(cpu));
            set
        };
        assert_eq!(count_together(&[set(&[3]), set(&[700])]), 2);
        assert_eq!(count_together(&[set(&[3, 4]), set(&[4])]), 2);
        assert_eq!(count_together(&[]), 0);
    }

    #[test]
    fn processes_are_known_by_their_descriptors() {
        let own = || pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        assert_eq!(pid(&own()), Some(getpid()));
        assert!(suffice(1, &[own()]) && suffice(1, &[]));
        assert!(!suffice(1 << 20, &[own()]) && !suffice(1 << 20, &[]));
        // No process: what this one may use counts.
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(pid(&file.into()), None);
    }
}
