//! Losses and scores of classifiers.

use candle_core::{Result, Tensor};
use fsdp_candle::nn::{self, CrossEntropyOptions, IGNORED, Reduction};

/// Returns the mean cross-entropy of logits `[records, classes]` for the classes in `labels`.
pub fn loss(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    nn::cross_entropy(logits, labels)
}

/// Counts of right and wrong predictions, which ranks add up.
#[derive(Clone, Debug)]
pub struct Scores {
    loss: f64,
    records: f64,
    /// For each class: records that are right, predicted and true.
    counts: Vec<[f64; 3]>,
}

impl Scores {
    /// Creates scores of no records.
    pub fn new(classes: usize) -> Self {
        Scores { loss: 0., records: 0., counts: vec![[0.; 3]; classes] }
    }

    /// Adds the records of a batch, except those without a label.
    pub fn add(&mut self, logits: &Tensor, labels: &Tensor) -> Result<()> {
        let labels_of = labels.to_vec1::<u32>()?;
        let counted = labels_of.iter().filter(|&&label| label != IGNORED).count();
        if counted == 0 {
            return Ok(());
        }
        let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
        self.loss += f64::from(nn::cross_entropy_with(logits, labels, &options)?.to_scalar::<f32>()?);
        self.records += counted as f64;
        for (row, label) in logits.to_vec2::<f32>()?.iter().zip(labels_of).filter(|(_, label)| *label != IGNORED) {
            let label = label as usize;
            self.counts[label][2] += 1.;
            // Without a largest logit, the record is wrong, whatever its label.
            if let Some((predicted, _)) = most_likely(row) {
                self.counts[label][0] += f64::from(label == predicted);
                self.counts[predicted][1] += 1.;
            }
        }
        Ok(())
    }

    /// Returns all numbers, for a sum over ranks.
    pub fn values(&self) -> Vec<f64> {
        [self.loss, self.records].into_iter().chain(self.counts.iter().flatten().copied()).collect()
    }

    /// Returns the scores of summed [`Scores::values`].
    pub fn of_values(values: &[f64]) -> Self {
        let (sums, counts) = values.split_at(2.min(values.len()));
        let counts = counts.as_chunks().0.to_vec();
        Scores { loss: sums.first().copied().unwrap_or(0.), records: sums.get(1).copied().unwrap_or(0.), counts }
    }

    /// Returns the number of records.
    pub fn records(&self) -> u64 {
        self.records as u64
    }

    /// Returns the mean loss.
    pub fn mean_loss(&self) -> f64 {
        self.loss / self.records
    }

    /// Returns the share of right predictions.
    pub fn accuracy(&self) -> f64 {
        self.counts.iter().map(|[right, ..]| right).sum::<f64>() / self.records
    }

    /// Returns the mean F1 score of the classes that occur in labels or predictions, as scikit-learn's
    /// `f1_score(average="macro")`.
    pub fn macro_f1(&self) -> f64 {
        let scores = self.counts.iter().filter(|[_, predicted, labelled]| predicted + labelled > 0.);
        let (sum, count) = scores.fold((0., 0.), |(sum, count), [right, predicted, labelled]| {
            (sum + 2. * right / (predicted + labelled), count + 1.)
        });
        sum / count
    }
}

/// Returns the class with the largest logit, and its probability. Returns `None` if several classes have the largest
/// logit, or a logit is NaN.
pub fn most_likely(logits: &[f32]) -> Option<(usize, f64)> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut best = logits.iter().enumerate().filter(|(_, logit)| **logit == largest);
    let (class, _) = best.next().filter(|_| best.next().is_none() && !logits.iter().any(|logit| logit.is_nan()))?;
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    Some((class, 1. / sum))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// Accuracy and macro F1 of scikit-learn for these labels and predictions.
    #[test]
    fn scores_are_those_of_scikit_learn() {
        let (labels, predictions) = ([0u32, 0, 1, 2, 2, 2, IGNORED], [0usize, 1, 1, 2, 0, 2, 3]);
        let one_hot = |class: &usize| (0..5).map(|i| if i == *class { 4f32 } else { 0. }).collect::<Vec<_>>();
        let rows: Vec<Vec<f32>> = predictions.iter().map(one_hot).collect();
        let mut parts = [Scores::new(5), Scores::new(5)];
        for (part, range) in parts.iter_mut().zip([0..2, 2..7]) {
            let logits = Tensor::new(rows[range.clone()].to_vec(), &Device::Cpu).unwrap();
            part.add(&logits, &Tensor::new(&labels[range], &Device::Cpu).unwrap()).unwrap();
        }
        let [a, b] = parts.map(|part| part.values());
        let all = Scores::of_values(&a.iter().zip(&b).map(|(a, b)| a + b).collect::<Vec<_>>());
        assert_eq!((all.records(), all.accuracy()), (6, 4. / 6.));
        // F1: 0.5, 2/3 and 0.8. Classes that do not occur are left out.
        assert!((all.macro_f1() - (0.5 + 2. / 3. + 0.8) / 3.).abs() < 1e-12);
        let right = (4f64.exp() + 4.).ln() - 4.;
        assert!((all.mean_loss() - (4. * right + 2. * (right + 4.)) / 6.).abs() < 1e-6);
    }

    #[test]
    fn most_likely_class_has_its_probability() {
        let (class, probability) = most_likely(&[0., 3f32.ln(), f32::NEG_INFINITY]).unwrap();
        assert_eq!(class, 1);
        assert!((probability - 0.75).abs() < 1e-6);
    }

    #[test]
    fn records_without_a_largest_logit_are_wrong() {
        for row in [[1f32; 3], [0.; 3], [f32::NAN; 3], [f32::NEG_INFINITY; 3], [2., f32::NAN, 0.], [2., 1., 2.]] {
            assert_eq!(most_likely(&row), None);
            let mut scores = Scores::new(3);
            let logits = Tensor::new(&[row; 3], &Device::Cpu).unwrap();
            scores.add(&logits, &Tensor::new(&[0u32, 1, 2], &Device::Cpu).unwrap()).unwrap();
            assert_eq!((scores.records(), scores.accuracy(), scores.macro_f1()), (3, 0., 0.), "{row:?}");
        }
        assert_eq!(most_likely(&[]), None);
    }
}
