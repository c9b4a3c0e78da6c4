//! Combinations of `train`'s flags that give the same training.

/// A combination, by the values of `train`'s flags.
#[derive(Clone, Copy, Debug)]
pub struct Combination {
    /// The number of ranks.
    pub ranks: usize,
    /// `--replicate`.
    pub replicate: &'static str,
    /// `--reshard-after-forward`.
    pub reshard: &'static str,
    /// `--grad-accum`.
    pub accumulate: &'static str,
    /// `--grad-sync`.
    pub sync: &'static str,
    /// `--activation-checkpoint`.
    pub checkpoint: &'static str,
    /// `--prefetch`.
    pub prefetch: &'static str,
}

impl Combination {
    /// All combinations on two ranks and on four.
    pub fn all() -> Vec<Self> {
        let mut all = vec![];
        for ranks in [2, 4] {
            for replicate in ["1", "2"] {
                for reshard in ["default", "always", "never", "2"] {
                    // Resharding to fewer ranks needs a number below that of shards and above one.
                    if reshard == "2" && (ranks, replicate) != (4, "1") {
                        continue;
                    }
                    for (accumulate, sync) in [("1", "every"), ("2", "every"), ("2", "last")] {
                        for checkpoint in ["none", "full"] {
                            for prefetch in ["0", "1", "2"] {
                                let one = Self { ranks, replicate, reshard, accumulate, sync, checkpoint, prefetch };
                                all.push(one);
                            }
                        }
                    }
                }
            }
        }
        all
    }

    /// The flags for `train`: `--grad-sync` only with accumulation.
    pub fn flags(&self) -> Vec<&'static str> {
        let mut flags = vec![
            "--replicate",
            self.replicate,
            "--reshard-after-forward",
            self.reshard,
            "--grad-accum",
            self.accumulate,
            "--activation-checkpoint",
            self.checkpoint,
            "--prefetch",
            self.prefetch,
        ];
        if self.accumulate != "1" {
            flags.extend(["--grad-sync", self.sync]);
        }
        flags
    }

    /// Sequences for each rank and micro-batch.
    pub fn batch_size(&self) -> usize {
        if (self.ranks, self.accumulate) == (2, "1") { 2 } else { 1 }
    }

    /// Sequences of a step: four, as PyTorch recorded, or eight, whose reference is one unsharded rank.
    pub fn sequences(&self) -> usize {
        if (self.ranks, self.accumulate) == (4, "2") { 8 } else { 4 }
    }
}
