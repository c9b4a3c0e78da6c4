//! Sequences to train on.

/// Whether tokens attend to tokens of other documents in their sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pack {
    /// Attention stays within a document, positions restart with each one, and no token is predicted from another
    /// document.
    Documents,
    /// A sequence is one text.
    Stream,
}

/// Tokens of a sequence with T inputs, and where documents start in it.
///
/// ```
/// use fsdp_corpus::sequence::{Pack, Sequence};
///
/// // Two documents: 1 2 3 and 7 8.
/// let sequence = Sequence { ids: vec![1, 2, 3, 7, 8], starts: vec![0, 3] };
/// assert_eq!(sequence.inputs(), [1, 2, 3, 7]);
/// assert_eq!(sequence.targets(Pack::Stream, u32::MAX), [2, 3, 7, 8]);
/// assert_eq!(sequence.targets(Pack::Documents, u32::MAX), [2, 3, u32::MAX, 8]);
/// assert_eq!(sequence.lengths(), [3, 1]);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sequence {
    /// T + 1 ids. The last one is the first id of the next sequence.
    pub ids: Vec<u32>,
    /// Indices of ids that start a document, in order.
    pub starts: Vec<usize>,
}

impl Sequence {
    /// Returns the T inputs.
    pub fn inputs(&self) -> &[u32] {
        &self.ids[..self.ids.len().saturating_sub(1)]
    }

    /// Returns the id that follows each input, or `ignored`.
    pub fn targets(&self, pack: Pack, ignored: u32) -> Vec<u32> {
        let mut targets = self.ids.get(1..).unwrap_or_default().to_vec();
        if pack == Pack::Documents {
            for start in self.starts.iter().filter(|&&start| start > 0) {
                if let Some(target) = targets.get_mut(start - 1) {
                    *target = ignored;
                }
            }
        }
        targets
    }

    /// Returns the lengths of the documents among the inputs. Their sum is T.
    pub fn lengths(&self) -> Vec<usize> {
        let mut lengths = Vec::new();
        let mut last = 0;
        for &start in self.starts.iter().filter(|&&start| start > 0 && start < self.inputs().len()) {
            lengths.push(start - last);
            last = start;
        }
        lengths.push(self.inputs().len() - last);
        lengths
    }
}
