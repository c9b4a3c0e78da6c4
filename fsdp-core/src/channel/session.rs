//! A connection between two sides that have the same key: encrypted and authenticated by the Noise protocol, with
//! bounded messages.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    sync::Arc,
    time::Duration,
};

use snow::{Builder, HandshakeState, StatelessTransportState};

use super::{key::Key, stream::Timed};

/// Noise's NNpsk0: who has not the key can't make the first message, so nothing of a stranger's is looked at.
const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// Both sides must mean the same by the bytes that follow.
const PROLOGUE: &[u8] = b"fsdp channel 1";
/// Each of the two handshake messages: a public key and a tag.
const HANDSHAKE: usize = 48;
/// The longest message on the wire, by Noise's definition.
const LONGEST: usize = 65535;
const TAG: usize = 16;

/// Bytes of the longest message.
pub const MOST_BYTES: usize = LONGEST - TAG;

/// The two directions of a connection.
pub struct Channel {
    /// From the peer.
    pub reader: Reader,
    /// To the peer.
    pub writer: Writer,
}

impl Channel {
    /// The side that connects. The handshake takes 5 seconds at most.
    ///
    /// # Errors
    /// When the peer has another key, or is none of ours; its text says so.
    pub fn connect(stream: TcpStream, key: &Key) -> io::Result<Self> {
        let mut stream = Timed::new(stream)?;
        let mut state = noise(key, |builder| builder.build_initiator())?;
        let mut message = [0; HANDSHAKE];
        state.write_message(&[], &mut message).map_err(broken)?;
        stream.write_all(&message)?;
        // Whoever listens without knowing the key closes, or answers what it likes.
        stream.read_exact(&mut message).map_err(|error| io::Error::new(error.kind(), NO_ANSWER))?;
        state
            .read_message(&message, &mut [])
            .map_err(|_| io::Error::new(io::ErrorKind::PermissionDenied, NO_ANSWER))?;
        Channel::new(stream, state)
    }

