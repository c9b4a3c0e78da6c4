//! Communication of ranks that share a host, so that data crosses the network once for each host.
//!
//! To gather, a rank sends its data to one rank of every other host, and that rank sends it to the others of its host.
//! The ranks of a host take turns.
//!
//! To reduce, ranks form blocks: subtrees of the tree of sums whose ranks share a host. One rank of a block combines
//! the block's data for a rank of another host, and only the result crosses the network. The ranks of a block take
//! turns. Ranks placed in order form blocks of powers of two; ranks placed round-robin form none.
//!
//! Blocks are subtrees so that the bits are the same as without hosts. For the same reason, partial sums of
//! half-precision elements cross the network as f32. A block of two ranks saves nothing then, and does not add up.
//!
//! Announcements and all-to-alls go directly between all ranks. All ranks must want the hierarchy, which they tell each
//! other when they meet.

use std::ops::Range;

use super::{
    super::host::{packing::Stream, reduce::widening},
    mpi_backend::{Combined, Lane, Output, Phase},
};
use crate::{DType, ReduceOp};

/// The ranks of a group by host.
#[derive(Clone, Debug)]
pub(super) struct Hosts {
    pub(super) size: usize,
    pub(super) hosts: Vec<Vec<usize>>,
}

impl Hosts {
    /// Groups ranks by the identifiers of their hosts. Returns `None` if an identifier is 0 (no hierarchy).
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

    /// Returns whether there are several hosts.
    pub(super) fn are_several(&self) -> bool {
        self.hosts.len() > 1
    }

    /// Returns whether there are several hosts, one of them with several ranks.
    pub(super) fn are_shared(&self) -> bool {
        self.are_several() && self.hosts.len() < self.size
    }

    /// Returns whether these ranks are on one host.
    pub(super) fn share_one(&self, ranks: &[usize]) -> bool {
        self.hosts.iter().any(|host| ranks.iter().all(|rank| host.contains(rank)))
    }

    /// Returns `rank`'s phases of an all-gather of the streams `of` all ranks.
    pub(super) fn gather(&self, rank: usize, of: &dyn Fn(usize) -> Stream) -> [Phase; 2] {
        let mut phases = [Phase::nothing(self.size), Phase::nothing(self.size)];
        let seat = |host: &[usize], rank| host.iter().position(|&other| other == rank);
        let Some((mine, own)) = self.hosts.iter().find_map(|host| Some((host, seat(host, rank)?))) else {
            return phases;
        };
        let mut relayed: Vec<Vec<Stream>> = vec![Vec::new(); mine.len()];
        let mut sends = vec![Stream::default(); self.size];
        let mut receives = sends.clone();
        for host in &self.hosts {
            if host[0] == mine[0] {
                for &peer in host.iter().filter(|&&peer| peer != rank) {
                    (sends[peer], receives[peer]) = (of(rank), of(peer));
                }
                continue;
            }
            sends[host[own % host.len()]] = of(rank);
            for (seat, &from) in host.iter().enumerate() {
                let relay = seat % mine.len();
                relayed[relay].push(of(from));
                if relay == own {
                    receives[from] = of(from);
                }
            }
        }
        phases[0] = placed(sends, receives);
        let (mut sends, mut receives) = (vec![Stream::default(); self.size], vec![Stream::default(); self.size]);
        let relayed: Vec<Stream> = relayed.into_iter().map(Stream::joined).collect();
        for (seat, &peer) in mine.iter().enumerate().filter(|(seat, _)| *seat != own) {
            (sends[peer], receives[peer]) = (relayed[own].clone(), relayed[seat].clone());
        }
        phases[1] = placed(sends, receives);
        phases
    }

