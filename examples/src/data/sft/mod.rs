//! Examples for supervised fine-tuning and preference tuning: `--sft FILE` and `--dpo FILE`.
//!
//! A record is a conversation or a prompt with a completion. `template` formats conversations by the model's chat
//! template and finds the assistant's turns, which the loss counts. `packing` combines examples into sequences. `pairs`
//! reads records with two completions.

use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use crc_fast::{CrcAlgorithm, Digest};
use fsdp_corpus::documents::records;
use fsdp_corpus::format::{CorpusFile, Format};
use indicatif::HumanCount;
use minijinja::Value;
use minijinja::value::ValueKind;

use crate::data::MOST_BYTES;
use crate::data::sft::template::{Specials, Templates, conversation};
use crate::data::text::{Marked, Text};
use crate::input::check_data;
use crate::json;

mod jinja;
pub(in crate::data) mod packing;
pub(in crate::data) mod pairs;
mod template;
pub(in crate::data) use template::read_json;
#[cfg(test)]
mod tests;

/// Records tokenised in parallel.
const RECORDS: usize = 512;

/// Examples of a `--sft` file: their tokens, and which of them the loss counts.
pub struct Examples {
    tokens: Vec<u32>,
    learnt: Vec<bool>,
    /// End of each example.
    ends: Vec<usize>,
    origin: String,
    cut: usize,
    dropped: usize,
    digest: Digest,
    stops: Vec<u32>,
}

/// An example.
#[derive(Clone, Copy, Debug)]
pub(in crate::data) struct Example<'a> {
    pub(in crate::data) tokens: &'a [u32],
    /// Whether the loss counts each token. False for the first token.
    pub(in crate::data) learnt: &'a [bool],
}

impl Examples {
    fn new(origin: String, stops: Vec<u32>) -> Self {
        let (tokens, learnt, ends) = (vec![], vec![], vec![]);
        let digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        Examples { tokens, learnt, ends, origin, cut: 0, dropped: 0, digest, stops }
    }

    /// Reads a file of records: JSON Lines, JSON or Parquet. Each is a conversation (`messages`, formatted by the model
    /// directory's chat template) or a `prompt` with a `completion`. Blank lines are skipped. Examples are cut to `seq_len` tokens and one target,
    /// and dropped if nothing is left to learn.
    ///
    /// # Errors
    /// A record has another form, the template refuses it, no example is left, or an id is not below `vocab_size`. Errors
    /// name the file and the line or the row.
    pub fn load(path: &Path, model: Option<&Path>, text: &Text, seq_len: usize, vocab_size: usize) -> Result<Self> {
        let reading = Reading::new(model, text, seq_len, vocab_size)?;
        let mut examples = Examples::new(path.display().to_string(), reading.specials.stops.clone());
        let read = |line: &str| read_line(line, &reading.templates, &reading.special);
        read_records(path, read, |chunk| reading.tokenise(chunk, &mut examples, path))?;
        ensure!(
            examples.cut > 0 || !examples.ends.is_empty(),
            "{} has no examples: it must have at least one line, such as {{\"messages\": [{{\"role\": \"user\", \
             \"content\": \"...\"}}, {{\"role\": \"assistant\", \"content\": \"...\"}}]}}",
            path.display()
        );
        ensure!(
            !examples.ends.is_empty(),
            "nothing is left to learn of the {} examples in {} after they were cut to --seq-len {seq_len} tokens: use \
             a larger --seq-len",
            HumanCount(examples.dropped as u64),
            path.display()
        );
        Ok(examples)
    }

    /// Returns the number of examples.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns whether there are no examples, which is never the case.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns a checksum of tokens, counted tokens and ends of examples.
    pub fn checksum(&self) -> u64 {
        self.digest.finalize()
    }

    /// Describes how many examples were cut, if any.
    pub fn truncation_warning(&self) -> Option<String> {
        let (all, cut) = (self.len() + self.dropped, self.cut);
        let dropped = match self.dropped {
            0 => String::new(),
            dropped => format!("; {dropped} of these were dropped, because nothing was left to learn"),
        };
        (cut > 0).then(|| {
            format!(
                "{cut} of the {all} examples in {} are longer than --seq-len and were cut to it{dropped}",
                self.origin
            )
        })
    }

