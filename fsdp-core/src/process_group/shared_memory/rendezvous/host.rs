//! Rank 0's side of a meeting: it lets the others in.

use std::{
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
    net::SocketFlags,
};

use super::{
    super::super::patience::Patience,
    meeting::{Meeting, Met, SLICE, TOO_MANY_FILES, is_same_user, listed, timespec, went_away},
    message::{receive, reply, send},
};
use crate::{Error, Result};

/// Connections beyond the number of ranks that may be open at a time.
pub(super) const STRANGERS: usize = 64;

/// A rank that has said hello.
struct Guest {
    socket: OwnedFd,
    process: OwnedFd,
}

/// Waits for all others and gives each what they share.
pub(super) fn host(meeting: &Meeting<'_>, number: u64, file: OwnedFd, own: OwnedFd) -> Result<Met> {
    let started = Instant::now();
    let mut patience = Patience::default();
    let listener = listen(meeting)?;
    let mut guests: Vec<Option<Guest>> = (1..meeting.group.size).map(|_| None).collect();
    let mut strangers: Vec<OwnedFd> = Vec::new();
    let outcome = loop {
        let missing: Vec<_> = (1..meeting.group.size).filter(|rank| guests[rank - 1].is_none()).collect();
        if missing.is_empty() {
            break Ok(());
        }
        if let Err(error) = meeting.may_come(&missing) {
            break Err(error);
        }
        if started.elapsed() >= meeting.group.timeout {
            let seconds = meeting.group.timeout.as_secs_f64();
            let advice = match meeting.group.is_world() {
                true => "are they running, on this host, with the same MASTER_PORT and run id?",
                false => "are they running, and do they share this host's memory and network?",
            };
            break meeting.fail(format!("rank(s) {missing:?} did not arrive within {seconds:.1} s: {advice}"));
        }
        meeting.tell(&mut patience, || format!("rank(s) {}", listed(&missing)));
        if let Err(text) = receive_guests(meeting, &listener, &mut strangers, &mut guests) {
            break meeting.fail(text);
        }
    };
    // Whoever comes now is too late.
    drop(listener);
    if let Err(error) = outcome {
        let text = match &error {
            Error::Rendezvous { message, .. } => message.clone(),
            other => other.to_string(),
        };
        for socket in strangers.iter().chain(guests.iter().flatten().map(|guest| &guest.socket)) {
            let _ = send(socket, &reply(1, 0, &text), &[]);
        }
        return Err(error);
    }
    let guests: Vec<_> = guests.into_iter().flatten().collect();
    let mut fds = vec![file.as_fd(), own.as_fd()];
    fds.extend(guests.iter().map(|guest| guest.process.as_fd()));
    let message = reply(0, number, "");
    for (index, guest) in guests.iter().enumerate() {
        let sent = loop {
            match send(&guest.socket, &message, &fds) {
                // The kernel limits how many descriptors are on their way: the guests before have to take theirs.
                Err(Errno::TOOMANYREFS | Errno::AGAIN | Errno::INTR) if started.elapsed() < meeting.group.timeout => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                sent => break sent,
            }
        };
        sent.map_err(|errno| match errno {
            Errno::PIPE | Errno::CONNRESET => meeting.error(went_away(index + 1)),
            errno => meeting.os(&format!("sending the shared memory to rank {}", index + 1), errno),
        })?;
    }
    let processes = std::iter::once(own).chain(guests.into_iter().map(|guest| guest.process)).collect();
    Ok(Met { file, number, processes })
}

fn listen(meeting: &Meeting<'_>) -> Result<OwnedFd> {
    let address = meeting.address()?;
    let listener = meeting.socket()?;
    // An earlier job's rank 0 may be about to close it.
    let deadline = Instant::now() + meeting.group.timeout.min(Duration::from_secs(2));
    loop {
        match rustix::net::bind(&listener, &address) {
            Ok(()) => break,
            Err(Errno::ADDRINUSE) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            Err(Errno::ADDRINUSE) => {
                return meeting.fail(
                    "another process is rank 0 already: give each process a RANK of its own, and jobs that run side \
                     by side \
                     MASTER_PORTs or run ids of their own",
                );
            }
            Err(errno) => return Err(meeting.os("binding a socket", errno)),
        }
    }
    rustix::net::listen(&listener, meeting.group.size as i32).map_err(|errno| meeting.os("listening", errno))?;
    Ok(listener)
}

/// Waits a little for connections and messages and takes them in. The error is for all ranks.
fn receive_guests(
    meeting: &Meeting<'_>,
    listener: &OwnedFd,
    strangers: &mut Vec<OwnedFd>,
    guests: &mut [Option<Guest>],
) -> Result<(), String> {
    let seated: Vec<_> = (0..guests.len()).filter(|&index| guests[index].is_some()).collect();
    let ready: Vec<bool> = {
        let sockets =
            std::iter::once(listener).chain(strangers.iter()).chain(guests.iter().flatten().map(|guest| &guest.socket));
        let mut fds: Vec<_> = sockets.map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
        match rustix::event::poll(&mut fds, timespec(SLICE).as_ref()) {
            Ok(_) => fds.iter().map(|fd| !fd.revents().is_empty()).collect(),
            Err(_) => return Ok(()),
        }
    };
    let (strange, known) = ready[1..].split_at(strangers.len());
    if let Some((&index, _)) = seated.iter().zip(known).find(|(_, ready)| **ready) {
        // A seated guest has nothing more to say.
        return Err(went_away(index + 1));
    }
    let mut strange = strange.iter();
    let (speaking, silent): (Vec<_>, Vec<_>) =
        strangers.drain(..).partition(|_| strange.next().is_some_and(|&ready| ready));
    *strangers = silent;
    for socket in speaking {
        let (message, mut fds) = match receive(&socket) {
            Ok(received) => received,
            Err(Errno::MFILE | Errno::NFILE) => return Err(format!("letting ranks in: {TOO_MANY_FILES}")),
            Err(_) => continue,
        };
        match meeting.guest(&message) {
            None => continue,
            Some(Err(text)) => {
                strangers.push(socket);
                return Err(text);
            }
            Some(Ok(rank)) => {
                let Some(process) = fds.pop() else { continue };
                let seat = &mut guests[rank - 1];
                if seat.is_some() {
                    strangers.push(socket);
                    return Err(format!("two processes say they are rank {rank}: give each process a RANK of its own"));
                }
                *seat = Some(Guest { socket, process });
            }
        }
    }
    while ready[0] && strangers.len() < 2 * (meeting.group.size + STRANGERS) {
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) if is_same_user(&socket) => strangers.push(socket),
            Ok(_) | Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(Errno::MFILE | Errno::NFILE) => return Err(format!("letting ranks in: {TOO_MANY_FILES}")),
            Err(_) => break,
        }
    }
    // Ranks speak as soon as they are connected: who has been silent longest keeps others out for nothing.
    strangers.drain(..strangers.len().saturating_sub(meeting.group.size + STRANGERS));
    Ok(())
}
