//! Conversion of text to tokens and back.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Error, Result, ensure};
use crc_fast::{CrcAlgorithm, Digest};
use fsdp_ckpt::hf::{ConfiguredTokens, missing_tokenizer};
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::{AddedToken, EncodeInput, Encoding, PostProcessor, Tokenizer, TruncationParams};

use crate::data::sft::read_json;
use crate::input::read_text;

/// Text is tokenised in pieces of about this many bytes, because tokenizers need about 100 bytes of memory per token.
const PIECE: usize = 256 << 10;
/// Number of ids in a vocabulary of bytes.
const BYTES: usize = 256;
/// Pieces tokenised in parallel.
const PIECES: usize = 32;

/// A tokenizer: that of a model, or bytes as tokens.
///
/// ```
/// use fsdp_train::data::Text;
///
/// let bytes = Text::new(None)?;
/// assert_eq!(bytes.encode("hi\n")?, [104, 105, 10]);
/// assert_eq!(bytes.decode(&[104, 105, 10])?, "hi\n");
/// # anyhow::Ok(())
/// ```
#[derive(Clone)]
pub struct Text(Arc<Kind>);

/// A text with the byte ranges that the loss counts.
#[derive(Debug, PartialEq)]
pub(super) struct Marked {
    pub(super) text: String,
    pub(super) learnt: Vec<Range<usize>>,
    /// Whether the tokenizer adds its special tokens, as it does by default.
    pub(super) bare: bool,
}

/// An encoder of whole texts. Two texts that are too long lose tokens of the longer one first.
pub(super) struct Cutting<'a> {
    tokenizer: Option<(&'a Path, Tokenizer)>,
    seq_len: usize,
}

/// A text as [`Cutting`] encodes it.
pub(super) struct Encoded {
    pub(super) ids: Vec<u32>,
    /// Segment type of each token.
    pub(super) types: Vec<u32>,
    pub(super) is_cut: bool,
}

impl Cutting<'_> {
    /// Encodes texts, each with the second text of a pair, if any.
    pub(super) fn encode(&self, texts: Vec<(&str, Option<&str>)>) -> Result<Vec<Encoded>> {
        let Some((file, tokenizer)) = &self.tokenizer else {
            let of_bytes = |(text, _): (&str, Option<&str>)| Encoded {
                ids: text.bytes().take(self.seq_len).map(u32::from).collect(),
                types: vec![0; text.len().min(self.seq_len)],
                is_cut: text.len() > self.seq_len,
            };
            return Ok(texts.into_iter().map(of_bytes).collect());
        };
        let inputs = texts.into_iter().map(|(text, pair)| match pair {
            Some(pair) => EncodeInput::from((text, pair)),
            None => EncodeInput::from(text),
        });
        let encodings = tokenizer.encode_batch(inputs.collect(), true).map_err(Error::from_boxed);
        let encodings = encodings.with_context(|| format!("the tokenizer {} fails on the text", file.display()))?;
        let encoded = |encoding: Encoding| Encoded {
            ids: encoding.get_ids().to_vec(),
            types: encoding.get_type_ids().to_vec(),
            is_cut: !encoding.get_overflowing().is_empty(),
        };
        Ok(encodings.into_iter().map(encoded).collect())
    }
}

enum Kind {
    Bytes {
        model: Option<PathBuf>,
    },
    /// A model with a tokenizer that can't be read. Texts are refused; tokens are not.
    Missing {
        reason: String,
    },
    Tokenizer {
        file: PathBuf,
        tokenizer: Box<Tokenizer>,
    },
}

