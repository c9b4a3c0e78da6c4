//! The tokenizer that the caller provides.

use anyhow::{Context, Result, ensure};

use crate::documents::Part;

/// A tokenizer. Its ids are below `vocab_size`.
pub trait Tokenise: Send + Sync {
    /// Tokenises texts without adding special tokens. Returns the ids of each text.
    fn encode(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>>;

    /// Returns the token that starts a document, if any.
    fn start(&self) -> Option<u32>;

    /// Returns the token that ends a document, if any.
    fn end(&self) -> Option<u32>;

    /// Returns the number of ids.
    fn vocab_size(&self) -> usize;

    /// Returns a name for people, such as the path of `tokenizer.json`.
    fn name(&self) -> String;

    /// Returns a checksum of everything that decides about ids, such as the SHA-256 of `tokenizer.json`.
    fn fingerprint(&self) -> String;
}

/// Identifies what a tokenizer makes of a document: its fingerprint, and the start and end tokens.
pub fn identity(tokenizer: &dyn Tokenise) -> String {
    format!("{}, start {:?}, end {:?}", tokenizer.fingerprint(), tokenizer.start(), tokenizer.end())
}

/// Bytes as tokens, with an end token of id 256 if wanted.
///
/// ```
/// use fsdp_corpus::tokenise::{Bytes, Tokenise};
///
/// assert_eq!(Bytes::new().encode(&["ab", "c"])?, [vec![97, 98], vec![99]]);
/// assert_eq!(Bytes::with_end().end(), Some(256));
/// # anyhow::Ok(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    has_end: bool,
}

impl Bytes {
    /// Creates a tokenizer of 256 ids.
    pub fn new() -> Self {
        Bytes { has_end: false }
    }

    /// Creates a tokenizer of 257 ids, of which the last ends documents.
    pub fn with_end() -> Self {
        Bytes { has_end: true }
    }
}

impl Tokenise for Bytes {
    fn encode(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>> {
        Ok(texts.iter().map(|text| text.bytes().map(u32::from).collect()).collect())
    }

    fn start(&self) -> Option<u32> {
        None
    }

    fn end(&self) -> Option<u32> {
        self.has_end.then_some(256)
    }

    fn vocab_size(&self) -> usize {
        if self.has_end { 257 } else { 256 }
    }

    fn name(&self) -> String {
        "bytes".into()
    }

    fn fingerprint(&self) -> String {
        format!("bytes-{}", self.vocab_size())
    }
}

/// Tokenises parts of documents. Adds the start token before a document and the end token after it, unless the text
/// has them there.
pub(crate) fn encode_parts(tokenizer: &dyn Tokenise, parts: &[Part]) -> Result<Vec<Vec<u32>>> {
    if parts.is_empty() {
        return Ok(Vec::new());
    }
    let texts: Vec<&str> = parts.iter().map(|part| &*part.text).collect();
    let name = || format!("the tokenizer {}", tokenizer.name());
    let mut encoded = tokenizer.encode(&texts).with_context(|| format!("{} fails on the text", name()))?;
    ensure!(
        encoded.len() == parts.len(),
        "{} gave the ids of {} texts, but {} were expected",
        name(),
        encoded.len(),
        parts.len()
    );
    let vocab_size = tokenizer.vocab_size();
    for (ids, part) in encoded.iter_mut().zip(parts) {
        if let Some(start) = tokenizer.start().filter(|start| part.is_first() && ids.first() != Some(start)) {
            ids.insert(0, start);
        }
        if let Some(end) = tokenizer.end().filter(|end| part.is_last && ids.last() != Some(end)) {
            ids.push(end);
        }
        let beyond = ids.iter().find(|&&id| id as usize >= vocab_size);
        ensure!(
            beyond.is_none(),
            "{} gave the id {}, but its vocabulary has {vocab_size} ids. Use the tokenizer that belongs to the model",
            name(),
            beyond.copied().unwrap_or_default()
        );
    }
    Ok(encoded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::documents::Cursor;

    /// `s` and `e` are the start and end tokens.
    struct Letters;

    impl Tokenise for Letters {
        fn encode(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>> {
            Bytes::new().encode(texts)
        }
        fn start(&self) -> Option<u32> {
            Some(b's'.into())
        }
        fn end(&self) -> Option<u32> {
            Some(b'e'.into())
        }
        fn vocab_size(&self) -> usize {
            122
        }
        fn name(&self) -> String {
            "letters".into()
        }
        fn fingerprint(&self) -> String {
            "letters".into()
        }
    }

    fn encoded(text: &str, is_first: bool, is_last: bool) -> Result<String> {
        let at = Cursor { record: 0, byte: if is_first { 0 } else { 9 } };
        let parts = [Part { at, text: text.into(), is_last }];
        let ids = encode_parts(&Letters, &parts)?.remove(0);
        Ok(ids.into_iter().map(|id| char::from(id as u8)).collect())
    }

    #[test]
    fn documents_have_one_start_and_one_end() {
        for (text, expected) in [("ab", "sabe"), ("sab", "sabe"), ("abe", "sabe"), ("sabe", "sabe"), ("e", "se")] {
            assert_eq!(encoded(text, true, true).unwrap(), expected);
        }
        assert_eq!(encoded("ab", true, false).unwrap(), "sab");
        assert_eq!(encoded("ab", false, false).unwrap(), "ab");
        assert_eq!(encoded("ab", false, true).unwrap(), "abe");
        let message = encoded("z", true, true).unwrap_err().to_string();
        assert!(message.contains("letters gave the id 122, but its vocabulary has 122 ids"), "{message}");
    }
}
