//! What became of a rank: how its process ended, the error that it recorded, and the end of its stderr.

use std::{
    fmt,
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
    time::SystemTime,
};

use fsdp_core::heartbeat::Age;
use serde::{Deserialize, Serialize};
use signal_hook::{consts::SIGKILL, low_level::signal_name};

use crate::report::rank_snapshot::RankSnapshot;

/// What became of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// The host it ran on.
    pub host: String,
    /// Its process id.
    pub pid: i32,
    /// How it ended, or wanted to by `MPI_Abort`; `None` for a process that not even SIGKILL ended in time (it hangs in
    /// the kernel).
    pub exit_status: Option<ExitStatus>,
    /// When it ended.
    pub ended_at: Option<SystemTime>,
    /// How long after its start.
    pub after: Option<Age>,
    /// The last thing the launcher did to make it end, before it ended; `None` if it ended by itself.
    pub request: Option<StopRequest>,
    /// How long its heart had stood still, if it was ended because of that.
    pub silent_for: Option<Age>,
    /// Where it was when the first rank of its host failed, or when the ranks were asked to end for another reason.
    pub snapshot: Option<Box<RankSnapshot>>,
    /// The error it recorded in its `TORCHELASTIC_ERROR_FILE`, or what it did over PMI.
    pub message: Option<String>,
    /// The end of its stderr, if it failed and its stderr goes to a file only.
    pub stderr: Option<LogEnd>,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Failure {
    /// This rank failed, before all others.
    Rank(RankReport),
    /// A host is gone with its ranks.
    NodeLost {
        /// The host.
        host: String,
        /// How it went.
        how: String,
    },
    /// A host could not start its ranks.
    NotStarted {
        /// The host.
        host: String,
        /// Why not.
        why: String,
    },
    /// The hosts did not come together.
    Rendezvous {
        /// Why not, and the way out.
        why: String,
    },
}

impl Failure {
    /// What the launcher should exit with.
    pub fn exit_code(&self) -> u8 {
        match self {
            // A rank may fail by what it told, and end well all the same.
            Failure::Rank(report) => report.exit_status.map_or(1, ExitStatus::exit_code).max(1),
            Failure::NodeLost { .. } | Failure::NotStarted { .. } | Failure::Rendezvous { .. } => 1,
        }
    }

    /// The same with no more than the start of what the rank said, and without where it was.
    pub(crate) fn shortened(mut self) -> Self {
        match &mut self {
            Failure::Rank(report) => {
                report.snapshot = None;
                report.stderr = None;
                report.message.iter_mut().for_each(|message| shorten(message, SHORT));
            }
            Failure::NodeLost { how: text, .. }
            | Failure::NotStarted { why: text, .. }
            | Failure::Rendezvous { why: text } => shorten(text, SHORT),
        }
        self
    }
}

/// Bytes of a message that are kept of an attempt before the last.
const SHORT: usize = 300;

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Rank(report) => write!(f, "{}", report.as_first()),
            Failure::NodeLost { host, how } => write!(f, "node {host} {how}"),
            Failure::NotStarted { host, why } => write!(f, "node {host}: {why}"),
            Failure::Rendezvous { why } => f.write_str(why),
        }
    }
}

/// What went wrong in an attempt that was followed by another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FailedAttempt {
    /// The attempt, counted from 0.
    pub attempt: u32,
    /// What went wrong first.
    pub failure: Failure,
}

/// Says how the rank that failed first did.
pub(crate) struct First<'a>(&'a RankReport);

impl RankReport {
    /// What other hosts are told: no more of where it was than fits a message, whatever a rank wrote on its board.
    pub(crate) fn for_others(mut self) -> Self {
        if let Some(at) = &mut self.snapshot {
            at.status.collectives.truncate(4);
        }
        self
    }

    pub(crate) fn as_first(&self) -> First<'_> {
        First(self)
    }
}