impl Text {
    /// Loads `tokenizer.json` of a model directory, and adds the tokens that only `tokenizer_config.json` and other files
    /// have, as transformers does. Without files of a tokenizer, tokens are bytes (ids 0 to 255). With files of another
    /// form, texts are refused.
    ///
    /// Ignores truncation and padding in the file, because all text is data.
    pub fn new(model: Option<&Path>) -> Result<Self> {
        let Some(model) = model else { return Ok(Text::of(Kind::Bytes { model: None })) };
        let file = model.join("tokenizer.json");
        if !file.exists() {
            return Ok(Text::of(match missing_tokenizer(model)? {
                Some(reason) => Kind::Missing { reason },
                None => Kind::Bytes { model: Some(model.to_owned()) },
            }));
        }
        let read = || -> Result<Tokenizer> {
            let mut tokenizer: Tokenizer = read_text(&file)?.parse().map_err(Error::from_boxed)?;
            add_tokens(&mut tokenizer, configured_tokens(Some(model))?).map_err(Error::from_boxed)?;
            tokenizer.with_truncation(None).map_err(Error::from_boxed)?.with_padding(None);
            if let Some(mut processor) = tokenizer.get_post_processor().cloned() {
                keep_offsets(&mut processor);
                tokenizer.with_post_processor(Some(processor));
            }
            Ok(tokenizer)
        };
        let tokenizer = read().with_context(|| format!("cannot read the tokenizer {}", file.display()))?;
        Ok(Text::of(Kind::Tokenizer { tokenizer: Box::new(tokenizer), file }))
    }

    fn of(kind: Kind) -> Self {
        Text(Arc::new(kind))
    }

    /// Refuses texts as bytes for a model with weights and a vocabulary of more ids than bytes.
    pub fn expect_vocabulary(&mut self, vocab_size: usize) {
        if let Kind::Bytes { model: Some(model) } = &*self.0
            && vocab_size > BYTES
        {
            let reason = format!(
                "{} has no tokenizer.json, and its weights are of a vocabulary of {vocab_size} ids, which are not bytes: \
                 put the model's tokenizer.json there, or pass tokens as a .bin file",
                model.display()
            );
            *self = Text::of(Kind::Missing { reason });
        }
    }

    /// Fails if texts can't be tokenised.
    pub(super) fn check(&self) -> Result<()> {
        match &*self.0 {
            Kind::Missing { reason } => Err(Error::msg(reason.clone())),
            Kind::Bytes { .. } | Kind::Tokenizer { .. } => Ok(()),
        }
    }

