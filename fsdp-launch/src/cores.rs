//! The cores of this host, and a share of them for each rank.

use std::{io, os::unix::process::CommandExt, process::Command};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::{Error, Result};

/// The cores that this process may use, at least 1.
pub(crate) fn count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The numbers of the cores that `local_rank` of `ranks` is pinned to: neighbours, and no two ranks' the same unless there are fewer cores than ranks.
pub(crate) fn share_of(local_rank: usize, ranks: usize) -> Result<Vec<usize>> {
    let allowed = sched_getaffinity(None).map_err(Error::system("read which cores may be used"))?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    Ok(share(&cores, local_rank, ranks))
}

fn share(cores: &[usize], local_rank: usize, ranks: usize) -> Vec<usize> {
    if cores.len() < ranks {
        return cores.iter().copied().cycle().skip(local_rank).take(1).collect();
    }
    let start_of = |rank: usize| rank * cores.len() / ranks;
    cores[start_of(local_rank)..start_of(local_rank + 1)].to_vec()
}

/// Makes `command` run on these cores only.
pub(crate) fn pin(command: &mut Command, cores: &[usize]) {
    let mut set = CpuSet::new();
    cores.iter().for_each(|&core| set.set(core));
    // SAFETY: the hook runs between fork and exec, where only async-signal-safe calls are allowed: sched_setaffinity is a plain system call, and nothing
    // is allocated.
    unsafe {
        command.pre_exec(move || sched_setaffinity(None, &set).map_err(io::Error::from));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_disjoint_and_complete() {
        let cores = [0, 1, 2, 5, 7];
        assert_eq!([share(&cores, 0, 2), share(&cores, 1, 2)].concat(), cores);
        assert_eq!(share(&cores, 0, 2), [0, 1]);
        assert_eq!(share(&cores, 4, 5), [7]);
        assert_eq!((share(&cores, 1, 6), share(&cores, 5, 6)), (vec![1], vec![0]));
        assert!(share(&[], 0, 2).is_empty());
    }
}
