//! The ranks' output: read as it comes, printed by whole lines behind the rank's prefix, so that lines of different
//! ranks never mix.

pub(crate) mod console;
pub(crate) mod logs;

use std::{
    fs::File,
    io::{self, PipeReader, PipeWriter, Read, Write},
    os::fd::OwnedFd,
    sync::{Arc, Once, mpsc::Receiver, mpsc::Sender},
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, poll};

use crate::{Console, Error, Result, rendezvous::RendezvousEvent, watch::Event};

/// A line longer than this is printed in pieces, each a line of its own.
const MAX_LINE_LEN: usize = 64 << 10;

/// How long the reader of a launcher that was asked to end may take for what is left.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// The streams that are being printed, each by a thread.
pub(crate) struct Outputs {
    events: Sender<Event>,
    open: usize,
    /// Dropping the writer tells the threads to stop at the end of what is there: whoever else holds a stream open, it
    /// is no rank.
    ranks_live: Option<PipeWriter>,
    ranks_gone: Arc<PipeReader>,
}

impl Outputs {
    pub(crate) fn new(events: Sender<Event>) -> Result<Self> {
        let (ranks_gone, ranks_live) = io::pipe().map_err(Error::system("make a pipe"))?;
        Ok(Outputs { events, open: 0, ranks_live: Some(ranks_live), ranks_gone: Arc::new(ranks_gone) })
    }

    /// Starts to print one stream of `rank` behind `prefix`; `copy` gets it as it is.
    pub(crate) fn forward(
        &mut self,
        rank: usize,
        prefix: &str,
        source: OwnedFd,
        to: Console,
        copy: Option<File>,
    ) -> Result<()> {
        let lines = Lines::with_prefix(prefix);
        let (events, ranks_gone) = (self.events.clone(), Arc::clone(&self.ranks_gone));
        let print = move || {
            if let Err(error) = print_lines(&mut File::from(source), &ranks_gone, lines, to, copy) {
                tracing::debug!("the output of rank {rank} to {to:?} is lost: {error}");
            }
            events.send(Event::OutputEnded).ok();
        };
        thread::Builder::new()
            .name(format!("rank {rank} {to:?}"))
            .spawn(print)
            .map_err(Error::system("start a thread for a rank's output"))?;
        self.open += 1;
        Ok(())
    }

    /// After the ranks have ended: waits until all they wrote is printed, or a signal, which is returned, says that
    /// nobody wants to wait for a reader that has stalled; if one had said so `before`, not for long. What is heard of
    /// other hosts goes to `news`.
    pub(crate) fn finish(
        mut self,
        events: &Receiver<Event>,
        mut ended_before: usize,
        before: Option<i32>,
        news: &mut Vec<RendezvousEvent>,
    ) -> Option<i32> {
        self.ranks_live = None;
        let until = before.map(|_| Instant::now() + DRAIN_TIMEOUT);
        while ended_before < self.open {
            let event = match until {
                Some(until) => events.recv_timeout(until.saturating_duration_since(Instant::now())).ok(),
                None => events.recv().ok(),
            };
            match event {
                Some(Event::OutputEnded) => ended_before += 1,
                Some(Event::ChildEnded | Event::Pmi { .. }) => {}
                Some(Event::Rendezvous(heard)) => news.push(heard),
                Some(Event::Interrupted(signal)) => return Some(signal),
                None => break,
            }
        }
        before
    }
}

