//! TensorBoard's event files, which `--tensorboard` writes.
//!
//! An event file is a sequence of TFRecords, each a protocol buffer with checksums. Scalars need only a few messages,
//! which are defined here.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result};
use crc_fast::CrcAlgorithm;
use prost::Message;

use crate::metrics::{EvalRecord, ExpertBalance, Rewards, StepRecord};
use crate::tasks::TaskEvalRecord;
use crate::writable::in_directory;

/// Prefix of event file names, by which TensorBoard finds them.
const PREFIX: &str = "events.out.tfevents.";

/// An event file of a run. [`EventFile::write`] returns when the event is with the operating system, so a killed run
/// loses no event.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Creates a file in `directory` for a run that has taken `done` steps. Hides later steps in earlier files.
    pub fn open(directory: &Path, done: usize) -> Result<Self> {
        let made = in_directory(directory, || {
            let path = directory.join(name_after(directory)?);
            let file = OpenOptions::new().create_new(true).append(true).open(&path)?;
            Ok(EventFile { path, file })
        });
        let mut events = made.with_context(|| cannot(directory))?;
        events.append(0, What::FileVersion("brain.Event:2".into()))?;
        events.append(done + 1, What::SessionLog(SessionLog { status: SessionLog::START }))?;
        Ok(events)
    }

    /// Writes the measurements of a step.
    pub fn write(&mut self, record: &StepRecord) -> Result<()> {
        let scalars = [
            ("train/loss", record.loss),
            ("train/grad_norm", record.grad_norm),
            ("train/lr", record.lr),
            ("speed/tokens_per_s", record.tokens_per_s),
            ("speed/step_time_s", record.step_time_s),
            ("memory/peak_bytes", record.peak_mem_bytes as f64),
            ("memory/shard_bytes", record.shard_bytes as f64),
        ];
        self.scalars(record.step, &scalars)?;
        if let Some(ExpertBalance { least, most }) = record.experts {
            self.scalars(record.step, &[("experts/least", least), ("experts/most", most)])?;
        }
        self.rewards(record.step, "train", record.rewards)
    }

    /// Writes the measurements of an evaluation.
    pub fn write_eval(&mut self, record: &EvalRecord) -> Result<()> {
        let perplexity = record.eval_perplexity.map(|perplexity| ("eval/perplexity", perplexity));
        let scalars: Vec<_> = [("eval/loss", record.eval_loss)].into_iter().chain(perplexity).collect();
        self.scalars(record.step, &scalars)?;
        self.rewards(record.step, "eval", record.rewards.map(Rewards::from))
    }

    fn rewards(&mut self, step: usize, group: &str, rewards: Option<Rewards>) -> Result<()> {
        let Some(rewards) = rewards else { return Ok(()) };
        let named = rewards.named().map(|(name, value)| (format!("{group}/rewards/{name}"), value));
        self.scalars(step, &named.each_ref().map(|(name, value)| (name.as_str(), *value)))
    }

    /// Writes the loss and the scores of an evaluation of classes or embeddings.
    pub fn write_task_eval(&mut self, record: &TaskEvalRecord) -> Result<()> {
        let scores = record.scores().into_iter().map(|(name, score)| (format!("eval/{name}"), score));
        let all: Vec<(String, f64)> = [("eval/loss".into(), record.eval_loss)].into_iter().chain(scores).collect();
        let all: Vec<(&str, f64)> = all.iter().map(|(tag, value)| (tag.as_str(), *value)).collect();
        self.scalars(record.step, &all)
    }

    fn scalars(&mut self, step: usize, scalars: &[(&str, f64)]) -> Result<()> {
        let value = |&(tag, value): &(&str, f64)| Value { tag: tag.into(), simple_value: Some(value as f32) };
        self.append(step, What::Summary(Summary { value: scalars.iter().map(value).collect() }))
    }

    fn append(&mut self, step: usize, what: What) -> Result<()> {
        let event = Event { wall_time: now().as_secs_f64(), step: step as i64, what: Some(what) };
        // One write, so that a reader of the growing file sees whole events.
        self.file.write_all(&framed(&event.encode_to_vec())).with_context(|| cannot(&self.path))
    }
}

fn cannot(path: &Path) -> String {
    format!("cannot write --tensorboard {}", path.display())
}

fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Returns a name that sorts after those in `directory`. TensorBoard reads files in the order of their names.
fn name_after(directory: &Path) -> io::Result<String> {
    let mut seconds = now().as_secs();
    for entry in fs::read_dir(directory)? {
        let name = entry?.file_name();
        let time = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('.').next()?.parse::<u64>().ok());
        seconds = seconds.max(time.map_or(0, |time| time.saturating_add(1)));
    }
    let host = rustix::system::uname().nodename().to_string_lossy().replace('/', "_");
    Ok(format!("{PREFIX}{seconds:010}.{host}.{}", std::process::id()))
}

/// Returns a TFRecord: length, checksum of the length, bytes, checksum of the bytes.
fn framed(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    [&length[..], &masked_checksum(&length).to_le_bytes(), bytes, &masked_checksum(bytes).to_le_bytes()].concat()
}

/// Returns TensorFlow's masked CRC-32C, which can be a part of checksummed data.
fn masked_checksum(bytes: &[u8]) -> u32 {
    // A 32-bit checksum, which the library returns as u64.
    let checksum = crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32;
    checksum.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The fields of TensorFlow's `Event` that are used.
#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    what: Option<What>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

impl SessionLog {
    /// Hides this event's step and later ones in earlier files of the directory.
    const START: i32 = 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: usize) -> StepRecord {
        StepRecord { grad_norm: f64::INFINITY, ..crate::metrics::tests::record(step) }
    }

    fn files(directory: &Path) -> Vec<PathBuf> {
        let mut files: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    }

    /// Reads the events of a file and checks lengths and checksums.
    fn events(path: &Path) -> Vec<Event> {
        let bytes = fs::read(path).unwrap();
        let (mut rest, mut events) = (&bytes[..], Vec::new());
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            let (record, after) = rest.split_at(12 + length + 4);
            assert_eq!(record[8..12], masked_checksum(&record[..8]).to_le_bytes());
            assert_eq!(record[12 + length..], masked_checksum(&record[12..12 + length]).to_le_bytes());
            events.push(Event::decode(&record[12..12 + length]).unwrap());
            rest = after;
        }
        events
    }

    #[test]
    fn records_have_tensorflow_framing() {
        // The first event that TensorFlow writes, with a wall time of 0.
        let event = Event { wall_time: 0., step: 0, what: Some(What::FileVersion("brain.Event:2".into())) };
        let bytes = event.encode_to_vec();
        assert_eq!(bytes, b"\x1a\x0dbrain.Event:2");
        // CRC-32C's check value e3069283, masked.
        assert_eq!(masked_checksum(b"123456789"), 0xe306_9283_u32.rotate_right(15).wrapping_add(0xa282_ead8));
        assert_eq!(framed(&bytes)[..8], [15, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn steps_are_readable_when_written() {
        let directory = tempfile::tempdir().unwrap();
        let logs = directory.path().join("new/logs");
        let mut file = EventFile::open(&logs, 0).unwrap();
        for step in 1..=3 {
            file.write(&record(step)).unwrap();
            let events = events(&files(&logs)[0]);
            assert_eq!(events.len(), 2 + step);
            assert_eq!(events[0].what, Some(What::FileVersion("brain.Event:2".into())));
            let last = events.last().unwrap();
            let Some(What::Summary(summary)) = &last.what else { panic!("{last:?}") };
            assert!(last.step == step as i64 && last.wall_time > 1e9);
            let value = |tag: &str| summary.value.iter().find(|value| value.tag == tag).unwrap().simple_value;
            assert_eq!(value("train/loss"), Some(record(step).loss as f32));
            assert_eq!(value("train/grad_norm"), Some(f32::INFINITY));
            assert_eq!(value("memory/peak_bytes"), Some((1u64 << 33) as f32));
        }
    }

    #[test]
    fn resuming_hides_later_steps() {
        let directory = tempfile::tempdir().unwrap();
        for done in [0, 7, 3] {
            EventFile::open(directory.path(), done).unwrap();
        }
        let files = files(directory.path());
        let starts: Vec<_> = files.iter().map(|file| events(file)[1].clone()).collect();
        assert_eq!(starts.iter().map(|event| event.step).collect::<Vec<_>>(), [1, 8, 4]);
        assert!(starts.iter().all(|event| event.what == Some(What::SessionLog(SessionLog { status: 1 }))));
    }

    #[test]
    fn non_directories_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        for path in [&file, &file.join("below")] {
            let error = format!("{:#}", EventFile::open(path, 0).unwrap_err());
            assert!(error.contains("--tensorboard") && error.contains(path.to_str().unwrap()), "{error}");
        }
    }
}
