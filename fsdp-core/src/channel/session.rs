//! A connection between two processes that have the same key: encrypted and authenticated by the Noise protocol, with
//! messages of bounded length.

use std::{
    fmt,
    fs::File,
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use sha2::{Digest, Sha256};
use snow::{Builder, HandshakeState, StatelessTransportState};

/// Bytes of the shortest secret: a shorter one could be guessed.
pub const MIN_SECRET_LEN: usize = 16;

/// A key of 256 bits, made of a secret and of what it is for.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; 32]);

impl Key {
    /// The key of a `secret` for one `purpose`: who has the key for another purpose is a stranger.
    pub fn derive(purpose: &str, secret: &[u8]) -> Self {
        let hash = Sha256::new().chain_update((purpose.len() as u64).to_le_bytes()).chain_update(purpose);
        Key(hash.chain_update(secret).finalize().into())
    }

    fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Says nothing of the key.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// A new secret.
///
/// # Errors
/// When the system has no random bytes.
pub fn random_secret() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// How long a handshake may take, and a write.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

struct DeadlineStream {
    stream: TcpStream,
    /// Of the reads to come; none where the clock can't count so far.
    deadline: Option<Instant>,
}

impl DeadlineStream {
    /// The first reads may take as long as a handshake may.
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT))?;
        let mut stream = DeadlineStream { stream, deadline: None };
        stream.set_deadline(HANDSHAKE_TIMEOUT);
        Ok(stream)
    }

    /// What is read from now on must have come within this time.
    fn set_deadline(&mut self, timeout: Duration) {
        self.deadline = Instant::now().checked_add(timeout);
    }
}

impl Read for DeadlineStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(left)?;
        self.stream.read(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
            _ => error,
        })
    }
}

impl Write for DeadlineStream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.stream.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Noise's NNpsk0: who has not the key can't make the first message, so nothing of a stranger's is looked at.
const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// Both sides must mean the same by the bytes that follow.
const PROLOGUE: &[u8] = b"fsdp channel 1";
/// Each of the two handshake messages: a public key and a tag.
const HANDSHAKE_LEN: usize = 48;
/// The longest message on the wire, by Noise's definition.
const MAX_WIRE_LEN: usize = 65535;
const TAG_LEN: usize = 16;

/// Bytes of the longest message.
pub const MAX_MESSAGE_LEN: usize = MAX_WIRE_LEN - TAG_LEN;

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
        let mut stream = DeadlineStream::new(stream)?;
        let mut state = noise(key, |builder| builder.build_initiator())?;
        let mut message = [0; HANDSHAKE_LEN];
        state.write_message(&[], &mut message).map_err(invalid_data)?;
        stream.write_all(&message)?;
        // Whoever listens without knowing the key closes, or answers what it likes.
        stream.read_exact(&mut message).map_err(|error| io::Error::new(error.kind(), REJECTED))?;
        state.read_message(&message, &mut []).map_err(|_| io::Error::new(io::ErrorKind::PermissionDenied, REJECTED))?;
        Channel::new(stream, state)
    }

    /// The side that is connected to. The peer has shown that it has the key when a first message of its comes through
    /// [`Reader::receive`]: a handshake alone could be one that was recorded.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn accept(stream: TcpStream, key: &Key) -> io::Result<Self> {
        let mut stream = DeadlineStream::new(stream)?;
        let mut state = noise(key, |builder| builder.build_responder())?;
        let mut message = [0; HANDSHAKE_LEN];
        stream.read_exact(&mut message)?;
        let other = |_| io::Error::new(io::ErrorKind::PermissionDenied, "the peer has another secret");
        state.read_message(&message, &mut []).map_err(other)?;
        state.write_message(&[], &mut message).map_err(invalid_data)?;
        stream.write_all(&message)?;
        Channel::new(stream, state)
    }

    fn new(stream: DeadlineStream, state: HandshakeState) -> io::Result<Self> {
        let noise = Arc::new(state.into_stateless_transport_mode().map_err(invalid_data)?);
        let other = stream.stream.try_clone()?;
        Ok(Channel {
            reader: Reader { stream, noise: noise.clone(), nonce: 0, message: Vec::new(), plain: Vec::new() },
            writer: Writer { stream: other, noise, nonce: 0 },
        })
    }
}

