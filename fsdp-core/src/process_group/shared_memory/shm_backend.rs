//! The backend over shared memory, and the number of cores that its ranks have. A waiting rank spins for long only if
//! each rank has a core, since it could otherwise keep its peers from running.

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
        host::chunked::{self, SlotLayout},
        op::Op,
        options::Membership,
    },
    peer_monitor::{SegmentMonitor, WaitContext, Waiter},
    segment::Port,
    steps,
};
use crate::{DeviceId, Result};

/// One rank's end of a group.
pub(super) struct SharedMemory {
    port: Port,
    waiter: Arc<Waiter>,
    source: Box<dyn SegmentSource>,
}

impl SharedMemory {
    /// Meets the other ranks of a group of at least two. `check_peers` fails if an expected rank is gone.
    pub(super) fn join(
        source: Box<dyn SegmentSource>,
        group: &Membership,
        check_peers: &dyn Fn() -> Result<()>,
    ) -> Result<Self> {
        let (port, waiter) = source.open(group, check_peers)?;
        Ok(SharedMemory { port, waiter: Arc::new(waiter), source })
    }

    fn monitor(&self) -> SegmentMonitor {
        SegmentMonitor { segment: self.port.segment().clone(), waiter: self.waiter.clone(), rank: self.port.rank() }
    }
}

impl Backend for SharedMemory {
    fn device(&self) -> DeviceId {
        DeviceId::Host
    }

    fn guarantees(&self) -> Guarantees {
        Guarantees { detects_death: self.waiter.detects_death(), ..Guarantees::ALL }
    }

    fn run(&mut self, collective: &Collective<'_>, op: Op) -> Result<CollectiveOutput> {
        let layout = SlotLayout { rank: self.port.rank(), ranks: self.port.ranks(), bytes: self.port.chunk() };
        chunked::run(op, layout, |chunked| steps::run(&mut self.port, &self.waiter, collective, chunked))
            .map(Into::into)
    }

    fn split(&mut self, collective: &Collective<'_>, ranks: &[usize], group: &Membership) -> Result<Box<dyn Backend>> {
        let context = WaitContext { collective, end: 0 };
        let check_peers = || self.waiter.check_peers(&self.port, context, ranks);
        Ok(Box::new(SharedMemory::join(self.source.for_subgroup(), group, &check_peers)?))
    }

    fn fail(&mut self, why: &Failure) {
        self.monitor().fail(why);
    }

    fn peer_monitor(&self) -> Option<Arc<dyn PeerMonitor>> {
        Some(Arc::new(self.monitor()))
    }
}

/// Creates the segment of a group: the difference between threads and processes.
pub(super) trait SegmentSource: Send {
    /// Returns this rank's port of a new group's segment, and its waiter. `check_peers` fails if an expected rank is
    /// gone.
    fn open(&self, group: &Membership, check_peers: &dyn Fn() -> Result<()>) -> Result<(Port, Waiter)>;

    /// Returns the source of segments for groups split from this one.
    fn for_subgroup(&self) -> Box<dyn SegmentSource>;
}

/// Returns whether the ranks have a core each. `processes` has a pidfd for each rank, or none if ranks are threads.
///
/// Launchers bind ranks to cores, so the cores of one rank are not the cores of all.
pub(super) fn has_core_for_each_rank(ranks: usize, processes: &[OwnedFd]) -> bool {
    // This count includes a container's limit on CPU time, which the affinity set does not.
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

/// Returns `None` for a process that has ended or is unknown in this PID namespace.
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
    fn cores_of_bound_ranks_are_counted_together() {
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
    fn processes_are_identified_by_pidfd() {
        let own = || pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        assert_eq!(pid(&own()), Some(getpid()));
        assert!(has_core_for_each_rank(1, &[own()]) && has_core_for_each_rank(1, &[]));
        assert!(!has_core_for_each_rank(1 << 20, &[own()]) && !has_core_for_each_rank(1 << 20, &[]));
        // A file is not a process, so this process's cores count.
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(pid(&file.into()), None);
    }
}
