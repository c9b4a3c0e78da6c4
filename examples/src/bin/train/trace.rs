//! `--trace`: compute and communication of all processes on one time axis, in the Chrome trace format.
//!
//! Each process writes its own file, such as `trace.rank0.json`, and rank 0 joins the files at the end.
//! `tracing_chrome` collects the events. [`RankWriter`] rewrites them: names contain the unit, process ids are ranks,
//! and the clocks of all ranks agree.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use anyhow::Context;
use fsdp_candle::{ReduceOp, World};
use fsdp_core::file_limit;
use fsdp_train::console::Console;
use fsdp_train::job;
use serde_json::{Map, Value, json};
use tracing::Subscriber;
use tracing_chrome::{ChromeLayer, ChromeLayerBuilder, FlushGuard};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

use crate::nvtx::Nvtx;

/// Thread ids per rank. Viewers need ids that are unique over all processes.
const THREADS: u64 = 1000;

/// A trace in progress.
pub(crate) struct Trace {
    file: PathBuf,
    /// Completes this rank's file when dropped.
    guard: FlushGuard,
    /// Whether a write has failed.
    lost: Arc<AtomicBool>,
}

impl Trace {
    /// Starts the trace of all ranks. Collective.
    pub(crate) fn start<S>(file: &Path, world: &World) -> anyhow::Result<(ChromeLayer<S>, Trace)>
    where
        S: Subscriber + for<'span> LookupSpan<'span> + Send + Sync,
    {
        let cannot = || format!("can't write --trace {}", file.display());
        let rank = world.rank();
        let part = File::create(rank_file(file, rank)).with_context(cannot)?;
        let first = world.all_reduce(&[now_micros()?], ReduceOp::Min)?[0];
        let builder = ChromeLayerBuilder::new().include_args(true).include_locations(false);
        // The layer's clock starts when it is built.
        let writer = BestEffortWriter::new(RankWriter::new(BufWriter::new(part), rank, now_micros()? - first), file);
        let lost = writer.lost.clone();
        let (layer, guard) = builder.writer(writer).build();
        Ok((layer, Trace { file: file.to_path_buf(), guard, lost }))
    }

    /// Joins the files of all ranks. A trace that can't be written causes a warning only, because training has
    /// succeeded. Collective.
    pub(crate) fn finish(self, world: &World) -> anyhow::Result<()> {
        let Trace { file, guard, lost } = self;
        drop(guard);
        // All ranks have written their files.
        let own = f64::from(u8::from(lost.load(Ordering::Relaxed)));
        let lost = world.all_reduce(&[own], ReduceOp::Max)?[0] > 0.;
        if world.rank() != 0 {
            return Ok(());
        }
        let path = file.display();
        if lost {
            Console::Stderr.line(format_args!(
                "warning: --trace {path}: a process could not write all of its events, so the files of the processes \
                 are not joined"
            ));
        } else if let Err(error) = join(&file, world.size()) {
            // A partial file is removed. The removal may fail for the reason that the write did.
            let _ = std::fs::remove_file(&file);
            Console::Stderr.line(format_args!(
                "warning: can't join the processes' files, such as {}, to --trace {path}: {error}",
                rank_file(&file, 0).display()
            ));
        } else {
            Console::Stdout.line(format_args!("trace: {path}"));
        }
        Ok(())
    }
}

fn now_micros() -> anyhow::Result<f64> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).context("the clock is before 1970")?;
    Ok(now.as_micros() as f64)
}

/// Returns the file of one rank: `trace.rank1.json` for `trace.json`.
pub(crate) fn rank_file(file: &Path, rank: usize) -> PathBuf {
    let extension = file.extension().and_then(|extension| extension.to_str()).unwrap_or("json");
    file.with_extension(format!("rank{rank}.{extension}"))
}

/// Joins the files of all ranks into one, and removes them.
fn join(file: &Path, ranks: usize) -> std::io::Result<()> {
    let mut out = BufWriter::new(File::create(file)?);
    let mut separator = "[\n";
    for rank in 0..ranks {
        for line in BufReader::new(File::open(rank_file(file, rank))?).lines() {
            let line = line?;
            // The first and the last line of each file are brackets.
            if line.starts_with('{') {
                write!(out, "{separator}{}", line.trim_end_matches(','))?;
                separator = ",\n";
            }
        }
    }
    out.write_all(b"\n]\n")?;
    out.flush()?;
    // Files that can't be removed stay.
    (0..ranks).for_each(|rank| drop(std::fs::remove_file(rank_file(file, rank))));
    Ok(())
}

