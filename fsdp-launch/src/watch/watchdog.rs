//! Finds hung ranks: ranks whose heartbeat has started and then stopped.

use std::time::{Duration, Instant};

use fsdp_core::heartbeat::Snapshot;

use crate::{
    rank::worker::{Worker, pid_of},
    report::process::{ProcessInfo, ProcessState, is_held},
};

/// Interval of the checks.
const PERIOD: Duration = Duration::from_secs(1);
/// A check this late means that the launcher, and perhaps the whole host, did not run.
const TOO_LATE: Duration = Duration::from_secs(1);

/// Watches the heartbeats of an attempt's ranks.
pub(crate) struct Watchdog {
    /// Maximum time without heartbeat; `None` means forever.
    timeout: Option<Duration>,
    last_look: Instant,
    /// For each rank, the start of the time that counts as silence.
    counts_since: Vec<Instant>,
}

impl Watchdog {
    /// Watches `ranks` ranks that start now. A timeout of zero disables the check.
    pub(crate) fn new(timeout: Duration, ranks: usize, now: Instant) -> Self {
        let timeout = Some(timeout).filter(|timeout| !timeout.is_zero());
        Watchdog { timeout, last_look: now, counts_since: vec![now; ranks] }
    }

    /// Returns the time until the next check, if any.
    pub(crate) fn period(&self) -> Option<Duration> {
        self.timeout.map(|timeout| PERIOD.min(timeout / 4).max(Duration::from_millis(10)))
    }

    /// Returns the first hung rank, as an index into `workers`, and its time without heartbeat.
    pub(crate) fn look(&mut self, workers: &[Worker]) -> Option<(usize, Duration)> {
        let told =
            |worker: &Worker| Some(worker.status_page.as_ref().filter(|_| worker.exit_status.is_none())?.snapshot());
        let beats: Vec<_> = workers.iter().map(told).collect();
        let some_beat = beats.iter().flatten().any(|told| told.beat.is_some());
        let silence = |(worker, told): (&Worker, &Option<Snapshot>)| {
            let told = told.as_ref()?;
            match told.beat {
                Some(age) => Some((age.0, told.pid?, told.pid_started?)),
                // The rank was stopped before its first heartbeat.
                None if some_beat => ProcessInfo::of(pid_of(worker.pid))
                    .filter(|process| process.state == ProcessState::Stopped)
                    .map(|process| (Duration::MAX, process.pid, process.started)),
                None => None,
            }
        };
        // If the process that wrote the heartbeat has ended, the rank, such as a shell script, may continue without it.
        let may_be_silent = |pid, started| ProcessInfo::started_at(pid, started).is_none() || is_held(pid);
        self.judge(Instant::now(), workers.iter().zip(&beats).map(silence), may_be_silent)
    }

    fn judge(
        &mut self,
        now: Instant,
        ranks: impl Iterator<Item = Option<(Duration, u32, u64)>>,
        may_be_silent: impl Fn(u32, u64) -> bool,
    ) -> Option<(usize, Duration)> {
        let (timeout, period) = (self.timeout?, self.period()?);
        if now.saturating_duration_since(self.last_look) > period + TOO_LATE {
            self.counts_since.fill(now);
        }
        self.last_look = now;
        for ((index, rank), counts_since) in ranks.enumerate().zip(&mut self.counts_since) {
            let Some((silent, pid, started)) = rank else {
                *counts_since = now;
                continue;
            };
            let silent = silent.min(now.saturating_duration_since(*counts_since));
            if silent <= timeout {
                continue;
            }
            if !may_be_silent(pid, started) {
                return Some((index, silent));
            }
            *counts_since = now;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Checks once a second a rank that is silent from the start. Returns the second at which it counts as hung, up to
    /// 100.
    fn judged_after(watchdog: &mut Watchdog, start: Instant, is_held: impl Fn(u32) -> bool) -> Option<u32> {
        (1..100).find(|&second| {
            let silent = Some((SECOND * second, 7, 7));
            let ranks = [None, Some((SECOND / 2, 6, 6)), silent];
            let judged = watchdog.judge(start + SECOND * second, ranks.into_iter(), |_, _| is_held(second));
            judged.is_some_and(|(index, silent)| index == 2 && silent > 15 * SECOND)
        })
    }

    #[test]
    fn a_silent_rank_hangs_unless_it_is_held() {
        let start = Instant::now();
        let watchdog = |seconds: u64| Watchdog::new(Duration::from_secs(seconds), 3, start);
        assert_eq!(judged_after(&mut watchdog(15), start, |_| false), Some(16));
        assert_eq!(judged_after(&mut watchdog(0), start, |_| false), None);
        assert_eq!((watchdog(0).period(), watchdog(15).period()), (None, Some(SECOND)));
        // After a debugger's detach at 30 s, the rank has time for a heartbeat.
        assert_eq!(judged_after(&mut watchdog(15), start, |second| second < 30), Some(32));
        assert_eq!(judged_after(&mut watchdog(15), start, |_| true), None);
    }

    #[test]
    fn forgives_time_without_checks() {
        let start = Instant::now();
        let mut watchdog = Watchdog::new(15 * SECOND, 1, start);
        let mut judge = |second: u32| {
            watchdog.judge(start + SECOND * second, [Some((SECOND * second, 7, 7))].into_iter(), |_, _| false).is_some()
        };
        assert!((1..10).all(|second| !judge(second)));
        assert!((40..=55).all(|second| !judge(second)) && judge(56));
    }
}
