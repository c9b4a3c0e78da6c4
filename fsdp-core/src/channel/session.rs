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

/// Minimum length of a secret in bytes. A shorter secret could be guessed.
pub const MIN_SECRET_LEN: usize = 16;

/// A key of 256 bits, derived from a secret and a purpose.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; 32]);

impl Key {
    /// Derives the key of a `secret` for one `purpose`. Peers with keys for different purposes refuse each other.
    pub fn derive(purpose: &str, secret: &[u8]) -> Self {
        let hash = Sha256::new().chain_update((purpose.len() as u64).to_le_bytes()).chain_update(purpose);
        Key(hash.chain_update(secret).finalize().into())
    }
}

/// Does not print the key.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// Returns a new random secret.
///
/// # Errors
/// When the system has no random bytes.
pub fn random_secret() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Time limit of a handshake, and of a write.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

struct DeadlineStream {
    stream: Arc<TcpStream>,
    /// End of the next reads; `None` if it exceeds the clock's range.
    deadline: Option<Instant>,
}

impl DeadlineStream {
    /// The first reads have the time limit of a handshake.
    fn new(stream: Arc<TcpStream>) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT))?;
        let mut stream = DeadlineStream { stream, deadline: None };
        stream.set_deadline(HANDSHAKE_TIMEOUT);
        Ok(stream)
    }

    /// Sets the time limit of the following reads.
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
        (&*self.stream).read(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
            _ => error,
        })
    }
}

/// Noise's NNpsk0: without the key, a peer cannot make the first message, so its bytes are never parsed.
const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// Version of the messages that follow the handshake.
const PROLOGUE: &[u8] = b"fsdp channel 1";
/// Length of each of the two handshake messages: a public key and a tag.
const HANDSHAKE_LEN: usize = 48;
/// Maximum length on the wire, by the Noise specification.
const MAX_WIRE_LEN: usize = 65535;
const TAG_LEN: usize = 16;

/// Maximum length of a message in bytes.
pub const MAX_MESSAGE_LEN: usize = MAX_WIRE_LEN - TAG_LEN;

/// Time in which the peer of a connection that has ended must read the last messages and close.
const PARTING_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of bytes that such a peer may still send.
const MAX_UNREAD_LEN: usize = 64 << 20;

/// Waits until the peer has closed its end, and discards what it still sends. Then closes the connection.
///
/// If a socket closes while its peer still sends, the system resets the connection. The peer's next write then fails,
/// and messages that it has not received yet are lost, such as the reason of a refusal. So a server calls this function
/// after its last message, and once the [`Writer`] has been dropped or is about to be.
pub(super) fn part(stream: &Arc<TcpStream>) {
    let mut stream = DeadlineStream { stream: stream.clone(), deadline: None };
    stream.set_deadline(PARTING_TIMEOUT);
    let (mut unread, mut buffer) = (0, [0; 16 << 10]);
    while unread < MAX_UNREAD_LEN
        && let Ok(count @ 1..) = stream.read(&mut buffer)
    {
        unread += count;
    }
    // Ends a write that a peer without a deadline blocks.
    stream.stream.shutdown(Shutdown::Both).ok();
}

/// The two directions of a connection.
pub struct Channel {
    /// Receives from the peer.
    pub reader: Reader,
    /// Sends to the peer.
    pub writer: Writer,
}

