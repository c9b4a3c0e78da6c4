//! What ranks that share a host do for each other: bytes cross the network once a host, and not once a rank.
//!
//! Each rank sends what it has to one rank of every other host, whose ranks take turns. That one hands it on to the
//! others of its host, by messages of MPI, which are memory there.

use super::{
    super::host::packing::Stream,
    phase::{Lane, Phase},
};

/// The ranks of a group by the hosts that they are on.
#[derive(Clone, Debug)]
pub(super) struct Hosts {
    pub(super) size: usize,
    pub(super) hosts: Vec<Vec<usize>>,
}

impl Hosts {
    /// By what tells the hosts of all ranks apart. Nothing where a rank takes no part (0).
    pub(super) fn of(ids: &[u64]) -> Option<Self> {
        let mut hosts: Vec<(u64, Vec<usize>)> = Vec::new();
        for (rank, &id) in ids.iter().enumerate() {
            match hosts.iter_mut().find(|(of, _)| *of == id) {
                Some((_, ranks)) => ranks.push(rank),
                None => hosts.push((id, vec![rank])),
            }
        }
        let hosts = Hosts { size: ids.len(), hosts: hosts.into_iter().map(|(_, ranks)| ranks).collect() };
        (!ids.contains(&0)).then_some(hosts)
    }

    /// Whether there is more than one.
    pub(super) fn are_several(&self) -> bool {
        self.hosts.len() > 1
    }

    /// Whether there is more than one, and one of them has several ranks.
    pub(super) fn are_shared(&self) -> bool {
        self.are_several() && self.hosts.len() < self.size
    }

    /// Whether these ranks are on one host.
    pub(super) fn share_one(&self, ranks: &[usize]) -> bool {
        self.hosts.iter().any(|host| ranks.iter().all(|rank| host.contains(rank)))
    }

    /// What `rank` sends and receives for all ranks to have what each of them has: `of` says what that is.
    pub(super) fn gather(&self, rank: usize, of: &dyn Fn(usize) -> Stream) -> [Phase; 2] {
        let mut phases = [Phase::nothing(self.size), Phase::nothing(self.size)];
        let seat = |host: &[usize], rank| host.iter().position(|&other| other == rank);
        let Some((mine, own)) = self.hosts.iter().find_map(|host| Some((host, seat(host, rank)?))) else {
            return phases;
        };
        let mut relayed: Vec<Vec<Stream>> = vec![Vec::new(); mine.len()];
        let mut sends = vec![Stream::default(); self.size];
        let mut arrives = sends.clone();
        for host in &self.hosts {
            if host[0] == mine[0] {
                for &peer in host.iter().filter(|&&peer| peer != rank) {
                    (sends[peer], arrives[peer]) = (of(rank), of(peer));
                }
                continue;
            }
            sends[host[own % host.len()]] = of(rank);
            for (seat, &from) in host.iter().enumerate() {
                let relay = seat % mine.len();
                relayed[relay].push(of(from));
                if relay == own {
                    arrives[from] = of(from);
                }
            }
        }
        phases[0] = placed(sends, arrives);
        let (mut sends, mut arrives) = (vec![Stream::default(); self.size], vec![Stream::default(); self.size]);
        let relayed: Vec<Stream> = relayed.into_iter().map(Stream::joined).collect();
        for (seat, &peer) in mine.iter().enumerate().filter(|(seat, _)| *seat != own) {
            (sends[peer], arrives[peer]) = (relayed[own].clone(), relayed[seat].clone());
        }
        phases[1] = placed(sends, arrives);
        phases
    }

    /// What `rank` sends and receives for all ranks to have the stream of `root`: that shares it out among the ranks of
    /// its host, and among those of all others, and each of these sides gathers it.
    pub(super) fn broadcast(&self, rank: usize, root: usize, stream: &Stream) -> [Phase; 3] {
        let (mut near, mut far) = (self.hosts.clone(), self.hosts.clone());
        near.retain(|host| host.contains(&root));
        near.iter_mut().for_each(|host| host.retain(|&rank| rank != root));
        far.retain(|host| !host.contains(&root));
        let (mut sends, mut arrives) = (vec![Stream::default(); self.size], vec![Stream::default(); self.size]);
        let mut gathers = [Phase::nothing(self.size), Phase::nothing(self.size)];
        for mut hosts in [near, far] {
            hosts.retain(|host| !host.is_empty());
            let ranks = hosts.concat();
            let slice = stream.shares(ranks.len());
            let of = |rank| ranks.iter().position(|&other| other == rank).map(&slice).unwrap_or_default();
            if rank == root {
                ranks.iter().for_each(|&to| sends[to] = of(to));
            } else if ranks.contains(&rank) {
                arrives[root] = of(rank);
                gathers = Hosts { size: self.size, hosts }.gather(rank, &of);
            }
        }
        let [direct, relayed] = gathers;
        [placed(sends, arrives), direct, relayed]
    }
}

