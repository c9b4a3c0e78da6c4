//! The ranks' output: read as it arrives, and printed in whole lines with the rank's prefix, so that lines of different
//! ranks do not mix.

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

use fsdp_core::file_limit;
use rustix::event::{PollFd, PollFlags, poll};

use crate::{Console, Error, Result, rendezvous::RendezvousEvent, watch::Event};

/// Maximum length of a line. Longer lines are printed in pieces.
const MAX_LINE_LEN: usize = 64 << 10;

/// Time for the console's reader to take the remaining output, after a request to end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// The forwarded streams. Each has a thread.
pub(crate) struct Outputs {
    events: Sender<Event>,
    open: usize,
    /// Dropping the writer tells the threads that the ranks have ended: they stop at the end of the buffered output,
    /// even if another process keeps the stream open.
    ranks_live: Option<PipeWriter>,
    ranks_gone: Arc<PipeReader>,
}

impl Outputs {
    pub(crate) fn new(events: Sender<Event>) -> Result<Self> {
        let (ranks_gone, ranks_live) = io::pipe().map_err(Error::system("make a pipe"))?;
        Ok(Outputs { events, open: 0, ranks_live: Some(ranks_live), ranks_gone: Arc::new(ranks_gone) })
    }

    /// Forwards one stream of a rank to the console with a prefix, and unchanged to `copy`.
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

    /// Waits until all output of the ended ranks is printed. A signal ends the wait and is returned. If the launcher
    /// was interrupted before, the wait is short. Rendezvous events are added to `news`.
    pub(crate) fn finish(
        mut self,
        events: &Receiver<Event>,
        mut ended_before: usize,
        before: Option<i32>,
        rendezvous_events: &mut Vec<RendezvousEvent>,
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
                Some(Event::Rendezvous(event)) => rendezvous_events.push(event),
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
    // Buffered bytes when the ranks ended. Another process may keep writing forever.
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
            // A full disk does not end the run.
            let error = file_limit::explained(error);
            tracing::warn!("the log file of {}is no longer written: {error}", lines.prefix);
            copy = None;
        }
        if is_shown {
            lines.push(&chunk[..read]);
            if read == 0 {
                lines.end();
            }
            if let Err(error) = to.write_all(&lines.ready) {
                // Keep reading without a console: otherwise the rank would block or die of SIGPIPE.
                is_shown = false;
                warn_output_lost(to, error, copy.is_some());
            }
            lines.ready.clear();
        }
        if read == 0 {
            return Ok(());
        }
    }
}

/// Warns once for each console and each of: output kept in log files, output lost.
fn warn_output_lost(to: Console, error: io::Error, is_kept: bool) {
    static TOLD: [Once; 4] = [const { Once::new() }; 4];
    let (name, of_console) = match to {
        Console::Stdout => ("stdout", 0),
        Console::Stderr => ("stderr", 2),
    };
    TOLD[of_console + usize::from(is_kept)].call_once(|| {
        let error = file_limit::explained(error);
        if is_kept {
            tracing::warn!("the ranks' {name} is now written only to the log files: {error}");
        } else {
            tracing::warn!(
                "the ranks' {name} is lost from now on unless a log file keeps it; the run continues: {error}"
            );
        }
    });
}

/// Splits a stream into lines, and adds the rank's prefix.
struct Lines {
    prefix: String,
    /// Start of an incomplete line.
    partial: Vec<u8>,
    /// Whether a part of the current line was printed.
    cut: bool,
    /// Whether a carriage return ended the incomplete line. It is a part of a line end, or it starts a progress bar again.
    returned: bool,
    /// Complete lines with their prefix.
    ready: Vec<u8>,
}

impl Lines {
    fn with_prefix(prefix: &str) -> Self {
        Lines { prefix: prefix.into(), partial: Vec::new(), cut: false, returned: false, ready: Vec::new() }
    }

    fn push(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|byte| b"\n\r".contains(byte)) {
            if std::mem::take(&mut self.returned) {
                if piece == b"\n" {
                    self.partial.push(b'\r');
                } else {
                    // Each state of a bar is a line, as torchrun has it.
                    self.end();
                    self.cut = false;
                }
            }
            let (piece, returned) = piece.strip_suffix(b"\r").map_or((piece, false), |text| (text, true));
            self.returned = returned;
            let (text, complete) = piece.strip_suffix(b"\n").map_or((piece, false), |text| (text, true));
            self.partial.extend_from_slice(text);
            if complete {
                // The line was cut exactly at its end.
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

    /// Ends the stream, perhaps within a line.
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
    fn joins_chunks_into_lines() {
        assert_eq!(lines(&[b"a", b"b\n\nc\r", b"\nd"]), b"[rank 1] ab\n[rank 1] \n[rank 1] c\r\n[rank 1] d\n");
        assert_eq!(lines(&[b"\xff\0\n"]), b"[rank 1] \xff\0\n");
        assert_eq!(lines(&[]), b"");
    }

    #[test]
    fn each_state_of_a_bar_is_a_line() {
        let shown = lines(&[b"\r 0%|", b"   |\r 50%|", b"#  |\r100%|##|\n", b"done\r\n\r", b"\rend\r"]);
        let expected = [" 0%|   |", " 50%|#  |", "100%|##|", "done\r", "end"].map(|line| format!("[rank 1] {line}\n"));
        assert_eq!(String::from_utf8(shown).unwrap(), expected.concat());
    }

    #[test]
    fn cuts_a_long_line() {
        let half = vec![b'x'; MAX_LINE_LEN / 2];
        let piece = [b"[rank 1] ".as_slice(), &half, &half, b"\n"].concat();
        assert_eq!(lines(&[&half, &half, b"\nrest"]), [&piece, b"[rank 1] rest\n".as_slice()].concat());
        assert_eq!(lines(&[&half, &half, &half, &half]), [&*piece, &*piece].concat());
    }
}
