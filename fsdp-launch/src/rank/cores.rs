//! The cores of this host, and a share of them for each rank.

use std::{io, os::unix::process::CommandExt, path::Path, process::Command};

use clap::ValueEnum;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::{
    Error, LaunchSpec, NumaBinding, Result,
    rank::{gpus, numa::Topology},
};

/// The cores that this process may use, at least 1.
pub(crate) fn count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The numbers of the cores that a rank is pinned to, if it is.
///
/// # Errors
/// [`Error::Usage`] where there are none for it.
pub(crate) fn of_rank(spec: &LaunchSpec, local_rank: usize) -> Result<Option<Vec<usize>>> {
    let ranks = spec.nproc_per_node;
    match spec.numa_binding {
        Some(binding) => near(binding, local_rank, ranks).map(Some),
        None if spec.pin_cores => Ok(Some(share(&allowed()?, local_rank, ranks))),
        None => Ok(None),
    }
}

fn allowed() -> Result<Vec<usize>> {
    let allowed = sched_getaffinity(None).map_err(Error::system("read which cores may be used"))?;
    Ok((0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect())
}

fn near(binding: NumaBinding, local_rank: usize, ranks: usize) -> Result<Vec<usize>> {
    let topology = Topology::read(Path::new("/"), &allowed()?);
    topology.cores_of(binding, local_rank, ranks, gpus::visible_devices().as_deref()).map_err(|expected| {
        let value = binding.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        Error::Usage { flag: "--numa-binding", value, expected }
    })
}

/// Neighbours, and no two ranks' the same unless there are fewer cores than ranks.
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
    // SAFETY: the hook runs between fork and exec, where only async-signal-safe calls are allowed: sched_setaffinity is
    // a plain system call, and nothing is allocated.
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
