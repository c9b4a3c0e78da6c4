//! Preference pairs: `--dpo FILE.jsonl`.
//!
//! A line has two completions of one prompt, in the formats of TRL's `DPOTrainer`. As there, the completions begin at
//! the first token that differs between the prompt alone and the prompt with either completion.

use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use fsdp_candle::nn::IGNORED;
use indicatif::HumanCount;
use minijinja::Value;
use minijinja::value::ValueKind;

use crate::data::batches::{MicroBatch, with_padding};
use crate::data::sft::template::Templates;
use crate::data::sft::{Examples, Reading, is_assistant, messages_of, read_records};
use crate::data::text::{Marked, Text};
use crate::json;
use fsdp_corpus::permutation::Permutation;

/// Pairs of a `--dpo` file, and their order.
pub struct Pairs {
    /// Chosen and rejected completions in turn, each after its prompt.
    examples: Examples,
    shuffle: Option<u64>,
    /// Lengths of rows are multiples of this.
    multiple: usize,
}

/// How [`Pairs`] are read.
#[derive(Clone, Copy, Debug)]
pub struct PairOptions {
    /// Largest number of tokens in a row, before its last target.
    pub seq_len: usize,
    /// Ids are below this.
    pub vocab_size: usize,
    /// Rows are padded to a multiple of this, which divides `seq_len`. Sequence parallelism splits them by it.
    pub multiple: usize,
    /// Seed of the order in each epoch, if it is not the file's.
    pub shuffle: Option<u64>,
}

impl Pairs {
    /// Reads a file of records: JSON Lines, JSON or Parquet. Each has a `prompt`, a `chosen` and a `rejected` completion: texts, or lists of messages
    /// that the model directory's chat template formats. Without a prompt, it is the common start of both. Blank lines
    /// are skipped. Completions are cut to `seq_len` tokens and one target. A pair is dropped if one completion is cut
    /// off, or if both are equal after the cut.
    ///
    /// # Errors
    /// A record has another form, the template refuses it, no pair is left, or an id is not below `vocab_size`. Errors
    /// name the file and the line or the row.
    pub fn load(path: &Path, model: Option<&Path>, text: &Text, options: PairOptions) -> Result<Self> {
        let PairOptions { seq_len, vocab_size, multiple, shuffle } = options;
        let reading = Reading::new(model, text, seq_len, vocab_size)?;
        let mut examples = Examples::new(path.display().to_string(), reading.specials.stops.clone());
        let read = |line: &str| read_pair(line, &reading.templates);
        read_records(path, read, |chunk| tokenise(&reading, chunk, &mut examples, path))?;
        let pairs = Pairs { examples, shuffle, multiple };
        ensure!(
            pairs.examples.dropped > 0 || !pairs.is_empty(),
            "{} has no pairs: it must have at least one line. {FORMS}",
            path.display()
        );
        ensure!(
            !pairs.is_empty(),
            "nothing is left to learn of the {} pairs in {} after they were cut to --seq-len {seq_len} tokens: use a \
             larger --seq-len",
            HumanCount(pairs.examples.dropped as u64),
            path.display()
        );
        Ok(pairs)
    }

    /// Returns the number of pairs.
    pub fn len(&self) -> usize {
        self.examples.len() / 2
    }

    /// Returns whether there are no pairs, which is never the case.
    pub fn is_empty(&self) -> bool {
        self.examples.is_empty()
    }

    /// Returns the examples, chosen and rejected in turn.
    pub(in crate::data) fn examples(&self) -> &Examples {
        &self.examples
    }

    /// Describes how many pairs were cut or dropped, if any.
    pub(in crate::data) fn truncation_warning(&self) -> Option<String> {
        let Examples { cut, dropped, origin, .. } = &self.examples;
        let all = self.len() + dropped;
        let of_dropped = match dropped {
            0 => String::new(),
            dropped => format!("; {dropped} of these were dropped, because nothing was left to learn"),
        };
        (*cut > 0).then(|| {
            format!("{cut} of the {all} pairs in {origin} are longer than --seq-len and were cut to it{of_dropped}")
        })
    }

    /// Returns the pair at `offset` after `position`.
    pub(in crate::data) fn place(&self, position: u64, offset: u64) -> usize {
        let count = self.len() as u64;
        let past = position % count + offset;
        let index = match self.shuffle {
            Some(seed) => Permutation::new(count, seed, position / count + past / count).at(past % count),
            None => past % count,
        };
        index as usize
    }