    /// Returns `rank`'s phases of a broadcast. The root scatters the stream over the ranks of its host and over the
    /// ranks of all others, and each side gathers it.
    pub(super) fn broadcast(&self, rank: usize, root: usize, stream: &Stream) -> [Phase; 3] {
        let (mut near, mut far) = (self.hosts.clone(), self.hosts.clone());
        near.retain(|host| host.contains(&root));
        near.iter_mut().for_each(|host| host.retain(|&rank| rank != root));
        far.retain(|host| !host.contains(&root));
        let (mut sends, mut receives) = (vec![Stream::default(); self.size], vec![Stream::default(); self.size]);
        let mut gathers = [Phase::nothing(self.size), Phase::nothing(self.size)];
        for mut hosts in [near, far] {
            hosts.retain(|host| !host.is_empty());
            let ranks = hosts.concat();
            let slice = stream.shares(ranks.len());
            let of = |rank| ranks.iter().position(|&other| other == rank).map(&slice).unwrap_or_default();
            if rank == root {
                ranks.iter().for_each(|&to| sends[to] = of(to));
            } else if ranks.contains(&rank) {
                receives[root] = of(rank);
                gathers = Hosts { size: self.size, hosts }.gather(rank, &of);
            }
        }
        let [direct, relayed] = gathers;
        [placed(sends, receives), direct, relayed]
    }
}

fn placed(sends: Vec<Stream>, receives: Vec<Stream>) -> Phase {
    let lanes = |streams: Vec<Stream>| streams.into_iter().map(|stream| Lane::from(0, stream)).collect();
    Phase::placed(lanes(sends), lanes(receives))
}

/// A reduction with a part for each rank.
pub(super) struct Reduction<'a> {
    pub(super) op: ReduceOp,
    pub(super) dtypes: &'a [DType],
    /// The data to reduce for a rank.
    pub(super) of: &'a dyn Fn(usize) -> Stream,
    /// Destination of this rank's results.
    pub(super) output: Output,
    /// Number of buffers. Pages of partial sums follow them.
    pub(super) buffers: usize,
    /// Largest number of bytes of such a page.
    pub(super) room: usize,
}

impl Reduction<'_> {
    /// Returns `rank`'s phase without regard to hosts.
    pub(super) fn flat(&self, rank: usize, size: usize) -> Phase {
        let streams: Vec<_> = (0..size).map(self.of).collect();
        self.last(rank, (0..size).map(|rank| (rank, 1)).collect(), &|_| true, &streams)
    }

    /// Returns `rank`'s phases, and the sizes of its pages.
    pub(super) fn over(&self, hosts: &Hosts, rank: usize) -> (Vec<Phase>, Vec<usize>) {
        let (mut phases, mut partials) = (Vec::new(), Vec::new());
        // An accumulator of half precision is as long as two elements.
        for width in [1, 2] {
            let is_one = |part: usize| widening(self.dtypes[part]) == width;
            if !(0..self.dtypes.len()).any(is_one) {
                continue;
            }
            let streams: Vec<_> = (0..hosts.size).map(|to| (self.of)(to).of_parts(is_one)).collect();
            let blocks = Blocks::of(hosts, width);
            if !blocks.all.iter().any(|block| blocks.is_worth_it(block)) {
                let inputs = (0..hosts.size).map(|rank| (rank, 1)).collect();
                phases.push(self.last(rank, inputs, &|_| true, &streams));
                continue;
            }
            // Several steps keep the pages short.
            let goes = (width * blocks.longest(&streams)).div_ceil(self.room).max(1);
            let cut: Vec<_> = streams.iter().map(|stream| stream.shares(goes)).collect();
            let region = self.buffers + partials.len();
            let mut longest = 0;
            for go in 0..goes {
                let streams: Vec<_> = cut.iter().map(|slice| slice(go)).collect();
                let (bytes, both) = self.in_blocks(rank, &blocks, &streams, region);
                phases.extend(both);
                longest = longest.max(bytes);
            }
            partials.push(longest);
        }
        (phases, partials)
    }

    /// Returns the phase that computes results from `inputs`: their ranks, and the number of ranks that they combine.
    /// This rank sends its data to the ranks that it `is_direct` to.
    fn last(
        &self,
        rank: usize,
        inputs: Vec<(usize, usize)>,
        is_direct: &dyn Fn(usize) -> bool,
        streams: &[Stream],
    ) -> Phase {
        let mut phase = Phase::nothing(streams.len());
        for peer in (0..streams.len()).filter(|&peer| peer != rank && is_direct(peer)) {
            phase.sends[peer] = Lane::from(0, streams[peer].clone());
        }
        for &(from, _) in inputs.iter().filter(|&&(from, ranks)| from != rank && ranks == 1) {
            phase.receives[from] = Lane::from(0, streams[rank].clone());
        }
        phase.combined = Some(self.combined(streams[rank].clone(), inputs, self.output.clone()));
        phase
    }

    fn combined(&self, stream: Stream, inputs: Vec<(usize, usize)>, output: Output) -> Combined {
        Combined { op: self.op, dtypes: self.dtypes.to_vec(), stream, inputs, output }
    }

    /// Returns the phases that add up blocks and then compute results, and the bytes of the page.
    fn in_blocks(&self, rank: usize, blocks: &Blocks<'_>, streams: &[Stream], region: usize) -> (usize, [Phase; 2]) {
        let (size, width) = (streams.len(), blocks.width);
        let own = blocks.all.iter().find(|block| block.contains(&rank)).cloned().unwrap_or(rank..rank + 1);
        // Data that each rank of this block adds up.
        let mut added = vec![Vec::new(); own.len()];
        for (to, stream) in streams.iter().enumerate() {
            blocks.adds(&own, to).into_iter().for_each(|member| added[member - own.start].push(stream.clone()));
        }
        let added: Vec<_> = added.into_iter().map(Stream::joined).collect();
        let of_member = |member: usize| added[member - own.start].clone();
        let mut first = Phase::nothing(size);
        for peer in own.clone().filter(|&peer| peer != rank) {
            first.sends[peer] = Lane::from(0, of_member(peer));
            first.receives[peer] = Lane::from(0, of_member(rank));
        }
        let inputs = own.clone().map(|rank| (rank, 1)).collect();
        first.combined = Some(self.combined(of_member(rank), inputs, Output::Partial { region }));

        let inputs = blocks.all.iter().flat_map(|block| match blocks.adds(block, rank) {
            Some(member) => vec![(member, block.len())],
            None => block.clone().map(|rank| (rank, 1)).collect(),
        });
        let mut last = self.last(rank, inputs.collect(), &|to| blocks.adds(&own, to).is_none(), streams);
        last.width = width;
        let partial = |start: usize, stream: &Stream| Lane {
            stream: Stream::new(Some(width * start..width * (start + stream.end()))),
            first: region,
            width,
        };
        let mut start = 0;
        for to in (0..size).filter(|&to| blocks.adds(&own, to) == Some(rank)) {
            last.sends[to] = partial(start, &streams[to]);
            start += streams[to].len();
        }
        for member in blocks.all.iter().filter_map(|block| blocks.adds(block, rank)) {
            last.receives[member] = partial(0, &streams[rank]);
        }
        (width * start, [first, last])
    }
}

