//! What a program says on stdout and stderr: where that can't be written any more, the words are lost and the work goes
//! on.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// One of the process's own streams. Writing to it never fails: `println!` would end hours of training because a disk
/// is full or a reader has gone. The first time that words are lost, the other stream says so.
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
            // Where both are lost there is nowhere left to tell.
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
