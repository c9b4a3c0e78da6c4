//! The launcher's own stdout and stderr, which may be pipes that somebody else made non-blocking, or that nobody reads
//! any more.

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

/// How long the launcher waits for room for its own words.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);

/// One of the launcher's own streams: what is written in one call of `write_all` stays together, and waits for the
/// reader, also where the stream is non-blocking. Nothing is buffered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Console {
    /// stdout
    Stdout,
    /// stderr
    Stderr,
}

impl Console {
    /// Writes a line of the launcher's own, and is content if nobody reads it: that must change neither what the
    /// launcher does nor its exit code, and not stop it for longer than a second.
    pub fn print_line(self, line: &str) {
        self.write_until(format!("{line}\n").as_bytes(), Some(Instant::now() + MESSAGE_TIMEOUT)).ok();
    }

    /// Where [`tell`](Self::tell) writes.
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

    /// With `deadline` it gives up then, and never waits in the write itself.
    fn write_until(self, mut bytes: &[u8], deadline: Option<Instant>) -> io::Result<()> {
        let (lock, stream) = self.stream();
        // Another thread may hold the lock while it waits for the reader.
        let _guard = match deadline {
            Some(deadline) => lock.try_lock_until(deadline).ok_or(io::ErrorKind::TimedOut)?,
            None => lock.lock(),
        };
        while !bytes.is_empty() {
            // So much is taken without waiting where there is room.
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

/// Waits deadline something can be written; an error after `deadline`.
fn wait_for_room(stream: BorrowedFd<'_>, deadline: Option<Instant>) -> io::Result<()> {
    // Ranks that end interrupt it.
    let ready = retry_on_intr(|| {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        poll(&mut [PollFd::from_borrowed_fd(stream, PollFlags::OUT)], left.as_ref())
    })?;
    if ready == 0 { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
}
