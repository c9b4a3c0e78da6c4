//! When a rank that waits tells so: not at once, and ever more rarely.

use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_secs(5);

/// A wait that goes on.
pub(super) struct Patience {
    started: Instant,
    next: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience { started: Instant::now(), next: FIRST }
    }
}

impl Patience {
    /// How long it has been, when it is time to tell: after 5 s, 10 s, 20 s, and so on.
    pub(super) fn is_due(&mut self) -> Option<Duration> {
        self.is_due_after(self.started.elapsed())
    }

    fn is_due_after(&mut self, waited: Duration) -> Option<Duration> {
        if waited < self.next {
            return None;
        }
        while self.next <= waited {
            self.next = self.next.saturating_mul(2);
        }
        Some(waited)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_told_at_doubling_intervals() {
        let mut patience = Patience::default();
        let told: Vec<u64> =
            (0..100).filter(|&second| patience.is_due_after(Duration::from_secs(second)).is_some()).collect();
        assert_eq!(told, [5, 10, 20, 40, 80]);
        // A process that was stopped for long tells once.
        let mut patience = Patience::default();
        let long = Duration::from_secs(1000);
        assert_eq!((patience.is_due_after(long), patience.is_due_after(long)), (Some(long), None));
    }
}
