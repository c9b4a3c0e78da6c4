//! Messages of agents over a connection of those that have the token.

use std::{io, net::TcpStream, time::Duration};

use fsdp_core::channel::{self, Key, Reader, Writer};
use serde::{Serialize, de::DeserializeOwned};

/// Both sides must mean the same by the messages that follow.
const PURPOSE: &str = "fsdp-launch rendezvous 3";

/// The key of a token.
pub(crate) fn key(token: &[u8]) -> Key {
    Key::derive(PURPOSE, token)
}

/// The side that connects.
pub(crate) fn connect(stream: TcpStream, key: &Key) -> io::Result<channel::Channel> {
    channel::Channel::connect(stream, key).map_err(|error| {
        let way_out = "give all launchers the same --rdzv-token-file, and start the same version of fsdp-launch";
        io::Error::new(error.kind(), format!("{error}: {way_out}"))
    })
}

/// Sends a message.
///
/// # Errors
/// The connection can't be used any more then.
pub(crate) fn send<M: Serialize>(writer: &mut Writer, message: &M) -> io::Result<()> {
    writer.send(&serde_json::to_vec(message)?)
}

/// The peer's next message, which must have come whole within `timeout`.
///
/// # Errors
/// The connection can't be used any more then: nothing came in time, it was closed, or what came is no message.
pub(crate) fn receive<M: DeserializeOwned>(reader: &mut Reader, timeout: Duration) -> io::Result<M> {
    Ok(serde_json::from_slice(reader.receive(timeout)?)?)
}
