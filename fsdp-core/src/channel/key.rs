//! What is made of a secret.

use std::{
    fmt,
    fs::File,
    io::{self, Read},
};

use sha2::{Digest, Sha256};

/// Bytes of the shortest secret: a shorter one could be guessed.
pub const LEAST_SECRET: usize = 16;

/// A key of 256 bits, made of a secret and of what it is for.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; 32]);

impl Key {
    /// The key of a `secret` for one `purpose`: who has the key for another purpose is a stranger.
    pub fn of(purpose: &str, secret: &[u8]) -> Self {
        let hash = Sha256::new().chain_update((purpose.len() as u64).to_le_bytes()).chain_update(purpose);
        Key(hash.chain_update(secret).finalize().into())
    }

    pub(super) fn bytes(&self) -> &[u8; 32] {
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
pub fn random() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_for_one_secret_and_one_purpose_and_is_not_printed() {
        let key = Key::of("a", b"secret");
        assert_eq!(key, Key::of("a", b"secret"));
        for (purpose, secret) in [("b", &b"secret"[..]), ("a", b"other"), ("as", b"ecret"), ("", b"asecret")] {
            assert_ne!(key, Key::of(purpose, secret));
        }
        assert_eq!(format!("{key:?}"), "Key");
        assert_ne!(random().unwrap(), random().unwrap());
    }
}
