//! The side of every rank but rank 0: it asks to be let in.

use std::{
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
};

use super::{
    super::super::patience::Patience,
    meeting::{Meeting, Met, SLICE, is_same_user, timespec, went_away},
    message::{parse_reply, receive, send},
};
use crate::Result;

/// Meets rank 0, and through it the others.
pub(super) fn join(meeting: &Meeting<'_>, own: OwnedFd) -> Result<Met> {
    let mut patience = Patience::default();
    let socket = connect(meeting, &mut patience)?;
    if !is_same_user(&socket) {
        return meeting.fail("the process that answers for rank 0 belongs to another user");
    }
    match send(&socket, &meeting.hello(), &[own.as_fd()]) {
        // What rank 0 said before it hung up is still to be read.
        Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => {}
        Err(errno) => return Err(meeting.os("saying hello", errno)),
    }
    // Rank 0 answers when its own time is over, and it may have started later than this rank.
    let (started, longest) = (Instant::now(), meeting.group.timeout.saturating_add(Duration::from_secs(2)));
    loop {
        let mut fds = [PollFd::new(&socket, PollFlags::IN)];
        if rustix::event::poll(&mut fds, timespec(SLICE).as_ref()).is_ok_and(|ready| ready > 0) {
            break;
        }
        (meeting.all_well)()?;
        if started.elapsed() >= longest {
            return meeting.fail(format!(
                "rank 0 did not answer within {:.1} s: is it stopped? Otherwise raise FSDP_TIMEOUT_S",
                longest.as_secs_f64()
            ));
        }
        meeting.tell(&mut patience, || "the ranks that rank 0 has not met yet".into());
    }
    let (message, mut fds) = match receive(&socket) {
        Ok(received) => received,
        Err(Errno::CONNRESET) => Default::default(),
        Err(errno) => return Err(meeting.os("receiving rank 0's answer", errno)),
    };
    if message.is_empty() {
        (meeting.all_well)()?;
        return meeting.fail(went_away(0));
    }
    let Some((status, number, text)) = parse_reply(&message) else {
        return meeting.fail("rank 0 answered in another protocol: run the same build everywhere");
    };
    if status != 0 {
        return meeting.fail(format!("rank 0 says: {text}"));
    }
    if fds.len() != meeting.group.size + 1 {
        return meeting.fail(format!("rank 0 sent {} descriptors instead of {}", fds.len(), meeting.group.size + 1));
    }
    let processes = fds.split_off(1);
    match fds.pop() {
        Some(file) => Ok(Met { file, number, processes }),
        None => meeting.fail("rank 0 sent no shared memory"),
    }
}

/// A connection to rank 0, which may not be there yet.
pub(super) fn connect(meeting: &Meeting<'_>, patience: &mut Patience) -> Result<OwnedFd> {
    let address = meeting.address()?;
    let socket = meeting.socket()?;
    let started = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            // Nobody listens yet, or too many wait to be let in.
            Err(Errno::CONNREFUSED | Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => return Err(meeting.os("connecting to rank 0", errno)),
        }
        meeting.may_come(&[0])?;
        if started.elapsed() >= meeting.group.timeout {
            return meeting.fail(format!(
                "rank(s) [0] did not arrive within {:.1} s: is it running, on this host, with the same MASTER_PORT \
                 and run id?",
                meeting.group.timeout.as_secs_f64()
            ));
        }
        meeting.tell(patience, || "rank(s) 0".into());
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}