/// All ranks, as the largest subtrees within hosts.
struct Blocks<'a> {
    hosts: &'a Hosts,
    /// Host of each rank.
    host_of: Vec<usize>,
    all: Vec<Range<usize>>,
    width: usize,
}

impl<'a> Blocks<'a> {
    fn of(hosts: &'a Hosts, width: usize) -> Self {
        let mut host_of = vec![0; hosts.size];
        for (host, ranks) in hosts.hosts.iter().enumerate() {
            ranks.iter().for_each(|&rank| host_of[rank] = host);
        }
        let mut all = Vec::new();
        let mut start = 0;
        while start < hosts.size {
            let subtree = |level: u32| {
                let end = (start + (1 << level)).min(hosts.size);
                let is_one = start.is_multiple_of(1 << level) && (level == 0 || end - start > 1 << (level - 1));
                (is_one && host_of[start..end].iter().all(|&host| host == host_of[start])).then_some(end)
            };
            let end = (0..usize::BITS - 1).map_while(subtree).last().unwrap_or(start + 1);
            all.push(start..end);
            start = end;
        }
        Blocks { hosts, host_of, all, width }
    }

    /// Returns whether a block's sum is shorter than the data of its ranks.
    fn is_worth_it(&self, block: &Range<usize>) -> bool {
        block.len() > self.width
    }

    /// Returns the rank of a block that adds up its data for the rank `to`, if the block does so.
    fn adds(&self, block: &Range<usize>, to: usize) -> Option<usize> {
        let here = self.host_of[block.start];
        (self.host_of[to] != here && self.is_worth_it(block)).then(|| {
            let others = to - self.hosts.hosts[here].partition_point(|&rank| rank < to);
            block.start + others % block.len()
        })
    }

