//! Text to tokens and back.

use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result};
use tokenizers::Tokenizer;

/// Longer text is tokenised in pieces of about this many bytes: a tokenizer keeps some 100 bytes a token while it
/// works.
const PIECE: usize = 256 << 10;
/// So many pieces are tokenised at a time, in parallel.
const PIECES: usize = 32;

/// How text becomes tokens: by a model's tokenizer, or byte by byte.
///
/// ```
/// use fsdp_examples::data::Text;
///
/// let bytes = Text::new(None)?;
/// assert_eq!(bytes.encode("hi\n")?, [104, 105, 10]);
/// assert_eq!(bytes.decode(&[104, 105, 10])?, "hi\n");
/// # anyhow::Ok(())
/// ```
pub struct Text(Kind);

enum Kind {
    Bytes { model: Option<PathBuf> },
    Tokenizer { file: PathBuf, tokenizer: Box<Tokenizer> },
}

impl Text {
    /// The tokenizer of a model directory, its `tokenizer.json`. Without such a file, or without a model, tokens are
    /// bytes (ids 0 to 255).
    ///
    /// Truncation and padding that the file asks for are left out: all the text is data.
    ///
    /// # Errors
    /// `tokenizer.json` is there, but can't be read.
    pub fn new(model: Option<&Path>) -> Result<Self> {
        let Some(file) = model.map(|model| model.join("tokenizer.json")).filter(|file| file.exists()) else {
            return Ok(Text(Kind::Bytes { model: model.map(Path::to_owned) }));
        };
        let read = || {
            let mut tokenizer = Tokenizer::from_file(&file)?;
            tokenizer.with_truncation(None)?.with_padding(None);
            Ok(tokenizer)
        };
        let tokenizer = read()
            .map_err(Error::from_boxed)
            .with_context(|| format!("cannot read the tokenizer {}", file.display()))?;
        Ok(Text(Kind::Tokenizer { tokenizer: Box::new(tokenizer), file }))
    }

    /// The tokens of `text`, without special tokens around them. Text of more than 256 KiB is tokenised in pieces that
    /// end at a line's end.
    ///
    /// # Errors
    /// The tokenizer has no token for a part of the text, not even an unknown one.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let Kind::Tokenizer { file, tokenizer } = &self.0 else {
            return Ok(text.bytes().map(u32::from).collect());
        };
        let mut ids = Vec::new();
        for pieces in pieces(text, PIECE).chunks(PIECES) {
            let encodings = tokenizer.encode_batch_fast(pieces.to_vec(), false).map_err(Error::from_boxed);
            for encoding in encodings.with_context(|| format!("the tokenizer {} fails on the text", file.display()))? {
                ids.extend_from_slice(encoding.get_ids());
            }
        }
        Ok(ids)
    }

    /// The text of `tokens`, fit for a terminal: what is no text, or a control character other than tab and newline,
    /// shows as U+FFFD.
    ///
    /// # Errors
    /// The tokenizer's decoder fails on them.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        let text = match &self.0 {
            // No byte 0xff is in any UTF-8 text.
            Kind::Bytes { .. } => {
                let bytes: Vec<u8> = tokens.iter().map(|&token| u8::try_from(token).unwrap_or(0xff)).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Kind::Tokenizer { file, tokenizer } => tokenizer
                .decode(tokens, true)
                .map_err(Error::from_boxed)
                .with_context(|| format!("the tokenizer {} can't turn tokens into text", file.display()))?,
        };
        Ok(text.replace(|c: char| c.is_control() && !matches!(c, '\n' | '\t'), "\u{fffd}"))
    }

    /// The id that the tokenizer has for a token, if it has one.
    pub(super) fn id_of(&self, token: &str) -> Option<u32> {
        match &self.0 {
            Kind::Bytes { .. } => None,
            Kind::Tokenizer { tokenizer, .. } => tokenizer.token_to_id(token),
        }
    }

    /// Whether tokens are bytes.
    pub(super) fn is_bytes(&self) -> bool {
        matches!(self.0, Kind::Bytes { .. })
    }

    /// What to do about an id beyond the model's vocabulary.
    pub(super) fn way_out(&self) -> String {
        match &self.0 {
            Kind::Bytes { model: None } => "Text is read as bytes, which need a vocabulary of 256".into(),
            Kind::Bytes { model: Some(model) } => format!(
                "{} has no tokenizer.json, so text is read as bytes, which need a vocabulary of 256: put the model's \
                    tokenizer.json there, or pass tokens as a .bin file",
                model.display()
            ),
            Kind::Tokenizer { file, .. } => format!(
                "{} gives ids that config.json's vocab_size does not allow: use the tokenizer that belongs to this \
                    model",
                file.display()
            ),
        }
    }
}

