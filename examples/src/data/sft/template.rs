//! Chat templates in Jinja with transformers' extensions, and the assistant's turns in a conversation.

use std::collections::BTreeMap;
use std::io;
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::{Formatter, PrettyFormatter};

use crate::data::sft::is_assistant;
use crate::data::text::{Marked, Text};

/// Template for models without one.
pub(super) const DEFAULT: &str = "{% for message in messages %}\
{{ message.role + ':\\n' + message.content + eos_token + '\\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}";

const NAME: &str = "chat template";

/// Instruction limit against endless loops. A conversation of a thousand messages takes a thousandth of it.
const FUEL: u64 = 100_000_000;

/// Variables that replace `{% generation %}` and `{% endgeneration %}`: empty, or a mark.
const VARIABLES: [&str; 2] = ["__generation", "__endgeneration"];
/// Candidates for marks. A text may contain these noncharacters too.
const NONCHARACTERS: RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// A compiled chat template.
pub(super) struct Template {
    environment: Environment<'static>,
    /// File that it was read from.
    pub(super) origin: String,
    /// Whether it marks the assistant's turns by `{% generation %}`.
    pub(super) marks: bool,
}

impl Template {
    /// Loads the template of a model directory: `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`,
    /// which may be a list of named ones. Otherwise [`DEFAULT`].
    pub(super) fn new(model: Option<&Path>, specials: &Specials) -> Result<Self> {
        let (source, origin) = match model.map(of_directory).transpose()?.flatten() {
            Some((source, path)) => (source, format!("the chat template in {}", path.display())),
            None => {
                if specials.token("eos_token").is_none() {
                    bail!(
                        "{} has no chat template, and the built-in format needs an eos_token, which neither \
                         tokenizer_config.json, generation_config.json nor config.json has: add the model's \
                         chat_template.jinja or its tokenizer_config.json",
                        model.unwrap_or(Path::new("the model")).display()
                    );
                }
                (DEFAULT.to_owned(), "the built-in format".to_owned())
            }
        };
        let (source, marks) = with_marks(&source);
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        environment.set_syntax(syntax);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: String| -> Result<String, Error> {
            jiff::fmt::strtime::format(&format, &jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC))
                .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
        });
        for (name, token) in &specials.named {
            environment.add_global(name.clone(), Value::from(token.clone()));
        }
        environment.add_template_owned(NAME, source).map_err(|error| {
            anyhow!(
                "{origin} is not a valid Jinja template: {}; fix it, or put another chat_template.jinja into \
                 the model directory",
                describe(&error)
            )
        })?;
        Ok(Template { environment, origin, marks })
    }

    /// Renders messages. Returns the text, and the byte ranges inside `{% generation %}`.
    pub(super) fn render(
        &self,
        messages: &[Value],
        others: &BTreeMap<String, Value>,
        add_generation_prompt: bool,
    ) -> Result<(String, Vec<Range<usize>>)> {
        let mut context: BTreeMap<String, Value> =
            ["tools", "documents"].map(|name| (name.to_owned(), Value::from(()))).into();
        context.extend(others.clone());
        context.insert("messages".into(), messages.iter().cloned().collect());
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        let template = self.environment.get_template(NAME)?;
        let mut written = |marks: [String; 2]| {
            context.extend(VARIABLES.into_iter().map(str::to_owned).zip(marks.map(Value::from)));
            template
                .render(Value::from(context.clone()))
                .map_err(|error| anyhow!("{} refuses it: {}", self.origin, describe(&error)))
        };
        let text = written(Default::default())?;
        if !self.marks {
            return Ok((text, vec![]));
        }
        // A character that the text contains would act as a mark.
        let mut free = NONCHARACTERS.filter(|mark| !text.contains(*mark));
        let (Some(begin), Some(end)) = (free.next(), free.next()) else {
            bail!(
                "the text uses almost all of the noncharacters U+FDD0 to U+FDEF, and two must be free to mark the \
                 assistant's turns: remove them"
            )
        };
        let marked = written([begin, end].map(String::from))?;
        let (unmarked, spans) = without_marks(&marked, [begin, end]);
        ensure!(
            unmarked == text,
            "{} applies a filter or a test to the contents of {{% generation %}}, so the assistant's words can't be \
             found: put {{% generation %}} and {{% endgeneration %}} around the final text",
            self.origin
        );
        Ok((text, spans))
    }
}