    /// Tokenises `text` without adding special tokens. Text above 256 KiB is split at line ends.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.check()?;
        let Kind::Tokenizer { file, tokenizer } = &*self.0 else {
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

    /// Tokenises a text without adding special tokens, on this thread.
    pub(super) fn encode_piece(&self, text: &str) -> Result<Vec<u32>> {
        self.check()?;
        let Kind::Tokenizer { file, tokenizer } = &*self.0 else { return Ok(text.bytes().map(u32::from).collect()) };
        let encoding = tokenizer.encode_fast(text, false).map_err(Error::from_boxed);
        Ok(encoding.with_context(|| format!("the tokenizer {} fails on the text", file.display()))?.get_ids().to_vec())
    }

    /// Returns the token that the tokenizer adds before a text, if any.
    pub(super) fn start_token(&self) -> Result<Option<u32>> {
        self.check()?;
        let Kind::Tokenizer { file, tokenizer } = &*self.0 else { return Ok(None) };
        let encode = |add_special_tokens| -> Result<Vec<u32>> {
            let encoding = tokenizer.encode_fast("a", add_special_tokens).map_err(Error::from_boxed);
            let encoding = encoding.with_context(|| format!("the tokenizer {} fails on a text", file.display()))?;
            Ok(encoding.get_ids().to_vec())
        };
        let (with_special, bare) = (encode(true)?, encode(false)?);
        Ok(with_special.split_first().filter(|(_, rest)| rest.starts_with(&bare)).map(|(&start, _)| start))
    }

    /// Returns a name for people: the path of the tokenizer.
    pub(super) fn name(&self) -> String {
        match &*self.0 {
            Kind::Missing { .. } => "unknown".into(),
            Kind::Bytes { .. } => "bytes".into(),
            Kind::Tokenizer { file, .. } => file.display().to_string(),
        }
    }

    /// Returns a checksum of the tokenizer's file and added tokens.
    pub(super) fn fingerprint(&self) -> Result<String> {
        self.check()?;
        let Kind::Tokenizer { file, tokenizer } = &*self.0 else { return Ok(self.name()) };
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        digest.update(&fs::read(file).with_context(|| format!("cannot read {}", file.display()))?);
        let added: BTreeMap<u32, AddedToken> = tokenizer.get_added_tokens_decoder().into_iter().collect();
        added.iter().for_each(|(id, token)| digest.update(format!("{id} {}\n", token.content).as_bytes()));
        Ok(format!("{:016x}", digest.finalize()))
    }

    /// Returns the number of ids, with added ones.
    pub(super) fn vocab_size(&self) -> usize {
        match &*self.0 {
            Kind::Missing { .. } | Kind::Bytes { .. } => BYTES,
            Kind::Tokenizer { tokenizer, .. } => tokenizer.get_vocab_size(true),
        }
    }

    /// Converts `tokens` to text that is safe to print: invalid text and control characters except tab and newline
    /// become U+FFFD. Without the model's tokenizer, returns the numbers of the tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        let text = match &*self.0 {
            Kind::Missing { .. } => tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
            // The byte 0xff is not in any UTF-8 text.
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

    /// Tokenises texts, and returns for each token whether it overlaps a counted range. Special tokens in the text are
    /// recognised.
    pub(super) fn encode_marked(&self, texts: Vec<Marked>) -> Result<Vec<(Vec<u32>, Vec<bool>)>> {
        self.check()?;
        let Kind::Tokenizer { file, tokenizer } = &*self.0 else {
            let of_bytes = |marked: &Marked| {
                let is_learnt = |at: usize| marked.learnt.iter().any(|span| span.contains(&at));
                (marked.text.bytes().map(u32::from).collect(), (0..marked.text.len()).map(is_learnt).collect())
            };
            return Ok(texts.iter().map(of_bytes).collect());
        };
        let mut tokenised = Vec::with_capacity(texts.len());
        for texts in texts.chunk_by(|a, b| a.bare == b.bare) {
            let inputs = texts.iter().map(|marked| marked.text.as_str()).collect();
            let encodings = tokenizer.encode_batch(inputs, texts[0].bare).map_err(Error::from_boxed);
            let encodings = encodings.with_context(|| format!("the tokenizer {} fails on the text", file.display()))?;
            for (encoding, marked) in encodings.iter().zip(texts) {
                let is_learnt = |&(start, end): &(usize, usize)| {
                    marked.learnt.iter().any(|span| start < span.end && span.start < end)
                };
                tokenised.push((encoding.get_ids().to_vec(), encoding.get_offsets().iter().map(is_learnt).collect()));
            }
        }
        Ok(tokenised)
    }

    /// Returns an encoder of whole texts, which adds the tokenizer's special tokens and cuts to `seq_len` tokens. Fails
    /// if `seq_len` has no room for a text beside the special tokens.
    pub(super) fn cutting(&self, seq_len: usize) -> Result<Cutting<'_>> {
        self.check()?;
        let Kind::Tokenizer { file, tokenizer } = &*self.0 else { return Ok(Cutting { tokenizer: None, seq_len }) };
        let mut cutting = (**tokenizer).clone();
        let special = cutting.get_post_processor().map_or(0, |processor| processor.added_tokens(true));
        ensure!(seq_len > special, "--seq-len {seq_len} has no room for a text beside {special} special tokens");
        let params = TruncationParams { max_length: seq_len, ..TruncationParams::default() };
        cutting.with_truncation(Some(params)).map_err(Error::from_boxed)?;
        Ok(Cutting { tokenizer: Some((file, cutting)), seq_len })
    }