    /// Returns the ids that end an answer.
    pub fn stops(&self) -> &[u32] {
        &self.stops
    }

    /// Returns the tokens before those that the loss counts, of the first example that has such tokens. Empty if each
    /// example begins with a counted token.
    pub fn first_prompt(&self) -> &[u32] {
        let prompt = |index| {
            let Example { tokens, learnt } = self.get(index);
            &tokens[..learnt.iter().position(|&learnt| learnt).unwrap_or(tokens.len())]
        };
        (0..self.len()).map(prompt).find(|prompt| !prompt.is_empty()).unwrap_or(&[])
    }

    pub(in crate::data) fn get(&self, index: usize) -> Example<'_> {
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        let range = start..self.ends[index];
        Example { tokens: &self.tokens[range.clone()], learnt: &self.learnt[range] }
    }

    fn push(&mut self, tokens: &[u32], learnt: &[bool]) {
        self.digest.update(&(tokens.len() as u64).to_le_bytes());
        self.digest.update(&tokens.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>());
        self.digest.update(&learnt.iter().map(|&learnt| u8::from(learnt)).collect::<Vec<_>>());
        self.tokens.extend_from_slice(tokens);
        self.learnt.extend_from_slice(learnt);
        self.ends.push(self.tokens.len());
    }

    #[cfg(test)]
    pub(in crate::data) fn of(examples: &[(&[u32], &[bool])]) -> Self {
        let mut all = Examples::new("a test".into(), vec![]);
        examples.iter().for_each(|(tokens, learnt)| all.push(tokens, learnt));
        all
    }
}

/// Reads the records of a file, and passes them on in chunks, with their places. Errors name the place.
fn read_records<T>(
    path: &Path,
    read: impl Fn(&str) -> Result<T>,
    mut pass_on: impl FnMut(Vec<(String, T)>) -> Result<()>,
) -> Result<()> {
    check_data(path)?;
    let format = match Format::of_file(path)? {
        // A file of another name holds JSON Lines.
        Format::Text(compression) => Format::JsonLines(compression),
        format => format,
    };
    let mut records = records(&CorpusFile { path: path.to_owned(), format }, MOST_BYTES)?.peekable();
    while records.peek().is_some() {
        let mut chunk = Vec::new();
        for record in records.by_ref().take(RECORDS) {
            let record = record?;
            let read = read(&record.json).with_context(|| record.place.clone())?;
            chunk.push((record.place, read));
        }
        pass_on(chunk)?;
    }
    Ok(())
}

/// Formats as `300 examples of chat.jsonl`.
impl fmt::Display for Examples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} examples of {}", HumanCount(self.len() as u64), self.origin)
    }
}

/// Returns the token that ends a text of a model, if it is known.
pub(in crate::data) fn end_token(model: Option<&Path>, text: &Text) -> Result<Option<u32>> {
    Ok(Specials::new(model, text)?.end)
}

/// State for reading records.
struct Reading<'a> {
    text: &'a Text,
    specials: Specials,
    /// All special tokens.
    special: Vec<String>,
    templates: Templates,
    seq_len: usize,
    vocab_size: usize,
}

impl<'a> Reading<'a> {
    fn new(model: Option<&Path>, text: &'a Text, seq_len: usize, vocab_size: usize) -> Result<Self> {
        let specials = Specials::new(model, text)?;
        let templates = Templates::new(model, &specials)?;
        let special = text.special_tokens(&specials.named);
        Ok(Reading { text, specials, special, templates, seq_len, vocab_size })
    }