fn print_lines(
    source: &mut File,
    ranks_gone: &PipeReader,
    mut lines: Lines,
    mut to: Console,
    mut copy: Option<File>,
) -> io::Result<()> {
    let mut chunk = vec![0; 16 << 10];
    let mut is_shown = true;
    // Bytes that were there when the ranks had ended: who writes on is no rank, and may do so for ever.
    let mut left: Option<usize> = None;
    loop {
        let mut fds = [PollFd::new(&*source, PollFlags::IN), PollFd::new(ranks_gone, PollFlags::IN)];
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            polled => polled?,
        };
        let (nothing_there, are_gone) = (fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if are_gone && left.is_none() {
            left = Some(usize::try_from(rustix::io::ioctl_fionread(&*source)?).unwrap_or(usize::MAX));
        }
        let wanted = left.map_or(chunk.len(), |left| left.min(chunk.len()));
        let read = if nothing_there { 0 } else { source.read(&mut chunk[..wanted])? };
        left = left.map(|left| left - read);
        if let Err(error) = copy.as_mut().map_or(Ok(()), |copy| copy.write_all(&chunk[..read])) {
            // A full disk is no reason to end the run.
            tracing::warn!("the log file of {}is not written any further: {error}", lines.prefix);
            copy = None;
        }
        if is_shown {
            lines.push(&chunk[..read]);
            if read == 0 {
                lines.end();
            }
            if let Err(error) = to.write_all(&lines.ready) {
                // Neither a full disk nor a reader that has seen enough is a reason to end the run, and a rank whose
                // output nobody takes would end.
                is_shown = false;
                warn_output_lost(to, &error, copy.is_some());
            }
            lines.ready.clear();
        }
        if read == 0 {
            return Ok(());
        }
    }
}

/// Says of each console that it takes nothing any more: once to what is kept, and once to what is not.
fn warn_output_lost(to: Console, error: &io::Error, is_kept: bool) {
    static TOLD: [Once; 4] = [const { Once::new() }; 4];
    let (name, of_console) = match to {
        Console::Stdout => ("stdout", 0),
        Console::Stderr => ("stderr", 2),
    };
    TOLD[of_console + usize::from(is_kept)].call_once(|| {
        if is_kept {
            tracing::warn!("what the ranks print to {name} is no longer shown, only kept in the log files: {error}");
        } else {
            tracing::warn!(
                "what the ranks print to {name}, and no log file keeps, is lost from now on, and the run goes on: \
                 {error}"
            );
        }
    });
}

/// Cuts a stream into lines and names the rank before each.
struct Lines {
    prefix: String,
    /// The start of a line whose end has not come.
    partial: Vec<u8>,
    /// Part of the line that `partial` belongs to has been printed.
    cut: bool,
    /// Complete lines with their prefix.
    ready: Vec<u8>,
}

impl Lines {
    fn with_prefix(prefix: &str) -> Self {
        Lines { prefix: prefix.into(), partial: Vec::new(), cut: false, ready: Vec::new() }
    }

    fn push(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            let (text, complete) = piece.strip_suffix(b"\n").map_or((piece, false), |text| (text, true));
            self.partial.extend_from_slice(text);
            if complete {
                // Where the line was cut exactly at its end there is nothing more to print.
                if !(self.cut && self.partial.is_empty()) {
                    self.print_partial();
                }
                self.cut = false;
            } else if self.partial.len() >= MAX_LINE_LEN {
                self.print_partial();
                self.cut = true;
            }
        }
    }

    /// The stream has ended, perhaps in the middle of a line.
    fn end(&mut self) {
        if !self.partial.is_empty() {
            self.print_partial();
        }
    }

    fn print_partial(&mut self) {
        self.ready.extend_from_slice(self.prefix.as_bytes());
        self.ready.append(&mut self.partial);
        self.ready.push(b'\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(chunks: &[&[u8]]) -> Vec<u8> {
        let mut lines = Lines::with_prefix("[rank 1] ");
        chunks.iter().for_each(|chunk| lines.push(chunk));
        lines.end();
        lines.ready
    }

    #[test]
    fn lines_are_put_together_from_chunks() {
        assert_eq!(lines(&[b"a", b"b\n\nc\r", b"\nd"]), b"[rank 1] ab\n[rank 1] \n[rank 1] c\r\n[rank 1] d\n");
        assert_eq!(lines(&[b"\xff\0\n"]), b"[rank 1] \xff\0\n");
        assert_eq!(lines(&[]), b"");
    }

    #[test]
    fn a_long_line_is_cut() {
        let half = vec![b'x'; MAX_LINE_LEN / 2];
        let piece = [b"[rank 1] ".as_slice(), &half, &half, b"\n"].concat();
        assert_eq!(lines(&[&half, &half, b"\nrest"]), [&piece, b"[rank 1] rest\n".as_slice()].concat());
        assert_eq!(lines(&[&half, &half, &half, &half]), [&*piece, &*piece].concat());
    }
}
