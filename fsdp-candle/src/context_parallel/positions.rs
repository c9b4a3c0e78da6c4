//! The positions of a rank's tokens in their sequence.

/// Positions of the tokens of a row: they follow each other from `first` on, with at most one gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Positions {
    pub(crate) first: usize,
    /// The first token after the gap; `usize::MAX` without one.
    pub(crate) gap_at: usize,
    /// Positions that the gap skips.
    pub(crate) gap: usize,
}

impl Positions {
    /// Returns positions without a gap.
    pub(crate) fn from(first: usize) -> Self {
        Positions { first, gap_at: usize::MAX, gap: 0 }
    }

    /// Returns the positions of the `steps` tokens of a rank: chunk `rank` and chunk `2 * ranks - 1 - rank` of a sequence
    /// that is cut into `2 * ranks` chunks.
    pub(crate) fn of_rank(rank: usize, ranks: usize, steps: usize) -> Self {
        let chunk = steps / 2;
        Positions { first: rank * chunk, gap_at: chunk, gap: 2 * (ranks - 1 - rank) * chunk }
    }

    /// Returns the positions from token `start` on.
    pub(crate) fn skip(self, start: usize) -> Self {
        let first = self.of(start);
        match self.gap_at {
            usize::MAX => Positions::from(first),
            at if start >= at => Positions::from(first),
            at => Positions { first, gap_at: at - start, gap: self.gap },
        }
    }

    /// Returns a token's position.
    #[inline(always)]
    pub(crate) fn of(self, token: usize) -> usize {
        self.first + token + if token >= self.gap_at { self.gap } else { 0 }
    }

    /// Returns the runs of tokens without a gap, of `tokens` in all: the first token of each, and its length.
    pub(crate) fn runs(self, tokens: usize) -> impl Iterator<Item = (usize, usize)> {
        let cut = if self.gap == 0 { tokens } else { self.gap_at.min(tokens) };
        [(0, cut), (cut, tokens - cut)].into_iter().filter(|(_, length)| *length > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_each_position_once_and_equal_causal_work() {
        for ranks in 1..=5 {
            let steps = 6;
            let mut all = vec![];
            for rank in 0..ranks {
                let positions = Positions::of_rank(rank, ranks, steps);
                let own: Vec<usize> = (0..steps).map(|token| positions.of(token)).collect();
                assert!(own.is_sorted());
                assert_eq!(own.iter().map(|position| position + 1).sum::<usize>(), steps * (ranks * steps + 1) / 2);
                for start in 0..steps {
                    let rest: Vec<usize> = (0..steps - start).map(|token| positions.skip(start).of(token)).collect();
                    assert_eq!(rest, own[start..]);
                }
                let runs: Vec<usize> = positions
                    .runs(steps)
                    .flat_map(|(first, length)| (0..length).map(move |token| positions.of(first) + token))
                    .collect();
                assert_eq!(runs, own);
                all.extend(own);
            }
            all.sort_unstable();
            assert_eq!(all, (0..ranks * steps).collect::<Vec<_>>());
        }
    }
}
