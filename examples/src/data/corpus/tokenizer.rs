//! The model's tokenizer, as `fsdp-corpus` uses it.

use std::path::Path;

use anyhow::Result;
use fsdp_corpus::tokenise::Tokenise;

use crate::data::sft::end_token;
use crate::data::text::Text;

/// Tokenizer of a corpus: the tokenizer of a model, and the tokens that start and end a document.
pub struct CorpusTokenizer {
    text: Text,
    start: Option<u32>,
    end: Option<u32>,
    vocab_size: usize,
    fingerprint: String,
}

impl CorpusTokenizer {
    /// Adds the start and end tokens of a model directory. Ids must be below `vocab_size`, if it is
    /// given.
    ///
    /// # Errors
    /// The model has a tokenizer that can't be read, or its configuration can't be read.
    pub fn new(text: &Text, model: Option<&Path>, vocab_size: Option<usize>) -> Result<Self> {
        let (start, end) = (text.start_token()?, end_token(model, text)?);
        let vocab_size = vocab_size.unwrap_or_else(|| text.vocab_size());
        Ok(CorpusTokenizer { start, end, vocab_size, fingerprint: text.fingerprint()?, text: text.clone() })
    }
}

impl Tokenise for CorpusTokenizer {
    fn encode(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>> {
        texts.iter().map(|text| self.text.encode_piece(text)).collect()
    }

    fn start(&self) -> Option<u32> {
        self.start
    }

    fn end(&self) -> Option<u32> {
        self.end
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn name(&self) -> String {
        self.text.name()
    }

    fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }
}
