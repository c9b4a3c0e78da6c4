//! The launcher's own stdout and stderr. They may be non-blocking pipes, or pipes that nobody reads.

use std::{
    io::{self, Write},
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, retry_on_intr, write},
    pipe::PIPE_BUF,
    stdio,
};

/// Time limit for the launcher's own messages.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);

/// One of the launcher's own streams. One `write_all` stays together and waits for the reader, even if the stream is
/// non-blocking. There is no buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Console {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl Console {
    /// Writes a line of the launcher. Gives up silently after a second without a reader, so that a stalled console
    /// changes neither the run nor the exit code.
    pub fn print_line(self, line: &str) {
        self.write_until(format!("{line}\n").as_bytes(), Some(Instant::now() + MESSAGE_TIMEOUT)).ok();
    }

    /// Returns a writer with the time limit of [`print_line`](Self::print_line).
    pub fn writer_with_timeout(self) -> impl Write {
        TimedWriter(self)
    }

    fn stream(self) -> (&'static Mutex<()>, BorrowedFd<'static>) {
        static STDOUT: Mutex<()> = Mutex::new(());
        static STDERR: Mutex<()> = Mutex::new(());
        match self {
            Console::Stdout => (&STDOUT, stdio::stdout()),
            Console::Stderr => (&STDERR, stdio::stderr()),
        }
    }

    /// With a `deadline`, it fails at the deadline and never blocks in `write`.
    fn write_until(self, mut bytes: &[u8], deadline: Option<Instant>) -> io::Result<()> {
        let (lock, stream) = self.stream();
        // Another thread may hold the lock while it waits for the reader.
        let _guard = match deadline {
            Some(deadline) => lock.try_lock_until(deadline).ok_or(io::ErrorKind::TimedOut)?,
            None => lock.lock(),
        };
        while !bytes.is_empty() {
            // A ready pipe takes this many bytes without blocking.
            let most = if deadline.is_some() { PIPE_BUF } else { usize::MAX };
            if deadline.is_some() {
                wait_for_room(stream, deadline)?;
            }
            match write(stream, &bytes[..bytes.len().min(most)]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => bytes = &bytes[written..],
                Err(Errno::INTR) => {}
                // `EWOULDBLOCK` is the same number.
                Err(Errno::AGAIN) => wait_for_room(stream, deadline)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_all(bytes).map(|()| bytes.len())
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_until(bytes, None)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct TimedWriter(Console);

impl Write for TimedWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write_until(bytes, Some(Instant::now() + MESSAGE_TIMEOUT)).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits until the stream is writable. Fails at the `deadline`.
fn wait_for_room(stream: BorrowedFd<'_>, deadline: Option<Instant>) -> io::Result<()> {
    // SIGCHLD interrupts the call.
    let ready = retry_on_intr(|| {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        poll(&mut [PollFd::from_borrowed_fd(stream, PollFlags::OUT)], left.as_ref())
    })?;
    if ready == 0 { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
}
