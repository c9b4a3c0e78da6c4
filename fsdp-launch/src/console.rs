//! The launcher's own stdout and stderr, which may be pipes that somebody else made non-blocking, or that nobody reads any more.

use std::{
    io::{self, Write},
    os::fd::BorrowedFd,
    sync::{Mutex, PoisonError, TryLockError},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, write},
    pipe::PIPE_BUF,
    stdio,
};

/// How long the launcher waits for room for its own words.
const LONGEST: Duration = Duration::from_secs(1);

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
    /// Writes a line of the launcher's own, and is content if nobody reads it: that must change neither what the launcher does nor its exit code, and not
    /// stop it for longer than a second.
    pub fn tell(self, line: &str) {
        self.offer(format!("{line}\n").as_bytes()).ok();
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

    fn offer(self, mut bytes: &[u8]) -> io::Result<()> {
        let until = Instant::now() + LONGEST;
        let (lock, stream) = self.stream();
        // Who has it may wait for the reader.
        let _guard = loop {
            match lock.try_lock() {
                Ok(guard) => break guard,
                Err(TryLockError::Poisoned(poisoned)) => break poisoned.into_inner(),
                Err(TryLockError::WouldBlock) if Instant::now() >= until => return Err(io::ErrorKind::TimedOut.into()),
                Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(5)),
            }
        };
        while !bytes.is_empty() {
            wait_for_room(stream, Some(until))?;
            // So much is taken without waiting where there is room.
            let (now, _) = bytes.split_at(bytes.len().min(PIPE_BUF));
            match write(stream, now) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => bytes = &bytes[written..],
                Err(Errno::INTR | Errno::AGAIN) => {}
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

    fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        let (lock, stream) = self.stream();
        let _guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        while !bytes.is_empty() {
            match write(stream, bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => bytes = &bytes[written..],
                Err(Errno::INTR) => {}
                // `EWOULDBLOCK` is the same number.
                Err(Errno::AGAIN) => wait_for_room(stream, None)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct OwnWords(Console);

impl Write for OwnWords {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.offer(bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits until something can be written; an error after `until`.
fn wait_for_room(stream: BorrowedFd<'_>, until: Option<Instant>) -> io::Result<()> {
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut [PollFd::from_borrowed_fd(stream, PollFlags::OUT)], left.as_ref()) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            // Ranks that end interrupt it too.
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
