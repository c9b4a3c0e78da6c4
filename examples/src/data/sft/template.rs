//! Chat templates: Jinja, with what transformers gives to it.
//! What of a conversation the assistant says.
//! The special tokens that a model directory names.
//! JSON as Python's `json.dumps` writes it, which templates expect of `tojson`.

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

use crate::data::text::{Marked, Text};

/// How conversations are written where a model brings no template of its own.
pub(super) const DEFAULT: &str = "{% for message in messages %}\
{{ message.role + ':\\n' + message.content + eos_token + '\\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}";

const NAME: &str = "chat template";

/// Instructions after which a template is taken to run forever; a conversation of a thousand messages takes a
/// thousandth of them.
const FUEL: u64 = 100_000_000;

/// The variables that stand in the place of `{% generation %}` and its end: empty, or marks.
const VARIABLES: [&str; 2] = ["__generation", "__endgeneration"];
/// Candidates for marks: noncharacters, which a text may contain all the same.
const NONCHARACTERS: RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// A chat template, ready to run.
pub(super) struct Template {
    environment: Environment<'static>,
    /// Where it was read.
    pub(super) origin: String,
    /// Whether it marks what the assistant says by `{% generation %}`.
    pub(super) marks: bool,
}

impl Template {
    /// The template of a model directory: `chat_template.jinja`, or the `chat_template` in `tokenizer_config.json`,
    /// which may be a list of named ones. Else [`DEFAULT`].
    ///
    /// # Errors
    /// It is no template, or can't be read.
    pub(super) fn new(model: Option<&Path>, specials: &Specials) -> Result<Self> {
        let (source, origin) = match model.map(of_directory).transpose()?.flatten() {
            Some((source, path)) => (source, format!("the chat template in {}", path.display())),
            None => {
                if specials.token("eos_token").is_none() {
                    bail!(
                        "{} has no chat template, and the built-in format needs an eos_token, which is in none of \
                         tokenizer_config.json, generation_config.json and config.json there: add the model's \
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
                "{origin} is no Jinja template that can be used: {}; mend it, or put another chat_template.jinja into \
                 the model directory",
                told(&error)
            )
        })?;
        Ok(Template { environment, origin, marks })
    }

    /// What the template makes of messages, and which stretches of it (in bytes) it marks by `{% generation %}`.
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
                .map_err(|error| anyhow!("{} refuses it: {}", self.origin, told(&error)))
        };
        let text = written(Default::default())?;
        if !self.marks {
            return Ok((text, vec![]));
        }
        // A character of the text itself would act as a mark.
        let mut free = NONCHARACTERS.filter(|mark| !text.contains(*mark));
        let (Some(begin), Some(end)) = (free.next(), free.next()) else {
            bail!(
                "the text has almost all of U+FDD0 to U+FDEF, which are no characters, and two of them must be left to \
                 mark what the assistant says: remove them"
            )
        };
        let marked = written([begin, end].map(String::from))?;
        let (unmarked, spans) = without_marks(&marked, [begin, end]);
        ensure!(
            unmarked == text,
            "{} works on what is inside {{% generation %}}, by a filter or a test, so that the assistant's words are \
             not known: put {{% generation %}} and {{% endgeneration %}} around what is written at last",
            self.origin
        );
        Ok((text, spans))
    }
}

/// The source of a directory's template, if it has one, and its file.
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
            "the chat_template in {} is neither a text nor a list with one named default: put the template into \
             chat_template.jinja beside it",
            file.display()
        ),
    }
}

/// The source with [`VARIABLES`] in the place of `{% generation %}` and its end, and whether there are any. A block
/// that does nothing stands on both sides of each, so that whitespace is trimmed as around the tag itself.
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

/// The text without marks, and the stretches between them.
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

/// An error with where it is in the template and what caused it.
fn told(error: &Error) -> String {
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

/// Writes a conversation and finds the assistant's turns in it: as the template marks them, or else by writing the
/// conversation up to each of them, and with it.
///
/// A turn reaches to its last special token, if nothing but whitespace follows that, else to its end.
pub(super) fn conversation(
    template: &Template,
    messages: &[Value],
    others: &BTreeMap<String, Value>,
    specials: &[String],
) -> Result<Marked> {
    let is_assistant = |message: &Value| message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"));
    ensure!(
        messages.iter().any(is_assistant),
        "there is no message with the role \"assistant\", so there is nothing to learn: add the answer, or remove the \
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
        "the assistant's answer is empty, so there is nothing to learn: write it, or remove the line"
    );
    learnt.retain(|span| !span.is_empty());
    ensure!(
        !learnt.is_empty(),
        "{} leaves nothing of the assistant to be learnt{}",
        template.origin,
        if template.marks { ": it marks nothing by {% generation %} here" } else { "" }
    );
    Ok(Marked { text, learnt, bare: false })
}

/// The stretch that is message `i`, which is the assistant's.
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
    // Some templates end every conversation, and so this one, by a token of its own.
    let endings = specials.iter().filter_map(|token| after.trim_end().strip_suffix(token.as_str()));
    let end = std::iter::once(after.as_str()).chain(endings).find(|after| text.starts_with(after));
    match end {
        Some(end) if text.starts_with(&before) && before.len() <= end.len() => Ok(before.len()..end.len()),
        _ => bail!(
            "{} writes the messages up to number {} otherwise when they are alone than within the whole conversation, \
             so that it is not known which words are the assistant's. Write the conversation as lines that end with \
             the assistant's first answer, or mark what the assistant says by {{% generation %}} and \
             {{% endgeneration %}} in a chat_template.jinja in the model directory",
            template.origin,
            i + 1
        ),
    }
}

/// What ends a turn where tokens are bytes: the one that is in no text.
const END_OF_BYTES: &str = "\0";

/// Special tokens by the names that templates know them by, `bos_token` and its like, and what ends a text.
#[derive(Debug, Default)]
pub(super) struct Specials {
    pub(super) named: BTreeMap<String, String>,
    /// What is put after a completion.
    pub(super) end: Option<u32>,
    /// The ids that end an answer.
    pub(super) stops: Vec<u32>,
}

impl Specials {
    /// Of `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and `config.json` in a model
    /// directory, as far as they are there; of bytes, where there is no tokenizer.
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

    /// The text of a special token.
    pub(super) fn token(&self, name: &str) -> Option<&str> {
        self.named.get(name).map(String::as_str)
    }
}

/// A file of the model directory, if it is there.
pub(super) fn read_json(model: Option<&Path>, name: &str) -> Result<Option<serde_json::Value>> {
    let Some(path) = model.map(|model| model.join(name)).filter(|path| path.exists()) else { return Ok(None) };
    let read = || -> Result<serde_json::Value> { Ok(serde_json::from_str(&std::fs::read_to_string(&path)?)?) };
    read().map(Some).with_context(|| format!("cannot read {}", path.display()))
}

/// The filter `tojson` of transformers' templates: `ensure_ascii` is false unless asked for, and nothing is escaped
/// for HTML.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let sorted: Option<bool> = options.get("sort_keys")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    if ascii == Some(true) {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson(ensure_ascii=true) is not supported"));
    }
    let written = match sorted {
        // The values of `serde_json` have their keys sorted.
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

/// A space after each comma and colon.
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