const REJECTED: &str =
    "the peer did not accept the secret: its secret differs, or it is another program or another version";

fn noise(
    key: &Key,
    build: impl FnOnce(Builder<'_>) -> Result<HandshakeState, snow::Error>,
) -> io::Result<HandshakeState> {
    let builder = Builder::new(PATTERN.parse().map_err(invalid_data)?);
    builder.psk(0, key.bytes()).and_then(|it| it.prologue(PROLOGUE)).and_then(build).map_err(invalid_data)
}

fn invalid_data(error: snow::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}

/// The direction from the peer.
pub struct Reader {
    stream: DeadlineStream,
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
        self.stream.set_deadline(timeout);
        let mut len = [0; 2];
        self.stream.read_exact(&mut len)?;
        self.message.resize(usize::from(u16::from_be_bytes(len)), 0);
        self.stream.read_exact(&mut self.message)?;
        self.plain.resize(self.message.len(), 0);
        let len = self.noise.read_message(self.nonce, &self.message, &mut self.plain).map_err(invalid_data)?;
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
    /// Sends a message of up to [`MAX_MESSAGE_LEN`].
    ///
    /// # Errors
    /// The connection can't be used any more then, but for a message that is too long.
    pub fn send(&mut self, message: &[u8]) -> io::Result<()> {
        if message.len() > MAX_MESSAGE_LEN {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a message of {} bytes is longer than {MAX_MESSAGE_LEN}", message.len()),
            ));
        }
        let mut wire = vec![0; 2 + message.len() + TAG_LEN];
        let len = self.noise.write_message(self.nonce, message, &mut wire[2..]).map_err(invalid_data)?;
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

    #[test]
    fn a_key_depends_on_secret_and_purpose_and_is_not_printed() {
        let key = Key::derive("a", b"secret");
        assert_eq!(key, Key::derive("a", b"secret"));
        for (purpose, secret) in [("b", &b"secret"[..]), ("a", b"other"), ("as", b"ecret"), ("", b"asecret")] {
            assert_ne!(key, Key::derive(purpose, secret));
        }
        assert_eq!(format!("{key:?}"), "Key");
        assert_ne!(random_secret().unwrap(), random_secret().unwrap());
    }

    const SOON: Duration = Duration::from_secs(20);

    fn pair(keys: [u8; 2]) -> [io::Result<Channel>; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let [theirs, ours] = keys.map(|byte| Key::derive("test", &[byte; 32]));
        let connecting = thread::spawn(move || Channel::connect(TcpStream::connect(address)?, &theirs));
        let accepted = Channel::accept(listener.accept().unwrap().0, &ours);
        [connecting.join().unwrap(), accepted]
    }

    #[test]
    fn messages_go_both_ways_up_to_the_maximum_length() {
        let [mut one, mut other] = pair([7, 7]).map(Result::unwrap);
        for bytes in [vec![], vec![1], vec![2; MAX_MESSAGE_LEN]] {
            one.writer.send(&bytes).unwrap();
            assert_eq!(other.reader.receive(SOON).unwrap(), bytes);
            other.writer.send(&bytes).unwrap();
            assert_eq!(one.reader.receive(Duration::MAX).unwrap(), bytes);
        }
        assert!(one.writer.send(&[0; MAX_MESSAGE_LEN + 1]).is_err());
        one.writer.close();
        assert_eq!(other.reader.receive(SOON).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_wrong_key_is_refused_by_both_sides() {
        let [one, other] = pair([7, 8]);
        assert!(one.err().unwrap().to_string().contains("did not accept the secret"));
        assert!(other.is_err());
    }

    #[test]
    fn a_changed_byte_and_a_replayed_message_are_errors() {
        for repeat in [true, false] {
            let [one, mut other] = pair([7, 7]).map(Result::unwrap);
            let mut wire = vec![0; 2 + 3 + TAG_LEN];
            one.writer.noise.write_message(0, b"abc", &mut wire[2..]).unwrap();
            wire[1] = (3 + TAG_LEN) as u8;
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
    fn an_incomplete_message_times_out() {
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
            let key = Key::derive("test", b"key");
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
