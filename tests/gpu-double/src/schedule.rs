//! Which stream goes on: any that may, as bad for the program as can be.
//!
//! `GPU_DOUBLE_SEED` chooses a schedule, 0 if it is not set. With seed 0 only that runs which the host waits for, the
//! stream that was made first before others. With any other seed streams have priorities that change now and then, a
//! stream goes on out of turn here and there, and things run that nobody waits for yet. A program without races has the
//! same results with all seeds. Ranks have different schedules with the same seed.

/// A seeded choice.
#[derive(Debug)]
pub(crate) struct Schedule {
    seed: u64,
    state: u64,
    /// Changes all priorities.
    epoch: u64,
}

impl Schedule {
    pub(crate) fn new(seed: u64, rank: u64) -> Self {
        let seed = if seed == 0 { 0 } else { mix(seed).wrapping_add(rank) };
        Self { seed, state: mix(seed), epoch: 0 }
    }

    /// One of `1 / of` calls, by chance.
    pub(crate) fn one_in(&mut self, of: u64) -> bool {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state).is_multiple_of(of)
    }

    /// Whether something is to run that nobody waits for.
    pub(crate) fn strays(&mut self) -> bool {
        self.seed != 0 && self.one_in(4)
    }

    /// One of `streams`, of which there is one at least.
    pub(crate) fn choose(&mut self, streams: &[usize]) -> usize {
        let first = streams.iter().copied().min().expect("there is one at least");
        if self.seed == 0 {
            return first;
        }
        if self.one_in(64) {
            self.epoch += 1;
        }
        if self.one_in(8) {
            let place = mix(self.state ^ self.seed) % streams.len() as u64;
            return streams[place as usize];
        }
        let priority = |stream: &usize| mix(mix(self.seed ^ mix(self.epoch)) ^ *stream as u64);
        streams.iter().copied().max_by_key(priority).unwrap_or(first)
    }
}

/// SplitMix64's mixing of bits.
fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_schedule() {
        let run = |seed, rank| {
            let mut schedule = Schedule::new(seed, rank);
            (0..200).map(|_| schedule.choose(&[3, 1, 2])).collect::<Vec<_>>()
        };
        assert_eq!(run(7, 0), run(7, 0));
        assert_ne!(run(7, 0), run(8, 0));
        assert_ne!(run(7, 0), run(7, 1));
        assert!(run(0, 1).iter().all(|stream| *stream == 1));
        for stream in 1..=3 {
            assert!((1..20).all(|seed| run(seed, 0).contains(&stream)), "each stream has its turn");
        }
    }
}