    /// Returns the number of tokens in a pair's two rows.
    pub(in crate::data) fn tokens(&self, pair: usize) -> u64 {
        (2 * pair..2 * pair + 2).map(|example| self.examples.get(example).tokens.len() as u64 - 1).sum()
    }

    /// Returns the rows of these pairs, chosen and rejected in turn, and empty rows up to `size` pairs. Rows are as
    /// long as the longest of them, padded to a multiple.
    pub(in crate::data) fn micro_batch(&self, pairs: impl Iterator<Item = usize>, size: usize) -> MicroBatch {
        let rows: Vec<_> =
            pairs.flat_map(|pair| [2 * pair, 2 * pair + 1]).map(|example| self.examples.get(example)).collect();
        let mut filled: Vec<usize> = rows.iter().map(|row| row.tokens.len() - 1).collect();
        let width = filled.iter().copied().max().unwrap_or(1).next_multiple_of(self.multiple);
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for (number, row) in rows.iter().enumerate() {
            inputs.extend_from_slice(&row.tokens[..filled[number]]);
            let learnt = row.tokens.iter().zip(row.learnt).skip(1);
            targets.extend(learnt.map(|(&token, &learnt)| if learnt { token } else { IGNORED }));
            inputs.resize((number + 1) * width, 0);
            targets.resize((number + 1) * width, IGNORED);
        }
        let count = rows.len() / 2;
        filled.resize(2 * size, 0);
        inputs.resize(2 * size * width, 0);
        targets.resize(2 * size * width, IGNORED);
        let counted = targets.iter().filter(|&&target| target != IGNORED).count() as u64;
        let documents = Some(filled.iter().map(|&filled| with_padding(filled, width)).collect());
        MicroBatch { inputs, targets, counted, documents, filled, pairs: Some(count as u64) }
    }
}

/// Formats as `300 pairs of preferences.jsonl`.
impl fmt::Display for Pairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pairs of {}", HumanCount(self.len() as u64), self.examples.origin)
    }
}

/// Appends the pairs of records with their places: prompt, prompt with the chosen completion, prompt with the rejected one.
fn tokenise(
    reading: &Reading<'_>,
    records: Vec<(String, [Marked; 3])>,
    pairs: &mut Examples,
    path: &Path,
) -> Result<()> {
    let (places, marked): (Vec<String>, Vec<[Marked; 3]>) = records.into_iter().unzip();
    let marked: Vec<Marked> = marked.into_iter().flatten().collect();
    let bare: Vec<bool> = marked.chunks(3).map(|marked| marked[0].bare).collect();
    let tokenised = reading.text.encode_marked(marked).with_context(|| format!("in {}", path.display()))?;
    let mut tokenised = tokenised.into_iter();
    for (place, bare) in places.into_iter().zip(bare) {
        let place = || place.clone();
        let [mut prompt, mut chosen, mut rejected] =
            std::array::from_fn(|_| tokenised.next().map_or(vec![], |(tokens, _)| tokens));
        if bare {
            for completed in [&mut chosen, &mut rejected] {
                let mut learnt = vec![true; completed.len()];
                reading.complete(completed, &mut learnt).with_context(place)?;
            }
            let mut learnt = vec![false; prompt.len()];
            reading.remove_second_start(&mut prompt, &mut learnt);
        }
        for tokens in [&chosen, &rejected] {
            reading.check_ids(tokens).with_context(place)?;
        }
        let begin = common(&prompt, &chosen).min(common(&prompt, &rejected));
        ensure!(
            [&chosen, &rejected].iter().any(|tokens| tokens.len() > begin.max(1)),
            "{}: no token to learn: chosen and rejected add nothing to the prompt",
            place()
        );
        let most = reading.seq_len + 1;
        pairs.cut += usize::from(chosen.len().max(rejected.len()) > most);
        chosen.truncate(most);
        rejected.truncate(most);
        // The first token of a row is not predicted.
        if chosen.len().min(rejected.len()) <= begin.max(1) || chosen == rejected {
            pairs.dropped += 1;
            continue;
        }
        for tokens in [&chosen, &rejected] {
            let learnt: Vec<bool> = (0..tokens.len()).map(|at| at >= begin.max(1)).collect();
            pairs.push(tokens, &learnt);
        }
    }
    Ok(())
}

