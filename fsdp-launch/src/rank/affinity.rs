//! The cores that a rank runs on: all, an equal share (`--pin-cores`), or those near to its GPU (`--numa-binding`).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::process::CommandExt,
    path::Path,
    process::Command,
};

use clap::ValueEnum;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::{Error, LaunchSpec, NumaBinding, rank::gpus};

/// Returns the number of cores that this process may use, at least 1.
pub(crate) fn core_count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the cores to bind a rank to; `None` without an option for it.
pub(crate) fn cores_of_rank(spec: &LaunchSpec, local_rank: usize) -> crate::Result<Option<Vec<usize>>> {
    let ranks = spec.nproc_per_node;
    match spec.numa_binding {
        Some(binding) => near(binding, local_rank, ranks).map(Some),
        None if spec.pin_cores => Ok(Some(share(&allowed()?, local_rank, ranks))),
        None => Ok(None),
    }
}

fn allowed() -> crate::Result<Vec<usize>> {
    let allowed = sched_getaffinity(None).map_err(Error::system("read which cores may be used"))?;
    Ok((0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect())
}

fn near(binding: NumaBinding, local_rank: usize, ranks: usize) -> crate::Result<Vec<usize>> {
    let topology = Topology::read(Path::new("/"), &allowed()?);
    topology.cores_of(binding, local_rank, ranks, gpus::visible_devices().as_deref()).map_err(|expected| {
        let value = binding.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        Error::Usage { flag: "--numa-binding", value, expected }
    })
}

/// Returns a rank's share: consecutive cores, disjoint between ranks unless there are fewer cores than ranks.
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
    // a plain system call, and the hook does not allocate.
    unsafe {
        command.pre_exec(move || sched_setaffinity(None, &set).map_err(io::Error::from));
    }
}

/// Usable cores, and the memory, caches and GPUs near them.
#[derive(Debug, PartialEq, Eq)]
struct Topology {
    /// NUMA nodes with usable cores.
    nodes: BTreeMap<usize, BTreeSet<usize>>,
    places: BTreeMap<usize, CoreTopology>,
    /// NVIDIA GPUs in the order of their PCI addresses, including hidden ones.
    gpus: Vec<Gpu>,
}

/// Location of a core. Physical core and cache are named by their lowest logical core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CoreTopology {
    socket: usize,
    physical: usize,
    cache: usize,
}

#[derive(Debug, PartialEq, Eq)]
struct Gpu {
    uuid: Option<String>,
    node: usize,
}

impl Topology {
    /// Reads the topology of the `allowed` cores from `/sys` and `/proc` below `root`. Missing information means one
    /// node, one socket, one cache.
    fn read(root: &Path, allowed: &[usize]) -> Self {
        let allowed: BTreeSet<usize> = allowed.iter().copied().collect();
        let mut nodes: BTreeMap<usize, BTreeSet<usize>> = numbered(&root.join("sys/devices/system/node"), "node")
            .filter_map(|(node, dir)| {
                Some((node, list(&dir.join("cpulist"))?.intersection(&allowed).copied().collect()))
            })
            .collect();
        nodes.retain(|_, cores: &mut BTreeSet<usize>| !cores.is_empty());
        if nodes.is_empty() {
            nodes.insert(0, allowed.clone());
        }
        let first = allowed.first().copied().unwrap_or(0);
        let place = |&core: &usize| {
            let dir = root.join("sys/devices/system/cpu").join(format!("cpu{core}"));
            let siblings = list(&dir.join("topology/thread_siblings_list"));
            let place = CoreTopology {
                socket: number(&dir.join("topology/physical_package_id")).unwrap_or(0),
                physical: siblings.and_then(|cores| cores.first().copied()).unwrap_or(core),
                cache: last_level_cache(&dir.join("cache")).unwrap_or(first),
            };
            (core, place)
        };
        Topology { nodes, places: allowed.iter().map(place).collect(), gpus: gpus(root) }
    }

    /// Returns the cores of `local_rank` of `ranks`, or why none fit. `visible` lists the usable GPUs as in
    /// `CUDA_VISIBLE_DEVICES`; `None` means all.
    fn cores_of(
        &self,
        binding: NumaBinding,
        local_rank: usize,
        ranks: usize,
        visible: Option<&[String]>,
    ) -> Result<Vec<usize>, String> {
        let of_ranks = (0..ranks).map(|rank| self.node_of(rank, ranks, visible)).collect::<Result<Vec<_>, _>>()?;
        let node = of_ranks[local_rank];
        let cores = &self.nodes[&node];
        let neighbours = of_ranks.iter().filter(|other| **other == node).count();
        let position = of_ranks[..local_rank].iter().filter(|other| **other == node).count();
        Ok(match binding {
            NumaBinding::Node => cores.iter().copied().collect(),
            NumaBinding::Socket => {
                let sockets: BTreeSet<usize> = cores.iter().map(|core| self.places[core].socket).collect();
                let is_there = |place: &CoreTopology| sockets.contains(&place.socket);
                self.places.iter().filter(|(_, place)| is_there(place)).map(|(core, _)| *core).collect()
            }
            NumaBinding::Exclusive => {
                let physical = grouped(cores, |core| self.places[&core].physical);
                if physical.len() < neighbours {
                    return Err(format!(
                        "NUMA node {node} has {} physical cores that may be used, and {neighbours} ranks: start \
                            fewer, or choose another binding",
                        physical.len()
                    ));
                }
                // The first ranks get the remainder.
                let (each, more) = (physical.len() / neighbours, physical.len() % neighbours);
                let start_of = |position: usize| position * each + position.min(more);
                let mut share = physical[start_of(position)..start_of(position + 1)].concat();
                share.sort_unstable();
                share
            }
            NumaBinding::CoreComplex => {
                let mut caches = grouped(cores, |core| self.places[&core].cache);
                // Caches with the most usable cores come first.
                caches.sort_by_key(|cores| std::cmp::Reverse(cores.len()));
                caches[position % caches.len()].clone()
            }
        })
    }