    /// Returns the most bytes that any rank adds up.
    fn longest(&self, streams: &[Stream]) -> usize {
        let mut bytes = vec![0; streams.len()];
        for (block, (to, stream)) in
            self.all.iter().flat_map(|block| streams.iter().enumerate().map(move |to| (block, to)))
        {
            self.adds(block, to).into_iter().for_each(|member| bytes[member] += stream.len());
        }
        bytes.into_iter().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    use super::super::super::host::packing::ALIGN;
    use crate::DType;

    /// Lets ranks exchange the data of their phases. `has` tells which bytes each rank has. Returns the bytes that
    /// crossed hosts.
    fn play<const N: usize>(ids: &[u64], phases: &[[Phase; N]], has: &mut [Vec<Vec<bool>>]) -> usize {
        let mut crossed = 0;
        let of = |rank: usize, phase: usize| &phases[rank][phase];
        for phase in 0..N {
            let before = has.to_vec();
            for (from, to) in (0..ids.len()).flat_map(|from| (0..ids.len()).map(move |to| (from, to))) {
                let sent = bytes(&of(from, phase).sends[to].stream);
                let receives = bytes(&of(to, phase).receives[from].stream);
                assert_eq!(sent, receives, "from {from} to {to} in phase {phase}");
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
    fn a_hierarchy_needs_all_ranks() {
        let shared = |ids: &[u64]| Hosts::of(ids).is_some_and(|hosts| hosts.are_shared());
        assert!(shared(&[7, 7, 8]) && shared(&[7, 8, 7, 8]));
        assert!(!shared(&[7, 8, 9]) && !shared(&[7, 7]) && !shared(&[7, 7, 0]) && !shared(&[0, 0]));
        let hosts = Hosts::of(&[7, 8, 7, 8]).unwrap();
        assert!(hosts.share_one(&[2, 0]) && hosts.share_one(&[3]) && !hosts.share_one(&[0, 1]));
    }

    proptest! {
        #[test]
        fn every_byte_crosses_to_a_host_once(
            ids in proptest::collection::vec(1u64..4, 2..9),
            counts in proptest::collection::vec([0usize..40, 0usize..3], 9),
            root in 0usize..9,
        ) {
            let (size, root) = (ids.len(), root % ids.len());
            let all = Hosts::of(&ids).unwrap();
            // Two parts, with elements of four and two bytes.
            let (dtypes, counts) = ([DType::F32, DType::BF16], &counts[..size]);
            let of_part: Vec<Vec<usize>> = (0..2).map(|part| counts.iter().map(|of| of[part]).collect()).collect();
            let streams = Stream::by_rank(size, dtypes.into_iter().zip(of_part.iter().map(|it| &it[..])));
            let stream = |of: usize| streams[of].clone();
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

    fn blocks(ids: &[u64]) -> Vec<Range<usize>> {
        Blocks::of(&Hosts::of(ids).unwrap(), 1).all
    }

    #[test]
    fn blocks_are_subtrees_within_a_host() {
        assert_eq!(blocks(&[1, 1, 2, 2]), [0..2, 2..4]);
        assert_eq!(blocks(&[1, 1, 2, 2, 3, 3]), [0..2, 2..4, 4..6]);
        assert_eq!(blocks(&[1, 1, 1, 2, 2, 2]), [0..2, 2..3, 3..4, 4..6]);
        assert_eq!(blocks(&[1, 1, 1, 1, 2, 2, 2]), [0..4, 4..7]);
        assert_eq!(blocks(&[1, 2, 1, 2]), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(blocks(&[2, 1, 1, 1, 1, 1, 1, 1]), [0..1, 1..2, 2..4, 4..8]);
    }

    /// Returns the bytes of a stream, with their parts.
    fn bytes(stream: &Stream) -> Vec<(usize, usize)> {
        let pieces = stream.pieces(0, usize::MAX / ALIGN * ALIGN);
        pieces.flat_map(|piece| piece.bytes.map(move |byte| (piece.part, byte))).collect()
    }

    /// Returns the bytes that cross hosts.
    fn crossing(ids: &[u64], phases: &[Vec<Phase>]) -> usize {
        let mut crossed = 0;
        for (from, phases) in phases.iter().enumerate() {
            for phase in phases {
                let sent = phase.sends.iter().enumerate().filter(|(to, _)| ids[*to] != ids[from]);
                crossed += sent.map(|(_, lane)| lane.stream.end()).sum::<usize>();
            }
        }
        crossed
    }

    const DTYPES: [DType; 2] = [DType::F32, DType::BF16];

    fn planned(ids: &[u64], of: &dyn Fn(usize) -> Stream, dtypes: &[DType], room: usize) -> [Vec<Vec<Phase>>; 2] {
        let sums = Reduction { op: ReduceOp::Sum, dtypes, of, output: Output::Own, buffers: dtypes.len(), room };
        let hosts = Hosts::of(ids).unwrap();
        let of_all = |f: &dyn Fn(usize) -> Vec<Phase>| (0..ids.len()).map(f).collect();
        [of_all(&|rank| vec![sums.flat(rank, ids.len())]), of_all(&|rank| sums.over(&hosts, rank).0)]
    }

    #[test]
    fn sums_cross_once_for_ranks_in_order() {
        for (ids, dtype, expected) in [
            // Shares that cross for each rank: one for every rank of another host, or one for each other host.
            (&[1u64, 1, 2, 2][..], DType::F32, [8, 4]),
            (&[1, 1, 2, 2], DType::I64, [8, 4]),
            // The sum of two halves is as long as both.
            (&[1, 1, 2, 2], DType::BF16, [8, 8]),
            (&[1, 1, 1, 1, 2, 2, 2, 2], DType::F32, [32, 8]),
            (&[1, 1, 1, 1, 2, 2, 2, 2], DType::F16, [32, 16]),
            (&[1, 1, 2, 2, 3, 3], DType::F32, [24, 12]),
            (&[1, 1, 1, 2, 2, 2], DType::F32, [18, 12]),
            (&[1, 2, 1, 2], DType::F32, [8, 8]),
        ] {
            let share = 640 * dtype.size();
            let of = |rank: usize| Stream::new(Some(rank * share..(rank + 1) * share));
            for room in [1 << 30, 2560] {
                let crossed = planned(ids, &of, &[dtype], room).map(|phases| crossing(ids, &phases));
                assert_eq!(crossed, expected.map(|shares| shares * share), "{ids:?} {dtype} {room}");
            }
        }
    }

    proptest! {
        #[test]
        fn sent_data_is_received_and_added_once(
            ids in proptest::collection::vec(1u64..4, 2..9),
            counts in proptest::collection::vec([0usize..40, 0usize..3], 9),
            room in 1usize..500,
        ) {
            prop_assume!(Hosts::of(&ids).unwrap().are_several());
            let size = ids.len();
            let counts = &counts[..size];
            let of_part: Vec<Vec<usize>> = (0..2).map(|part| counts.iter().map(|of| of[part]).collect()).collect();
            let streams = Stream::by_rank(size, DTYPES.into_iter().zip(of_part.iter().map(|it| &it[..])));
            let of = |rank: usize| streams[rank].clone();
            let [flat, over] = planned(&ids, &of, &DTYPES, room);
            for phases in [&flat, &over] {
                let phase = |rank: usize, number: usize| &phases[rank][number];
                for number in 0..phases[0].len() {
                    for (from, to) in (0..size).flat_map(|from| (0..size).map(move |to| (from, to))) {
                        let (sent, receives) = (&phase(from, number).sends[to], &phase(to, number).receives[from]);
                        prop_assert_eq!((sent.stream.end(), sent.width), (receives.stream.end(), receives.width));
                    }
                }
                // Each rank combines the data of all ranks, in order, once.
                for (rank, phases) in phases.iter().enumerate() {
                    let mut results = Vec::new();
                    for Combined { stream, inputs, output, .. } in phases.iter().filter_map(|it| it.combined.as_ref()) {
                        if let Output::Partial { .. } = output {
                            continue;
                        }
                        let mut next = 0;
                        for &(from, ranks) in inputs {
                            prop_assert!((next..next + ranks).contains(&from));
                            next += ranks;
                        }
                        prop_assert_eq!(next, size);
                        results.extend(bytes(stream));
                    }
                    results.sort_unstable();
                    prop_assert_eq!(results, bytes(&of(rank)));
                }
            }
        }
    }
}