/// A writer that never fails, because `tracing_chrome` would panic. Prints the first error.
struct BestEffortWriter<W> {
    out: W,
    file: PathBuf,
    lost: Arc<AtomicBool>,
}

impl<W: Write> BestEffortWriter<W> {
    fn new(out: W, file: &Path) -> Self {
        BestEffortWriter { out, file: file.to_path_buf(), lost: Arc::default() }
    }

    fn attempt(&mut self, write: impl FnOnce(&mut W) -> std::io::Result<()>) {
        if self.lost.load(Ordering::Relaxed) {
            return;
        }
        if let Err(error) = write(&mut self.out) {
            self.lost.store(true, Ordering::Relaxed);
            let (path, error) = (self.file.display(), file_limit::explained(error));
            Console::Stderr.line(format_args!("warning: can't write --trace {path}: {error}: the rest of it is lost"));
        }
    }
}

impl<W: Write> Write for BestEffortWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.attempt(|out| out.write_all(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.attempt(W::flush);
        Ok(())
    }
}

/// A writer that rewrites the events of `tracing_chrome`, one per line, for a rank's file.
struct RankWriter<W: Write> {
    out: W,
    rank: usize,
    /// Microseconds between the start of the first rank and the start of this rank.
    late: f64,
    /// An incomplete line.
    line: Vec<u8>,
    /// Whether the process has been named.
    introduced: bool,
}

impl<W: Write> RankWriter<W> {
    fn new(out: W, rank: usize, late: f64) -> Self {
        RankWriter { out, rank, late, line: vec![], introduced: false }
    }

    fn end_line(&mut self) -> std::io::Result<()> {
        let line = std::mem::take(&mut self.line);
        let event = line.strip_suffix(b"\n").unwrap_or(&line);
        let event = event.strip_suffix(b",").unwrap_or(event);
        match serde_json::from_slice::<Map<String, Value>>(event) {
            Ok(mut object) => {
                self.introduce()?;
                readable(&mut object, self.rank, self.late);
                serde_json::to_writer(&mut self.out, &object)?;
                self.out.write_all(&line[event.len()..])
            }
            // A bracket.
            Err(_) => self.out.write_all(&line),
        }
    }

    /// Writes the name of the process before its first event.
    fn introduce(&mut self) -> std::io::Result<()> {
        if std::mem::replace(&mut self.introduced, true) {
            return Ok(());
        }
        let name = json!({ "name": format!("rank {}", self.rank) });
        for (what, args) in [("process_name", name), ("process_sort_index", json!({ "sort_index": self.rank }))] {
            let event = json!({ "ph": "M", "pid": self.rank, "name": what, "args": args });
            writeln!(self.out, "{event},")?;
        }
        Ok(())
    }
}

impl<W: Write> Write for RankWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            self.line.extend_from_slice(piece);
            if piece.ends_with(b"\n") {
                self.end_line()?;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.end_line()?;
        self.out.flush()
    }
}

/// Gives an event a readable name, its rank, and a time that all ranks share.
fn readable(event: &mut Map<String, Value>, rank: usize, late: f64) {
    event.insert("pid".into(), rank.into());
    if let Some(tid) = event.get("tid").and_then(Value::as_u64) {
        event.insert("tid".into(), (rank as u64 * THREADS + tid + 1).into());
    }
    if let Some(ts) = event.get("ts").and_then(Value::as_f64) {
        event.insert("ts".into(), (ts + late).into());
    }
    let mut args = match event.remove("args") {
        Some(Value::Object(args)) => args,
        _ => Map::new(),
    };
    if event.get("name").is_some_and(|name| name == "thread_name") {
        let thread = args.get("name").and_then(Value::as_str).unwrap_or_default();
        args.insert("name".into(), thread_name(thread).into());
    } else {
        // `tracing_chrome` writes arguments with Rust's Debug: quoted text, which is nearly always JSON.
        for value in args.values_mut() {
            if let Some(better) = value.as_str().and_then(|text| serde_json::from_str(text).ok()) {
                *value = better;
            }
        }
        let name = event_name(event.get("name").and_then(Value::as_str).unwrap_or_default(), &args);
        event.insert("name".into(), name.into());
        args.remove("message");
    }
    if !args.is_empty() {
        event.insert("args".into(), args.into());
    }
}

