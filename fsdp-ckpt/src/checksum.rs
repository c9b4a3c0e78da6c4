//! CRC-32C.

use crc_fast::{CrcAlgorithm, Digest};

/// A checksum of bytes that are passed in pieces.
pub(crate) struct Checksum(Digest);

impl Checksum {
    pub(crate) fn new() -> Self {
        Checksum(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Returns the checksum of these pieces.
    pub(crate) fn of(pieces: &[&[u8]]) -> u32 {
        let mut checksum = Checksum::new();
        pieces.iter().for_each(|piece| checksum.update(piece));
        checksum.value()
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn value(&self) -> u32 {
        // The type also holds checksums of 64 bits.
        self.0.finalize() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_check_values() {
        // The check value of the CRC catalogue, and values of RFC 3720, B.4.
        for (bytes, value) in [(&b"123456789"[..], 0xe306_9283), (&[0; 32], 0x8a91_36aa), (&[0xff; 32], 0x62a8_ab43)] {
            assert_eq!(Checksum::of(&bytes.chunks(5).collect::<Vec<_>>()), value);
        }
    }
}
