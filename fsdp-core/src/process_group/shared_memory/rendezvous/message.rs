//! The messages of a meeting, and sending them with descriptors.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{BorrowedFd, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags,
    },
};

/// The most ranks: the kernel passes at most 253 descriptors in a message, and one is the shared file.
pub(crate) const MOST_RANKS: usize = 252;
/// How every message begins.
pub(super) const MAGIC: &[u8; 8] = b"FSDPSHM\n";
/// The longest message.
pub(super) const MESSAGE: usize = 4096;

/// Rank 0's answer: a status (0 for good), a number and a text.
pub(super) fn reply(status: u32, number: u64, text: &str) -> Vec<u8> {
    let mut reply = MAGIC.to_vec();
    reply.extend(status.to_le_bytes());
    reply.extend(number.to_le_bytes());
    reply.extend(crate::text::shortened(text, MESSAGE / 2).as_bytes());
    reply
}

/// What [`reply`] made.
pub(super) fn parse_reply(message: &[u8]) -> Option<(u32, u64, String)> {
    let rest = message.strip_prefix(MAGIC)?;
    let (status, rest) = rest.split_first_chunk()?;
    let (number, text) = rest.split_first_chunk()?;
    Some((u32::from_le_bytes(*status), u64::from_le_bytes(*number), String::from_utf8_lossy(text).into_owned()))
}

/// Sends one message with descriptors in it.
pub(super) fn send(socket: &OwnedFd, message: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_RANKS + 1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL).map(drop)
}

/// One message with the descriptors in it. Empty when the other side is gone.
pub(super) fn receive(socket: &OwnedFd) -> Result<(Vec<u8>, Vec<OwnedFd>), Errno> {
    match receive_once(socket) {
        // The other side is gone without having read all that it was sent. What it said before comes after this error.
        Err(Errno::CONNRESET) => receive_once(socket),
        received => received,
    }
}

fn receive_once(socket: &OwnedFd) -> Result<(Vec<u8>, Vec<OwnedFd>), Errno> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_RANKS + 1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut message = vec![0; MESSAGE];
    let received =
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut message)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let fds = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(Errno::MSGSIZE);
    }
    // There is room for all descriptors that fit a message, unless this process has too many.
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Errno::MFILE);
    }
    message.truncate(received.bytes);
    Ok((message, fds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    #[test]
    fn what_somebody_said_before_hanging_up_unread_is_heard() {
        let (flags, kind) = (SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, SocketType::SEQPACKET);
        let (one, other) = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        send(&one, b"never read", &[]).unwrap();
        send(&other, &reply(1, 0, "why"), &[]).unwrap();
        drop(other);
        let (message, _) = receive(&one).unwrap();
        assert_eq!(parse_reply(&message), Some((1, 0, "why".to_string())));
        assert!(receive(&one).unwrap().0.is_empty());
    }
}