fn placed(sends: Vec<Stream>, arrives: Vec<Stream>) -> Phase {
    let lanes = |streams: Vec<Stream>| streams.into_iter().map(|stream| Lane::from(0, stream)).collect();
    Phase::placed(lanes(sends), lanes(arrives))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::super::host::packing::ALIGN, *};
    use crate::DType;

    /// The bytes of parts that a stream is of.
    fn bytes(stream: &Stream) -> Vec<(usize, usize)> {
        let pieces = stream.pieces(0, usize::MAX / ALIGN * ALIGN);
        pieces.flat_map(|piece| piece.bytes.map(move |byte| (piece.part, byte))).collect()
    }

    /// Lets ranks exchange what their phases say; `has` is what each has of the parts. Returns how many bytes crossed
    /// between hosts.
    fn play<const N: usize>(ids: &[u64], phases: &[[Phase; N]], has: &mut [Vec<Vec<bool>>]) -> usize {
        let mut crossed = 0;
        let of = |rank: usize, phase: usize| &phases[rank][phase];
        for phase in 0..N {
            let before = has.to_vec();
            for (from, to) in (0..ids.len()).flat_map(|from| (0..ids.len()).map(move |to| (from, to))) {
                let sent = bytes(&of(from, phase).sends[to].stream);
                let arrives = bytes(&of(to, phase).arrives[from].stream);
                assert_eq!(sent, arrives, "from {from} to {to} in phase {phase}");
                for (part, byte) in &sent {
                    assert!(before[from][*part][*byte], "{from} sends what it does not have");
                    assert!(!has[to][*part][*byte], "{to} gets what it has");
                    has[to][*part][*byte] = true;
                }
                crossed += if ids[from] == ids[to] { 0 } else { sent.len() };
            }
        }
        assert!(has.iter().flatten().flatten().all(|&is_there| is_there), "something did not come");
        crossed
    }

    fn hosts(ids: &[u64]) -> usize {
        ids.iter().collect::<std::collections::HashSet<_>>().len()
    }

    #[test]
    fn ranks_take_part_where_all_do() {
        let shared = |ids: &[u64]| Hosts::of(ids).is_some_and(|hosts| hosts.are_shared());
        assert!(shared(&[7, 7, 8]) && shared(&[7, 8, 7, 8]));
        assert!(!shared(&[7, 8, 9]) && !shared(&[7, 7]) && !shared(&[7, 7, 0]) && !shared(&[0, 0]));
        let hosts = Hosts::of(&[7, 8, 7, 8]).unwrap();
        assert!(hosts.share_one(&[2, 0]) && hosts.share_one(&[3]) && !hosts.share_one(&[0, 1]));
    }

    proptest! {
        #[test]
        fn every_byte_crosses_once_a_host(
            ids in proptest::collection::vec(1u64..4, 2..9),
            counts in proptest::collection::vec([0usize..40, 0usize..3], 9),
            root in 0usize..9,
        ) {
            let (size, root) = (ids.len(), root % ids.len());
            let all = Hosts::of(&ids).unwrap();
            // Two parts, of four and of two bytes an element.
            let (dtypes, counts) = ([DType::F32, DType::BF16], &counts[..size]);
            let of_part: Vec<Vec<usize>> = (0..2).map(|part| counts.iter().map(|of| of[part]).collect()).collect();
            let stream = |of| Stream::of_counts(dtypes.into_iter().zip(of_part.iter().map(|it| &it[..])), of);
            let lens: Vec<usize> =
                (0..2).map(|part| of_part[part].iter().sum::<usize>() * dtypes[part].size()).collect();
            let nothing: Vec<Vec<bool>> = lens.iter().map(|&len| vec![false; len]).collect();
            let mut has = vec![nothing.clone(); size];
            for (rank, has) in has.iter_mut().enumerate() {
                bytes(&stream(rank)).into_iter().for_each(|(part, byte)| has[part][byte] = true);
            }
            let phases: Vec<_> = (0..size).map(|rank| all.gather(rank, &stream)).collect();
            let len: usize = lens.iter().sum();
            prop_assert_eq!(play(&ids, &phases, &mut has), len * (hosts(&ids) - 1));

            let whole = Stream::new(lens.iter().map(|&len| 0..len));
            let mut has = vec![nothing; size];
            has[root].iter_mut().flatten().for_each(|is_there| *is_there = true);
            let phases: Vec<_> = (0..size).map(|rank| all.broadcast(rank, root, &whole)).collect();
            prop_assert_eq!(play(&ids, &phases, &mut has), len * (hosts(&ids) - 1));
        }
    }
}
