//! How much a store takes.

/// Bytes of the longest key.
pub const MOST_KEY: usize = 1024;
/// Bytes of the longest value.
pub const MOST_VALUE: usize = 24 << 10;
/// Bytes of all keys and values of a store.
pub const MOST_TOTAL: usize = 64 << 20;

/// Why a store does not take this key, or this value, if it does not.
pub(super) fn refusal(key: &str, values: [Option<&[u8]>; 2]) -> Option<String> {
    let longest = values.into_iter().flatten().map(<[u8]>::len).max().unwrap_or(0);
    if key.len() > MOST_KEY {
        return Some(format!("the key has {} bytes, and the longest that a store takes has {MOST_KEY}", key.len()));
    }
    (longest > MOST_VALUE)
        .then(|| format!("the value has {longest} bytes, and the longest that a store takes has {MOST_VALUE}"))
}
