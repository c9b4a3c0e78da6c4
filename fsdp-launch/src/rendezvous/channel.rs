//! A connection between two agents that have the same token: encrypted and authenticated by the Noise protocol
//! (<https://noiseprotocol.org>), with bounded messages.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use serde::{Serialize, de::DeserializeOwned};
use snow::{Builder, HandshakeState, StatelessTransportState};

use crate::rendezvous::token::Token;

/// Noise's NNpsk0: who has not the token can't make the first message, so nothing of a stranger's is looked at.
const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// Both sides must mean the same by the bytes that follow.
const PROLOGUE: &[u8] = b"fsdp-launch rendezvous 2";
/// Each of the two handshake messages: a public key and a tag.
const HANDSHAKE: usize = 48;
/// The longest message on the wire, by Noise's definition.
const LONGEST: usize = 65535;
const TAG: usize = 16;
/// How long a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// The two directions of a connection.
pub(crate) struct Channel {
    pub(crate) reader: Reader,
    pub(crate) writer: Writer,
}

impl Channel {
    /// The side that connects.
    pub(crate) fn connect(stream: TcpStream, token: &Token) -> io::Result<Self> {
        let mut stream = Timed::new(stream)?;
        let mut state = noise(token, |builder| builder.build_initiator())?;
        let mut message = [0; HANDSHAKE];
        state.write_message(&[], &mut message).map_err(broken)?;
        stream.write_all(&message)?;
        // Whoever listens without knowing the token closes, or answers what it likes.
        stream.read_exact(&mut message).map_err(|error| io::Error::new(error.kind(), NO_ANSWER))?;
        state
            .read_message(&message, &mut [])
            .map_err(|_| io::Error::new(io::ErrorKind::PermissionDenied, NO_ANSWER))?;
        Channel::new(stream, state)
    }

    /// The side that is connected to. The peer has shown that it has the token when a first message of its comes
    /// through [`Reader::receive`]: a handshake alone could be one that was recorded.
    pub(crate) fn accept(stream: TcpStream, token: &Token) -> io::Result<Self> {
        let mut stream = Timed::new(stream)?;
        let mut state = noise(token, |builder| builder.build_responder())?;
        let mut message = [0; HANDSHAKE];
        stream.read_exact(&mut message)?;
        let other = |_| io::Error::new(io::ErrorKind::PermissionDenied, "it has another token");
        state.read_message(&message, &mut []).map_err(other)?;
        state.write_message(&[], &mut message).map_err(broken)?;
        stream.write_all(&message)?;
        Channel::new(stream, state)
    }

    fn new(stream: Timed, state: HandshakeState) -> io::Result<Self> {
        let noise = Arc::new(state.into_stateless_transport_mode().map_err(broken)?);
        let other = stream.stream.try_clone()?;
        Ok(Channel {
            reader: Reader { stream, noise: noise.clone(), nonce: 0, message: Vec::new(), plain: Vec::new() },
            writer: Writer { stream: other, noise, nonce: 0 },
        })
    }
}

const NO_ANSWER: &str = "whoever listens there did not accept the token: it differs (--rdzv-token-file), or that is \
    no fsdp-launch of this version";

