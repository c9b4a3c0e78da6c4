//! Which elements of a local tensor are in its parts. A part has all combinations of some ranges of indices, one list
//! of ranges a dimension.

#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges are what this is about")]

use std::ops::Range;

use crate::layout::Ranges;

/// What `a` and `b` have in common, as positions among the indices of each.
pub(super) fn overlap(a: &[Ranges], b: &[Ranges]) -> (Vec<Ranges>, Vec<Ranges>) {
    a.iter().zip(b).map(|(a, b)| overlap_of_one(a, b)).unzip()
}

fn overlap_of_one(a: &[Range<usize>], b: &[Range<usize>]) -> (Ranges, Ranges) {
    let (mut in_a, mut in_b) = (Vec::new(), Vec::new());
    let (mut next_a, mut next_b) = (a.iter().peekable(), b.iter().peekable());
    // How many indices of each came before the range at hand.
    let (mut before_a, mut before_b) = (0, 0);
    while let (Some(range_a), Some(range_b)) = (next_a.peek(), next_b.peek()) {
        let (start, end) = (range_a.start.max(range_b.start), range_a.end.min(range_b.end));
        if start < end {
            let position =
                |before: usize, range: &Range<usize>| before + start - range.start..before + end - range.start;
            in_a.push(position(before_a, range_a));
            in_b.push(position(before_b, range_b));
        }
        if range_a.end <= range_b.end {
            before_a += range_a.len();
            next_a.next();
        } else {
            before_b += range_b.len();
            next_b.next();
        }
    }
    (in_a, in_b)
}

/// How many elements the part of `picks` has.
fn elements(picks: &[Ranges]) -> usize {
    picks.iter().map(|ranges| ranges.iter().map(Range::len).sum::<usize>()).product()
}

/// The part of `picks` of a row-major tensor of shape `shape`, as runs of consecutive elements, in row-major order.
/// Each run is as long as it can be, but that a new row of the first dimension that is not whole starts a new one.
pub(super) fn runs(shape: &[usize], picks: &[Ranges]) -> Vec<Range<usize>> {
    let mut runs = Vec::new();
    if elements(picks) == 0 {
        return runs;
    }
    // Trailing dimensions that are picked whole make longer elements.
    let whole = shape.iter().zip(picks).rev().take_while(|(size, ranges)| **ranges == [0..**size]).count();
    let (outer, inner) = shape.split_at(shape.len() - whole);
    visit(outer, &picks[..outer.len()], inner.iter().product(), 0, &mut |run| runs.push(run));
    runs
}

fn visit(shape: &[usize], picks: &[Ranges], element: usize, base: usize, f: &mut impl FnMut(Range<usize>)) {
    match (shape, picks) {
        ([size], [ranges]) => {
            let base = base * size;
            ranges.iter().for_each(|range| f((base + range.start) * element..(base + range.end) * element));
        }
        ([size, shape @ ..], [ranges, picks @ ..]) => {
            for index in ranges.iter().flat_map(Clone::clone) {
                visit(shape, picks, element, base * size + index, f);
            }
        }
        _ => f(base * element..(base + 1) * element),
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::{LocalMemory, packing, unpacking};
    use super::*;
    use crate::{Buffer, DType, Heap, View};
    use proptest::prelude::*;

    /// Up to three ascending ranges in 0..12 that don't touch.
    fn ranges() -> impl Strategy<Value = Ranges> {
        prop::collection::btree_set(0usize..12, 0..7).prop_map(|ends| {
            let ends: Vec<_> = ends.into_iter().collect();
            ends.chunks_exact(2).map(|pair| pair[0]..pair[1]).collect()
        })
    }

    fn indices(ranges: &[Range<usize>]) -> Vec<usize> {
        ranges.iter().flat_map(Clone::clone).collect()
    }

    proptest! {
        #[test]
        fn overlaps_are_positions_of_common_indices(a in ranges(), b in ranges()) {
            let (in_a, in_b) = overlap_of_one(&a, &b);
            let (a, b) = (indices(&a), indices(&b));
            let common: Vec<_> = a.iter().copied().filter(|index| b.contains(index)).collect();
            prop_assert_eq!(&common, &indices(&in_a).into_iter().map(|at| a[at]).collect::<Vec<_>>());
            prop_assert_eq!(&common, &indices(&in_b).into_iter().map(|at| b[at]).collect::<Vec<_>>());
        }

        #[test]
        fn runs_are_the_elements_in_order(
            rows in ranges(),
            columns in ranges(),
            whole in any::<bool>(),
            depth in 1usize..4,
        ) {
            let picks = vec![rows.clone(), columns.clone(), if whole { vec![0..depth] } else { vec![0..1] }];
            let mut expected = Vec::new();
            for i in indices(&rows) {
                for j in indices(&columns) {
                    expected.extend(indices(&picks[2]).into_iter().map(|k| (i * 12 + j) * depth + k));
                }
            }
            let runs = runs(&[12, 12, depth], &picks);
            prop_assert_eq!(&indices(&runs), &expected);
            let tensor = Buffer::U32((0..12 * 12 * depth as u32).collect());
            let mut packed = Buffer::zeros(DType::U32, expected.len());
            Heap.copy_rows(View::Host(tensor.bytes()), &mut packed, &packing(&runs, 0)).unwrap();
            let expected: Vec<u32> = expected.into_iter().map(|at| at as u32).collect();
            prop_assert_eq!(&packed, &Buffer::U32(expected.clone()));
            let mut back = Buffer::U32(vec![u32::MAX; tensor.len()]);
            Heap.copy_rows(View::Host(packed.bytes()), &mut back, &unpacking(&runs, 0)).unwrap();
            let there = |at: u32| if expected.contains(&at) { at } else { u32::MAX };
            prop_assert_eq!(back, Buffer::U32((0..tensor.len() as u32).map(there).collect()));
        }
    }

    #[test]
    fn what_lies_together_is_one_run() {
        assert_eq!(runs(&[4, 3, 2], &[vec![1..3], vec![0..3], vec![0..2]]), [6..18]);
        assert_eq!(runs(&[4, 3], &[vec![0..4], vec![0..3]]), [0..12]);
        assert_eq!(runs(&[], &[]), [0..1]);
        assert_eq!(runs(&[4, 0], &[vec![0..4], vec![]]), []);
    }
}
