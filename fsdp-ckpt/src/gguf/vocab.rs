//! The tokenizer, from `tokenizer.json`.
//!
//! llama.cpp has three kinds of tokenizers for these models. `gpt2` merges pairs of bytes. `llama` merges pairs of
//! characters, as sentencepiece does, and has tokens for single bytes. `bert` is WordPiece.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value as Json;

use crate::Result;
use crate::gguf::chat_template::ChatTemplates;
use crate::gguf::config::Config;
use crate::gguf::metadata::{Metadata, Value};
use crate::gguf::pre_tokenizer;
use crate::gguf::special_tokens::{Sources, SpecialTokens};
use crate::hf::{AddedToken, ConfiguredTokens, missing_tokenizer};
use crate::text_file::{malformed, read_json};

const FILE: &str = "tokenizer.json";
/// Sentencepiece's space.
const SPACE: char = '\u{2581}';
/// Score of tokens that merges do not make.
const UNMERGED: f32 = -1e9;

/// A tokenizer.
#[derive(Debug)]
pub(super) struct Vocabulary {
    kind: &'static str,
    /// llama.cpp's name of the pre-tokenizer.
    pre: String,
    tokens: Vec<Token>,
    merges: Vec<String>,
    /// Whether a space is put before a text; only for `llama`.
    space_prefix: Option<bool>,
    lowercase: Option<bool>,
    strip_accents: Option<bool>,
    special: SpecialTokens,
    chat_templates: ChatTemplates,
}

#[derive(Clone, Debug)]
struct Token {
    text: String,
    kind: Kind,
    /// Tokens with higher scores are merged first; only for `llama`.
    score: f32,
}

/// llama.cpp's kinds of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

#[derive(Deserialize)]
struct TokenizerJson {
    model: Model,
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Json,
    #[serde(default)]
    pre_tokenizer: Json,
    post_processor: Option<Json>,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    vocab: Json,
    #[serde(default)]
    merges: Vec<Merge>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: Option<bool>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair([String; 2]),
    Text(String),
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

impl Vocabulary {
    /// Returns whether llama.cpp loads the tokenizer of a model with this name. It looks up Phi-3's special tokens by the
    /// name alone, and fails if one is missing.
    pub(super) fn accepts_name(&self, name: &str) -> bool {
        let name = name.to_lowercase();
        let is_phi3 = ["phi-3", "phi3"].iter().any(|part| name.contains(part));
        let has = |text: &&str| self.tokens.iter().any(|token| token.text == *text);
        !is_phi3 || ["</s>", "<unk>", "<s>", "<|endoftext|>"].iter().all(has)
    }

    /// Reads the tokenizer of a model directory; `None` without one.
    pub(super) fn read(dir: &Path, config: &Config, pre_tokenizer: Option<&str>) -> Result<Option<Self>> {
        let Some(mut json) = read_json::<TokenizerJson>(dir, FILE)? else {
            return match missing_tokenizer(dir)? {
                None => Ok(None),
                Some(reason) => Err(malformed(&dir.join(FILE), None, reason)),
            };
        };
        let tokenizer_config = read_json::<Json>(dir, "tokenizer_config.json")?;
        let special_tokens_map = read_json::<Json>(dir, "special_tokens_map.json")?;
        let added_tokens = read_json::<Json>(dir, "added_tokens.json")?;
        let files = [tokenizer_config.as_ref(), special_tokens_map.as_ref(), added_tokens.as_ref()];
        let tokens = ConfiguredTokens::new(files[0], files[1], files[2]);
        let tokens = tokens.map_err(|reason| malformed(dir, None, reason))?;
        json.add(&tokens);
        let reader = Reader { path: dir.join(FILE), json, size: config.vocabulary };
        let mut vocabulary = reader.vocabulary(pre_tokenizer)?;
        let ids: HashMap<&str, u32> = (0..).zip(&reader.texts()?).map(|(id, text)| (*text, id)).collect();
        let sources = Sources {
            tokenizer_config: tokenizer_config.as_ref(),
            named: &tokens.named,
            post_processor: reader.json.post_processor.as_ref(),
            unknown: reader.json.model.unk_token.as_deref(),
        };
        vocabulary.special = SpecialTokens::new(&sources, config, |text| ids.get(text).copied());
        vocabulary.chat_templates = ChatTemplates::read(dir, tokenizer_config.as_ref())?;
        Ok(Some(vocabulary))
    }