    /// The side that is connected to. The peer has shown that it has the key when a first message of its comes through
    /// [`Reader::receive`]: a handshake alone could be one that was recorded.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn accept(stream: TcpStream, key: &Key) -> io::Result<Self> {
        let mut stream = Timed::new(stream)?;
        let mut state = noise(key, |builder| builder.build_responder())?;
        let mut message = [0; HANDSHAKE];
        stream.read_exact(&mut message)?;
        let other = |_| io::Error::new(io::ErrorKind::PermissionDenied, "it has another secret");
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

const NO_ANSWER: &str = "whoever listens there did not accept the secret: it differs, or that is another program, or \
    another version";

fn noise(
    key: &Key,
    build: impl FnOnce(Builder<'_>) -> Result<HandshakeState, snow::Error>,
) -> io::Result<HandshakeState> {
    let builder = Builder::new(PATTERN.parse().map_err(broken)?);
    builder.psk(0, key.bytes()).and_then(|it| it.prologue(PROLOGUE)).and_then(build).map_err(broken)
}

fn broken(error: snow::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}

/// The direction from the peer.
pub struct Reader {
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
    pub fn receive(&mut self, timeout: Duration) -> io::Result<&[u8]> {
        self.stream.within(timeout);
        let mut len = [0; 2];
        self.stream.read_exact(&mut len)?;
        self.message.resize(usize::from(u16::from_be_bytes(len)), 0);
        self.stream.read_exact(&mut self.message)?;
        self.plain.resize(self.message.len(), 0);
        let len = self.noise.read_message(self.nonce, &self.message, &mut self.plain).map_err(broken)?;
        self.nonce += 1;
        Ok(&self.plain[..len])
    }
}

/// The direction to the peer.
pub struct Writer {
    stream: TcpStream,
    noise: Arc<StatelessTransportState>,
    nonce: u64,
}

impl Writer {
    /// Sends a message of up to [`MOST_BYTES`].
    ///
    /// # Errors
    /// The connection can't be used any more then, but for a message that is too long.
    pub fn send(&mut self, message: &[u8]) -> io::Result<()> {
        if message.len() > MOST_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("a message of {} bytes", message.len())));
        }
        let mut wire = vec![0; 2 + message.len() + TAG];
        let len = self.noise.write_message(self.nonce, message, &mut wire[2..]).map_err(broken)?;
        self.nonce += 1;
        wire[..2].copy_from_slice(&(len as u16).to_be_bytes());
        self.stream.write_all(&wire[..2 + len])
    }

    /// Says that nothing more comes, and that nothing more is wanted.
    pub fn close(&self) {
        self.stream.shutdown(Shutdown::Both).ok();
    }

    /// The connection itself, to be closed from elsewhere.
    pub(crate) fn stream(&self) -> io::Result<TcpStream> {
        self.stream.try_clone()
    }
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, thread};

    use proptest::prelude::*;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn pair(keys: [u8; 2]) -> [io::Result<Channel>; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let [theirs, ours] = keys.map(|byte| Key::of("test", &[byte; 32]));
        let connecting = thread::spawn(move || Channel::connect(TcpStream::connect(address)?, &theirs));
        let accepted = Channel::accept(listener.accept().unwrap().0, &ours);
        [connecting.join().unwrap(), accepted]
    }

    #[test]
    fn messages_go_both_ways_up_to_the_longest() {
        let [mut one, mut other] = pair([7, 7]).map(Result::unwrap);
        for bytes in [vec![], vec![1], vec![2; MOST_BYTES]] {
            one.writer.send(&bytes).unwrap();
            assert_eq!(other.reader.receive(SOON).unwrap(), bytes);
            other.writer.send(&bytes).unwrap();
            assert_eq!(one.reader.receive(Duration::MAX).unwrap(), bytes);
        }
        assert!(one.writer.send(&[0; MOST_BYTES + 1]).is_err());
        one.writer.close();
        assert_eq!(other.reader.receive(SOON).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn another_key_is_refused_on_both_sides() {
        let [one, other] = pair([7, 8]);
        assert!(one.err().unwrap().to_string().contains("did not accept the secret"));
        assert!(other.is_err());
    }

    #[test]
    fn a_changed_byte_and_a_repeated_message_are_noticed() {
        for repeat in [true, false] {
            let [one, mut other] = pair([7, 7]).map(Result::unwrap);
            let mut wire = vec![0; 2 + 3 + TAG];
            one.writer.noise.write_message(0, b"abc", &mut wire[2..]).unwrap();
            wire[1] = (3 + TAG) as u8;
            if !repeat {
                wire[4] ^= 1;
            }
            (&one.writer.stream).write_all(&wire).unwrap();
            if repeat {
                assert_eq!(other.reader.receive(SOON).unwrap(), b"abc");
                (&one.writer.stream).write_all(&wire).unwrap();
            }
            assert_eq!(other.reader.receive(SOON).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }

    #[test]
    fn a_message_that_does_not_end_times_out() {
        let [one, mut other] = pair([7, 7]).map(Result::unwrap);
        (&one.writer.stream).write_all(&[1, 0, 5]).unwrap();
        let error = other.reader.receive(Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever comes before a handshake, or in the place of a message, ends in an error.
        #[test]
        fn any_bytes_are_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..300), after in any::<bool>()) {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let key = Key::of("test", b"key");
            let theirs = key.clone();
            let stranger = thread::spawn(move || {
                let mut stream = TcpStream::connect(address).unwrap();
                if after {
                    let channel = Channel::connect(stream.try_clone().unwrap(), &theirs).unwrap();
                    channel.writer.stream.try_clone().unwrap().write_all(&bytes).unwrap();
                } else {
                    stream.write_all(&bytes).ok();
                }
                stream.shutdown(Shutdown::Write).ok();
            });
            let met = Channel::accept(listener.accept().unwrap().0, &key);
            prop_assert_eq!(met.is_ok(), after);
            if let Ok(mut channel) = met {
                prop_assert!(channel.reader.receive(SOON).is_err());
            }
            stranger.join().unwrap();
        }
    }
}
