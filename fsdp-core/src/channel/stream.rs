//! A stream whose reads end at a moment, however the bytes trickle.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

/// How long a handshake may take, and a write.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

pub(super) struct Timed {
    pub(super) stream: TcpStream,
    /// Of the reads to come; none where the clock can't count so far.
    deadline: Option<Instant>,
}

impl Timed {
    /// The first reads may take as long as a handshake may.
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut timed = Timed { stream, deadline: None };
        timed.within(PATIENCE);
        Ok(timed)
    }

    /// What is read from now on must have come within this time.
    pub(super) fn within(&mut self, timeout: Duration) {
        self.deadline = Instant::now().checked_add(timeout);
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(left)?;
        self.stream.read(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
            _ => error,
        })
    }
}

impl Write for Timed {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.stream.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
