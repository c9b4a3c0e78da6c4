//! Free and used ranges of a file that grows.

use std::collections::BTreeMap;
use std::ops::Range;

/// The ranges of a file. The file ends where the last used range ends.
#[derive(Default)]
pub(super) struct Ranges {
    /// Ends of the free ranges, by their starts. No two of them touch, and none touches `end`.
    free: BTreeMap<u64, u64>,
    end: u64,
}

impl Ranges {
    /// Returns the first free range of this many bytes, or a new one at the end.
    pub(super) fn take(&mut self, bytes: u64) -> Range<u64> {
        let found = self.free.iter().find(|(start, end)| *end - *start >= bytes).map(|(start, end)| *start..*end);
        let Some(found) = found else {
            let start = self.end;
            self.end += bytes;
            return start..self.end;
        };
        self.free.remove(&found.start);
        let taken = found.start..found.start + bytes;
        if taken.end < found.end {
            self.free.insert(taken.end, found.end);
        }
        taken
    }

    /// Returns a range that is not used any more.
    pub(super) fn give(&mut self, range: Range<u64>) {
        let Range { mut start, mut end } = range;
        if let Some((&before, &touches)) = self.free.range(..start).next_back()
            && touches == start
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(after) = self.free.remove(&end) {
            end = after;
        }
        if end == self.end {
            self.end = start;
        } else {
            self.free.insert(start, end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_ranges_are_disjoint_and_freed_ranges_are_used_again() {
        let mut ranges = Ranges::default();
        let mut used: Vec<Range<u64>> = vec![];
        let (mut seed, mut most) = (1_u64, 0);
        for _ in 0..2000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let draw = seed >> 33;
            if used.len() < 8 && draw % 3 > 0 {
                let range = ranges.take(1 + draw % 5);
                assert!(used.iter().all(|other| range.end <= other.start || other.end <= range.start), "{range:?}");
                used.push(range);
            } else if !used.is_empty() {
                ranges.give(used.swap_remove(draw as usize % used.len()));
            }
            assert_eq!(ranges.end, ranges.free.iter().map(|(start, end)| end - start).sum::<u64>() + sum(&used));
            most = most.max(ranges.end);
        }
        // 8 ranges of up to 5 bytes, and holes between them.
        assert!(most <= 80, "{most}");
        used.drain(..).for_each(|range| ranges.give(range));
        assert!(ranges.end == 0 && ranges.free.is_empty());
    }

    fn sum(used: &[Range<u64>]) -> u64 {
        used.iter().map(|range| range.end - range.start).sum()
    }
}