fn noise(
    token: &Token,
    build: impl FnOnce(Builder<'_>) -> Result<HandshakeState, snow::Error>,
) -> io::Result<HandshakeState> {
    let builder = Builder::new(PATTERN.parse().map_err(broken)?).psk(0, &token.0).and_then(|it| it.prologue(PROLOGUE));
    builder.and_then(build).map_err(broken)
}

fn broken(error: snow::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}

/// The direction from the peer.
pub(crate) struct Reader {
    stream: Timed,
    noise: Arc<StatelessTransportState>,
    nonce: u64,
    message: Vec<u8>,
    plain: Vec<u8>,
}

impl Reader {
    /// The peer's next message, which must have come whole within `timeout`.
    ///
    /// # Errors
    /// The connection can't be used any more then: nothing came in time, it was closed, or what came is not the peer's.
    pub(crate) fn receive<M: DeserializeOwned>(&mut self, timeout: Duration) -> io::Result<M> {
        self.stream.deadline = Instant::now() + timeout;
        let mut len = [0; 2];
        self.stream.read_exact(&mut len)?;
        self.message.resize(usize::from(u16::from_be_bytes(len)), 0);
        self.stream.read_exact(&mut self.message)?;
        self.plain.resize(self.message.len(), 0);
        let len = self.noise.read_message(self.nonce, &self.message, &mut self.plain).map_err(broken)?;
        self.nonce += 1;
        Ok(serde_json::from_slice(&self.plain[..len])?)
    }
}

/// The direction to the peer.
pub(crate) struct Writer {
    stream: TcpStream,
    noise: Arc<StatelessTransportState>,
    nonce: u64,
}

impl Writer {
    /// Sends a message.
    ///
    /// # Errors
    /// The connection can't be used any more then.
    pub(crate) fn send<M: Serialize>(&mut self, message: &M) -> io::Result<()> {
        let plain = serde_json::to_vec(message)?;
        if plain.len() > LONGEST - TAG {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("a message of {} bytes", plain.len())));
        }
        let mut wire = vec![0; 2 + plain.len() + TAG];
        let len = self.noise.write_message(self.nonce, &plain, &mut wire[2..]).map_err(broken)?;
        self.nonce += 1;
        wire[..2].copy_from_slice(&(len as u16).to_be_bytes());
        self.stream.write_all(&wire[..2 + len])
    }

    /// Says that nothing more comes, and that nothing more is wanted.
    pub(crate) fn close(&self) {
        self.stream.shutdown(Shutdown::Both).ok();
    }
}

/// A stream whose reads end at a moment, however the bytes trickle.
struct Timed {
    stream: TcpStream,
    deadline: Instant,
}

impl Timed {
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT))?;
        Ok(Timed { stream, deadline: Instant::now() + HANDSHAKE_TIMEOUT })
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
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

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, thread};

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn pair(tokens: [u8; 2]) -> [io::Result<Channel>; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let [theirs, ours] = tokens.map(|byte| Token([byte; 32]));
        let connecting = thread::spawn(move || Channel::connect(TcpStream::connect(address)?, &theirs));
        let accepted = Channel::accept(listener.accept().unwrap().0, &ours);
        [connecting.join().unwrap(), accepted]
    }

    #[test]
    fn messages_go_both_ways_up_to_the_longest() {
        let [mut one, mut other] = pair([7, 7]).map(Result::unwrap);
        for text in ["", "x", &"y".repeat(LONGEST - TAG - 2)] {
            one.writer.send(&text).unwrap();
            assert_eq!(other.reader.receive::<String>(SOON).unwrap(), text);
            other.writer.send(&text).unwrap();
            assert_eq!(one.reader.receive::<String>(SOON).unwrap(), text);
        }
        assert!(one.writer.send(&"y".repeat(LONGEST)).is_err());
        one.writer.close();
        assert_eq!(other.reader.receive::<String>(SOON).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn another_token_is_refused_on_both_sides() {
        let [one, other] = pair([7, 8]);
        assert!(one.err().unwrap().to_string().contains("--rdzv-token-file"));
        assert!(other.is_err());
    }

    #[test]
    fn a_changed_byte_and_a_repeated_message_are_noticed() {
        for repeat in [true, false] {
            let [one, mut other] = pair([7, 7]).map(Result::unwrap);
            let mut wire = vec![0; 2 + 3 + TAG];
            one.writer.noise.write_message(0, b"\"a\"", &mut wire[2..]).unwrap();
            wire[1] = (3 + TAG) as u8;
            if !repeat {
                wire[4] ^= 1;
            }
            (&one.writer.stream).write_all(&wire).unwrap();
            if repeat {
                assert_eq!(other.reader.receive::<String>(SOON).unwrap(), "a");
                (&one.writer.stream).write_all(&wire).unwrap();
            }
            assert_eq!(other.reader.receive::<String>(SOON).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }

    #[test]
    fn a_message_that_does_not_end_times_out() {
        let [one, mut other] = pair([7, 7]).map(Result::unwrap);
        (&one.writer.stream).write_all(&[1, 0, 5]).unwrap();
        let error = other.reader.receive::<String>(Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
