//! Whether each rank of a group has a core of its own.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::{
    process::Pid,
    thread::{CpuSet, sched_getaffinity},
};

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
    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    use super::*;

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
