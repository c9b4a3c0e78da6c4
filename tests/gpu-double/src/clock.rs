//! Vector clocks: what of each stream has come before.

/// For each stream, by its place in the order of creation, how many of its operations come before a point in time. What
/// is not there is 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    /// Whether operation `number` of stream `stream` comes before.
    pub(crate) fn covers(&self, stream: usize, number: u64) -> bool {
        self.0.get(stream).copied().unwrap_or(0) >= number
    }

    /// After this, what comes before `other` comes before as well.
    pub(crate) fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, other) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*other);
        }
    }

    /// Operation `number` of `stream`, and all before it on that stream, come before.
    pub(crate) fn advance(&mut self, stream: usize, number: u64) {
        if self.0.len() <= stream {
            self.0.resize(stream + 1, 0);
        }
        self.0[stream] = self.0[stream].max(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_covers_what_it_joined() {
        let (mut a, mut b) = (Clock::default(), Clock::default());
        a.advance(0, 3);
        b.advance(2, 1);
        assert!(a.covers(0, 3) && !a.covers(0, 4) && !a.covers(2, 1));
        assert!(a.covers(7, 0), "nothing comes before everything");
        b.join(&a);
        assert!(b.covers(0, 3) && b.covers(2, 1) && !b.covers(2, 2));
        assert!(!a.covers(2, 1), "a join is one way");
    }

    #[test]
    fn a_clock_never_goes_back() {
        let mut clock = Clock::default();
        clock.advance(1, 5);
        clock.advance(1, 2);
        clock.join(&Clock::default());
        assert!(clock.covers(1, 5));
    }
}
