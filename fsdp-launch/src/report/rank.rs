//! The report of a rank: how its process ended, the error that it recorded, and the end of its stderr.

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

/// How one rank ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// Host of the rank.
    pub host: String,
    /// Process id.
    pub pid: i32,
    /// How the rank ended, or asked to end by `MPI_Abort`. `None` if SIGKILL did not end it in time, as in an
    /// uninterruptible wait.
    pub exit_status: Option<ExitStatus>,
    /// Time of the end.
    pub ended_at: Option<SystemTime>,
    /// Time from start to end.
    pub after: Option<Age>,
    /// Last request of the launcher before the rank ended; `None` if it ended by itself.
    pub request: Option<StopRequest>,
    /// Time without heartbeat, if the rank was killed for it.
    pub silent_for: Option<Age>,
    /// State of the rank at the first failure on its host, or when ranks were asked to end for another reason.
    pub snapshot: Option<Box<RankSnapshot>>,
    /// Error from its `TORCHELASTIC_ERROR_FILE`, or its failure over PMI.
    pub message: Option<String>,
    /// End of its stderr, if the rank failed and its stderr goes only to a file.
    pub stderr: Option<LogEnd>,
}

/// Why a launch or an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Failure {
    /// This rank failed first.
    Rank(RankReport),
    /// A host and its ranks are gone.
    NodeLost {
        /// The host.
        host: String,
        /// How it was lost.
        how: String,
    },
    /// A host could not start its ranks.
    NotStarted {
        /// The host.
        host: String,
        /// Reason.
        why: String,
    },
    /// The hosts did not meet.
    Rendezvous {
        /// Reason, and a remedy.
        why: String,
    },
}

impl Failure {
    /// Returns the launcher's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            // A rank may fail over PMI and still exit with code 0.
            Failure::Rank(report) => report.exit_status.map_or(1, ExitStatus::exit_code).max(1),
            Failure::NodeLost { .. } | Failure::NotStarted { .. } | Failure::Rendezvous { .. } => 1,
        }
    }

    /// Shortens the message and removes the state, to keep failures of earlier attempts small.
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

/// Maximum length of a message of an earlier attempt.
const SHORT: usize = 300;

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Rank(report) => report.write_as_first(f),
            Failure::NodeLost { host, how } => write!(f, "node {host} {how}"),
            Failure::NotStarted { host, why } => write!(f, "node {host}: {why}"),
            Failure::Rendezvous { why } => f.write_str(why),
        }
    }
}

/// A failed attempt that another attempt followed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FailedAttempt {
    /// Attempt number, from 0.
    pub attempt: u32,
    /// First failure.
    pub failure: Failure,
}

impl RankReport {
    /// Limits the report to the size of a message: a rank can write anything to its status page.
    pub(crate) fn for_others(mut self) -> Self {
        if let Some(at) = &mut self.snapshot {
            at.status.collectives.truncate(4);
        }
        self
    }

    /// Writes the report of the first failed rank.
    fn write_as_first(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (pid {} on {}) failed first, ", self.rank, self.pid, self.host)?;
        match self.exit_status {
            _ if self.silent_for.is_some() => {
                let silent = self.silent_for.unwrap_or_default();
                let state = self.snapshot.as_ref().and_then(|at| at.process.as_ref());
                let state = state.map_or_else(String::new, |process| format!(" ({process})"));
                write!(f, "it hung: no heartbeat for {silent}{state}")?;
            }
            Some(end @ ExitStatus::Exited(_)) => write!(f, "with {end}")?,
            Some(end @ ExitStatus::Signaled(SIGKILL)) => {
                write!(f, "killed by {end}: from outside, often because the host ran out of memory (see `dmesg`)")?;
            }
            Some(ExitStatus::Signaled(libc::SIGXFSZ)) => {
                write!(
                    f,
                    "killed by SIGXFSZ: a file reached the limit of its size. Raise it by `ulimit -f unlimited`"
                )?;
            }
            Some(end) => write!(f, "killed by {end}")?,
            None => write!(f, "and did not end")?,
        }
        if let Some(message) = &self.message {
            write!(f, "\n  it recorded: {}", message.trim_end().replace('\n', "\n    "))?;
        }
        if let Some(at) = self.ended_at {
            write!(f, "\n  at {}", humantime::format_rfc3339_seconds(at))?;
            self.after.map_or(Ok(()), |after| write!(f, ", {after} after its start"))?;
        }
        self.stderr.as_ref().map_or(Ok(()), |end| write!(f, "\n  {end}"))
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// Exited with this code.
    Exited(i32),
    /// Killed by this signal.
    Signaled(i32),
}

impl ExitStatus {
    /// Returns whether the process exited with code 0.
    pub fn is_success(self) -> bool {
        self == ExitStatus::Exited(0)
    }

    /// Returns the code that a shell would report: the exit code, or 128 + the signal.
    pub fn exit_code(self) -> u8 {
        match self {
            // The system passes on only 8 bits.
            ExitStatus::Exited(code) => code as u8,
            ExitStatus::Signaled(signal) => (128 + signal) as u8,
        }
    }
}

impl fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ExitStatus::Exited(code) => write!(f, "exit code {code}"),
            ExitStatus::Signaled(signal) => f.write_str(&name_of(signal)),
        }
    }
}

pub(crate) fn name_of(signal: i32) -> String {
    signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}

/// Request by which the launcher ended a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum StopRequest {
    /// SIGTERM was sent.
    Terminate,
    /// SIGKILL was sent.
    Kill,
}

/// Limits of a file that a rank writes.
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

/// Returns the message in a rank's error file, if any.
pub(crate) fn read_message(path: &Path) -> Option<String> {
    // Opening a FIFO could block.
    path.symlink_metadata().ok().filter(|meta| meta.is_file())?;
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MAX_FILE).read_to_end(&mut bytes).ok()?;
    let mut message = match serde_json::from_slice(&bytes) {
        Ok(ErrorFile { message: Message::Text(message) | Message::Detailed { message } }) => message,
        // Show a partial file, or one of another format, as it is.
        Err(_) => String::from_utf8_lossy(&bytes).into_owned(),
    };
    shorten(&mut message, MAX_MESSAGE);
    (!message.trim().is_empty()).then_some(message)
}

/// Returns when the file was written: the earliest error is the likely cause.
pub(crate) fn recorded_at(path: &Path) -> Option<SystemTime> {
    path.symlink_metadata().ok()?.modified().ok()
}

/// Limits of the text that is shown.
const LINES: usize = 10;
const BYTES: u64 = 2 << 10;

/// Last lines of a log file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LogEnd {
    /// Path of the file.
    pub file: String,
    /// Up to 10 lines and 2 KiB, without control characters.
    pub lines: Vec<String>,
}

impl LogEnd {
    /// Reads the end of a file. Returns `None` for a blank or unreadable file.
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
    // Drop a partial first line, unless it is the only one.
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
    fn reads_both_formats() {
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
    fn cuts_a_long_message_between_characters() {
        let message = read(format!("{{\"message\": \"x{}\"}}", "é".repeat(MAX_MESSAGE)).as_bytes()).unwrap();
        assert!(message.len() <= MAX_MESSAGE + 4 && message.ends_with("é ..."), "{} bytes", message.len());
    }

    #[test]
    fn reads_the_last_whole_lines() {
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
