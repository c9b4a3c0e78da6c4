//! Measurements of steps and evaluations, and the file of `--metrics` with one JSON object per line.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, Write},
    ops::{Add, Mul},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde::{Deserialize, Deserializer, Serialize};

use crate::writable::in_directory;

/// Measurements of an optimizer step. Numbers are written so that they read back bit for bit, and NaN and infinity as
/// `null`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Number of the step, from 1.
    pub step: usize,
    /// Mean cross-entropy over the tokens of all ranks, or mean loss over their preference pairs.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
    /// Global gradient norm before clipping.
    #[serde(deserialize_with = "null_is_nan")]
    pub grad_norm: f64,
    /// Learning rate.
    #[serde(deserialize_with = "null_is_nan")]
    pub lr: f64,
    /// Duration of the step in seconds.
    #[serde(deserialize_with = "null_is_nan")]
    pub step_time_s: f64,
    /// Tokens per second over all ranks.
    #[serde(deserialize_with = "null_is_nan")]
    pub tokens_per_s: f64,
    /// Peak resident memory of the largest rank so far, in bytes.
    pub peak_mem_bytes: u64,
    /// Parameters, gradients and optimizer state resident per rank, in bytes.
    pub shard_bytes: u64,
    /// Rewards of preference tuning.
    #[serde(flatten)]
    pub rewards: Option<Rewards>,
    /// Balance of experts.
    #[serde(flatten)]
    pub experts: Option<ExpertBalance>,
    /// Use of corpora.
    #[serde(flatten)]
    pub data: Option<DataRecord>,
}

/// Tokens of the experts that have the fewest and the most, over all layers, as a multiple of the mean in their layer: 1
/// if each expert has as many.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertBalance {
    /// The fewest.
    #[serde(rename = "experts/least")]
    pub least: f64,
    /// The most.
    #[serde(rename = "experts/most")]
    pub most: f64,
}

impl ExpertBalance {
    /// Returns the balance, given the tokens of the experts of each layer.
    ///
    /// ```
    /// use fsdp_train::metrics::ExpertBalance;
    ///
    /// let layers = [[3., 1.], [2., 2.]];
    /// assert_eq!(ExpertBalance::of(layers.iter().map(|tokens| &tokens[..])), ExpertBalance { least: 0.5, most: 1.5 });
    /// ```
    pub fn of<'a>(layers: impl Iterator<Item = &'a [f64]>) -> Self {
        let even = ExpertBalance { least: 1., most: 1. };
        layers.fold(even, |balance, tokens| {
            let mean = tokens.iter().sum::<f64>() / tokens.len() as f64;
            if mean == 0. {
                return balance;
            }
            let (least, most) = tokens.iter().fold((f64::INFINITY, 0f64), |(a, b), &x| (a.min(x), b.max(x)));
            ExpertBalance { least: balance.least.min(least / mean), most: balance.most.max(most / mean) }
        })
    }
}

/// Use of the corpora of `--data`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataRecord {
    /// Longest time that a rank waited for data in this step, in seconds.
    #[serde(deserialize_with = "null_is_nan")]
    pub data_wait_s: f64,
    /// The sources, in the order of `--data`.
    pub sources: Vec<SourceRecord>,
}

/// Counters of a corpus since the start of the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceRecord {
    /// Name, as `--data` has it.
    pub name: String,
    /// Tokens trained on.
    pub tokens: u64,
    /// Epochs completed.
    pub epochs: u64,
    /// Documents begun, if they are counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub documents: Option<u64>,
}

/// Mean rewards of preference pairs, with TRL's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rewards {
    /// Reward of the chosen completion.
    #[serde(rename = "rewards/chosen", deserialize_with = "null_is_nan")]
    pub chosen: f64,
    /// Reward of the rejected completion.
    #[serde(rename = "rewards/rejected", deserialize_with = "null_is_nan")]
    pub rejected: f64,
    /// Share of the pairs whose chosen completion has the higher reward.
    #[serde(rename = "rewards/accuracies", deserialize_with = "null_is_nan")]
    pub accuracies: f64,
    /// Reward of the chosen completion minus that of the rejected one.
    #[serde(rename = "rewards/margins", deserialize_with = "null_is_nan")]
    pub margins: f64,
}

