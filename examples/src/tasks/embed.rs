//! Losses and scores of embeddings: sentence-transformers' `MultipleNegativesRankingLoss`.
//!
//! Shapes: records N of a rank, width C, ranks R.

use candle_core::{D, Result, Tensor};
use fsdp_candle::collectives::{Consumers, all_gather};
use fsdp_candle::nn;
use fsdp_core::ProcessGroup;

/// Factor of cosine similarities.
pub const SCALE: f64 = 20.;
/// Smallest squared norm, which keeps an embedding of zeros finite.
const SMALLEST: f64 = 1e-24;
/// Records that are compared with each other in an evaluation.
pub const BLOCK: usize = 256;

/// Divides rows by their norms.
fn normalized(x: &Tensor) -> Result<Tensor> {
    x.broadcast_div(&(x.sqr()?.sum_keepdim(D::Minus1)? + SMALLEST)?.sqrt()?)
}

/// Returns the mean over this rank's anchors of the cross-entropy of finding the anchor's positive among the positives
/// and negatives of all ranks, by cosine similarity times [`SCALE`].
///
/// `embeddings` has a row for each text, `[N * columns, C]`: an anchor, its positive, and maybe its negative. All ranks
/// have the same N. Backward sums the gradients that other ranks have for this rank's texts.
pub fn loss(embeddings: &Tensor, columns: usize, group: &ProcessGroup) -> Result<Tensor> {
    let (rows, width) = embeddings.dims2()?;
    let records = rows / columns;
    let normalized = normalized(embeddings)?.reshape((records, columns, width))?;
    let column = |column: usize| normalized.narrow(1, column, 1)?.squeeze(1)?.contiguous();
    let candidates =
        (1..columns).map(|i| all_gather(&column(i)?, 0, group, Consumers::Differ)).collect::<Result<Vec<Tensor>>>()?;
    let scores = (column(0)?.matmul(&Tensor::cat(&candidates, 0)?.t()?)? * SCALE)?;
    let first = (group.rank() * records) as u32;
    let positives = Tensor::arange(first, first + records as u32, &candle_core::Device::Cpu)?;
    nn::cross_entropy(&scores, &positives)
}

/// Sums of scores over anchors.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scores {
    loss: f64,
    right: f64,
    cosine: f64,
    records: u64,
}

impl Scores {
    /// Adds the records of a block, `columns` embeddings of `width` elements each. Each anchor is compared with all
    /// positives and negatives of the block.
    pub fn add(&mut self, embeddings: &[f32], columns: usize, width: usize) {
        let rows: Vec<Vec<f64>> = embeddings.chunks(width.max(1)).map(unit).collect();
        let records = rows.len() / columns;
        for record in 0..records {
            let anchor = &rows[record * columns];
            let of_positive = record * columns + 1;
            let positive = dot(anchor, &rows[of_positive]);
            let texts = (0..rows.len()).filter(|row| row % columns != 0 && *row != of_positive);
            let others: Vec<f64> = texts.map(|row| dot(anchor, &rows[row])).collect();
            let most = others.iter().copied().fold(positive, f64::max);
            let cosines = others.iter().chain([&positive]);
            let sum: f64 = cosines.map(|cosine| ((cosine - most) * SCALE).exp()).sum();
            self.loss += most * SCALE + sum.ln() - positive * SCALE;
            // A tie is wrong, and so is NaN: otherwise a model that maps all texts to one embedding would be right.
            self.right += f64::from(!positive.is_nan() && others.iter().all(|other| positive > *other));
            self.cosine += positive;
            self.records += 1;
        }
    }

    /// Returns the number of records.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// Returns the mean loss.
    pub fn mean_loss(&self) -> f64 {
        self.loss / self.records as f64
    }

    /// Returns the share of anchors whose positive is more similar than every other text.
    pub fn accuracy(&self) -> f64 {
        self.right / self.records as f64
    }

    /// Returns the mean cosine similarity of anchors and their positives.
    pub fn cosine(&self) -> f64 {
        self.cosine / self.records as f64
    }
}

fn unit(row: &[f32]) -> Vec<f64> {
    let norm = (row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() + SMALLEST).sqrt();
    row.iter().map(|&x| f64::from(x) / norm).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};
    use fsdp_core::process_group::local;

    use super::*;

    /// Returns the loss, averaged over ranks, and the gradients of all rows, each rank's with the factor of FSDP's mean.
    fn of_ranks(ranks: usize, rows: &[[f32; 3]], columns: usize) -> (f32, Vec<Vec<f32>>) {
        let parts = local::try_run(ranks, |group| {
            let own = rows.len() / group.size();
            let own = &rows[group.rank() * own..][..own];
            let x = Var::from_slice(own.as_flattened(), (own.len(), 3), &Device::Cpu)?;
            let loss = loss(&x, columns, &group)?;
            let gradient = loss.backward()?.remove(&x).unwrap();
            Result::Ok((loss.to_scalar::<f32>()?, (gradient / group.size() as f64)?.to_vec2::<f32>()?))
        })
        .unwrap();
        let mean = parts.iter().map(|(loss, _)| loss).sum::<f32>() / ranks as f32;
        (mean, parts.into_iter().flat_map(|(_, gradient)| gradient).collect())
    }

    #[test]
    fn loss_and_gradients_do_not_depend_on_ranks() {
        let value = |i: usize| ((i * 37 % 23) as f32 - 11.) / 7.;
        let rows: Vec<[f32; 3]> = (0..12).map(|i| [value(3 * i), value(3 * i + 1), value(3 * i + 2)]).collect();
        for columns in [2, 3] {
            let (whole, gradients) = of_ranks(1, &rows, columns);
            let (mean, parts) = of_ranks(2, &rows, columns);
            assert!((mean - whole).abs() < 1e-5 * whole, "{mean} for {whole}");
            let largest = gradients.iter().flatten().fold(0f32, |most, x| most.max(x.abs()));
            for (a, b) in gradients.iter().flatten().zip(parts.iter().flatten()) {
                assert!((a - b).abs() < 1e-5 * largest, "{a} for {b}");
            }
            let mut scores = Scores::default();
            scores.add(rows.as_flattened(), columns, 3);
            assert!((scores.mean_loss() - f64::from(whole)).abs() < 1e-5 * f64::from(whole));
        }
    }

    #[test]
    fn right_positives_are_counted() {
        let mut scores = Scores::default();
        // The second anchor is closer to the first positive.
        scores.add(&[1., 0., 1., 0., 1., 0.1, 0., 1.], 2, 2);
        assert_eq!((scores.records(), scores.accuracy()), (2, 0.5));
        let cosine = 0.1 / 1.01f64.sqrt();
        assert!((scores.cosine() - f64::midpoint(1., cosine)).abs() < 1e-6);
        // All embeddings are equal, zero or NaN.
        for x in [1., 0., f32::NAN] {
            let mut collapsed = Scores::default();
            collapsed.add(&[x; 12], 2, 2);
            assert_eq!((collapsed.records(), collapsed.accuracy()), (3, 0.));
            assert_eq!(collapsed.mean_loss().is_nan(), x.is_nan());
        }
        // The negative is as similar as the positive, or NaN.
        for negative in [1., f32::NAN] {
            let mut tied = Scores::default();
            tied.add(&[1., 1., negative], 3, 1);
            assert_eq!(tied.accuracy(), 0.);
        }
        let mut empty = Scores::default();
        empty.add(&[], 2, 2);
        assert_eq!(empty, Scores::default());
    }
}
