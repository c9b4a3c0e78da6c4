//! The hosts of a group's ranks, where hosts share no file system.

use std::collections::BTreeMap;

use fsdp_core::ProcessGroup;

use crate::checkpoint::agree::{agree, on_rank_0};
use crate::{Error, Result};

/// The hosts of a group's ranks. Ranks of one host share a directory.
#[derive(Clone, Debug)]
pub(crate) struct Hosts {
    /// Number of ranks.
    ranks: usize,
    /// Host names, in the order of their first ranks. Empty if all ranks share one directory.
    names: Vec<String>,
    /// First rank of each host.
    firsts: Vec<usize>,
    /// Index of each rank's host. Empty if all ranks share one directory.
    of: Vec<usize>,
}

impl Hosts {
    /// Creates the value for one directory that all ranks share.
    pub(crate) fn shared(ranks: usize) -> Self {
        Hosts { ranks, names: Vec::new(), firsts: Vec::new(), of: Vec::new() }
    }

    /// Exchanges the ranks' host names; either all ranks pass one or none does. Collective.
    pub(crate) fn exchange(group: &ProcessGroup, host: Option<&str>) -> Result<Self> {
        let nameless = group.first_rank(host.is_none_or(str::is_empty))?;
        if nameless.is_some() && group.first_rank(host.is_some())?.is_none() {
            return Ok(Self::shared(group.size()));
        }
        if let Some(rank) = nameless {
            let why = "either all ranks name their hosts or none does; a name is not empty";
            return Err(Error::Argument(format!("rank {rank} does not name its host, but others do: {why}")));
        }
        Ok(Self::of_names(group.gather_bytes(host.unwrap_or_default().into())?))
    }

    /// Groups ranks by the names of their hosts.
    fn of_names(names: Vec<Vec<u8>>) -> Self {
        let mut hosts = Self::shared(names.len());
        let mut known = BTreeMap::new();
        for (rank, name) in names.into_iter().enumerate() {
            let name = String::from_utf8_lossy(&name).into_owned();
            let host = *known.entry(name.clone()).or_insert_with(|| {
                hosts.names.push(name);
                hosts.firsts.push(rank);
                hosts.firsts.len() - 1
            });
            hosts.of.push(host);
        }
        hosts
    }

    /// Returns whether each host has a directory of its own.
    pub(crate) fn are_named(&self) -> bool {
        !self.names.is_empty()
    }

    /// Returns the index of a rank's host.
    pub(crate) fn of(&self, rank: usize) -> usize {
        self.of.get(rank).copied().unwrap_or(0)
    }

    /// Returns the name of a rank's host; `None` if all ranks share one directory.
    pub(crate) fn name(&self, rank: usize) -> Option<&str> {
        self.names.get(self.of(rank)).map(String::as_str)
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.names.iter().any(|known| known == name)
    }

    /// Returns the first rank of a rank's host, which manages the directory.
    pub(crate) fn first(&self, rank: usize) -> usize {
        self.firsts.get(self.of(rank)).copied().unwrap_or(0)
    }

    pub(crate) fn is_first(&self, rank: usize) -> bool {
        self.first(rank) == rank
    }

    /// Returns a rank's number among the ranks of its host, and their count.
    pub(crate) fn local_rank_and_size(&self, rank: usize) -> (usize, usize) {
        let on_host = |ranks: usize| (0..ranks).filter(|&other| self.of(other) == self.of(rank)).count();
        (on_host(rank), on_host(self.ranks))
    }

    /// Runs `make` on the first rank of each host. Returns the texts by first rank on every rank, or the first error.
    pub(crate) fn on_first_ranks(
        &self,
        group: &ProcessGroup,
        phase: &'static str,
        make: impl FnOnce() -> Result<String>,
    ) -> Result<BTreeMap<usize, String>> {
        if !self.are_named() {
            return Ok([(0, on_rank_0(group, phase, make)?)].into());
        }
        let made = if self.is_first(group.rank()) { make() } else { Ok(String::new()) };
        let texts = group.gather_bytes(agree(group, phase, made)?.into_bytes())?;
        let of_first = texts.into_iter().enumerate().filter(|(rank, _)| self.is_first(*rank));
        Ok(of_first.map(|(rank, text)| (rank, String::from_utf8_lossy(&text).into_owned())).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use fsdp_core::process_group::local;

    #[test]
    fn groups_ranks_by_host_name() {
        let hosts = Hosts::of_names(["b", "a", "b", "a", "c"].map(|text| text.as_bytes().to_vec()).into());
        assert_eq!((0..5).map(|rank| hosts.first(rank)).collect::<Vec<_>>(), [0, 1, 0, 1, 4]);
        assert_eq!((hosts.name(2), hosts.name(4), hosts.local_rank_and_size(3)), (Some("b"), Some("c"), (1, 2)));
        assert!(hosts.contains("a") && !hosts.contains("d") && hosts.is_first(1) && !hosts.is_first(3));
        let one = local::run(2, |group| Hosts::exchange(&group, None).unwrap()).pop().unwrap();
        assert_eq!((one.first(1), one.name(1), one.local_rank_and_size(1)), (0, None, (1, 2)));
        assert!(hosts.are_named() && !one.are_named());
    }

    #[test]
    fn names_the_rank_without_a_host() {
        for nameless in [None, Some("")] {
            for error in local::run(2, |group| {
                Hosts::exchange(&group, if group.rank() == 1 { nameless } else { Some("a") }).unwrap_err().to_string()
            }) {
                assert!(error.contains("rank 1 does not name its host"), "{error}");
            }
        }
    }
}