    /// Appends the examples of records with their places.
    fn tokenise(&self, records: Vec<(String, Marked)>, examples: &mut Examples, path: &Path) -> Result<()> {
        let (places, marked): (Vec<String>, Vec<Marked>) = records.into_iter().unzip();
        let bare: Vec<bool> = marked.iter().map(|marked| marked.bare).collect();
        let tokenised = self.text.encode_marked(marked).with_context(|| format!("in {}", path.display()))?;
        for ((place, bare), (mut tokens, mut learnt)) in places.into_iter().zip(bare).zip(tokenised) {
            let place = || place.clone();
            if bare {
                self.complete(&mut tokens, &mut learnt).with_context(place)?;
            }
            self.check_ids(&tokens).with_context(place)?;
            let whole = tokens.len();
            let end = whole.min(self.seq_len + 1);
            // Tokens after the last counted one have no effect.
            let last = (1..end).rev().find(|&at| learnt[at]);
            ensure!(
                last.is_some() || learnt.iter().skip(1).any(|&learnt| learnt),
                "{}: no token to learn: the assistant must answer something",
                place()
            );
            examples.cut += usize::from((end..whole).any(|at| learnt[at]));
            match last {
                Some(last) => examples.push(&tokens[..=last], &learnt[..=last]),
                None => examples.dropped += 1,
            }
        }
        Ok(())
    }

    /// Fails if an id is beyond the vocabulary.
    fn check_ids(&self, tokens: &[u32]) -> Result<()> {
        let vocab_size = self.vocab_size;
        match tokens.iter().find(|&&id| id as usize >= vocab_size) {
            Some(id) => bail!(
                "it has a token with id {id}, but the model's vocabulary has {vocab_size} ids. {}",
                self.text.advice()
            ),
            None => Ok(()),
        }
    }

    /// Adds the end token after a completion unless it is there, and removes a second start token.
    fn complete(&self, tokens: &mut Vec<u32>, learnt: &mut Vec<bool>) -> Result<()> {
        let Some(end) = self.specials.end else {
            bail!(
                "the token that ends a completion is not known: add tokenizer_config.json with an eos_token, or \
                 config.json with an eos_token_id, to the model directory"
            )
        };
        if tokens.last() != Some(&end) {
            tokens.push(end);
            learnt.push(true);
        } else if let Some(learnt) = learnt.last_mut() {
            *learnt = true;
        }
        self.remove_second_start(tokens, learnt);
        Ok(())
    }

    fn remove_second_start(&self, tokens: &mut Vec<u32>, learnt: &mut Vec<bool>) {
        let begin = self.specials.token("bos_token").and_then(|token| self.text.id_of(token));
        if tokens.len() > 1 && begin.is_some() && tokens[0] == tokens[1] && Some(tokens[0]) == begin {
            tokens.remove(0);
            learnt.remove(0);
        }
    }
}

/// Returns the text of a conversation, a line of a `--sft` file, as the chat template of a model directory formats it.
/// With `add_generation_prompt`, the text ends where the assistant's next answer begins.
///
/// # Errors
/// The line is not a conversation, or the template refuses it or uses something that is not supported.
///
/// ```
/// let line = r#"{"messages": [{"role": "user", "content": "Hi"}]}"#;
/// let text = fsdp_train::data::chat_text(None, line, true)?;
/// assert_eq!(text, "user:\nHi\0\nassistant:\n");
/// # anyhow::Ok(())
/// ```
pub fn chat_text(model: Option<&Path>, line: &str, add_generation_prompt: bool) -> Result<String> {
    let templates = Templates::new(model, &Specials::new(model, &Text::new(model)?)?)?;
    let mut fields = json::fields(line)?;
    let messages = messages_of("messages", &fields.remove("messages").unwrap_or_default(), FORMS)?;
    Ok(templates.of(&fields).render(&messages, &fields, add_generation_prompt)?.0)
}

/// Forms of a line, for error messages.
const FORMS: &str = "a line is {\"messages\": [{\"role\": \"user\", \"content\": \"...\"}, ..]} or \
                     {\"prompt\": \"...\", \"completion\": \"...\"}";