/// Cuts `text` into pieces of at most `longest` bytes, after a newline where there is one.
fn pieces(mut text: &str, longest: usize) -> Vec<&str> {
    let mut pieces = Vec::new();
    while text.len() > longest {
        let end = (1..=longest).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(text.len());
        let most = &text[..end];
        let (piece, rest) = text.split_at(most.rfind('\n').map_or(most.len(), |newline| newline + 1));
        pieces.push(piece);
        text = rest;
    }
    if !text.is_empty() {
        pieces.push(text);
    }
    pieces
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::fs;

    /// A tokenizer that knows three words, one of them under an id beyond what a small model has, and that wants to cut
    /// after two tokens.
    pub(crate) const TOKENIZER: &str = r#"{
        "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null, "decoder": null,
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}, "padding": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "b": 2, "rare": 999}, "unk_token": "[UNK]"}
    }"#;

    #[test]
    fn bytes_come_back_as_text_that_can_not_control_a_terminal() {
        let text = Text::new(None).unwrap();
        assert!(text.is_bytes());
        assert_eq!(text.decode(&text.encode("Grüße\t1\n").unwrap()).unwrap(), "Grüße\t1\n");
        assert_eq!(text.decode(&[97, 27, 200, 256, 70_000, 98]).unwrap(), "a\u{fffd}\u{fffd}\u{fffd}\u{fffd}b");
    }

    #[test]
    fn a_model_without_tokenizer_reads_bytes() {
        let model = tempfile::tempdir().unwrap();
        let text = Text::new(Some(model.path())).unwrap();
        assert_eq!(text.encode("ab").unwrap(), [97, 98]);
        assert!(text.way_out().contains("has no tokenizer.json"));
    }

    #[test]
    fn a_model_s_tokenizer_is_used_and_never_cuts() {
        let model = tempfile::tempdir().unwrap();
        fs::write(model.path().join("tokenizer.json"), TOKENIZER).unwrap();
        let text = Text::new(Some(model.path())).unwrap();
        assert!(!text.is_bytes());
        assert_eq!(text.encode("a b a what rare").unwrap(), [1, 2, 1, 0, 999]);
        assert_eq!(text.encode("").unwrap(), [0_u32; 0]);
        assert_eq!(text.decode(&[1, 2, 12_345]).unwrap(), "a b");
        let long = "a b\n".repeat(100_000);
        assert_eq!(text.encode(&long).unwrap(), [1, 2].repeat(100_000));
    }

    #[test]
    fn a_broken_tokenizer_is_named() {
        let model = tempfile::tempdir().unwrap();
        fs::write(model.path().join("tokenizer.json"), "{}").unwrap();
        let error = format!("{:#}", Text::new(Some(model.path())).err().unwrap());
        assert!(error.contains("cannot read the tokenizer") && error.contains("tokenizer.json"), "{error}");
    }

    #[test]
    fn pieces_end_at_newlines_or_else_at_characters() {
        assert_eq!(pieces("ab\ncd\nef", 6), ["ab\ncd\n", "ef"]);
        assert_eq!(pieces("ab\ncd\nef", 4), ["ab\n", "cd\n", "ef"]);
        assert_eq!(pieces("äöü", 5), ["äö", "ü"]);
        assert_eq!(pieces("", 5), [""; 0]);
    }
}