    /// Returns the id of a token.
    pub(super) fn id_of(&self, token: &str) -> Option<u32> {
        match &*self.0 {
            Kind::Missing { .. } => None,
            Kind::Bytes { .. } => token.bytes().next().filter(|_| token.len() == 1).map(u32::from),
            Kind::Tokenizer { tokenizer, .. } => tokenizer.token_to_id(token),
        }
    }

    /// Returns the text of a token in the tokenizer's file.
    pub(super) fn token_of(&self, id: u32) -> Option<String> {
        match &*self.0 {
            Kind::Missing { .. } => None,
            Kind::Bytes { .. } => u8::try_from(id).ok().map(|byte| char::from(byte).to_string()),
            Kind::Tokenizer { tokenizer, .. } => tokenizer.id_to_token(id),
        }
    }

    /// Returns all special tokens: those in `named`, and those of the tokenizer.
    pub(super) fn special_tokens(&self, named: &BTreeMap<String, String>) -> Vec<String> {
        let mut all: BTreeSet<String> = named.values().filter(|token| !token.is_empty()).cloned().collect();
        if let Kind::Tokenizer { tokenizer, .. } = &*self.0 {
            let added = tokenizer.get_added_tokens_decoder();
            all.extend(added.into_values().filter(|token| token.special).map(|token| token.content));
        }
        all.into_iter().collect()
    }

    /// Returns whether tokens are bytes.
    pub(super) fn is_bytes(&self) -> bool {
        matches!(*self.0, Kind::Bytes { .. })
    }

