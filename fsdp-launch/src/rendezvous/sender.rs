//! Sending what is to be sent, and a sign of life when there is nothing.

use std::{
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::Duration,
};

use fsdp_core::channel::Writer;
use serde::Serialize;

use crate::rendezvous::channel::send;

/// Sends `messages` until no more can come or the connection breaks, `ping` after each `interval` without any; then
/// closes the connection.
pub(crate) fn send_until_closed<M: Serialize>(
    mut writer: Writer,
    messages: &Receiver<M>,
    interval: Duration,
    ping: &M,
) {
    loop {
        let sent = match messages.recv_timeout(interval) {
            Ok(message) => send(&mut writer, &message),
            Err(RecvTimeoutError::Timeout) => send(&mut writer, ping),
            Err(RecvTimeoutError::Disconnected) => break,
        };
        if let Err(error) = sent {
            tracing::debug!("a message was not sent: {error}");
            break;
        }
    }
    writer.close();
}
