//! Connections of a listener, and the last message before it closes one.

use std::{
    io,
    net::{IpAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use fsdp_core::channel::{Accepted, Channel, Handler, Key, Listener, MAX_MESSAGE_LEN};

/// A limit that only a hang exceeds.
const LONG: Duration = Duration::from_secs(60);
/// More than the system buffers for a connection.
const MUCH: usize = 32 << 20;

/// Refuses every connection with a text.
struct Refuses;

impl Handler for Refuses {
    fn serve(&self, mut guest: Accepted) -> io::Result<()> {
        // What the peer writes meanwhile is not read.
        thread::sleep(Duration::from_millis(200));
        guest.channel.writer.send(&self.refusal("on purpose"))
    }

    fn refusal(&self, why: &str) -> Vec<u8> {
        why.as_bytes().to_vec()
    }

    fn refused(&self, _: IpAddr, _: &io::Error) {}
}

fn listener(max: usize, handler: impl Handler) -> (Listener, impl Fn() -> Channel) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, key) = (listener.local_addr().unwrap(), Key::derive("test", &[7; 32]));
    let dial = {
        let key = key.clone();
        move || Channel::connect(TcpStream::connect(address).unwrap(), &key).unwrap()
    };
    (Listener::start(listener, key, max, handler).unwrap(), dial)
}

#[test]
fn a_peer_that_writes_much_before_it_reads_gets_the_last_message() {
    let (mut listener, dial) = listener(8, Refuses);
    let mut peer = dial();
    for _ in 0..MUCH / MAX_MESSAGE_LEN {
        peer.writer.send(&[1; MAX_MESSAGE_LEN]).unwrap();
    }
    // It does not stop the listener, and others are served meanwhile.
    assert_eq!(dial_and_receive(&dial).unwrap(), "on purpose");
    listener.stop();
    assert!(!listener.wait_until_closed(Duration::from_millis(10)), "the peer has not closed its end");
    assert_eq!(peer.reader.receive(LONG).unwrap(), b"on purpose");
    assert_eq!(peer.reader.receive(LONG).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    drop(peer);
    assert!(listener.wait_until_closed(LONG));
}

fn dial_and_receive(dial: &impl Fn() -> Channel) -> io::Result<String> {
    let mut peer = dial();
    peer.writer.send(b"hello")?;
    Ok(String::from_utf8_lossy(peer.reader.receive(LONG)?).into_owned())
}

/// Serves connections until their peers close them.
struct Serves;

impl Handler for Serves {
    fn serve(&self, mut guest: Accepted) -> io::Result<()> {
        guest.channel.writer.send(b"served")?;
        guest.channel.reader.receive(LONG).map(drop)
    }

    fn refusal(&self, why: &str) -> Vec<u8> {
        format!("refused: {why}").into_bytes()
    }

    fn refused(&self, _: IpAddr, _: &io::Error) {}
}

#[test]
fn a_connection_beyond_the_maximum_is_told_so() {
    let (_listener, dial) = listener(2, Serves);
    let served = [(); 2].map(|()| {
        let mut peer = dial();
        peer.writer.send(b"hello").unwrap();
        assert_eq!(peer.reader.receive(LONG).unwrap(), b"served");
        peer
    });
    assert_eq!(dial_and_receive(&dial).unwrap(), "refused: 2 connections are open, which is the maximum");
    drop(served);
    // The listener learns a little later that they have closed.
    let is_served = || dial_and_receive(&dial).is_ok_and(|answer| answer == "served");
    assert!((0..500).any(|_| {
        thread::sleep(Duration::from_millis(10));
        is_served()
    }));
}