    /// Returns advice for ids beyond the model's vocabulary.
    pub(super) fn advice(&self) -> String {
        match &*self.0 {
            Kind::Missing { reason } => reason.clone(),
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

/// Returns the tokens in the configuration of a model's tokenizer.
pub(super) fn configured_tokens(model: Option<&Path>) -> Result<ConfiguredTokens> {
    let [config, map, added] =
        ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"].map(|name| read_json(model, name));
    let tokens = ConfiguredTokens::new(config?.as_ref(), map?.as_ref(), added?.as_ref());
    tokens.map_err(Error::msg).with_context(|| format!("in {}", model.unwrap_or(Path::new("")).display()))
}

/// Adds tokens in the order of transformers, which decides on the ids of new ones.
fn add_tokens(tokenizer: &mut Tokenizer, tokens: ConfiguredTokens) -> tokenizers::Result<()> {
    let of = |token: fsdp_ckpt::hf::AddedToken| {
        AddedToken::from(token.content, token.special)
            .single_word(token.single_word)
            .lstrip(token.lstrip)
            .rstrip(token.rstrip)
            .normalized(token.normalized)
    };
    tokenizer.add_tokens(tokens.added.into_iter().map(of))?;
    let own: BTreeSet<String> = tokenizer.get_added_tokens_decoder().into_values().map(|token| token.content).collect();
    tokenizer.add_tokens(tokens.special.into_iter().filter(|token| !own.contains(&token.content)).map(of))?;
    Ok(())
}

/// Makes a tokenizer's last stage leave spaces in the offsets of tokens. A token of spaces would be at no place, and so
/// not be learned. The ids stay the same.
fn keep_offsets(processor: &mut PostProcessorWrapper) {
    match processor {
        PostProcessorWrapper::ByteLevel(bytes) => bytes.trim_offsets = false,
        PostProcessorWrapper::Roberta(roberta) => roberta.trim_offsets = false,
        PostProcessorWrapper::Sequence(all) => all.as_mut().iter_mut().for_each(keep_offsets),
        PostProcessorWrapper::Bert(_) | PostProcessorWrapper::Template(_) => {}
    }
}

/// Splits `text` into pieces of at most `longest` bytes, after newlines if possible.
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

    /// A tokenizer with three words, one with an id beyond a small vocabulary, and truncation to two tokens.
    pub(crate) const TOKENIZER: &str = r#"{
        "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null, "decoder": null,
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}, "padding": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "b": 2, "rare": 999}, "unk_token": "[UNK]"}
    }"#;

    #[test]
    fn decoded_bytes_are_safe_to_print() {
        let text = Text::new(None).unwrap();
        assert!(text.is_bytes());
        assert_eq!(text.decode(&text.encode("Grüße\t1\n").unwrap()).unwrap(), "Grüße\t1\n");
        assert_eq!(text.decode(&[97, 27, 200, 256, 70_000, 98]).unwrap(), "a\u{fffd}\u{fffd}\u{fffd}\u{fffd}b");
    }

    #[test]
    fn bytes_without_a_tokenizer() {
        let model = tempfile::tempdir().unwrap();
        let text = Text::new(Some(model.path())).unwrap();
        assert_eq!(text.encode("ab").unwrap(), [97, 98]);
        assert!(text.advice().contains("has no tokenizer.json"));
    }

    fn recorded(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/golden/directories").join(name)
    }

    /// Recorded by `tests/golden/record_directories.py`.
    #[test]
    fn configured_tokens_are_those_of_transformers() {
        let json: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(recorded("recorded.json")).unwrap()).unwrap();
        let cases = json["configured"].as_array().unwrap();
        assert_eq!(cases.len(), 20);
        for case in cases {
            let model = tempfile::tempdir().unwrap();
            fs::copy(recorded("model/tokenizer.json"), model.path().join("tokenizer.json")).unwrap();
            for (name, content) in case["files"].as_object().unwrap() {
                fs::write(model.path().join(name), content.to_string()).unwrap();
            }
            let text = Text::new(Some(model.path())).unwrap();
            let ids: Vec<Vec<u32>> =
                json["texts"].as_array().unwrap().iter().map(|s| text.encode(s.as_str().unwrap()).unwrap()).collect();
            assert_eq!(serde_json::json!(ids), case["ids"], "{}", case["files"]);
            let named = configured_tokens(Some(model.path())).unwrap().named;
            assert_eq!(serde_json::json!(named.get("eos_token")), case["eos_token"], "{}", case["files"]);
        }
    }

    #[test]
    fn models_with_another_tokenizer_refuse_texts() {
        let model = tempfile::tempdir().unwrap();
        fs::write(model.path().join("vocab.json"), "{}").unwrap();
        let text = Text::new(Some(model.path())).unwrap();
        for error in [text.encode("a").err(), text.cutting(9).err(), text.encode_marked(vec![]).err()] {
            let error = error.unwrap().to_string();
            assert!(error.contains("has vocab.json, but no tokenizer.json: make it with transformers"), "{error}");
        }
        assert_eq!(text.decode(&[7, 300]).unwrap(), "7 300");
        fs::remove_file(model.path().join("vocab.json")).unwrap();
        let mut text = Text::new(Some(model.path())).unwrap();
        text.expect_vocabulary(256);
        assert_eq!(text.encode("a").unwrap(), [97]);
        text.expect_vocabulary(257);
        assert!(text.encode("a").unwrap_err().to_string().contains("a vocabulary of 257 ids"));
    }

    #[test]
    fn tokenizer_does_not_truncate() {
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
    fn broken_tokenizer_is_refused() {
        let model = tempfile::tempdir().unwrap();
        fs::write(model.path().join("tokenizer.json"), "{}").unwrap();
        let error = format!("{:#}", Text::new(Some(model.path())).err().unwrap());
        assert!(error.contains("cannot read the tokenizer") && error.contains("tokenizer.json"), "{error}");
    }

    #[test]
    fn pieces_end_at_newlines_or_characters() {
        assert_eq!(pieces("ab\ncd\nef", 6), ["ab\ncd\n", "ef"]);
        assert_eq!(pieces("ab\ncd\nef", 4), ["ab\n", "cd\n", "ef"]);
        assert_eq!(pieces("äöü", 5), ["äö", "ü"]);
        assert_eq!(pieces("", 5), [""; 0]);
    }
}
