//! A word: a name or an address, as options take them.

/// An address, a role, an id: text that a rank finds in its environment.
pub(crate) fn word(text: &str) -> Result<String, String> {
    if text.is_empty() || text.contains(|c: char| c.is_control() || c.is_whitespace()) {
        return Err("expected a text without spaces and control characters, and not an empty one".into());
    }
    Ok(text.into())
}