    /// Adds the tokenizer, and returns its kind.
    pub(super) fn add_to(&self, metadata: &mut Metadata) -> &'static str {
        let mut own = |key: &str, value: Value| metadata.add(format!("tokenizer.ggml.{key}"), value);
        own("model", self.kind.into());
        own("pre", self.pre[..].into());
        own("tokens", Value::Texts(self.tokens.iter().map(|token| token.text.clone()).collect()));
        own("token_type", Value::I32s(self.tokens.iter().map(|token| token.kind as i32).collect()));
        if self.kind == "llama" {
            own("scores", Value::F32s(self.tokens.iter().map(|token| token.score).collect()));
        }
        if self.kind == "gpt2" {
            own("merges", Value::Texts(self.merges.clone()));
        }
        let flags = [
            ("add_space_prefix", self.space_prefix),
            ("normalizer.lowercase", self.lowercase),
            ("normalizer.strip_accents", self.strip_accents),
        ];
        for (key, flag) in flags {
            if let Some(flag) = flag {
                own(key, Value::Bool(flag));
            }
        }
        self.special.add_to(metadata, self.tokens.len());
        self.chat_templates.add_to(metadata);
        self.kind
    }
}

impl TokenizerJson {
    /// Adds tokens as the tokenizers library does: a token that the model lacks gets the next id.
    fn add(&mut self, tokens: &ConfiguredTokens) {
        let Json::Object(vocab) = &self.model.vocab else { return };
        let last = self.added_tokens.iter().map(|added| added.id.saturating_add(1)).max();
        let mut next = last.unwrap_or(0).max(vocab.len() as u32);
        let own = tokens.added.iter().map(|token| (token, true));
        for (token, replaces) in own.chain(tokens.special.iter().map(|token| (token, false))) {
            let AddedToken { content, special, .. } = token;
            if let Some(known) = self.added_tokens.iter_mut().find(|known| known.content == *content) {
                known.special = if replaces { *special } else { known.special };
            } else if !content.is_empty() {
                let known = vocab.get(content).and_then(Json::as_u64).and_then(|id| u32::try_from(id).ok());
                let id = known.unwrap_or(next);
                next = next.saturating_add(u32::from(known.is_none()));
                self.added_tokens.push(Added { id, content: content.clone(), special: *special });
            }
        }
    }
}

/// A parsed `tokenizer.json`.
struct Reader {
    path: PathBuf,
    json: TokenizerJson,
    /// Rows of the embedding.
    size: usize,
}

impl Reader {
    fn fail<T>(&self, item: &str, reason: impl Into<String>) -> Result<T> {
        Err(malformed(&self.path, Some(item), reason))
    }

