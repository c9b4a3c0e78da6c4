//! Chat templates: Jinja, with what transformers gives to it.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::json::tojson;
use super::specials::{Specials, read_json};

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
