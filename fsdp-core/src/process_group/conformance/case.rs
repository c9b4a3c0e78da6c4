//! All collectives on one list of parts, in flight at once.

use std::sync::Arc;

use super::{
    super::{
        group::ProcessGroup,
        op::{ExchangePart, GatherPart, ScatterPart},
    },
    reference::{Allowed, concat, input, reduced, same, scrambled, slice},
    verdict::{Wrong, ensure},
};
use crate::{Buffer, DType, Heap, ReduceOp};

/// Ranks that a case has counts for.
pub(super) const RANKS: usize = 4;

/// What each collective is tried on: for each part a dtype, and for each pair of ranks, of up to four, how many
/// elements go from the one to the other.
#[derive(Clone, Debug)]
pub struct Case {
    /// Makes the elements.
    pub seed: u64,
    /// How reductions combine them.
    pub op: ReduceOp,
    /// The rank that broadcasts, if there are so many.
    pub root: usize,
    /// The dtypes and counts.
    pub parts: Vec<(DType, Vec<Vec<usize>>)>,
}

impl Case {
    /// A fixed list: even, uneven, empty, many parts; and some that no order is in.
    pub(super) fn all() -> Vec<Case> {
        let matrix = |f: fn(usize, usize) -> usize| -> Vec<Vec<usize>> {
            (0..RANKS).map(|from| (0..RANKS).map(|to| f(from, to)).collect()).collect()
        };
        let mut cases = Vec::new();
        for (root, op) in OPS.into_iter().enumerate() {
            let case = |parts| Case { seed: root as u64, op, root, parts };
            let large = |_, to| if to == 1 { 40_000 } else { 0 };
            cases.push(case(Vec::new()));
            cases.push(case(vec![(DType::F32, matrix(|_, _| 0))]));
            let every = DType::ALL.into_iter().map(|dtype| (dtype, matrix(|from, to| from * 13 + to * 700)));
            cases.push(case(every.collect()));
            cases.push(case(vec![(DType::BF16, matrix(large)), (DType::F32, matrix(|_, _| 9_999))]));
        }
        cases.extend((0..20).map(Case::any));
        cases
    }

    fn any(seed: u64) -> Case {
        let mut drawn = seed << 32;
        let mut below = |limit: usize| {
            drawn += 1;
            (scrambled(drawn) % limit as u64) as usize
        };
        let count = |below: &mut dyn FnMut(usize) -> usize| match below(8) {
            0 | 1 => 0,
            2..5 => below(20),
            _ => below(700),
        };
        let (op, root, parts) = (OPS[below(OPS.len())], below(RANKS), below(5));
        let part = |_| {
            let dtype = DType::ALL[below(DType::ALL.len())];
            (dtype, (0..RANKS).map(|_| (0..RANKS).map(|_| count(&mut below)).collect()).collect())
        };
        Case { seed, op, root, parts: (0..parts).map(part).collect() }
    }

    fn dtypes(&self) -> impl Iterator<Item = (usize, DType, &Vec<Vec<usize>>)> {
        self.parts.iter().enumerate().map(|(part, (dtype, matrix))| (part, *dtype, matrix))
    }

    /// Floats where the operation needs them.
    fn reducible(&self, dtype: DType) -> DType {
        if self.op == ReduceOp::Avg && !dtype.is_float() { DType::F32 } else { dtype }
    }

