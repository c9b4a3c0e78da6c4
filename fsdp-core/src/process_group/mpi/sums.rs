//! What ranks that share a host add up for each other, so that not all of their bytes cross the network.
//!
//! All engines combine what ranks have as one tree. Ranks that are a subtree of it and share a host are a block: one of
//! them combines what they have for a rank of another host, and only that crosses. They take turns. Ranks placed in
//! their order are such blocks, as many as fit a power of two; ranks placed in turns are none.

use std::ops::Range;

use super::{
    super::host::{packing::Stream, reduce::accumulator},
    hosts::Hosts,
    phase::{Combined, Lane, Output, Phase},
};
use crate::{DType, ReduceOp};

/// How many times as long an accumulator is.
fn width(dtype: DType) -> usize {
    accumulator(dtype).size() / dtype.size()
}

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
}

impl Sums<'_> {
    /// What `rank` of so many sends and receives, without regard to hosts.
    pub(super) fn flat(&self, rank: usize, size: usize) -> Phase {
        self.last(rank, (0..size).map(|rank| (rank, 1)).collect(), &|_| true, &|_| true)
    }

    /// What `rank` sends and receives, and the bytes of pages that it wants: for each dtype whose parts are to cross
    /// as accumulators this rank's share of them.
    pub(super) fn over(&self, hosts: &Hosts, rank: usize) -> (Vec<Phase>, Vec<usize>) {
        let (mut phases, mut partials) = (Vec::new(), Vec::new());
        // Accumulators of half precision are as long as two elements.
        for width in [1, 2] {
            let is_one = |part: usize| self::width(self.dtypes[part]) == width;
            if !(0..self.dtypes.len()).any(is_one) {
                continue;
            }
            let blocks = Blocks { hosts, all: hosts.blocks(), width };
            match blocks.all.iter().any(|block| blocks.is_worth_it(block)) {
                true => {
                    let region = self.buffers + partials.len();
                    let (bytes, both) = self.in_blocks(rank, &blocks, &is_one, region);
                    phases.extend(both);
                    partials.push(bytes);
                }
                false => {
                    let inputs = (0..hosts.size).map(|rank| (rank, 1)).collect();
                    phases.push(self.last(rank, inputs, &|_| true, &is_one));
                }
            }
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
        is_one: &dyn Fn(usize) -> bool,
    ) -> Phase {
        let of = |rank| (self.of)(rank).of_parts(is_one);
        let size = inputs.iter().map(|(_, ranks)| ranks).sum();
        let mut phase = Phase::nothing(size);
        for peer in (0..size).filter(|&peer| peer != rank && is_direct(peer)) {
            phase.sends[peer] = Lane::from(0, of(peer));
        }
        for &(from, _) in inputs.iter().filter(|&&(from, ranks)| from != rank && ranks == 1) {
            phase.arrives[from] = Lane::from(0, of(rank));
        }
        phase.combined = Some(self.combined(of(rank), inputs, self.output.clone()));
        phase
    }

    fn combined(&self, stream: Stream, inputs: Vec<(usize, usize)>, output: Output) -> Combined {
        Combined { op: self.op, dtypes: self.dtypes.to_vec(), stream, inputs, output }
    }

    /// Blocks add up, in a page of so many bytes, and then results are made.
    fn in_blocks(
        &self,
        rank: usize,
        blocks: &Blocks<'_>,
        is_one: &dyn Fn(usize) -> bool,
        region: usize,
    ) -> (usize, [Phase; 2]) {
        let (size, width) = (blocks.hosts.size, blocks.width);
        let of = |rank| (self.of)(rank).of_parts(is_one);
        let own = blocks.all.iter().find(|block| block.contains(&rank)).cloned().unwrap_or(rank..rank + 1);
        // What a rank of this block adds up.
        let of_member = |member| Stream::joined((0..size).filter(|&to| blocks.adds(&own, to) == Some(member)).map(of));
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
        let mut last = self.last(rank, inputs.collect(), &|to| blocks.adds(&own, to).is_none(), is_one);
        last.width = width;
        let added = |start: usize, stream: &Stream| Lane {
            stream: Stream::new([width * start..width * (start + stream.end())]),
            first: region,
            width,
        };
        let mut start = 0;
        for to in (0..size).filter(|&to| blocks.adds(&own, to) == Some(rank)) {
            last.sends[to] = added(start, &of(to));
            start += of(to).len();
        }
        for member in blocks.all.iter().filter_map(|block| blocks.adds(block, rank)) {
            last.arrives[member] = added(0, &of(rank));
        }
        (width * start, [first, last])
    }
}

