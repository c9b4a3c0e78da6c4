//! Losses and gradient norms of a run by step: ours from its metrics, PyTorch's from its record.

use std::path::Path;

use serde_json::Value;

use crate::{golden, read_text};

/// A step's number, the mean loss over all ranks' tokens, and the gradient norm before clipping.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The step's number, from 1.
    pub number: u64,
    /// The mean loss.
    pub loss: f64,
    /// The norm of all gradients; infinite if the step was skipped because gradients overflowed.
    pub grad_norm: f64,
}

/// The steps of a run, in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Trajectory(pub Vec<Step>);

/// The relative differences between two trajectories.
#[derive(Clone, Copy, Debug)]
pub struct Difference {
    /// The difference of losses.
    pub loss: f64,
    /// The difference of gradient norms.
    pub grad_norm: f64,
}

impl Difference {
    /// The larger of the two differences.
    pub fn max(self) -> f64 {
        self.loss.max(self.grad_norm)
    }

    /// Whether both differences are smaller than these.
    pub fn is_within(self, near: Self) -> bool {
        self.loss < near.loss && self.grad_norm < near.grad_norm
    }
}

impl Trajectory {
    /// Reads metrics that `train --metrics` wrote.
    ///
    /// # Panics
    /// If the file cannot be read or parsed.
    pub fn of_metrics(path: &Path) -> Self {
        read_text(path).lines().map(|line| step(&parse(line, path), path)).collect()
    }

    /// Reads a record that `tests/golden/record.py` wrote.
    ///
    /// # Panics
    /// If the file cannot be read or parsed.
    pub fn of_record(path: &Path) -> Self {
        let record = parse(&read_text(path), path);
        let steps = record["trajectory"].as_array().unwrap_or_else(|| panic!("{}: no trajectory", path.display()));
        steps.iter().map(|value| step(value, path)).collect()
    }

    /// Reads the run `run` of the model `name` in `tests/golden`.
    ///
    /// # Panics
    /// If the run does not exist.
    pub fn recorded(name: &str, run: &str) -> Self {
        Trajectory::of_record(&golden(name).join(run).with_extension("json"))
    }

    /// The steps after `number`.
    pub fn after(&self, number: u64) -> Self {
        self.0.iter().copied().filter(|step| step.number > number).collect()
    }

    /// The numbers of the steps that were skipped because gradients overflowed.
    pub fn skipped(&self) -> Vec<u64> {
        self.0.iter().filter(|step| step.grad_norm.is_infinite()).map(|step| step.number).collect()
    }

    /// The largest differences from `other`: infinite if one of them has skipped a step that the other has taken.
    ///
    /// # Panics
    /// If they are empty or their steps differ.
    pub fn difference(&self, other: &Self) -> Difference {
        let most = |differences: &[f64]| differences.iter().copied().fold(0., f64::max);
        self.differences(other, most)
    }

    /// The mean differences of all steps from `other`.
    ///
    /// # Panics
    /// If they are empty or their steps differ.
    pub fn mean_difference(&self, other: &Self) -> Difference {
        self.differences(other, |differences| differences.iter().sum::<f64>() / differences.len() as f64)
    }

    fn differences(&self, other: &Self, combined: impl Fn(&[f64]) -> f64) -> Difference {
        let numbers = |of: &Self| of.0.iter().map(|step| step.number).collect::<Vec<_>>();
        assert_eq!(numbers(self), numbers(other));
        assert!(!self.0.is_empty(), "no steps");
        // Two infinite values are equal.
        let relative = |a: f64, b: f64| if a == b { 0. } else { ((a - b) / b).abs() };
        let of = |of: fn(&Step) -> f64| {
            let differences = self.0.iter().zip(&other.0).map(|(a, b)| relative(of(a), of(b)));
            combined(&differences.map(|one| if one.is_nan() { f64::INFINITY } else { one }).collect::<Vec<_>>())
        };
        Difference { loss: of(|step| step.loss), grad_norm: of(|step| step.grad_norm) }
    }
}

impl FromIterator<Step> for Trajectory {
    fn from_iter<I: IntoIterator<Item = Step>>(steps: I) -> Self {
        Trajectory(steps.into_iter().collect())
    }
}

fn parse(text: &str, path: &Path) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn step(value: &Value, path: &Path) -> Step {
    let number = |key: &str| value[key].as_f64().unwrap_or_else(|| panic!("{}: no {key} in {value}", path.display()));
    // JSON has no infinity.
    let skipped = value.get("grad_norm").is_some_and(Value::is_null);
    let grad_norm = if skipped { f64::INFINITY } else { number("grad_norm") };
    Step { number: number("step") as u64, loss: number("loss"), grad_norm }
}
