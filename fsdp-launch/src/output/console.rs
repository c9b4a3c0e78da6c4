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
const LONGEST: Duration = Duration::from_secs(1);

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
    pub fn tell(self, line: &str) {
        self.put(format!("{line}\n").as_bytes(), Some(Instant::now() + LONGEST)).ok();
    }

    /// Where [`tell`](Self::tell) writes.
    pub fn for_own_words(self) -> impl Write {
        OwnWords(self)
    }

    fn stream(self) -> (&'static Mutex<()>, BorrowedFd<'static>) {
        static STDOUT: Mutex<()> = Mutex::new(());
        static STDERR: Mutex<()> = Mutex::new(());
        match self {
            Console::Stdout => (&STDOUT, stdio::stdout()),
            Console::Stderr => (&STDERR, stdio::stderr()),
        }
    }

    /// With `until` it gives up then, and never waits in the write itself.
    fn put(self, mut bytes: &[u8], until: Option<Instant>) -> io::Result<()> {
        let (lock, stream) = self.stream();
        // Another thread may hold the lock while it waits for the reader.
        let _guard = match until {
            Some(until) => lock.try_lock_until(until).ok_or(io::ErrorKind::TimedOut)?,
            None => lock.lock(),
        };
        while !bytes.is_empty() {
            // So much is taken without waiting where there is room.
            let most = if until.is_some() { PIPE_BUF } else { usize::MAX };
            if until.is_some() {
                wait_for_room(stream, until)?;
            }
            match write(stream, &bytes[..bytes.len().min(most)]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => bytes = &bytes[written..],
                Err(Errno::INTR) => {}
                // `EWOULDBLOCK` is the same number.
                Err(Errno::AGAIN) => wait_for_room(stream, until)?,
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
        self.put(bytes, None)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct OwnWords(Console);

impl Write for OwnWords {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.put(bytes, Some(Instant::now() + LONGEST)).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits until something can be written; an error after `until`.
fn wait_for_room(stream: BorrowedFd<'_>, until: Option<Instant>) -> io::Result<()> {
    // Ranks that end interrupt it.
    let ready = retry_on_intr(|| {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        poll(&mut [PollFd::from_borrowed_fd(stream, PollFlags::OUT)], left.as_ref())
    })?;
    if ready == 0 { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
}
