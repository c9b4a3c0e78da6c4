//! A hash that is the same in every process.

/// FNV-1a: the same in every process, unlike the standard library's default hashers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hash(pub(crate) u64);

impl Default for Hash {
    fn default() -> Self {
        Hash(0xcbf2_9ce4_8422_2325)
    }
}

impl Hash {
    fn raw(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }

    pub(crate) fn number(&mut self, number: u64) {
        self.raw(&number.to_le_bytes());
    }

    /// Hashes the length too, so that neighbours can't be confused.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.raw(bytes);
    }

    pub(crate) fn counts(&mut self, counts: impl ExactSizeIterator<Item = usize>) {
        self.number(counts.len() as u64);
        counts.for_each(|count| self.number(count as u64));
    }
}