/// Returns the number of equal items at the start of both lists.
fn common<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Forms of a line, for error messages.
const FORMS: &str = "a line is {\"prompt\": \"...\", \"chosen\": \"...\", \"rejected\": \"...\"}, or has lists of messages \
                     such as [{\"role\": \"assistant\", \"content\": \"...\"}] in place of the texts";

/// Returns the text of a line's prompt, and of the prompt with each completion.
fn read_pair(line: &str, templates: &Templates) -> Result<[Marked; 3]> {
    let mut fields = json::fields(line).map_err(|error| anyhow!("{error}; {FORMS}"))?;
    let found = fields.keys().map(|key| format!("\"{key}\"")).collect::<Vec<_>>().join(", ");
    let mut take = |key: &str| fields.remove(key).filter(|value| !value.is_none());
    let prompt = take("prompt");
    let mut required = |key: &str| {
        take(key).with_context(|| match found.is_empty() {
            true => format!("it has no keys; {FORMS}"),
            false => format!("it has no \"{key}\", only the keys {found}; {FORMS}"),
        })
    };
    let (chosen, rejected) = (required("chosen")?, required("rejected")?);
    ensure!(chosen != rejected, "chosen and rejected are equal, so nothing can be learned: remove the line");
    let texts = (prompt.as_ref().map(Value::as_str), chosen.as_str(), rejected.as_str());
    if let (None | Some(Some(_)), Some(chosen), Some(rejected)) = texts {
        return Ok(texts_of(prompt.as_ref().and_then(Value::as_str), chosen, rejected));
    }
    let kinds = || prompt.iter().chain([&chosen, &rejected]).map(Value::kind);
    ensure!(
        kinds().all(|kind| kind == ValueKind::Seq),
        "the prompt, chosen and rejected are {}: expected only texts, or only lists of messages; {FORMS}",
        kinds().map(|kind| kind.to_string()).collect::<Vec<_>>().join(", ")
    );
    let list = |name: &str, value: &Value| messages_of(name, value, FORMS).with_context(|| format!("in \"{name}\""));
    let (mut chosen, mut rejected) = (list("chosen", &chosen)?, list("rejected", &rejected)?);
    let prompt = match prompt {
        Some(prompt) => list("prompt", &prompt)?,
        None => {
            let end = implicit(&chosen, &rejected);
            rejected.drain(..end);
            chosen.drain(..end).collect()
        }
    };
    ensure!(
        !prompt.is_empty(),
        "chosen and rejected begin with different messages, so there is no prompt: add \"prompt\", or begin both with \
         the same messages"
    );
    for (name, completion) in [("chosen", &chosen), ("rejected", &rejected)] {
        ensure!(
            completion.iter().any(is_assistant),
            "{name}: no message after the prompt has the role \"assistant\", so nothing can be learned: add the answer, \
             or remove the line"
        );
    }
    let template = templates.of(&fields);
    let format = |messages: &[Value], add_generation_prompt: bool| {
        let (text, _) = template.render(messages, &fields, add_generation_prompt)?;
        anyhow::Ok(Marked { text, learnt: vec![], bare: false })
    };
    let with = |completion: Vec<Value>| format(&[prompt.clone(), completion].concat(), false);
    Ok([format(&prompt, true)?, with(chosen)?, with(rejected)?])
}

/// Returns the prompt, and the prompt with each completion. An implicit prompt ends before a space.
fn texts_of(prompt: Option<&str>, chosen: &str, rejected: &str) -> [Marked; 3] {
    let marked = |text: String| Marked { text, learnt: vec![], bare: true };
    match prompt {
        Some(prompt) => [prompt.to_owned(), format!("{prompt}{chosen}"), format!("{prompt}{rejected}")].map(marked),
        None => {
            let (a, b) = (chosen.chars().collect::<Vec<_>>(), rejected.chars().collect::<Vec<_>>());
            let mut end = implicit(&a, &b);
            if end > 0 && a[end - 1] == ' ' {
                end -= 1;
            }
            [a[..end].iter().collect(), chosen.to_owned(), rejected.to_owned()].map(marked)
        }
    }
}

/// Returns the length of the prompt at the start of both: up to the first difference, and before the last item of
/// either.
fn implicit<T: PartialEq>(chosen: &[T], rejected: &[T]) -> usize {
    common(chosen, rejected).min(chosen.len().min(rejected.len()).saturating_sub(1))
}

#[cfg(test)]
mod tests;