/// Ranks of one host that are subtrees.
struct Blocks<'a> {
    hosts: &'a Hosts,
    all: Vec<Range<usize>>,
    width: usize,
}

impl Blocks<'_> {
    /// Whether what a block has added up is shorter than what its ranks have.
    fn is_worth_it(&self, block: &Range<usize>) -> bool {
        block.len() > self.width
    }

    /// Who of a block adds up what goes to a rank, if that is to be.
    fn adds(&self, block: &Range<usize>, to: usize) -> Option<usize> {
        let is_here = self.hosts.share_one(&[block.start, to]);
        (!is_here && self.is_worth_it(block)).then(|| {
            let others = (0..to).filter(|&other| !self.hosts.share_one(&[block.start, other])).count();
            block.start + others % block.len()
        })
    }
}

impl Hosts {
    /// All ranks, as the largest subtrees of sums that are on one host each.
    fn blocks(&self) -> Vec<Range<usize>> {
        let mut blocks = Vec::new();
        let mut start = 0;
        while start < self.size {
            let subtree = |level: u32| {
                let end = (start + (1 << level)).min(self.size);
                let is_one = start.is_multiple_of(1 << level) && (level == 0 || end - start > 1 << (level - 1));
                (is_one && self.share_one(&(start..end).collect::<Vec<_>>())).then_some(start..end)
            };
            let block = (0..usize::BITS - 1).map_while(subtree).last().unwrap_or(start..start + 1);
            start = block.end;
            blocks.push(block);
        }
        blocks
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn blocks(ids: &[u64]) -> Vec<Range<usize>> {
        Hosts::of(ids).unwrap().blocks()
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

    fn planned(ids: &[u64], of: &dyn Fn(usize) -> Stream, dtypes: &[DType]) -> [Vec<Vec<Phase>>; 2] {
        let sums = Sums { op: ReduceOp::Sum, dtypes, of, output: Output::Own, buffers: dtypes.len() };
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
            let of = |rank: usize| Stream::new([rank * share..(rank + 1) * share]);
            let crossed = planned(ids, &of, &[dtype]).map(|phases| crossing(ids, &phases));
            assert_eq!(crossed, expected.map(|shares| shares * share), "{ids:?} {dtype}");
        }
    }

    proptest! {
        #[test]
        fn what_is_sent_arrives_and_all_of_it_is_added_up_once(
            ids in proptest::collection::vec(1u64..4, 2..9),
            counts in proptest::collection::vec([0usize..40, 0usize..3], 9),
        ) {
            prop_assume!(Hosts::of(&ids).unwrap().are_several());
            let size = ids.len();
            let counts = &counts[..size];
            let of_part: Vec<Vec<usize>> = (0..2).map(|part| counts.iter().map(|of| of[part]).collect()).collect();
            let of = |rank| Stream::of_counts(DTYPES.into_iter().zip(of_part.iter().map(|it| &it[..])), rank);
            let [flat, over] = planned(&ids, &of, &DTYPES);
            // What an accumulator's stream is padded by is no more than what each rank's is.
            let lost = 64 * 2 * size * size;
            prop_assert!(crossing(&ids, &over) <= crossing(&ids, &flat) + lost);
            for phases in [&flat, &over] {
                for number in 0..phases[0].len() {
                    for (from, to) in (0..size).flat_map(|from| (0..size).map(move |to| (from, to))) {
                        let (sent, arrives) = (&phases[from][number].sends[to], &phases[to][number].arrives[from]);
                        prop_assert_eq!((sent.stream.end(), sent.width), (arrives.stream.end(), arrives.width));
                    }
                }
                // Each rank has all of them, in their order.
                for phase in phases.iter().map(|phases| phases.last().unwrap()) {
                    let mut next = 0;
                    for &(from, ranks) in &phase.combined.as_ref().unwrap().inputs {
                        prop_assert!((next..next + ranks).contains(&from));
                        next += ranks;
                    }
                    prop_assert_eq!(next, size);
                }
            }
        }
    }
}
