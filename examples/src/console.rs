//! Output to stdout and stderr that never fails.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// One of the process's own streams. Writing never fails: `println!` would panic after hours of training when a disk is
/// full or a reader is gone. The first lost write causes a warning on the other stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Console {
    /// stdout
    Stdout,
    /// stderr
    Stderr,
}

impl Console {
    /// Writes a line.
    pub fn line(self, words: impl Display) {
        self.put(format!("{words}\n").as_bytes());
    }

    fn put(self, bytes: &[u8]) {
        static LOST: [AtomicBool; 2] = [const { AtomicBool::new(false) }; 2];
        let (stream, other, name) = match self {
            Console::Stdout => (self, Console::Stderr, "stdout"),
            Console::Stderr => (self, Console::Stdout, "stderr"),
        };
        if let Err(error) = stream.try_put(bytes)
            && !LOST[self as usize].swap(true, Ordering::Relaxed)
        {
            let warning = format!("warning: can't write to {name} ({error}): words are lost, the program goes on\n");
            // Nothing can be reported if both streams fail.
            let _ = other.try_put(warning.as_bytes());
        }
    }

    fn try_put(self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Console::Stdout => {
                let mut stdout = io::stdout().lock();
                stdout.write_all(bytes)?;
                stdout.flush()
            }
            Console::Stderr => io::stderr().write_all(bytes),
        }
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.put(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