    /// Runs every collective on the case over a group of at most four ranks, and compares.
    ///
    /// # Errors
    /// Says which gave what instead of what.
    pub fn check(&self, group: &ProcessGroup) -> Result<(), Wrong> {
        let (rank, size, seed) = (group.rank(), group.size(), self.seed);
        ensure!(size <= RANKS, "a case is for at most {RANKS} ranks, not for {size}");
        let root = self.root % size;
        // The smallest and the largest are exact in any order.
        let is_rounded = !matches!(self.op, ReduceOp::Min | ReduceOp::Max);
        let allowed =
            |sums: &Buffer| if is_rounded { Allowed::of(group.promises(), sums.dtype()) } else { Allowed::EXACT };
        let exact = |_: &Buffer| Allowed::EXACT;
        let mine = |part, dtype, len| input(seed, rank, part, dtype, len);

        let gather = self.dtypes().map(|(part, dtype, matrix)| {
            let counts = matrix[0][..size].to_vec();
            GatherPart { input: Arc::new(mine(part, dtype, counts[rank])), counts }
        });
        let scatter = self.dtypes().map(|(part, dtype, matrix)| {
            let counts = matrix[0][..size].to_vec();
            ScatterPart { input: mine(part, self.reducible(dtype), counts.iter().sum()), counts }
        });
        let reduce = self
            .dtypes()
            .map(|(part, dtype, matrix)| mine(part, self.reducible(dtype), matrix[0][..size].iter().sum()));
        let spread = self.dtypes().map(|(part, dtype, matrix)| mine(part, dtype, matrix[0][0]));
        let exchange = self.dtypes().map(|(part, dtype, matrix)| {
            let send_counts = matrix[rank][..size].to_vec();
            ExchangePart {
                input: mine(part, dtype, send_counts.iter().sum()),
                send_counts,
                recv_counts: (0..size).map(|from| matrix[from][rank]).collect(),
            }
        });
        let gathered = group.all_gather(gather.collect(), Heap::shared());
        let scattered = group.reduce_scatter(scatter.collect(), self.op, Heap::shared());
        let barrier = group.barrier();
        let all_reduced = group.all_reduce(reduce.collect(), self.op);
        let broadcast = group.broadcast(spread.collect(), root);
        let exchanged = group.all_to_all(exchange.collect(), Heap::shared());

        let everybody = |part: usize, dtype: DType, len: &dyn Fn(usize) -> usize| -> Vec<Buffer> {
            (0..size).map(|rank| input(seed, rank, part, dtype, len(rank))).collect()
        };
        let expected: Vec<_> = self
            .dtypes()
            .map(|(part, dtype, matrix)| concat(dtype, &everybody(part, dtype, &|rank| matrix[0][rank])))
            .collect();
        same(&gathered.wait()?, &expected, "all_gather", &exact)?;

        let sum = |(part, dtype, matrix): (usize, DType, &Vec<Vec<usize>>)| {
            let (dtype, total) = (self.reducible(dtype), matrix[0][..size].iter().sum());
            reduced(dtype, &everybody(part, dtype, &|_| total), self.op)
        };
        let sums = self.dtypes().map(sum).collect::<Result<Vec<_>, Wrong>>()?;
        let own = |(part, _, matrix): (usize, DType, &Vec<Vec<usize>>)| {
            slice(&sums[part], start(&matrix[0], rank), matrix[0][rank])
        };
        same(&scattered.wait()?, &self.dtypes().map(own).collect::<Vec<_>>(), "reduce_scatter", &allowed)?;
        same(&barrier.wait()?, &[], "barrier", &exact)?;
        same(&all_reduced.wait()?, &sums, "all_reduce", &allowed)?;

        let expected: Vec<_> =
            self.dtypes().map(|(part, dtype, matrix)| input(seed, root, part, dtype, matrix[0][0])).collect();
        same(&broadcast.wait()?, &expected, "broadcast", &exact)?;

        let received = |(part, dtype, matrix): (usize, DType, &Vec<Vec<usize>>)| {
            let from = |from: usize| {
                let sent = input(seed, from, part, dtype, matrix[from][..size].iter().sum());
                slice(&sent, start(&matrix[from], rank), matrix[from][rank])
            };
            concat(dtype, &(0..size).map(from).collect::<Vec<_>>())
        };
        same(&exchanged.wait()?, &self.dtypes().map(received).collect::<Vec<_>>(), "all_to_all", &exact)
    }
}

const OPS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];

fn start(counts: &[usize], rank: usize) -> usize {
    counts[..rank].iter().sum()
}