impl Channel {
    /// Performs the handshake on the connecting side, within 5 seconds.
    ///
    /// # Errors
    /// When the peer has another key, does not speak this protocol, or does not answer
    /// ([`TimedOut`](io::ErrorKind::TimedOut)).
    pub fn connect(stream: TcpStream, key: &Key) -> io::Result<Self> {
        let mut stream = DeadlineStream::new(Arc::new(stream))?;
        let mut state = noise(key, |builder| builder.build_initiator())?;
        let mut message = [0; HANDSHAKE_LEN];
        state.write_message(&[], &mut message).map_err(invalid_data)?;
        // A peer without the key closes the connection, or answers anything. A stopped process does not answer.
        let answered = (&*stream.stream).write_all(&message).and_then(|()| stream.read_exact(&mut message));
        answered.map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => io::Error::new(error.kind(), SILENT),
            kind => io::Error::new(kind, REJECTED),
        })?;
        state.read_message(&message, &mut []).map_err(|_| io::Error::new(io::ErrorKind::PermissionDenied, REJECTED))?;
        Channel::new(stream, state)
    }

    /// Performs the handshake on the accepting side. The peer has proved the key only once [`Reader::receive`] returns
    /// its first message: the handshake alone could be a replay.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn accept(stream: impl Into<Arc<TcpStream>>, key: &Key) -> io::Result<Self> {
        let mut stream = DeadlineStream::new(stream.into())?;
        let mut state = noise(key, |builder| builder.build_responder())?;
        let mut message = [0; HANDSHAKE_LEN];
        stream.read_exact(&mut message)?;
        let other = |_| io::Error::new(io::ErrorKind::PermissionDenied, "the peer has another secret");
        state.read_message(&message, &mut []).map_err(other)?;
        state.write_message(&[], &mut message).map_err(invalid_data)?;
        (&*stream.stream).write_all(&message)?;
        Channel::new(stream, state)
    }

    fn new(stream: DeadlineStream, state: HandshakeState) -> io::Result<Self> {
        let noise = Arc::new(state.into_stateless_transport_mode().map_err(invalid_data)?);
        let other = stream.stream.clone();
        Ok(Channel {
            reader: Reader { stream, noise: noise.clone(), nonce: 0, message: Vec::new(), plain: Vec::new() },
            writer: Writer { stream: other, noise, nonce: 0 },
        })
    }
}

const SILENT: &str = "the peer does not answer: its process is stopped, or it is another program";
const REJECTED: &str =
    "the peer did not accept the secret: its secret differs, or it is another program or another version";

fn noise(
    key: &Key,
    build: impl FnOnce(Builder<'_>) -> Result<HandshakeState, snow::Error>,
) -> io::Result<HandshakeState> {
    let builder = Builder::new(PATTERN.parse().map_err(invalid_data)?);
    builder.psk(0, &key.0).and_then(|it| it.prologue(PROLOGUE)).and_then(build).map_err(invalid_data)
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
    /// Receives the peer's next message. All of it must arrive within `timeout`.
    ///
    /// # Errors
    /// On a timeout, a closed connection, or a message that does not decrypt. The connection is unusable afterwards.
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

    /// Shuts down both directions, because the connection is of no more use.
    pub fn close(&self) {
        self.stream.stream.shutdown(Shutdown::Both).ok();
    }
}

/// The direction to the peer. Dropping it ends the direction: the peer reads all messages, and then the end.
pub struct Writer {
    stream: Arc<TcpStream>,
    noise: Arc<StatelessTransportState>,
    nonce: u64,
}

impl Writer {
    /// Sends a message of up to [`MAX_MESSAGE_LEN`] bytes.
    ///
    /// # Errors
    /// When the message is too long, or the write fails. After a failed write, the connection is unusable.
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
        (&*self.stream).write_all(&wire[..2 + len])
    }

    /// Shuts down both directions, because the connection is of no more use. The peer may lose the last messages.
    pub fn close(&self) {
        self.stream.shutdown(Shutdown::Both).ok();
    }

    /// Returns the socket, to shut it down from another thread.
    pub(crate) fn stream(&self) -> &Arc<TcpStream> {
        &self.stream
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // The peer may have closed the connection.
        self.stream.shutdown(Shutdown::Write).ok();
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
            (&*one.writer.stream).write_all(&wire).unwrap();
            if repeat {
                assert_eq!(other.reader.receive(SOON).unwrap(), b"abc");
                (&*one.writer.stream).write_all(&wire).unwrap();
            }
            assert_eq!(other.reader.receive(SOON).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }

    #[test]
    fn an_incomplete_message_times_out() {
        let [one, mut other] = pair([7, 7]).map(Result::unwrap);
        (&*one.writer.stream).write_all(&[1, 0, 5]).unwrap();
        let error = other.reader.receive(Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Any bytes before the handshake, or instead of a message, yield an error.
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
                    (&*channel.writer.stream).write_all(&bytes).unwrap();
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