    /// Returns the NUMA node of a rank: the node of its GPU. Without GPUs, ranks are spread evenly over the nodes.
    fn node_of(&self, local_rank: usize, ranks: usize, visible: Option<&[String]>) -> Result<usize, String> {
        let visible = visible.filter(|_| !self.gpus.is_empty());
        let count = visible.map_or(self.gpus.len(), <[String]>::len);
        if count == 0 {
            let position = local_rank * self.nodes.len() / ranks;
            return Ok(self.nodes.keys().nth(position).copied().unwrap_or(0));
        }
        // Ranks beyond the GPUs share them.
        let device = local_rank % count;
        let gpu = match visible {
            None => &self.gpus[device],
            Some(names) => self.gpu(&names[device]).ok_or_else(|| {
                format!(
                    "which GPU {} is that local rank {local_rank} sees can't be told: name GPUs by number or UUID in \
                        CUDA_VISIBLE_DEVICES, or use --pin-cores",
                    names[device]
                )
            })?,
        };
        if !self.nodes.contains_key(&gpu.node) {
            return Err(format!(
                "the GPU of local rank {local_rank} is on NUMA node {}, of which no core may be used: allow some, or \
                    use --pin-cores",
                gpu.node
            ));
        }
        Ok(gpu.node)
    }

    /// Finds a GPU by number, or by a prefix of its UUID.
    fn gpu(&self, name: &str) -> Option<&Gpu> {
        match name.parse::<usize>() {
            Ok(number) => self.gpus.get(number),
            Err(_) => self
                .gpus
                .iter()
                .find(|gpu| name.starts_with("GPU-") && gpu.uuid.as_deref().is_some_and(|uuid| uuid.starts_with(name))),
        }
    }
}

/// Groups the cores by key, in key order.
fn grouped(cores: &BTreeSet<usize>, key: impl Fn(usize) -> usize) -> Vec<Vec<usize>> {
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for &core in cores {
        groups.entry(key(core)).or_default().push(core);
    }
    groups.into_values().collect()
}

/// Returns the NVIDIA GPUs. A GPU without a node (-1) counts as on node 0.
fn gpus(root: &Path) -> Vec<Gpu> {
    let entries = fs::read_dir(root.join("sys/bus/pci/drivers/nvidia")).into_iter().flatten().flatten();
    let mut addresses: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.split(':').count() == 3)
        .collect();
    addresses.sort_unstable();
    let gpu = |address: String| {
        let information = root.join("proc/driver/nvidia/gpus").join(&address).join("information");
        let information = fs::read_to_string(information).unwrap_or_default();
        let uuid =
            information.lines().find_map(|line| line.strip_prefix("GPU UUID:")).map(|uuid| uuid.trim().to_owned());
        let node = number(&root.join("sys/bus/pci/devices").join(&address).join("numa_node")).unwrap_or(0);
        Gpu { uuid, node }
    };
    addresses.into_iter().map(gpu).collect()
}

/// Returns the lowest core that shares the last-level cache, from a core's `cache` directory.
fn last_level_cache(dir: &Path) -> Option<usize> {
    let caches = numbered(dir, "index").filter_map(|(_, cache)| {
        let kind = fs::read_to_string(cache.join("type")).ok()?;
        let holds_data = ["Unified", "Data"].contains(&kind.trim());
        let first = list(&cache.join("shared_cpu_list"))?.first().copied()?;
        holds_data.then_some((number(&cache.join("level"))?, first))
    });
    caches.max_by_key(|(level, _)| *level).map(|(_, first)| first)
}

/// Returns the directories in `dir` named `prefix` and a number.
fn numbered<'a>(dir: &Path, prefix: &'a str) -> impl Iterator<Item = (usize, std::path::PathBuf)> + use<'a> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(move |entry| Some((entry.file_name().to_str()?.strip_prefix(prefix)?.parse().ok()?, entry.path())))
}

fn number(path: &Path) -> Option<usize> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Reads a file with a list of cores.
fn list(path: &Path) -> Option<BTreeSet<usize>> {
    ranges(&fs::read_to_string(path).ok()?)
}

/// Parses `0-2,8` as 0, 1, 2, 8. Empty text means no cores.
fn ranges(text: &str) -> Option<BTreeSet<usize>> {
    const MOST: usize = 1 << 16;
    let mut all = BTreeSet::new();
    for range in text.trim().split(',').filter(|_| !text.trim().is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last >= MOST {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all)
}

#[cfg(test)]
mod tests;