    fn vocabulary(&self, pre_tokenizer: Option<&str>) -> Result<Vocabulary> {
        let model = &self.json.model;
        let kind = match (model.kind.as_deref(), model.byte_fallback) {
            (Some("BPE"), true) => "llama",
            (Some("BPE"), false) => "gpt2",
            (None, false) if !model.merges.is_empty() => "gpt2",
            (Some("WordPiece"), _) => "bert",
            (other, _) => {
                let found = other.unwrap_or("missing");
                return self.fail("model.type", format!("it is {found}, expected BPE or WordPiece"));
            }
        };
        let pre = match (pre_tokenizer, kind) {
            (Some(name), _) => name.to_string(),
            (None, "gpt2") => self.pre_tokenizer()?,
            (None, _) => "default".to_string(),
        };
        if kind == "bert" && model.continuing_subword_prefix.as_deref().is_some_and(|prefix| prefix != "##") {
            return self.fail("model.continuing_subword_prefix", "it is not \"##\", which llama.cpp needs");
        }
        let mut tokens = self.tokens(kind)?;
        if kind == "llama" {
            self.score(&mut tokens)?;
        }
        self.pad(&mut tokens)?;
        let (mut lowercase, mut strip_accents) = (None, None);
        for step in steps(&self.json.normalizer, "normalizers") {
            match step.get("type").and_then(Json::as_str) {
                Some("Lowercase") => lowercase = Some(true),
                Some("StripAccents") => strip_accents = Some(true),
                Some("BertNormalizer") => {
                    lowercase = step.get("lowercase").and_then(Json::as_bool);
                    // BERT strips accents of lower-case models unless the file says otherwise.
                    strip_accents = step.get("strip_accents").and_then(Json::as_bool).or(lowercase);
                }
                _ => {}
            }
        }
        Ok(Vocabulary {
            kind,
            pre,
            tokens,
            merges: if kind == "gpt2" { self.merges()? } else { Vec::new() },
            space_prefix: (kind == "llama").then(|| self.space_prefix()),
            lowercase,
            strip_accents,
            special: SpecialTokens::default(),
            chat_templates: ChatTemplates::default(),
        })
    }

    fn pre_tokenizer(&self) -> Result<String> {
        let json = &self.json.pre_tokenizer;
        match pre_tokenizer::name(json, self.json.model.ignore_merges.unwrap_or(false)) {
            Some(name) => Ok(name.to_string()),
            None => {
                let mut found = json.to_string();
                if let Some((at, _)) = found.char_indices().nth(200) {
                    found.truncate(at);
                    found += "...";
                }
                let reason = format!(
                    "it is {found}, expected rules that llama.cpp has; if it has them, --pre-tokenizer names them"
                );
                self.fail("pre_tokenizer", reason)
            }
        }
    }

    /// Returns the texts of all tokens by id, with empty texts for ids without a token.
    fn texts(&self) -> Result<Vec<&str>> {
        let Json::Object(vocab) = &self.json.model.vocab else {
            return self.fail("model.vocab", "it is not an object of tokens with their ids");
        };
        let mut texts = Vec::new();
        let entries = vocab.iter().map(|(text, id)| (&text[..], id.as_u64()));
        let added = self.json.added_tokens.iter().map(|added| (&added.content[..], Some(u64::from(added.id))));
        for (text, id) in entries.chain(added) {
            let Some(id) = id.filter(|id| *id < self.size as u64) else {
                let found = id.map_or("not a number".to_string(), |id| id.to_string());
                let reason = format!("its id is {found}, expected less than {}, the size of the embedding", self.size);
                return self.fail(text, reason);
            };
            let id = id as usize;
            if texts.len() <= id {
                texts.resize(id + 1, "");
            }
            texts[id] = text;
        }
        Ok(texts)
    }

    fn tokens(&self, kind: &str) -> Result<Vec<Token>> {
        let texts = self.texts()?;
        let mut added = vec![None; texts.len()];
        self.json.added_tokens.iter().for_each(|token| added[token.id as usize] = Some(token.special));
        let mut tokens = Vec::with_capacity(self.size);
        for (id, text) in texts.into_iter().enumerate() {
            let is_unknown = self.json.model.unk_token.as_deref() == Some(text);
            let (text, kind) = match added[id] {
                _ if text.is_empty() => (padding(id), Kind::Unused),
                _ if is_unknown && kind == "llama" => (text.to_string(), Kind::Unknown),
                Some(special) if special || looks_special(text) => (text.to_string(), Kind::Control),
                Some(_) => (text.replace(SPACE, " "), Kind::UserDefined),
                None if kind == "llama" && is_byte(text) => (text.to_string(), Kind::Byte),
                // llama.cpp marks the beginnings of words instead of their continuations.
                None if kind == "bert" => match text.strip_prefix("##") {
                    Some(rest) => (rest.to_string(), Kind::Normal),
                    None => (format!("{SPACE}{text}"), Kind::Normal),
                },
                None => (text.to_string(), Kind::Normal),
            };
            tokens.push(Token { text, kind, score: UNMERGED });
        }
        Ok(tokens)
    }

