//! FNV-1a, a hash that is the same in every process, unlike the standard library's default.

use std::hash::Hasher;

use fnv::FnvHasher;

/// A hash in progress. Numbers are hashed in little-endian order on every machine.
#[derive(Default)]
pub(crate) struct Hash(FnvHasher);

impl Hash {
    pub(crate) fn number(&mut self, number: u64) {
        self.0.write(&number.to_le_bytes());
    }

    /// Hashes bytes with their length, so that different neighbours give different hashes.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.write(bytes);
    }

    pub(crate) fn counts(&mut self, counts: impl ExactSizeIterator<Item = usize>) {
        self.number(counts.len() as u64);
        counts.for_each(|count| self.number(count as u64));
    }

    /// Returns the hash.
    pub(crate) fn value(&self) -> u64 {
        self.0.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks and launchers of different builds compare these values.
    #[test]
    fn values_are_stable() {
        assert_eq!(Hash::default().value(), 0xcbf2_9ce4_8422_2325);
        let mut hash = Hash::default();
        hash.bytes(b"world");
        hash.counts([1, 2].into_iter());
        assert_eq!(
            hash.value(),
            by_hand(b"\x05\0\0\0\0\0\0\0world\x02\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0")
        );
    }

    fn by_hand(bytes: &[u8]) -> u64 {
        bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
    }
}
