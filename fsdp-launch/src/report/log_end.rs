//! The end of what a rank wrote to its stderr, for when nobody saw it: a traceback, most often.

use std::{
    fmt,
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};

use serde::{Deserialize, Serialize};

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

#[cfg(test)]
mod tests {
    use super::*;

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
