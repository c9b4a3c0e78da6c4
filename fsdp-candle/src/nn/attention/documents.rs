//! Documents that are packed in the rows of a batch.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor, bail};

use crate::context_parallel::Positions;
use crate::nn::last_upload::LastUpload;
use crate::tensors::Tensors;
use crate::upload;

/// The lengths of the documents in the rows of a packed batch `[batch, T, ..]`. A token attends only to its own
/// document ([`attention_in_documents`]), and positions start again with each document.
///
/// Units and activation checkpoints take it beside their tensors ([`Tensors`]).
///
/// [`attention_in_documents`]: crate::nn::attention_in_documents
///
/// ```
/// use fsdp_candle::nn::Documents;
///
/// // Two rows of six tokens: documents of two and four, and one of six.
/// let documents = Documents::new(vec![vec![2, 4], vec![6]])?;
/// assert_eq!(documents.positions(), [0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Documents {
    rows: Arc<[Vec<usize>]>,
    positions: Arc<[u32]>,
    /// Bounds of the documents on a device, for the device's attention.
    pub(super) bounds: LastUpload,
}

impl Documents {
    /// Returns documents of these lengths, row by row, in order. Fails without rows, or if rows differ in their number
    /// of tokens, or a document is empty.
    pub fn new(rows: Vec<Vec<usize>>) -> Result<Self> {
        let tokens = |row: &Vec<usize>| row.iter().try_fold(0, |sum: usize, &length| sum.checked_add(length));
        let Some(steps) = rows.first().and_then(tokens) else {
            bail!("Documents: needs at least one row, whose number of tokens fits in usize")
        };
        if let Some(row) = rows.iter().position(|row| tokens(row) != Some(steps) || row.contains(&0)) {
            bail!(
                "Documents: row {row} has documents of {:?} tokens. None may be empty, and their sum must be \
                 {steps}, as in row 0",
                rows[row]
            );
        }
        let positions = rows.iter().flatten().flat_map(|&length| 0..length as u32).collect();
        Ok(Documents { rows: rows.into(), positions, bounds: LastUpload::default() })
    }

    /// Returns the number of rows.
    pub fn batch(&self) -> usize {
        self.rows.len()
    }

    /// Returns the number of tokens in a row.
    pub fn steps(&self) -> usize {
        self.positions.len() / self.rows.len()
    }

    /// Returns the number of tokens in the longest document.
    pub fn longest(&self) -> usize {
        self.rows.iter().flatten().copied().max().unwrap_or(0)
    }

    /// Returns the lengths of a row's documents.
    pub fn row(&self, row: usize) -> &[usize] {
        &self.rows[row]
    }

    /// Returns each token's position in its document, row after row.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Returns [`Documents::positions`] as a tensor `[batch, T]`, u32, for a table of learned positions. Fails if the
    /// device has no memory for the tensor.
    pub fn position_ids(&self, device: &Device) -> Result<Tensor> {
        upload(&Tensor::from_slice(&self.positions, (self.batch(), self.steps()), &Device::Cpu)?, device)
    }

    /// Returns the items of the tokens at these positions, `tokens` in each row, row after row.
    pub(in crate::nn) fn own(&self, items: &[u32], positions: Positions, tokens: usize) -> Arc<[u32]> {
        let steps = self.steps();
        let at = |row: usize| (0..tokens).map(move |token| row * steps + positions.of(token));
        (0..self.batch()).flat_map(at).map(|at| items[at]).collect()
    }

    pub(in crate::nn) fn shared_positions(&self) -> Arc<[u32]> {
        self.positions.clone()
    }

    /// Fails unless the documents have this many rows and tokens.
    pub(in crate::nn) fn check(&self, function: &str, batch: usize, steps: usize) -> Result<()> {
        if (self.batch(), self.steps()) != (batch, steps) {
            bail!(
                "{function}: the documents have {} rows of {} tokens, but the input has {batch} of {steps}",
                self.batch(),
                self.steps()
            );
        }
        Ok(())
    }
}

/// `Documents` holds no tensors.
impl Tensors for Documents {
    fn map_tensors(self, _: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(self)
    }
}
