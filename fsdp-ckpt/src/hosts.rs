//! Which ranks write to the same directory: all of them, or those of each host.

use fsdp_core::ProcessGroup;

use crate::{Error, Result};

/// The hosts of a group's ranks, as far as directories are concerned: ranks of one host share theirs.
#[derive(Clone, Debug)]
pub(crate) struct Hosts {
    /// In the order of their first ranks. Empty where one directory is everybody's.
    names: Vec<String>,
    /// By rank, the position of its host.
    of: Vec<usize>,
}

impl Hosts {
    /// One directory for all ranks.
    pub(crate) fn one(ranks: usize) -> Self {
        Hosts { names: Vec::new(), of: vec![0; ranks] }
    }

    /// From what each rank calls its host, or none of them does. Collective.
    pub(crate) fn meet(group: &ProcessGroup, host: Option<&str>) -> Result<Self> {
        let message = host.map_or(Vec::new(), |name| [b"=", name.as_bytes()].concat());
        let messages = group.gather_bytes(message)?;
        Self::of_messages(&messages)
    }

    fn of_messages(messages: &[Vec<u8>]) -> Result<Self> {
        let nameless: Vec<usize> = (0..messages.len()).filter(|&rank| messages[rank].len() < 2).collect();
        if messages.iter().all(Vec::is_empty) {
            return Ok(Self::one(messages.len()));
        }
        if let Some(rank) = nameless.first() {
            let why = "all ranks name their hosts, or none does, and a name is not empty";
            return Err(Error::Argument(format!("rank {rank} does not name its host, and others do: {why}")));
        }
        let mut hosts = Hosts { names: Vec::new(), of: Vec::with_capacity(messages.len()) };
        for message in messages {
            let name = String::from_utf8_lossy(&message[1..]).into_owned();
            let known = hosts.names.iter().position(|known| *known == name);
            hosts.of.push(known.unwrap_or(hosts.names.len()));
            if known.is_none() {
                hosts.names.push(name);
            }
        }
        Ok(hosts)
    }

    /// The position of a rank's host.
    pub(crate) fn of(&self, rank: usize) -> usize {
        self.of[rank]
    }

    /// The name of a rank's host; `None` where one directory is everybody's.
    pub(crate) fn name(&self, rank: usize) -> Option<&str> {
        self.names.get(self.of[rank]).map(String::as_str)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.names.iter().any(|known| known == name)
    }

    /// The first rank of a rank's host, which looks after the directory.
    pub(crate) fn first(&self, rank: usize) -> usize {
        self.of.iter().position(|host| *host == self.of[rank]).unwrap_or(rank)
    }

    pub(crate) fn is_first(&self, rank: usize) -> bool {
        self.first(rank) == rank
    }

    /// A rank's number among those of its host, and how many they are.
    pub(crate) fn place(&self, rank: usize) -> (usize, usize) {
        let on_host = |ranks: &[usize]| ranks.iter().filter(|host| **host == self.of[rank]).count();
        (on_host(&self.of[..rank]), on_host(&self.of))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_one_name_are_of_one_host() {
        let messages = ["=b", "=a", "=b", "=a", "=c"].map(|text| text.as_bytes().to_vec());
        let hosts = Hosts::of_messages(&messages).unwrap();
        assert_eq!((0..5).map(|rank| hosts.first(rank)).collect::<Vec<_>>(), [0, 1, 0, 1, 4]);
        assert_eq!((hosts.name(2), hosts.name(4), hosts.place(3)), (Some("b"), Some("c"), (1, 2)));
        assert!(hosts.has("a") && !hosts.has("d") && hosts.is_first(1) && !hosts.is_first(3));
        let one = Hosts::of_messages(&[Vec::new(), Vec::new()]).unwrap();
        assert_eq!((one.first(1), one.name(1), one.place(1)), (0, None, (1, 2)));
    }

    #[test]
    fn a_rank_without_a_name_is_named_by_its_number() {
        for nameless in [&b""[..], b"="] {
            let error = Hosts::of_messages(&[b"=a".to_vec(), nameless.to_vec()]).unwrap_err().to_string();
            assert!(error.contains("rank 1 does not name its host"), "{error}");
        }
    }
}