impl Rewards {
    /// Returns the numbers with their names.
    pub fn named(&self) -> [(&'static str, f64); 4] {
        let Rewards { chosen, rejected, accuracies, margins } = *self;
        [("chosen", chosen), ("rejected", rejected), ("accuracies", accuracies), ("margins", margins)]
    }

    /// Returns the numbers in the order of [`Rewards::named`].
    pub fn values(&self) -> [f64; 4] {
        self.named().map(|(_, value)| value)
    }
}

impl From<[f64; 4]> for Rewards {
    fn from([chosen, rejected, accuracies, margins]: [f64; 4]) -> Self {
        Rewards { chosen, rejected, accuracies, margins }
    }
}

impl Add for Rewards {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let (own, others) = (self.values(), other.values());
        Rewards::from(std::array::from_fn(|i| own[i] + others[i]))
    }
}

impl Mul<f64> for Rewards {
    type Output = Self;

    fn mul(self, factor: f64) -> Self {
        Rewards::from(self.values().map(|value| factor * value))
    }
}

/// [`Rewards`] of an evaluation, whose names have the prefix `eval_`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalRewards {
    #[serde(rename = "eval_rewards/chosen", deserialize_with = "null_is_nan")]
    chosen: f64,
    #[serde(rename = "eval_rewards/rejected", deserialize_with = "null_is_nan")]
    rejected: f64,
    #[serde(rename = "eval_rewards/accuracies", deserialize_with = "null_is_nan")]
    accuracies: f64,
    #[serde(rename = "eval_rewards/margins", deserialize_with = "null_is_nan")]
    margins: f64,
}

impl From<Rewards> for EvalRewards {
    fn from(Rewards { chosen, rejected, accuracies, margins }: Rewards) -> Self {
        EvalRewards { chosen, rejected, accuracies, margins }
    }
}

impl From<EvalRewards> for Rewards {
    fn from(EvalRewards { chosen, rejected, accuracies, margins }: EvalRewards) -> Self {
        Rewards { chosen, rejected, accuracies, margins }
    }
}

/// Measurements of an evaluation, on their own line after the step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalRecord {
    /// Number of steps taken.
    pub step: usize,
    /// Mean cross-entropy over the counted tokens of the evaluation data, or mean loss over its preference pairs.
    #[serde(deserialize_with = "null_is_nan")]
    pub eval_loss: f64,
    /// `exp(eval_loss)`, if the loss is a cross-entropy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_perplexity: Option<f64>,
    /// Number of counted tokens.
    pub eval_tokens: u64,
    /// Duration in seconds.
    #[serde(deserialize_with = "null_is_nan")]
    pub eval_time_s: f64,
    /// Rewards of preference tuning.
    #[serde(flatten)]
    pub rewards: Option<EvalRewards>,
}

/// Field that both records have.
#[derive(Deserialize)]
struct OfStep {
    step: usize,
}

fn null_is_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// A file of [`StepRecord`]s and [`EvalRecord`]s, one per line. [`MetricsFile::write`] returns when the line is with
/// the operating system, so other programs can follow the file.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: File,
}

impl MetricsFile {
    /// Opens the file for a run that has taken `done` steps, and creates its directory. A fresh run (0) empties the
    /// file. A resumed run appends, after removing later steps and an incomplete last line.
    pub fn open(path: &Path, done: usize) -> Result<Self> {
        let open = || -> io::Result<File> {
            let file = in_directory(path.parent().unwrap_or(Path::new("")), || {
                OpenOptions::new().create(true).read(true).append(true).open(path)
            })?;
            // A pipe or a device has no earlier records, and may have no end.
            if file.metadata()?.is_file() {
                file.set_len(length_up_to(done, &file)?)?;
            }
            Ok(file)
        };
        let file = open().with_context(|| format!("cannot write metrics to {}", path.display()))?;
        Ok(MetricsFile { path: path.to_owned(), file })
    }