/// Returns the text of a line and its counted ranges.
fn read_line(line: &str, templates: &Templates, specials: &[String]) -> Result<Marked> {
    let mut fields = json::fields(line).map_err(|error| anyhow!("{error}; {FORMS}"))?;
    let found = || fields.keys().map(|key| format!("\"{key}\"")).collect::<Vec<_>>().join(", ");
    match (fields.get("messages"), fields.get("prompt"), fields.get("completion")) {
        (Some(messages), None, None) => {
            let messages = messages_of("messages", messages, FORMS)?;
            fields.remove("messages");
            conversation(templates.of(&fields), &messages, &fields, specials)
        }
        (None, Some(prompt), Some(completion)) => {
            let (Some(prompt), Some(completion)) = (prompt.as_str(), completion.as_str()) else {
                bail!(
                    "prompt is {} and completion is {}, but both must be text: write conversations as \"messages\"",
                    prompt.kind(),
                    completion.kind()
                )
            };
            ensure!(!completion.is_empty(), "the completion is empty, so nothing can be learned: remove the line");
            let text = format!("{prompt}{completion}");
            let completion = prompt.len()..text.len();
            Ok(Marked { text, learnt: Vec::from([completion]), bare: true })
        }
        (Some(_), Some(_), Some(_)) => bail!(
            "it has \"messages\" beside \"prompt\" and \"completion\", and the loss would count another text for each: drop \
             \"prompt\" and \"completion\" to train on the conversation, or drop \"messages\" to train on the completion"
        ),
        (Some(_), prompt, _) => {
            let other = if prompt.is_some() { "prompt" } else { "completion" };
            bail!("it has \"messages\" beside \"{other}\": drop \"{other}\" to train on the conversation")
        }
        _ if fields.is_empty() => bail!("it has no keys; {FORMS}"),
        _ => bail!("it has the keys {}; {FORMS}", found()),
    }
}

/// Returns the messages of a line, and its other fields.
#[cfg(test)]
pub(super) fn messages(line: &str) -> Result<(Vec<Value>, std::collections::BTreeMap<String, Value>)> {
    let mut fields = json::fields(line)?;
    let messages = messages_of("messages", &fields.remove("messages").unwrap_or_default(), FORMS)?;
    Ok((messages, fields))
}

/// Names of the key for the reasoning of the assistant, in the order in which transformers looks for them.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Returns the messages without null fields and with the reasoning under the names that templates read, as transformers
/// does.
fn messages_of(name: &str, messages: &Value, forms: &str) -> Result<Vec<Value>> {
    ensure!(
        messages.kind() == ValueKind::Seq,
        "{name} is {}, but must be a list of messages; {forms}",
        messages.kind()
    );
    let messages: Vec<Value> = messages.try_iter()?.collect();
    ensure!(!messages.is_empty(), "{name} is empty; {forms}");
    messages.into_iter().enumerate().map(|(i, message)| message_of(i + 1, &message, forms)).collect()
}

fn message_of(number: usize, message: &Value, forms: &str) -> Result<Value> {
    ensure!(message.kind() == ValueKind::Map, "message {number} is {}, but must be an object; {forms}", message.kind());
    let role = message.get_attr("role")?;
    ensure!(role.as_str().is_some(), "message {number} needs a role that is text; {forms}");
    let mut fields = Vec::new();
    for key in message.try_iter()? {
        let value = message.get_item(&key)?;
        if !value.is_none() {
            fields.push((key, value));
        }
    }
    ensure!(
        fields.iter().any(|(key, _)| matches!(key.as_str(), Some("content" | "tool_calls"))),
        "message {number} has no content; {forms}"
    );
    let place = |fields: &[(Value, Value)], name: &str| fields.iter().position(|(key, _)| key.as_str() == Some(name));
    if let Some(at) = REASONING.iter().find_map(|name| place(&fields, name)) {
        let reasoning = fields[at].1.clone();
        let thinking = match place(&fields, "thinking") {
            Some(at) => fields.remove(at),
            None => ("thinking".into(), reasoning.clone()),
        };
        fields.insert(0, thinking);
        match place(&fields, "reasoning_content") {
            Some(at) => fields[at].1 = reasoning,
            None => fields.push(("reasoning_content".into(), reasoning)),
        }
    }
    Ok(Value::from_pairs(fields))
}

/// Returns whether a message has the role of the assistant.
fn is_assistant(message: &Value) -> bool {
    message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))
}