    /// Scores tokens by the first merge that makes them: sentencepiece lists merges by falling scores.
    fn score(&self, tokens: &mut [Token]) -> Result<()> {
        let mut ranks = HashMap::new();
        for (rank, merge) in self.json.model.merges.iter().enumerate() {
            let [left, right] = self.pair(merge)?;
            ranks.entry([left, right].concat()).or_insert(rank);
        }
        for token in tokens {
            if let Some(rank) = ranks.get(&token.text) {
                token.score = -(*rank as f32);
            }
        }
        Ok(())
    }

    fn pair<'a>(&self, merge: &'a Merge) -> Result<[&'a str; 2]> {
        match merge {
            Merge::Pair([left, right]) => Ok([left, right]),
            Merge::Text(text) => match text.split_once(' ') {
                Some((left, right)) => Ok([left, right]),
                None => self.fail("model.merges", format!("it has {text:?}, expected two texts with a space between")),
            },
        }
    }

    fn merges(&self) -> Result<Vec<String>> {
        // Spaces in merges are only in tokenizers without bytes. llama.cpp splits at the first space.
        let encode = |text: &str| text.replace(' ', "\u{120}");
        let pairs = self.json.model.merges.iter().map(|merge| self.pair(merge));
        pairs.map(|pair| pair.map(|pair| pair.map(encode).join(" "))).collect()
    }

    /// Adds tokens up to the rows of the embedding, and checks that all texts differ, which llama.cpp needs.
    fn pad(&self, tokens: &mut Vec<Token>) -> Result<()> {
        for id in tokens.len()..self.size {
            tokens.push(Token { text: padding(id), kind: Kind::Unused, score: UNMERGED });
        }
        let mut seen = HashSet::new();
        match tokens.iter().find(|token| !seen.insert(&token.text)) {
            Some(twice) => self.fail(&twice.text, "two tokens have this text, and llama.cpp needs different texts"),
            None => Ok(()),
        }
    }

    /// Returns whether a space is put before a text.
    fn space_prefix(&self) -> bool {
        let of = |json, list, kind: &str| {
            steps(json, list).into_iter().find(|step| step.get("type").and_then(Json::as_str) == Some(kind))
        };
        let scheme = |step: &Json| step.get("prepend_scheme").and_then(Json::as_str).unwrap_or("always") != "never";
        of(&self.json.normalizer, "normalizers", "Prepend").is_some()
            || of(&self.json.pre_tokenizer, "pretokenizers", "Metaspace").is_some_and(scheme)
    }
}

/// Returns a step of the tokenizer, or the steps of a sequence.
fn steps<'a>(json: &'a Json, list: &str) -> Vec<&'a Json> {
    match json.get(list).and_then(Json::as_array) {
        Some(list) => list.iter().collect(),
        None => vec![json],
    }
}

/// Returns the text of a row without a token.
fn padding(id: usize) -> String {
    format!("[PAD{id}]")
}

/// Returns whether the text is a byte's, such as `<0x0A>`.
fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

/// Returns whether a token is a control token that some tokenizers do not mark as special.
fn looks_special(text: &str) -> bool {
    let between = |first: &str, last: &str| text.len() > 2 && text.starts_with(first) && text.ends_with(last);
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text) || between("<|", "|>") || between("<unused", ">")
}