/// Returns a name with the operation and the unit.
pub(crate) fn event_name(name: &str, args: &Map<String, Value>) -> String {
    let arg = |name: &str| args.get(name).and_then(Value::as_str);
    let what = match (arg("message"), name) {
        (Some(message), _) => message.to_string(),
        (None, "collective") => arg("op").unwrap_or(name).to_string(),
        (None, "wait for reduction") => format!("wait for {}", arg("what").unwrap_or("reduction")),
        (None, "step") => return format!("step {}", args.get("number").unwrap_or(&Value::Null)),
        (None, name) => name.to_string(),
    };
    match arg("unit") {
        Some(unit) => format!("{what} {unit}"),
        None => what,
    }
}

/// Returns a name for a thread. The progress thread of a group is called `fsdp <group>:<rank>`.
fn thread_name(thread: &str) -> String {
    match thread.strip_prefix("fsdp ").and_then(|group| group.rsplit_once(':')) {
        Some((group, _)) => format!("communication ({group})"),
        None if thread == "main" => "compute".into(),
        None => thread.to_string(),
    }
}

/// Starts logging to stderr, the trace if `file` is given, and the ranges of `--nvtx`. Collective.
pub(crate) fn init(trace: Option<&Path>, nvtx: bool, world: &World) -> anyhow::Result<Option<Trace>> {
    let filter = || EnvFilter::new("fsdp_candle=debug,fsdp_core=debug,train=debug");
    let (spans, trace) = match trace {
        Some(file) => {
            let (layer, trace) = Trace::start(file, world)?;
            (Some(layer.with_filter(filter())), Some(trace))
        }
        None => (None, None),
    };
    let ranges = nvtx.then(|| Nvtx::load().map(|layer| layer.with_filter(filter()))).transpose()?;
    tracing_subscriber::registry().with(spans).with(ranges).with(job::events()).init();
    Ok(trace)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(lines: &str) -> Vec<Value> {
        let mut file = vec![];
        let mut writer = RankWriter::new(&mut file, 2, 10.);
        // However the bytes come.
        lines.as_bytes().chunks(7).for_each(|piece| writer.write_all(piece).unwrap());
        writer.flush().unwrap();
        serde_json::from_slice(&file).unwrap()
    }

    #[test]
    fn events_have_readable_names_ranks_and_times() {
        let event = |fields: Value| {
            let mut event = json!({"ph": "B", "pid": 1, "tid": 0, "ts": 1.5, "name": "event src/x.rs:3"});
            event.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            event.to_string()
        };
        let lines = [
            event(json!({"args": {"message": "unshard", "unit": "\"layers.1\"", "parameters": "3"}})),
            event(json!({"name": "collective", "args": {"op": "\"all_gather\""}})),
            event(json!({"name": "wait for reduction", "args": {"unit": "\"layers.1\"", "what": "\"all-reduce\""}})),
            event(json!({"ph": "M", "name": "thread_name", "args": {"name": "fsdp world/3.0:2"}})),
        ];
        let events = rewritten(&format!("[\n{}\n]", lines.join(",\n")));
        let names: Vec<_> = events.iter().map(|event| event["name"].as_str().unwrap()).collect();
        let want = ["unshard layers.1", "all_gather", "wait for all-reduce layers.1", "thread_name"];
        assert_eq!(names, [&["process_name", "process_sort_index"], &want[..]].concat());
        assert_eq!(events[0]["args"]["name"], "rank 2");
        assert_eq!(events[2]["args"], json!({"unit": "layers.1", "parameters": 3}));
        assert_eq!(events[5]["args"]["name"], "communication (world/3.0)");
        for event in &events {
            assert_eq!(event["pid"], 2);
        }
        assert_eq!((&events[2]["tid"], &events[2]["ts"]), (&json!(2001), &json!(11.5)));
    }

    #[test]
    fn full_disk_loses_only_the_trace() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut writer =
            BestEffortWriter::new(RankWriter::new(BufWriter::with_capacity(16, full), 0, 0.), Path::new("t.json"));
        let lost = writer.lost.clone();
        writer.write_all(b"[\n").unwrap();
        assert!(!lost.load(Ordering::Relaxed), "it is still in the buffer");
        for _ in 0..2 {
            writer.write_all(b"{\"ph\": \"B\", \"name\": \"step\"},\n").unwrap();
            writer.flush().unwrap();
            assert!(lost.load(Ordering::Relaxed));
        }
    }

    #[test]
    fn empty_trace_is_valid() {
        assert!(rewritten("[\n\n]").is_empty());
    }
}
