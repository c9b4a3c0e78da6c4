//! The targets of a cross-entropy, which the losses of all devices share.

use std::hash::{DefaultHasher, Hash, Hasher};

use fsdp_core::ProcessGroup;
use fsdp_core::process_group::{Signature, Subject};

/// The targets of the rows of logits, and how their losses are combined.
pub(in crate::nn) struct TargetRows {
    /// Target of each row. `None` for ignored rows.
    pub(in crate::nn) targets: Vec<Option<u32>>,
    /// Number of columns of this rank's logits.
    pub(in crate::nn) columns: usize,
    /// Class of the first column.
    pub(in crate::nn) first: usize,
    /// Number of classes on all ranks.
    pub(in crate::nn) classes: usize,
    /// Ranks that hold parts of the vocabulary, if there are several.
    pub(in crate::nn) ranks: Option<ProcessGroup>,
    pub(in crate::nn) smoothing: f64,
    pub(in crate::nn) softcap: Option<f64>,
    /// Divisor of the sum of the rows' losses.
    pub(in crate::nn) divisor: f64,
    /// Whether the rows' losses are summed.
    pub(in crate::nn) combined: bool,
    /// Shape of the result.
    pub(in crate::nn) shape: Vec<usize>,
}

impl TargetRows {
    /// Returns the column of a target, if this rank has it.
    pub(in crate::nn) fn column(&self, target: u32) -> Option<usize> {
        (target as usize).checked_sub(self.first).filter(|column| *column < self.columns)
    }

    /// Returns the rows that count, if some are ignored.
    pub(in crate::nn) fn counted(&self) -> Option<Vec<usize>> {
        let counts = |(row, target): (usize, &Option<u32>)| target.map(|_| row);
        self.targets.contains(&None).then(|| self.targets.iter().enumerate().filter_map(counts).collect())
    }

    /// Returns a signature of the values on which ranks must agree: how the vocabulary is sharded, and the targets.
    pub(in crate::nn) fn signature(&self) -> Signature {
        let mut hash = DefaultHasher::new();
        self.targets.hash(&mut hash);
        let subject = Subject::new(format!("cross_entropy over {} columns on each rank", self.columns), []);
        Signature::new(&subject, [])
            .with_how(format!(", with targets of hash {:016x}", hash.finish()))
            .with_advice("Ranks that hold parts of one vocabulary need the same batch, and parts of one size")
    }
}
