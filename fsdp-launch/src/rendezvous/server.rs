//! The port at which agents of other hosts reach the coordinator.

use std::{
    io,
    net::{IpAddr, TcpListener},
    sync::{Arc, mpsc},
    thread,
};

use fsdp_core::channel::{Accepted, Channel, Handler, Key, Listener};

use crate::rendezvous::{
    channel::receive,
    hub::{Hub, Outbox},
    keep_alive::KeepAlive,
    message::{FromAgent, ToAgent},
    sender::send_until_closed,
};

/// The most agents beyond those that can take part.
const MOST_SPARES: usize = 64;
/// What a thread of a connection needs is little.
const STACK: usize = 256 << 10;

/// Admits up to `most` agents (and some spare ones) that connect to `listener` with the token, for as long as what is
/// returned lives.
pub(crate) fn serve(
    listener: TcpListener,
    hub: Arc<Hub>,
    key: Key,
    keep_alive: KeepAlive,
    most: u32,
) -> io::Result<Listener> {
    let most = (most as usize).saturating_add(MOST_SPARES);
    Listener::start(listener, key, most, Server { hub, keep_alive })
}

struct Server {
    hub: Arc<Hub>,
    keep_alive: KeepAlive,
}

impl Handler for Server {
    fn refused(&self, from: IpAddr, why: &io::Error) {
        tracing::warn!("refused {from}: {why} (--rdzv-token-file), or is no fsdp-launch");
    }

    fn serve(&self, guest: Accepted) -> io::Result<()> {
        let Accepted { channel: Channel { mut reader, writer }, first, from } = guest;
        let FromAgent::Join(mut member) = serde_json::from_slice(&first)? else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "its first message is not that it joins"));
        };
        member.address.get_or_insert_with(|| from.ip().to_canonical().to_string());
        let host = member.host.clone();
        let (outbox, messages) = mpsc::channel();
        let interval = self.keep_alive.interval;
        let sender = thread::Builder::new()
            .name(format!("to agent {from}"))
            .stack_size(STACK)
            .spawn(move || send_until_closed(writer, &messages, interval, &ToAgent::Ping))?;
        let put = move |message| {
            // The thread ends when the connection breaks, which the reader notices.
            outbox.send(message).ok();
        };
        let id = self.hub.enter(Outbox { put: Box::new(put), sender: Some(sender) });
        self.hub.hear(id, FromAgent::Join(member));
        let limit = self.keep_alive.limit();
        let error = loop {
            match receive(&mut reader, limit) {
                Ok(message) => self.hub.hear(id, message),
                Err(error) => break error,
            }
        };
        tracing::debug!("agent {host} is gone ({error})");
        match error.kind() {
            io::ErrorKind::TimedOut => {
                self.hub.fall_silent(id, &format!("is gone: nothing was heard of its launcher for {limit:?}"));
            }
            _ => self.hub.lose(id, "is gone: its launcher has ended"),
        }
        Ok(())
    }
}
