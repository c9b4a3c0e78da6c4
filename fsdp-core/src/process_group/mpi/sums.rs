//! What ranks that share a host add up for each other, so that not all of their bytes cross the network.
//!
//! All engines combine what ranks have as one tree. Ranks that are a subtree of it and share a host are a block: one of
//! them combines what they have for a rank of another host, and only that crosses. They take turns. Ranks placed in
//! their order are such blocks, as many as fit a power of two; ranks placed in turns are none.

use std::ops::Range;

use super::{
    super::host::{packing::Stream, reduce::widening},
    hosts::Hosts,
    phase::{Combined, Lane, Output, Phase},
};
use crate::{DType, ReduceOp};

/// A reduction of what the ranks have, for each rank a part.
pub(super) struct Sums<'a> {
    pub(super) op: ReduceOp,
    pub(super) dtypes: &'a [DType],
    /// What is combined for a rank.
    pub(super) of: &'a dyn Fn(usize) -> Stream,
    /// Where this rank's results go.
    pub(super) output: Output,
    /// How many buffers there are: pages for parts of results come behind them.
    pub(super) buffers: usize,
    /// Bytes that such a page has, at most.
    pub(super) room: usize,
}

impl Sums<'_> {
    /// What `rank` of so many sends and receives, without regard to hosts.
    pub(super) fn flat(&self, rank: usize, size: usize) -> Phase {
        let streams: Vec<_> = (0..size).map(self.of).collect();
        self.last(rank, (0..size).map(|rank| (rank, 1)).collect(), &|_| true, &streams)
    }

    /// What `rank` sends and receives, and the bytes of pages that it wants.
    pub(super) fn over(&self, hosts: &Hosts, rank: usize) -> (Vec<Phase>, Vec<usize>) {
        let (mut phases, mut partials) = (Vec::new(), Vec::new());
        // Accumulators of half precision are as long as two elements.
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
            // In several goes, so that pages stay short.
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

    /// The phase in which results are made, of `inputs`: who has them, and of how many ranks they are. What this rank
    /// has goes to those that it `is_direct` to.
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
            phase.arrives[from] = Lane::from(0, streams[rank].clone());
        }
        phase.combined = Some(self.combined(streams[rank].clone(), inputs, self.output.clone()));
        phase
    }

    fn combined(&self, stream: Stream, inputs: Vec<(usize, usize)>, output: Output) -> Combined {
        Combined { op: self.op, dtypes: self.dtypes.to_vec(), stream, inputs, output }
    }

    /// Blocks add up, in a page of so many bytes, and then results are made.
    fn in_blocks(&self, rank: usize, blocks: &Blocks<'_>, streams: &[Stream], region: usize) -> (usize, [Phase; 2]) {
        let (size, width) = (streams.len(), blocks.width);
        let own = blocks.all.iter().find(|block| block.contains(&rank)).cloned().unwrap_or(rank..rank + 1);
        // What each rank of this block adds up.
        let mut added = vec![Vec::new(); own.len()];
        for (to, stream) in streams.iter().enumerate() {
            blocks.adds(&own, to).into_iter().for_each(|member| added[member - own.start].push(stream.clone()));
        }
        let added: Vec<_> = added.into_iter().map(Stream::joined).collect();
        let of_member = |member: usize| added[member - own.start].clone();
        let mut first = Phase::nothing(size);
        for peer in own.clone().filter(|&peer| peer != rank) {
            first.sends[peer] = Lane::from(0, of_member(peer));
            first.arrives[peer] = Lane::from(0, of_member(rank));
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
            last.arrives[member] = partial(0, &streams[rank]);
        }
        (width * start, [first, last])
    }
}

/// All ranks, as the largest subtrees that are on one host each.
struct Blocks<'a> {
    hosts: &'a Hosts,
    /// Which host a rank is on.
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

    /// Whether what a block has added up is shorter than what its ranks have.
    fn is_worth_it(&self, block: &Range<usize>) -> bool {
        block.len() > self.width
    }

    /// Who of a block adds up what goes to a rank, if that is to be.
    fn adds(&self, block: &Range<usize>, to: usize) -> Option<usize> {
        let here = self.host_of[block.start];
        (self.host_of[to] != here && self.is_worth_it(block)).then(|| {
            let others = to - self.hosts.hosts[here].partition_point(|&rank| rank < to);
            block.start + others % block.len()
        })
    }

    /// Bytes of the most that any rank adds up.
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
    use proptest::prelude::*;

    use super::{super::super::host::packing::ALIGN, *};

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

    /// The bytes of parts that a stream is of.
    fn bytes(stream: &Stream) -> Vec<(usize, usize)> {
        let pieces = stream.pieces(0, usize::MAX / ALIGN * ALIGN);
        pieces.flat_map(|piece| piece.bytes.map(move |byte| (piece.part, byte))).collect()
    }

    /// Bytes that cross from host to host when each rank gets what is of it, by `sends`.
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
        let sums = Sums { op: ReduceOp::Sum, dtypes, of, output: Output::Own, buffers: dtypes.len(), room };
        let hosts = Hosts::of(ids).unwrap();
        let of_all = |f: &dyn Fn(usize) -> Vec<Phase>| (0..ids.len()).map(f).collect();
        [of_all(&|rank| vec![sums.flat(rank, ids.len())]), of_all(&|rank| sums.over(&hosts, rank).0)]
    }

    #[test]
    fn a_byte_crosses_once_a_host_where_ranks_are_in_order() {
        for (ids, dtype, expected) in [
            // For each rank what the others have: those of other hosts all, or one for all of its host.
            (&[1u64, 1, 2, 2][..], DType::F32, [8, 4]),
            (&[1, 1, 2, 2], DType::I64, [8, 4]),
            // Two halves are as long as their sum.
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
        fn what_is_sent_arrives_and_all_of_it_is_added_up_once(
            ids in proptest::collection::vec(1u64..4, 2..9),
            counts in proptest::collection::vec([0usize..40, 0usize..3], 9),
            room in 1usize..500,
        ) {
            prop_assume!(Hosts::of(&ids).unwrap().are_several());
            let size = ids.len();
            let counts = &counts[..size];
            let of_part: Vec<Vec<usize>> = (0..2).map(|part| counts.iter().map(|of| of[part]).collect()).collect();
            let of = |rank| Stream::of_counts(DTYPES.into_iter().zip(of_part.iter().map(|it| &it[..])), rank);
            let [flat, over] = planned(&ids, &of, &DTYPES, room);
            for phases in [&flat, &over] {
                let phase = |rank: usize, number: usize| &phases[rank][number];
                for number in 0..phases[0].len() {
                    for (from, to) in (0..size).flat_map(|from| (0..size).map(move |to| (from, to))) {
                        let (sent, arrives) = (&phase(from, number).sends[to], &phase(to, number).arrives[from]);
                        prop_assert_eq!((sent.stream.end(), sent.width), (arrives.stream.end(), arrives.width));
                    }
                }
                // Each rank has what all of them have for it, in their order, and once.
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