    /// Writes one line.
    pub fn write(&mut self, record: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        self.file.write_all(&line).with_context(|| format!("cannot write metrics to {}", self.path.display()))
    }
}

/// Returns the length in bytes of the complete records up to `step`.
fn length_up_to(step: usize, file: &File) -> io::Result<u64> {
    if step == 0 {
        return Ok(0);
    }
    let (mut length, mut line) = (0, Vec::new());
    let mut reader = BufReader::new(file);
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line)?;
        let keep =
            line.ends_with(b"\n") && serde_json::from_slice(&line).is_ok_and(|record: OfStep| record.step <= step);
        if !keep {
            return Ok(length);
        }
        length += read as u64;
    }
}

/// Returns the peak resident memory of this process in bytes, or 0 on systems without `/proc/self/status`.
pub fn peak_memory_bytes() -> u64 {
    fs::read_to_string("/proc/self/status").ok().and_then(|status| high_water_mark(&status)).unwrap_or(0)
}

/// Returns the number of pages that the system has given this process, or 0 on systems without `/proc/self/stat`.
pub fn page_faults() -> u64 {
    fs::read_to_string("/proc/self/stat").ok().and_then(|stat| minor_faults(&stat)).unwrap_or(0)
}

fn minor_faults(stat: &str) -> Option<u64> {
    // The program's name, in parentheses, may have spaces.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(7)?.parse().ok()
}

