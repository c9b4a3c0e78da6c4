//! Chat templates in Jinja with transformers' extensions, and the assistant's turns in a conversation.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use minijinja::{Error, Value};

use crate::data::sft::is_assistant;
use crate::data::sft::jinja::Program;
use crate::data::text::{Marked, Text, configured_tokens};
use crate::{input, json};

/// Template for models without one.
pub(super) const DEFAULT: &str = "{% for message in messages %}\
{{ message.role + ':\\n' + message.content + eos_token + '\\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}";

/// Name of the template of lines without tools.
const DEFAULT_NAME: &str = "default";
/// Name of the template of lines with tools.
const TOOL_USE: &str = "tool_use";

/// Variables that replace `{% generation %}` and `{% endgeneration %}`: empty, or a mark.
const VARIABLES: [&str; 2] = ["__generation", "__endgeneration"];
/// Candidates for marks. A text may contain these noncharacters too.
const NONCHARACTERS: RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// The chat templates of a model.
pub(super) struct Templates {
    default: Template,
    /// Template for lines with tools, if it is another.
    tool_use: Option<Template>,
}

impl Templates {
    /// Loads the templates of a model directory: `chat_template.jinja` and `additional_chat_templates`, or
    /// `chat_template` in `tokenizer_config.json`, which may be a list of named ones. Otherwise [`DEFAULT`].
    pub(super) fn new(model: Option<&Path>, specials: &Specials) -> Result<Self> {
        let mut found = model.map(of_directory).transpose()?.unwrap_or_default();
        let compiled = |(source, file): (String, PathBuf)| {
            Template::new(&source, format!("the chat template in {}", file.display()), specials)
        };
        let tool_use = found.remove(TOOL_USE).map(compiled).transpose()?;
        let default = match found.remove(DEFAULT_NAME) {
            Some(default) => compiled(default)?,
            None => {
                if specials.token("eos_token").is_none() {
                    bail!(
                        "{} has no chat template, and the built-in format needs an eos_token, which neither \
                         tokenizer_config.json, generation_config.json nor config.json has: add the model's \
                         chat_template.jinja or its tokenizer_config.json",
                        model.unwrap_or(Path::new("the model")).display()
                    );
                }
                Template::new(DEFAULT, "the built-in format".into(), specials)?
            }
        };
        Ok(Templates { default, tool_use })
    }

    /// Returns the template for a line with these fields.
    pub(super) fn of(&self, fields: &BTreeMap<String, Value>) -> &Template {
        let has_tools = fields.get("tools").is_some_and(|tools| !tools.is_none());
        self.tool_use.as_ref().filter(|_| has_tools).unwrap_or(&self.default)
    }
}

/// A compiled chat template.
pub(super) struct Template {
    program: Program,
    /// File that it was read from.
    pub(super) origin: String,
    /// Whether it marks the assistant's turns by `{% generation %}`.
    pub(super) marks: bool,
}

impl Template {
    fn new(source: &str, origin: String, specials: &Specials) -> Result<Self> {
        // As Python reads a file.
        let (source, marks) = with_marks(&source.replace("\r\n", "\n").replace('\r', "\n"));
        let program = Program::new(&source, specials.named.clone()).map_err(|error| {
            anyhow!(
                "{origin} is not a valid Jinja template: {}; fix it, or put another chat_template.jinja into \
                 the model directory",
                describe(&error)
            )
        })?;
        Ok(Template { program, origin, marks })
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
        context.insert("messages".into(), Value::from(messages.to_vec()));
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        let mut written = |marks: [String; 2]| {
            context.extend(VARIABLES.into_iter().map(str::to_owned).zip(marks.map(Value::from)));
            self.program
                .render(context.clone())
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

/// Returns the sources of a directory's templates and their files, by name.
fn of_directory(model: &Path) -> Result<BTreeMap<String, (String, PathBuf)>> {
    let mut found = BTreeMap::new();
    let mut add = |name: String, file: PathBuf| -> Result<()> {
        let source = input::read_text(&file).with_context(|| format!("cannot read {}", file.display()))?;
        found.insert(name, (source, file));
        Ok(())
    };
    let file = model.join("chat_template.jinja");
    if file.symlink_metadata().is_ok() {
        add(DEFAULT_NAME.into(), file)?;
    }
    let others = model.join("additional_chat_templates");
    if others.is_dir() {
        for entry in others.read_dir().with_context(|| format!("cannot list {}", others.display()))? {
            let file = entry?.path();
            if let (Some("jinja"), Some(name)) =
                (file.extension().and_then(|e| e.to_str()), file.file_stem().and_then(|name| name.to_str()))
            {
                add(name.to_owned(), file.clone())?;
            }
        }
    }
    let name = "tokenizer_config.json";
    let file = model.join(name);
    let none = |found: &BTreeMap<_, _>| found.is_empty();
    if none(&found) {
        match read_json(Some(model), name)?.and_then(|mut fields| Some(fields.get_mut("chat_template")?.take())) {
            None | Some(serde_json::Value::Null) => return Ok(found),
            Some(serde_json::Value::String(source)) => {
                found.insert(DEFAULT_NAME.into(), (source, file.clone()));
            }
            Some(serde_json::Value::Array(named)) => {
                for one in &named {
                    if let (Some(name), Some(source)) = (one["name"].as_str(), one["template"].as_str()) {
                        found.insert(name.to_owned(), (source.to_owned(), file.clone()));
                    }
                }
            }
            Some(_) => {}
        }
    }
    if !none(&found) && found.values().all(|(_, from)| *from != file) {
        ensure!(
            found.contains_key(DEFAULT_NAME),
            "{} has the templates {}, but no chat_template.jinja: add it",
            others.display(),
            found.keys().cloned().collect::<Vec<_>>().join(", ")
        );
    }
    ensure!(
        found.contains_key(DEFAULT_NAME),
        "the chat_template in {} is neither text nor a list with an entry named default: put the template into \
         chat_template.jinja beside it",
        file.display()
    );
    Ok(found)
}

/// Replaces `{% generation %}` and its end by [`VARIABLES`], and returns whether there were any. The `with` block
/// gives variables their own scope. Empty blocks inside keep the trimming of whitespace as it was around the tags.
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
        let [begin, end] = VARIABLES;
        match inner.trim_matches(['-', '+']).trim() {
            "generation" => {
                found = true;
                out.push_str(&format!("{{%{left} with %}}{{{{ {begin} }}}}{{% if true %}}{{% endif {right}%}}"));
            }
            "endgeneration" => {
                out.push_str(&format!("{{%{left} if true %}}{{% endif %}}{{{{ {end} }}}}{{% endwith {right}%}}"));
            }
            "raw" => {
                out.push_str(tag);
                // MiniJinja drops the newline after it, and Jinja2 does not.
                if right.is_empty() && after.starts_with('\n') {
                    out.push('\n');
                }
            }
            _ => out.push_str(tag),
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
        text.check()?;
        let mut named = configured_tokens(model)?.named;
        let mut stops = Vec::new();
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
    let Some(path) = model.map(|model| model.join(name)).filter(|path| path.symlink_metadata().is_ok()) else {
        return Ok(None);
    };
    let read = || json::parse(&input::read_text(&path)?);
    read().map(Some).with_context(|| format!("cannot read {}", path.display()))
}
