//! The launcher's own stdout and stderr, which may be pipes that somebody else made non-blocking, or that nobody reads any more.

use std::{
    io::{self, Write},
    os::fd::{AsFd, BorrowedFd},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::{Errno, write},
};

/// One of the launcher's own streams: what is written in one call of `write_all` stays together, and waits for the reader, also where the stream is
/// non-blocking. Nothing is buffered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Console {
    /// stdout
    Stdout,
    /// stderr
    Stderr,
}

impl Console {
    /// Writes a line, and is content if nobody reads it: that must change neither what the launcher does nor its exit code.
    pub fn tell(mut self, line: &str) {
        self.write_all(format!("{line}\n").as_bytes()).ok();
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_all(bytes).map(|()| bytes.len())
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Console::Stdout => write_to(io::stdout().lock().as_fd(), bytes),
            Console::Stderr => write_to(io::stderr().lock().as_fd(), bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_to(stream: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match write(stream, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            // `EWOULDBLOCK` is the same number.
            Err(Errno::AGAIN) => wait_for_room(stream)?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn wait_for_room(stream: BorrowedFd<'_>) -> io::Result<()> {
    match poll(&mut [PollFd::from_borrowed_fd(stream, PollFlags::OUT)], None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