impl fmt::Display for First<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.0;
        write!(f, "rank {} (pid {} on {}) failed first, ", report.rank, report.pid, report.host)?;
        match report.exit_status {
            _ if report.silent_for.is_some() => {
                let silent = report.silent_for.unwrap_or_default();
                let state = report.snapshot.as_ref().and_then(|at| at.process.as_ref());
                let state = state.map_or_else(String::new, |process| format!(" ({process})"));
                write!(f, "it hung: no heartbeat for {silent}{state}")?;
            }
            Some(end @ ExitStatus::Exited(_)) => write!(f, "with {end}")?,
            Some(end @ ExitStatus::Signaled(SIGKILL)) => {
                write!(f, "killed by {end}: from outside, often because the host ran out of memory (see `dmesg`)")?;
            }
            Some(end) => write!(f, "killed by {end}")?,
            None => write!(f, "and did not end")?,
        }
        if let Some(message) = &report.message {
            write!(f, "\n  it recorded: {}", message.trim_end().replace('\n', "\n    "))?;
        }
        if let Some(at) = report.ended_at {
            write!(f, "\n  at {}", humantime::format_rfc3339_seconds(at))?;
            report.after.map_or(Ok(()), |after| write!(f, ", {after} after its start"))?;
        }
        report.stderr.as_ref().map_or(Ok(()), |end| write!(f, "\n  {end}"))
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// By itself, with this exit code.
    Exited(i32),
    /// By this signal.
    Signaled(i32),
}

impl ExitStatus {
    /// Exit code 0.
    pub fn is_success(self) -> bool {
        self == ExitStatus::Exited(0)
    }

    /// As a shell reports it: the exit code, or 128 + the signal's number.
    pub fn exit_code(self) -> u8 {
        match self {
            ExitStatus::Exited(code) => low_byte(code),
            ExitStatus::Signaled(signal) => low_byte(128 + signal),
        }
    }
}

/// All that the system passes on of an exit code.
fn low_byte(code: i32) -> u8 {
    code.to_le_bytes()[0]
}

impl fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ExitStatus::Exited(code) => write!(f, "exit code {code}"),
            ExitStatus::Signaled(signal) => f.write_str(&name_of(signal)),
        }
    }
}

/// As people call it.
pub(crate) fn name_of(signal: i32) -> String {
    signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}

/// What the launcher did to end a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum StopRequest {
    /// Sent SIGTERM.
    Terminate,
    /// Sent SIGKILL.
    Kill,
}

/// No more of a file is read, and no more of a message shown: a rank writes what it likes.
const MAX_FILE: u64 = 1 << 20;
const MAX_MESSAGE: usize = 4 << 10;

#[derive(Deserialize)]
struct ErrorFile {
    message: Message,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Message {
    Text(String),
    Detailed { message: String },
}

/// The message in the file at `path`; `None` where a rank recorded nothing.
pub(crate) fn read_message(path: &Path) -> Option<String> {
    // Anything but a plain file, a FIFO say, could make us wait.
    path.symlink_metadata().ok().filter(|meta| meta.is_file())?;
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MAX_FILE).read_to_end(&mut bytes).ok()?;
    let mut message = match serde_json::from_slice(&bytes) {
        Ok(ErrorFile { message: Message::Text(message) | Message::Detailed { message } }) => message,
        // Cut off while it was being written, or of another format: better shown than lost.
        Err(_) => String::from_utf8_lossy(&bytes).into_owned(),
    };
    shorten(&mut message, MAX_MESSAGE);
    (!message.trim().is_empty()).then_some(message)
}

/// When the file at `path` was written: the error that came first is the cause of those that followed.
pub(crate) fn recorded_at(path: &Path) -> Option<SystemTime> {
    path.symlink_metadata().ok()?.modified().ok()
}

/// How much is shown: lines, and bytes.
const LINES: usize = 10;
const BYTES: u64 = 2 << 10;

