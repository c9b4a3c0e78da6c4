//! Host names of ranks, for messages.

use std::sync::Arc;

/// Host names of a group's ranks. Empty by default, and for a group on one host, where messages do not need them.
///
/// ```
/// use fsdp_core::HostNames;
/// let hosts = HostNames::of(["node0", "node0", "node1"]);
/// assert_eq!(hosts.rank(2), "rank 2 on node1");
/// assert_eq!(hosts.ranks(&[0, 1, 2]), "rank(s) [0, 1] on node0, [2] on node1");
/// assert_eq!(HostNames::default().ranks(&[0, 2]), "rank(s) [0, 2]");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostNames(Option<Arc<Vec<String>>>);

impl HostNames {
    /// Names the hosts of ranks, in rank order. Empty if all names are equal.
    pub fn of<T: Into<String>>(names: impl IntoIterator<Item = T>) -> Self {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        let are_several = names.iter().any(|name| *name != names[0]);
        HostNames(are_several.then(|| Arc::new(names)))
    }

    /// Returns the names of some of the ranks, in this order.
    pub(crate) fn select(&self, ranks: &[usize]) -> Self {
        let name = |&rank: &usize| self.name(rank).unwrap_or_default().to_string();
        HostNames(self.0.as_ref().map(|_| Arc::new(ranks.iter().map(name).collect())))
    }

    /// Returns the host of a rank, if known.
    pub fn name(&self, rank: usize) -> Option<&str> {
        self.0.as_ref()?.get(rank).map(String::as_str)
    }

    /// Formats a rank for messages: `rank 2 on node1`.
    pub fn rank(&self, rank: usize) -> String {
        self.name(rank).map_or_else(|| format!("rank {rank}"), |name| format!("rank {rank} on {name}"))
    }

    /// Formats ranks for messages: `rank(s) [0, 1] on node0, [2] on node1`.
    pub fn ranks(&self, ranks: &[usize]) -> String {
        let mut hosts: Vec<(Option<&str>, Vec<usize>)> = Vec::new();
        for &rank in ranks {
            let name = self.name(rank);
            match hosts.iter_mut().find(|(other, _)| *other == name) {
                Some((_, ranks)) => ranks.push(rank),
                None => hosts.push((name, vec![rank])),
            }
        }
        let host = |(name, ranks): &(Option<&str>, Vec<usize>)| match name {
            Some(name) => format!("{ranks:?} on {name}"),
            None => format!("{ranks:?}"),
        };
        format!("rank(s) {}", hosts.iter().map(host).collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_all_the_same_say_nothing_unless_they_were_selected() {
        assert_eq!(HostNames::of(["a", "a"]), HostNames::default());
        assert_eq!(HostNames::of(Vec::<String>::new()), HostNames::default());
        let hosts = HostNames::of(["a", "b", "b"]);
        assert_eq!(hosts.select(&[2, 1]).ranks(&[0, 1]), "rank(s) [0, 1] on b");
        assert_eq!(hosts.select(&[1, 0]).rank(1), "rank 1 on a");
        assert_eq!(hosts.rank(7), "rank 7");
        assert_eq!(HostNames::default().select(&[1]).rank(0), "rank 0");
    }
}
