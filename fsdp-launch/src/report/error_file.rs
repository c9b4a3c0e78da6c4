//! The error that a rank recorded in its `TORCHELASTIC_ERROR_FILE`, in the format of PyTorch's `@record`.

use std::{fs::File, io::Read, path::Path, time::SystemTime};

use serde::Deserialize;

use crate::report::shorten::shorten;

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
}