/// The last lines of a log file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LogEnd {
    /// The file.
    pub file: String,
    /// Its last lines, without control characters; at most 10, and 2 KiB.
    pub lines: Vec<String>,
}

impl LogEnd {
    /// Of the file at `path`; nothing where it can't be read or is blank.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let text = last_bytes(path).ok()?;
        let plain = |line: &str| line.chars().filter(|c| !c.is_control() || *c == '\t').collect();
        let mut lines: Vec<String> = text.lines().rev().take(LINES).map(plain).collect();
        lines.reverse();
        (!lines.is_empty()).then(|| LogEnd { file: path.display().to_string(), lines })
    }
}

fn last_bytes(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let start = file.metadata()?.len().saturating_sub(BYTES);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(BYTES).read_to_end(&mut bytes)?;
    let text = bytes.trim_ascii_end();
    // A line that was cut tells little, unless it is the only one.
    let first = if start == 0 { 0 } else { text.iter().position(|&byte| byte == b'\n').map_or(0, |end| end + 1) };
    Ok(String::from_utf8_lossy(&text[first..]).into_owned())
}

impl fmt::Display for LogEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ends with:", self.file)?;
        self.lines.iter().try_for_each(|line| write!(f, "\n    {line}"))
    }
}

/// Cuts `text` to about `most` bytes.
pub(crate) fn shorten(text: &mut String, most: usize) {
    if text.len() > most {
        let end = (0..=most).rev().find(|&end| text.is_char_boundary(end));
        text.truncate(end.unwrap_or(0));
        text.push_str(" ...");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(content: &[u8]) -> Option<String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        read_message(file.path())
    }

    #[test]
    fn both_formats_and_none() {
        let detailed = br#"{"message": {"message": "RuntimeError: no data",
            "extraInfo": {"py_callstack": "...", "timestamp": "17"}}}"#;
        assert_eq!(read(detailed).as_deref(), Some("RuntimeError: no data"));
        assert_eq!(read(br#"{"message": "no data"}"#).as_deref(), Some("no data"));
        assert_eq!(read(b"{\"mess\xff").as_deref(), Some("{\"mess\u{fffd}"));
        assert_eq!(read(b" \n"), None);
        assert_eq!(read_message(Path::new("/no/such/file")), None);
        assert_eq!(read_message(Path::new("/")), None);
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let message = read(format!("{{\"message\": \"x{}\"}}", "é".repeat(MAX_MESSAGE)).as_bytes()).unwrap();
        assert!(message.len() <= MAX_MESSAGE + 4 && message.ends_with("é ..."), "{} bytes", message.len());
    }

    #[test]
    fn no_more_than_the_last_whole_lines() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let lines_of = |text: &[u8]| {
            std::fs::write(file.path(), text).unwrap();
            LogEnd::of(file.path()).map(|end| end.lines)
        };
        assert_eq!(lines_of(b""), None);
        assert_eq!(lines_of(b"\n \n"), None);
        assert_eq!(lines_of(b"a\n\n\x1b[1mb\xff").unwrap(), ["a", "", "[1mb\u{fffd}"]);
        let many: String = (0..1000).map(|number| format!("line {number}\n")).collect();
        let last = lines_of(many.as_bytes()).unwrap();
        assert_eq!((last.len(), last[0].as_str(), last[9].as_str()), (10, "line 990", "line 999"));
        let long = format!("{}\nend\n", "x".repeat(5000));
        assert_eq!(lines_of(long.as_bytes()).unwrap(), ["end"]);
        assert_eq!(lines_of("x".repeat(5000).as_bytes()).unwrap()[0].len(), 2048);
        assert_eq!(lines_of(format!("Traceback\n{}\n", "x".repeat(5000)).as_bytes()).unwrap()[0].len(), 2047);
        assert_eq!(LogEnd::of(Path::new("/no/such/file")), None);
    }
}