fn high_water_mark(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn record(step: usize) -> StepRecord {
        StepRecord {
            step,
            loss: 4.897_181_034_088_135 / step as f64,
            grad_norm: 0.1 + 0.2,
            lr: 1e-3,
            step_time_s: 0.25,
            tokens_per_s: 4096.0,
            peak_mem_bytes: 1 << 33,
            shard_bytes: 123,
            rewards: None,
            experts: None,
            data: None,
        }
    }

    fn write(path: &Path, done: usize, steps: impl IntoIterator<Item = usize>) {
        let mut file = MetricsFile::open(path, done).unwrap();
        for step in steps {
            file.write(&record(step)).unwrap();
        }
    }

    fn steps(path: &Path) -> Vec<usize> {
        let lines = fs::read_to_string(path).unwrap();
        lines.lines().map(|line| serde_json::from_str::<StepRecord>(line).unwrap().step).collect()
    }

    #[test]
    fn line_has_the_documented_fields() {
        assert_eq!(
            serde_json::to_string(&record(1)).unwrap(),
            r#"{"step":1,"loss":4.897181034088135,"grad_norm":0.30000000000000004,"lr":0.001,"step_time_s":0.25,"tokens_per_s":4096.0,"peak_mem_bytes":8589934592,"shard_bytes":123}"#
        );
    }

    #[test]
    fn rewards_have_the_names_of_trl() {
        let rewards = Rewards { chosen: 0.5, rejected: -0.25, accuracies: 1., margins: 0.75 };
        let step = StepRecord { rewards: Some(rewards), ..record(1) };
        let line = serde_json::to_string(&step).unwrap();
        let names =
            r#","rewards/chosen":0.5,"rewards/rejected":-0.25,"rewards/accuracies":1.0,"rewards/margins":0.75}"#;
        assert!(line.ends_with(names), "{line}");
        assert_eq!(serde_json::from_str::<StepRecord>(&line).unwrap(), step);
        let rewards = Some((rewards + rewards * 2.).into());
        let eval =
            EvalRecord { step: 1, eval_loss: 0.5, eval_perplexity: None, eval_tokens: 7, eval_time_s: 1., rewards };
        let line = serde_json::to_string(&eval).unwrap();
        assert!(line.contains(r#""eval_rewards/margins":2.25"#) && !line.contains("perplexity"), "{line}");
        assert_eq!(serde_json::from_str::<EvalRecord>(&line).unwrap(), eval);
    }

    #[test]
    fn evaluations_have_their_own_lines() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        let (eval_loss, eval_perplexity, eval_tokens) = (2.5, Some(12.5), 7);
        let eval = |step| EvalRecord { step, eval_loss, eval_perplexity, eval_tokens, eval_time_s: 0.5, rewards: None };
        let mut file = MetricsFile::open(&path, 0).unwrap();
        file.write(&eval(0)).unwrap();
        (1..=2).for_each(|step| file.write(&record(step)).unwrap());
        file.write(&eval(2)).unwrap();
        file.write(&record(3)).unwrap();
        let lines = || fs::read_to_string(&path).unwrap().lines().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(
            lines()[0],
            r#"{"step":0,"eval_loss":2.5,"eval_perplexity":12.5,"eval_tokens":7,"eval_time_s":0.5}"#
        );
        MetricsFile::open(&path, 2).unwrap();
        assert_eq!(lines().len(), 4);
        assert_eq!(serde_json::from_str::<EvalRecord>(&lines()[3]).unwrap(), eval(2));
        MetricsFile::open(&path, 0).unwrap();
        assert!(lines().is_empty());
    }

    #[test]
    fn lines_are_readable_when_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new/metrics.jsonl");
        let mut file = MetricsFile::open(&path, 0).unwrap();
        for step in 1..=3 {
            file.write(&record(step)).unwrap();
            assert_eq!(steps(&path), (1..=step).collect::<Vec<_>>());
        }
    }

    #[test]
    fn non_finite_values_read_back_as_nan() {
        let line = serde_json::to_string(&StepRecord { loss: f64::INFINITY, ..record(1) }).unwrap();
        assert!(line.contains(r#""loss":null"#), "{line}");
        assert!(serde_json::from_str::<StepRecord>(&line).unwrap().loss.is_nan());
    }

    #[test]
    fn fresh_runs_empty_the_file_and_resumed_runs_append() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        write(&path, 0, 1..=3);
        write(&path, 3, 4..=5);
        assert_eq!(steps(&path), [1, 2, 3, 4, 5]);
        write(&path, 0, 1..=2);
        assert_eq!(steps(&path), [1, 2]);
    }

    #[test]
    fn later_steps_and_incomplete_lines_are_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        write(&path, 0, 1..=5);
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\":6,\"lo").unwrap();
        write(&path, 5, 6..=6);
        assert_eq!(steps(&path), [1, 2, 3, 4, 5, 6]);
        write(&path, 2, 3..=3);
        assert_eq!(steps(&path), [1, 2, 3]);
    }

    #[test]
    fn devices_can_be_written() {
        let mut file = MetricsFile::open(Path::new("/dev/null"), 3).unwrap();
        file.write(&record(1)).unwrap();
    }

    #[test]
    fn unwritable_file_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let error = format!("{:#}", MetricsFile::open(directory.path(), 0).unwrap_err());
        assert!(
            error.contains("cannot write metrics to") && error.contains(directory.path().to_str().unwrap()),
            "{error}"
        );
    }

    #[test]
    fn page_faults_come_after_the_programs_name() {
        assert_eq!(minor_faults("7 (a (b) c) S 1 7 7 0 -1 4194304 1234 0 5 0 1 2"), Some(1234));
        assert_eq!(minor_faults("7 (a) S 1"), None);
        assert!(page_faults() > 0);
    }

    #[test]
    fn high_water_mark_is_in_kib() {
        assert_eq!(high_water_mark("VmPeak:\t  9 kB\nVmHWM:\t    1752 kB\nVmRSS:\t 5 kB\n"), Some(1752 * 1024));
        assert_eq!(high_water_mark("VmPeak:\t  9 kB\n"), None);
        assert_eq!(high_water_mark("VmHWM:\t  many kB\n"), None);
        if cfg!(target_os = "linux") {
            assert!(peak_memory_bytes() > 1 << 16);
        }
    }
}