/// Returns the source of a directory's template and its file, if there is one.
fn of_directory(model: &Path) -> Result<Option<(String, PathBuf)>> {
    let file = model.join("chat_template.jinja");
    if file.exists() {
        let source = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        return Ok(Some((source, file)));
    }
    let name = "tokenizer_config.json";
    let file = model.join(name);
    let Some(found) = read_json(Some(model), name)?.and_then(|fields| fields.get("chat_template").cloned()) else {
        return Ok(None);
    };
    let source = match &found {
        serde_json::Value::String(source) => Some(source.as_str()),
        serde_json::Value::Array(named) => {
            let default = named.iter().find(|named| named.get("name").is_some_and(|name| name == "default"));
            default.and_then(|named| named.get("template")?.as_str())
        }
        _ => None,
    };
    match source {
        Some(source) => Ok(Some((source.to_owned(), file))),
        None if found.is_null() => Ok(None),
        None => bail!(
            "the chat_template in {} is neither text nor a list with an entry named default: put the template into \
             chat_template.jinja beside it",
            file.display()
        ),
    }
}

/// Replaces `{% generation %}` and its end by [`VARIABLES`], and returns whether there were any. Empty blocks on both
/// sides keep the trimming of whitespace as it was around the tags.
fn with_marks(source: &str) -> (String, bool) {
    let (mut out, mut rest, mut found) = (String::new(), source, false);
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let inner = tag.strip_prefix("{%").and_then(|tag| tag.strip_suffix("%}")).unwrap_or("");
        let left = if inner.starts_with(['-', '+']) { &inner[..1] } else { "" };
        let right = if inner.ends_with(['-', '+']) { &inner[inner.len() - 1..] } else { "" };
        let mark = match inner.trim_matches(['-', '+']).trim() {
            "generation" => Some(VARIABLES[0]),
            "endgeneration" => Some(VARIABLES[1]),
            _ => None,
        };
        match mark {
            Some(mark) => {
                found = true;
                out.push_str(&format!("{{%{left} if true %}}{{{{ {mark} }}}}{{% endif {right}%}}"));
            }
            None => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    (out, found)
}

/// Removes the marks, and returns the ranges between them.
fn without_marks(text: &str, [begin, end]: [char; 2]) -> (String, Vec<Range<usize>>) {
    let (mut out, mut spans, mut start) = (String::new(), vec![], None);
    for c in text.chars() {
        if c == begin {
            start = Some(out.len());
        } else if c == end {
            spans.extend(start.take().map(|start| start..out.len()));
        } else {
            out.push(c);
        }
    }
    (out, spans)
}

/// Formats an error with its line in the template and its cause.
fn describe(error: &Error) -> String {
    let mut text = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    if let Some(line) = error.line() {
        text.push_str(&format!(" (line {line} of the template)"));
    }
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

/// Formats a conversation and finds the assistant's turns: as the template marks them, or by formatting the
/// conversation up to and including each of them.
///
/// A turn includes its last special token if only whitespace follows it.
pub(super) fn conversation(
    template: &Template,
    messages: &[Value],
    others: &BTreeMap<String, Value>,
    specials: &[String],
) -> Result<Marked> {
    ensure!(
        messages.iter().any(is_assistant),
        "no message has the role \"assistant\", so nothing can be learned: add the answer, or remove the \
         line"
    );
    let (text, marked) = template.render(messages, others, false)?;
    let mut learnt = marked;
    if !template.marks {
        for (i, _) in messages.iter().enumerate().filter(|(_, message)| is_assistant(message)) {
            let turn = turn(template, messages, others, i, &text, specials)?;
            learnt.push(turn);
        }
    }
    for span in &mut learnt {
        let said = text[span.clone()].trim_end();
        if specials.iter().any(|token| said.ends_with(token.as_str())) {
            span.end = span.start + said.len();
        }
    }
    let says_something = |span: &Range<usize>| {
        let said = specials.iter().fold(text[span.clone()].to_owned(), |said, token| said.replace(token.as_str(), ""));
        !said.trim().is_empty()
    };
    ensure!(
        learnt.iter().all(Range::is_empty) || learnt.iter().any(says_something),
        "the assistant's answer is empty, so nothing can be learned: write it, or remove the line"
    );
    learnt.retain(|span| !span.is_empty());
    ensure!(
        !learnt.is_empty(),
        "{} leaves nothing of the assistant to learn{}",
        template.origin,
        if template.marks { ": its {% generation %} marks nothing here" } else { "" }
    );
    Ok(Marked { text, learnt, bare: false })
}

/// Returns the range of message `i` of the assistant.
fn turn(
    template: &Template,
    messages: &[Value],
    others: &BTreeMap<String, Value>,
    i: usize,
    text: &str,
    specials: &[String],
) -> Result<Range<usize>> {
    let (before, _) = template.render(&messages[..i], others, true)?;
    let (after, _) = template.render(&messages[..=i], others, false)?;
    // Some templates end every conversation, and so this prefix, with a token.
    let endings = specials.iter().filter_map(|token| after.trim_end().strip_suffix(token.as_str()));
    let end = std::iter::once(after.as_str()).chain(endings).find(|after| text.starts_with(after));
    match end {
        Some(end) if text.starts_with(&before) && before.len() <= end.len() => Ok(before.len()..end.len()),
        _ => bail!(
            "{} formats the messages up to number {} differently alone than in the whole conversation, so the \
             assistant's words can't be found. End lines with the assistant's first answer, or mark its turns by \
             {{% generation %}} and {{% endgeneration %}} in a chat_template.jinja in the model directory",
            template.origin,
            i + 1
        ),
    }
}

/// End token where tokens are bytes: a byte that is in no text.
const END_OF_BYTES: &str = "\0";

/// Special tokens by their names in templates, such as `bos_token`, and the tokens that end a text.
#[derive(Debug, Default)]
pub(super) struct Specials {
    pub(super) named: BTreeMap<String, String>,
    /// Token appended to a completion.
    pub(super) end: Option<u32>,
    /// Ids that end an answer.
    pub(super) stops: Vec<u32>,
}

impl Specials {
    /// Reads `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and `config.json` in a model
    /// directory, if they exist.
    pub(super) fn new(model: Option<&Path>, text: &Text) -> Result<Self> {
        if text.is_bytes() {
            let named = BTreeMap::from([("eos_token".to_owned(), END_OF_BYTES.to_owned())]);
            return Ok(Specials { named, end: Some(0), stops: vec![0] });
        }
        let mut named = BTreeMap::new();
        let mut stops = Vec::new();
        for name in ["special_tokens_map.json", "tokenizer_config.json"] {
            let Some(serde_json::Value::Object(fields)) = read_json(model, name)? else { continue };
            for (key, value) in fields.iter().filter(|(key, _)| key.ends_with("_token")) {
                if let Some(token) = value.as_str().or_else(|| value.get("content")?.as_str()) {
                    named.insert(key.clone(), token.to_owned());
                }
            }
        }
        if let Some(id) = named.get("eos_token").and_then(|token| text.id_of(token)) {
            stops.push(id);
        }
        for name in ["generation_config.json", "config.json"] {
            let ids = read_json(model, name)?.and_then(|fields| fields.get("eos_token_id").cloned());
            let ids = match ids {
                Some(serde_json::Value::Array(ids)) => ids,
                Some(id) => vec![id],
                None => vec![],
            };
            stops.extend(ids.iter().filter_map(serde_json::Value::as_u64).filter_map(|id| u32::try_from(id).ok()));
        }
        let end = stops.first().copied();
        if let (None, Some(token)) = (named.get("eos_token"), end.and_then(|id| text.token_of(id))) {
            named.insert("eos_token".into(), token);
        }
        Ok(Specials { named, end, stops })
    }

    /// Returns the text of a special token.
    pub(super) fn token(&self, name: &str) -> Option<&str> {
        self.named.get(name).map(String::as_str)
    }
}

/// Reads a JSON file of the model directory, if it exists.
pub(in crate::data) fn read_json(model: Option<&Path>, name: &str) -> Result<Option<serde_json::Value>> {
    let Some(path) = model.map(|model| model.join(name)).filter(|path| path.exists()) else { return Ok(None) };
    let read = || -> Result<serde_json::Value> { Ok(serde_json::from_str(&std::fs::read_to_string(&path)?)?) };
    read().map(Some).with_context(|| format!("cannot read {}", path.display()))
}

/// Filter `tojson` of transformers' templates, as Python's `json.dumps` with `ensure_ascii=False` and without HTML
/// escapes.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let sorted: Option<bool> = options.get("sort_keys")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    if ascii == Some(true) {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson(ensure_ascii=true) is not supported"));
    }
    let written = match sorted {
        // Values of `serde_json` have sorted keys.
        Some(true) => serde_json::to_value(value).and_then(|value| write(&value, indent)),
        _ => write(value, indent),
    };
    let written = written.map_err(|error| Error::new(ErrorKind::BadSerialization, "no JSON").with_source(error))?;
    Ok(Value::from(written))
}

fn write(value: &impl Serialize, indent: Option<usize>) -> Result<String, serde_json::Error> {
    let mut out = Vec::new();
    match indent {
        Some(indent) => {
            let indent = " ".repeat(indent.min(64));
            let formatter = PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut out, formatter))?;
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, Spaced))?,
    }
    String::from_utf8(out).map_err(serde::ser::Error::custom)
}

/// JSON format with a space after each comma and colon.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
