//! Comparison of templates with transformers' recorded output, and the tokens that the loss counts.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use minijinja::Value;
use proptest::prelude::*;
use tempfile::TempDir;

use crate::data::sft::template::{Specials, Templates};
use crate::data::sft::{Examples, chat_text};
use crate::data::text::{Marked, Text};

fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/golden/chat").join(name)
}

/// Returns a model directory with the recorded tokenizer and this chat template.
fn model(template: Option<&str>) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(recorded(name), dir.path().join(name)).unwrap();
    }
    if let Some(template) = template {
        fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    }
    dir
}

/// Returns a model directory with a recorded template.
fn model_of(name: &str) -> TempDir {
    model(Some(&fs::read_to_string(recorded(&format!("{name}.jinja"))).unwrap()))
}

/// State for reading lines.
struct Reader {
    text: Text,
    templates: Templates,
    specials: Vec<String>,
}

impl Reader {
    fn new(model: Option<&Path>) -> Self {
        let text = Text::new(model).unwrap();
        let specials = Specials::new(model, &text).unwrap();
        let templates = Templates::new(model, &specials).unwrap();
        Reader { specials: text.special_tokens(&specials.named), text, templates }
    }

    fn read(&self, line: &str) -> anyhow::Result<Marked> {
        super::read_line(line, &self.templates, &self.specials)
    }

    /// Returns the counted ranges of a line.
    fn learnt(&self, line: &str) -> Vec<String> {
        let Marked { text, learnt, .. } = self.read(line).unwrap();
        learnt.into_iter().map(|span| text[span].to_owned()).collect()
    }

    fn refuses(&self, line: &str) -> String {
        format!("{:#}", self.read(line).unwrap_err())
    }
}

fn load(dir: &Path, content: &str, model: Option<&Path>, seq_len: usize) -> anyhow::Result<Examples> {
    let file = dir.join("chat.jsonl");
    fs::write(&file, content).unwrap();
    Examples::load(&file, model, &Text::new(model).unwrap(), seq_len, 512)
}

fn message(examples: anyhow::Result<Examples>) -> String {
    format!("{:#}", examples.map(|examples| examples.len()).unwrap_err())
}

#[test]
fn templates_match_transformers() {
    let cases: Vec<BTreeMap<String, Value>> =
        serde_json::from_str(&fs::read_to_string(recorded("recorded.json")).unwrap()).unwrap();
    assert!(cases.len() > 40);
    for case in cases {
        let name = case["template"].as_str().unwrap();
        let dir = model_of(name);
        let reader = Reader::new(Some(dir.path()));
        let line = serde_json::to_string(&case["line"]).unwrap();
        let (messages, others) = super::messages(&line).unwrap();
        let prompt = case["add_generation_prompt"].is_true();
        let rendered = reader.templates.of(&others).render(&messages, &others, prompt);
        if let Some(error) = case.get("error") {
            let found = format!("{:#}", rendered.unwrap_err());
            assert!(found.contains(error.as_str().unwrap()), "{name}: {found}");
            continue;
        }
        let (text, learnt) = rendered.unwrap();
        assert_eq!(text, case["text"].as_str().unwrap(), "{name}, {prompt}: {line}");
        let (ids, learnt) =
            reader.text.encode_marked(vec![Marked { text, learnt, bare: false }]).unwrap().pop().unwrap();
        let numbers =
            |value: &Value| value.try_iter().unwrap().map(|id| u32::try_from(id).unwrap()).collect::<Vec<_>>();
        assert_eq!(ids, numbers(&case["ids"]), "{name}, {prompt}: {line}");
        if let Some(mask) = case.get("mask") {
            assert_eq!(
                learnt.into_iter().map(u32::from).collect::<Vec<_>>(),
                numbers(mask),
                "{name}, {prompt}: {line}"
            );
        }
    }
}

/// Returns whether an error says that something is not supported, or what to write instead.
fn names_the_reason(error: &str) -> bool {
    ["supported", "needs", "add | list", "can't be", "has no", "does not apply", "is not iterable", "a format has"]
        .iter()
        .any(|part| error.contains(part))
}

/// Cases of `tests/interop/jinja.py`. Constructs that are not supported are refused by name.
#[test]
fn jinja_is_rendered_as_by_transformers() {
    let cases: Vec<serde_json::Value> =
        serde_json::from_str(&fs::read_to_string(recorded("expressions.json")).unwrap()).unwrap();
    assert!(cases.len() > 300);
    let (mut equal, mut refused, mut unnamed) = (0, 0, vec![]);
    for case in &cases {
        let source = case["template"].as_str().unwrap();
        let dir = model(Some(source));
        match (chat_text(Some(dir.path()), case["line"].as_str().unwrap(), false), case["text"].as_str()) {
            (Ok(text), Some(expected)) => {
                assert_eq!(text, expected, "{source}");
                equal += 1;
            }
            (Ok(text), None) => panic!("{source}: {text:?}, but transformers fails: {}", case["error"]),
            (Err(_), None) => equal += 1,
            (Err(error), Some(_)) => {
                unnamed.extend(Some(format!("{source}: {error:#}")).filter(|error| !names_the_reason(error)));
                refused += 1;
            }
        }
    }
    assert!(unnamed.is_empty(), "{unnamed:#?}");
    assert!(refused * 8 < equal, "{refused} of {} are refused", cases.len());
}

/// Python reads files with the line ends of Windows.
#[test]
fn line_ends_of_windows_are_as_others() {
    let source = "{% for m in messages %}\n{{ m.role }}: {{ m.content }}{{ 'a\nb' }}\n\n{% endfor %}";
    let learnt =
        |source: &str| Reader::new(Some(model(Some(source)).path())).read(&TWO.replace("Hi", "H\\r\\ni")).unwrap();
    let expected = learnt(source);
    assert!(expected.text.contains("user: H\r\nia\nb\n\n"), "{:?}", expected.text);
    assert_eq!(learnt(&source.replace('\n', "\r\n")), expected);
    assert_eq!(learnt(&source.replace('\n', "\r")), expected);
}

/// transformers copies the reasoning of a message to the names that templates read.
#[test]
fn reasoning_has_the_names_of_transformers() {
    let dir = model(Some("{% for m in messages %}{{ m }}{% endfor %}"));
    let reader = Reader::new(Some(dir.path()));
    for (message, expected) in [
        (
            r#""content": "a", "reasoning": "r""#,
            "'thinking': 'r', 'role': 'assistant', 'content': 'a', 'reasoning': 'r', 'reasoning_content': 'r'",
        ),
        (
            r#""reasoning_content": "r", "thinking": "t", "content": "a""#,
            "'thinking': 't', 'role': 'assistant', 'reasoning_content': 'r', 'content': 'a'",
        ),
        (r#""thinking": null, "content": "a""#, "'role': 'assistant', 'content': 'a'"),
    ] {
        let line = format!(r#"{{"messages": [{{"role": "assistant", {message}}}]}}"#);
        let (messages, others) = super::messages(&line).unwrap();
        let (text, _) = reader.templates.of(&others).render(&messages, &others, false).unwrap();
        assert_eq!(text, format!("{{{expected}}}"));
    }
}

/// The token of spaces at the end of a completion is learned, as with `trim_offsets=False`.
#[test]
fn spaces_are_learned_whatever_offsets_the_tokenizer_gives() {
    let dir = model(None);
    let file = dir.path().join("tokenizer.json");
    let content = fs::read_to_string(&file).unwrap();
    let bytes =
        serde_json::json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let roberta = serde_json::json!({ "type": "RobertaProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0],
        "trim_offsets": true, "add_prefix_space": false });
    let sequence = serde_json::json!({ "type": "Sequence", "processors": [bytes] });
    let line = "{\"prompt\": \"hello\", \"completion\": \" there   \"}\n";
    let learnt = || {
        let examples = load(dir.path(), line, Some(dir.path()), 99).unwrap();
        let example = examples.get(0);
        Text::new(Some(dir.path()))
            .unwrap()
            .decode(
                &example
                    .tokens
                    .iter()
                    .zip(example.learnt)
                    .filter(|(_, learnt)| **learnt)
                    .map(|(id, _)| *id)
                    .collect::<Vec<_>>(),
            )
            .unwrap()
    };
    assert_eq!(learnt(), " there   ");
    for processor in [bytes, roberta, sequence] {
        fs::write(&file, content.replace("\"post_processor\":null", &format!("\"post_processor\":{processor}")))
            .unwrap();
        assert_eq!(learnt(), " there   ", "{processor}");
    }
}

#[test]
fn prompt_of_a_sample_is_not_empty() {
    let dir = tempfile::tempdir().unwrap();
    let empty = "{\"prompt\": \"\", \"completion\": \"b\"}\n";
    let examples =
        load(dir.path(), &format!("{empty}{{\"prompt\": \"a\", \"completion\": \"b\"}}\n"), None, 9).unwrap();
    assert_eq!(examples.first_prompt(), [u32::from(b'a')]);
    assert!(load(dir.path(), empty, None, 9).unwrap().first_prompt().is_empty());
}

const TWO: &str = r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And you?"}, {"role": "assistant", "content": "Fine"}]}"#;

#[test]
fn turns_include_their_end_token() {
    for (name, end) in
        [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("gemma", "<end_of_turn>"), ("generation", "<|im_end|>")]
    {
        let dir = model_of(name);
        let learnt = Reader::new(Some(dir.path())).learnt(TWO);
        assert_eq!(learnt, [format!("Hello.{end}"), format!("Fine{end}")], "{name}");
    }
    let dir = model_of("mistral");
    assert_eq!(Reader::new(Some(dir.path())).learnt(TWO), [" Hello.</s>", " Fine</s>"]);
    // This template ends every conversation with a token.
    let dir = model_of("phi3");
    assert_eq!(Reader::new(Some(dir.path())).learnt(TWO), ["Hello.<|end|>", "Fine<|end|>\n</s>"]);
}

#[test]
fn built_in_format_without_template() {
    let reader = Reader::new(None);
    let Marked { text, .. } = reader.read(TWO).unwrap();
    assert_eq!(text, "user:\nHi\0\nassistant:\nHello.\0\nuser:\nAnd you?\0\nassistant:\nFine\0\n");
    assert_eq!(reader.learnt(TWO), ["Hello.\0", "Fine\0"]);
    let dir = model(None);
    assert_eq!(Reader::new(Some(dir.path())).learnt(TWO), ["Hello.</s>", "Fine</s>"]);
}

#[test]
fn templates_are_found_like_transformers() {
    let dir = model(None);
    let config = dir.path().join("tokenizer_config.json");
    let learnt = || Reader::new(Some(dir.path())).learnt(TWO);
    let with = |template: serde_json::Value| {
        let fields = serde_json::json!({ "eos_token": { "content": "</s>" }, "chat_template": template });
        fs::write(&config, fields.to_string()).unwrap();
    };
    let own = "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}";
    with(own.into());
    assert_eq!(learnt(), ["Hello.</s>", "Fine</s>"]);
    with(serde_json::json!([{ "name": "tool_use", "template": own.replace("eos_token", "'?'") },
        { "name": "default", "template": own }]));
    assert_eq!(learnt(), ["Hello.</s>", "Fine</s>"]);
    // transformers has another template for lines with tools.
    let of_line = |line: String| Reader::new(Some(dir.path())).learnt(&line);
    let with_tools = TWO.replacen('{', "{\"tools\": [], ", 1);
    assert_eq!(of_line(with_tools.clone()), ["Hello.?", "Fine?"]);
    assert_eq!(of_line(with_tools.replace("[], ", "null, ")), ["Hello.</s>", "Fine</s>"]);
    fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
    fs::write(dir.path().join("additional_chat_templates/tool_use.jinja"), own.replace("eos_token", "'#'")).unwrap();
    fs::write(dir.path().join("chat_template.jinja"), own).unwrap();
    assert_eq!(
        (of_line(with_tools), learnt()),
        (vec!["Hello.#".into(), "Fine#".into()], vec!["Hello.</s>".into(), "Fine</s>".into()])
    );
    fs::remove_dir_all(dir.path().join("additional_chat_templates")).unwrap();
    fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
    with(serde_json::Value::Null);
    assert_eq!(Reader::new(Some(dir.path())).templates.of(&BTreeMap::new()).origin, "the built-in format");
    fs::write(dir.path().join("chat_template.jinja"), own.replace("eos_token", "'!'")).unwrap();
    with(own.into());
    assert_eq!(learnt(), ["Hello.!", "Fine!"]);
    with(serde_json::json!([{ "name": "rag", "template": own }]));
    fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
    let text = Text::new(Some(dir.path())).unwrap();
    let specials = Specials::new(Some(dir.path()), &text).unwrap();
    let error = format!("{:#}", Templates::new(Some(dir.path()), &specials).err().unwrap());
    assert!(
        error.contains("nor a list with an entry named default") && error.contains("chat_template.jinja"),
        "{error}"
    );
}

#[test]
fn end_token_may_be_given_by_id() {
    let dir = model(None);
    fs::remove_file(dir.path().join("tokenizer_config.json")).unwrap();
    let text = Text::new(Some(dir.path())).unwrap();
    let error = format!("{:#}", load(dir.path(), TWO.replace('\n', " ").as_str(), Some(dir.path()), 99).err().unwrap());
    assert!(error.contains("needs an eos_token") && error.contains("tokenizer_config.json"), "{error}");
    let id = text.id_of("<|eot_id|>").unwrap();
    fs::write(dir.path().join("generation_config.json"), format!("{{\"eos_token_id\": [{id}, 3]}}")).unwrap();
    let specials = Specials::new(Some(dir.path()), &text).unwrap();
    assert_eq!((specials.end, specials.stops.as_slice()), (Some(id), &[id, 3][..]));
    assert_eq!(specials.token("eos_token"), Some("<|eot_id|>"));
}

#[test]
fn bad_lines_are_refused() {
    let reader = Reader::new(None);
    let empty = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}"#;
    for (line, parts) in [
        (empty, &["the assistant's answer is empty", "remove the line"][..]),
        ("{\"messages\": [", &["not a JSON object", "EOF", "{\"messages\": ["][..]),
        ("[1, 2]", &["not a JSON object", "\"prompt\": "]),
        ("{}", &["it has no keys"]),
        ("{\"text\": \"a\", \"id\": 1}", &["it has the keys \"id\", \"text\"; a line is"]),
        ("{\"prompt\": \"a\"}", &["it has the keys \"prompt\""]),
        (
            "{\"prompt\": \"a\", \"completion\": \"b\", \"messages\": []}",
            &["drop \"prompt\" and \"completion\"", "drop \"messages\""],
        ),
        (
            "{\"prompt\": \"a\", \"messages\": []}",
            &["it has \"messages\" beside \"prompt\"", "drop \"prompt\" to train"],
        ),
        ("{\"prompt\": \"a\", \"completion\": \"\"}", &["the completion is empty"]),
        ("{\"prompt\": [1], \"completion\": \"b\"}", &["prompt is sequence and completion is string"]),
        ("{\"messages\": \"hi\"}", &["messages is string, but must be a list"]),
        ("{\"messages\": []}", &["messages is empty"]),
        ("{\"messages\": [1]}", &["message 1 is number, but must be an object"]),
        ("{\"messages\": [{\"content\": \"a\"}]}", &["message 1 needs a role"]),
        ("{\"messages\": [{\"role\": \"user\", \"content\": null}]}", &["message 1 has no content"]),
        ("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}", &["no message has the role \"assistant\""]),
    ] {
        let error = reader.refuses(line);
        assert!(parts.iter().all(|part| error.contains(part)), "{line}: {error}");
    }
    let dir = model_of("mistral");
    let odd = TWO.replace("\"user\", \"content\": \"And", "\"referee\", \"content\": \"And");
    let error = Reader::new(Some(dir.path())).refuses(&odd);
    assert!(error.contains("chat_template.jinja refuses it: Only user, assistant and system roles"), "{error}");
    assert!(error.contains("not referee (line "), "{error}");
}

#[test]
fn templates_that_look_ahead_need_marks() {
    // This template shortens messages before the last question.
    let forgets = "{% for m in messages %}[{{ m.role }}]\
                   {{ m.content if loop.index0 >= messages | length - 2 else '..' }}{% endfor %}\
                   {% if add_generation_prompt %}[assistant]{% endif %}";
    let dir = model(Some(forgets));
    let error = Reader::new(Some(dir.path())).refuses(TWO);
    assert!(error.contains("up to number 2 differently alone") && error.contains("{% generation %}"), "{error}");
    let marked = forgets
        .replace("{{ m.content", "{% generation %}{{ m.content")
        .replace(" else '..' }}", " else '' }}{% endgeneration %}");
    fs::write(dir.path().join("chat_template.jinja"), &marked).unwrap();
    assert_eq!(Reader::new(Some(dir.path())).learnt(TWO), ["And you?", "Fine"]);
    fs::write(dir.path().join("chat_template.jinja"), "{% generation %}{% endgeneration %}a").unwrap();
    let error = Reader::new(Some(dir.path())).refuses(TWO);
    assert!(error.contains("nothing of the assistant") && error.contains("{% generation %} marks nothing"), "{error}");
}

/// Noncharacters and tags inside messages are plain text.
#[test]
fn text_can_not_act_as_a_mark() {
    let dir = model_of("generation");
    let own = model(Some(
        "{% macro turn(m) %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endmacro %}\
         {% for m in messages %}{{ turn(m) if m.role == 'assistant' else m.content }}{% endfor %}",
    ));
    let all: String = ('\u{fdd0}'..='\u{fdef}').collect();
    for (user, assistant) in [
        ("\u{fdd0}user\u{fdd1}", "says"),
        ("user", "sa\u{fdd1}ys"),
        ("\u{fdd1}us\u{fdd0}er", "\u{fdd0}says\u{fdd0}"),
        ("{% generation %}user{% endgeneration %}", "says {{ __generation }}"),
        (all.trim_end_matches(['\u{fdee}', '\u{fdef}']), "says"),
    ] {
        let line = serde_json::json!({ "__generation": "user", "messages": [
            { "role": "user", "content": user }, { "role": "assistant", "content": assistant }] });
        let learnt = |dir: &TempDir| Reader::new(Some(dir.path())).learnt(&line.to_string());
        assert_eq!(learnt(&dir), [format!("{assistant}<|im_end|>")], "{user:?}");
        assert_eq!(learnt(&own), [assistant], "{user:?}");
        let text = Reader::new(Some(own.path())).read(&line.to_string()).unwrap().text;
        assert_eq!(text, format!("{user}[{assistant}]"));
    }
    let line = serde_json::json!({ "messages": [
        { "role": "user", "content": all }, { "role": "assistant", "content": "says" }] });
    let error = Reader::new(Some(dir.path())).refuses(&line.to_string());
    assert!(error.contains("U+FDD0 to U+FDEF") && error.contains("remove them"), "{error}");
    // A template without marks needs no free characters.
    assert_eq!(Reader::new(None).learnt(&line.to_string()), ["says\0"]);
    // A mark in filtered text would change the output.
    let filtered = model(Some(
        "{% for m in messages %}{% set text %}{% generation %} {{ m.content }}{% endgeneration %}{% endset %}\
         {{ text | trim }}{% endfor %}",
    ));
    let error = Reader::new(Some(filtered.path())).refuses(TWO);
    assert!(error.contains("to the contents of {% generation %}"), "{error}");
}

#[test]
fn bad_templates_are_refused() {
    let dir = model(Some("{{ bos_token }}\n{% for message in messages %}"));
    let error = message(load(dir.path(), "{}", Some(dir.path()), 9));
    assert!(error.contains("chat_template.jinja is not a valid Jinja template") && error.contains("line "), "{error}");
    let dir = model(Some("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"));
    let error = message(load(dir.path(), &TWO.replace('\n', " "), Some(dir.path()), 9));
    assert!(error.contains("refuses it: engine ran out of fuel"), "{error}");
    let dir = model(Some("{{ messages | nothing_known }}"));
    let error = message(load(dir.path(), &TWO.replace('\n', " "), Some(dir.path()), 9));
    assert!(error.contains("chat.jsonl, line 1: ") && error.contains("nothing_known"), "{error}");
}

/// Returns the tokens of an example, and the number of counted ones.
fn shown(examples: &Examples, index: usize) -> (Vec<u32>, usize) {
    let example = examples.get(index);
    (example.tokens.to_vec(), example.learnt.iter().filter(|&&learnt| learnt).count())
}

#[test]
fn completions_have_special_tokens_once() {
    let dir = model(None);
    let text = Text::new(Some(dir.path())).unwrap();
    let [begin, end] = ["<s>", "</s>"].map(|token| text.id_of(token).unwrap());
    let lines = "{\"prompt\": \"the user\", \"completion\": \" asks\"}\n\n\
                 {\"prompt\": \"<s>a\", \"completion\": \"b</s>\"}\n";
    let examples = load(dir.path(), lines, Some(dir.path()), 99).unwrap();
    assert_eq!(examples.len(), 2);
    let (tokens, learnt) = shown(&examples, 0);
    let prompt = text.encode("the user").unwrap();
    assert_eq!((&tokens[..prompt.len()], tokens.last()), (&prompt[..], Some(&end)));
    assert_eq!((learnt, examples.first_prompt()), (tokens.len() - prompt.len(), &prompt[..]));
    assert_eq!(shown(&examples, 1), (vec![begin, text.id_of("a").unwrap(), text.id_of("b").unwrap(), end], 2));

    // A tokenizer that starts every text with a token.
    let file = dir.path().join("tokenizer.json");
    let special = |token: &str| serde_json::json!({ "SpecialToken": { "id": token, "type_id": 0 } });
    let sequence = |id: &str| serde_json::json!({ "Sequence": { "id": id, "type_id": 0 } });
    let processor = serde_json::json!({
        "type": "TemplateProcessing",
        "single": [special("<s>"), sequence("A"), special("</s>")],
        "pair": [sequence("A"), sequence("B")],
        "special_tokens": {
            "<s>": { "id": "<s>", "ids": [begin], "tokens": ["<s>"] },
            "</s>": { "id": "</s>", "ids": [end], "tokens": ["</s>"] },
        },
    });
    let processor = format!("\"post_processor\":{processor}");
    let content = fs::read_to_string(&file).unwrap();
    assert!(content.contains("\"post_processor\":null"));
    fs::write(&file, content.replace("\"post_processor\":null", &processor)).unwrap();
    let examples = load(dir.path(), lines, Some(dir.path()), 99).unwrap();
    let (tokens, learnt) = shown(&examples, 0);
    assert_eq!(tokens[..=prompt.len()], [&[begin][..], &prompt].concat());
    assert_eq!((tokens.last(), learnt), (Some(&end), tokens.len() - prompt.len() - 1));
    assert_eq!(tokens.iter().filter(|id| [begin, end].contains(id)).count(), 2);
    let (tokens, learnt) = shown(&examples, 1);
    assert_eq!((tokens[0], tokens.iter().filter(|&&id| id == begin).count(), learnt), (begin, 1, 3));
    // A conversation has what its template writes, and no more.
    fs::write(dir.path().join("chat_template.jinja"), "<s>{% for m in messages %}{{ m.content }}|{% endfor %}")
        .unwrap();
    let examples = load(dir.path(), &TWO.replace('\n', " "), Some(dir.path()), 99).unwrap();
    assert_eq!(shown(&examples, 0).0.iter().filter(|id| [begin, end].contains(id)).count(), 1);
}

#[test]
fn long_examples_are_cut_or_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let line =
        |prompt: &str, completion: &str| format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{completion}\"}}\n");
    let lines = [line("ab", "cd"), line("abcdef", "g"), line("ab", "cdefgh"), line("a", "bcd")].concat();
    let examples = load(dir.path(), &lines, None, 4).unwrap();
    // Five tokens fit: four to read, and one more to predict.
    let of = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    assert_eq!(examples.len(), 3);
    assert_eq!([0, 1, 2].map(|i| shown(&examples, i)), [(of("abcd\0"), 3), (of("abcde"), 3), (of("abcd\0"), 4)]);
    let said = examples.truncation_warning().unwrap();
    assert!(said.starts_with("2 of the 4 examples in ") && said.contains("1 of these were dropped"), "{said}");
    assert_eq!(load(dir.path(), &line("ab", "cd"), None, 4).unwrap().truncation_warning(), None);
    let error = message(load(dir.path(), &line("abcdef", "g"), None, 4));
    assert!(
        error.contains("nothing is left to learn of the 1 examples") && error.contains("larger --seq-len"),
        "{error}"
    );
    // A larger --seq-len would not help where the answer is empty.
    let silent = r#"{"messages": [{"role": "user", "content": "abcdef"}, {"role": "assistant", "content": ""}]}"#;
    let error = message(load(dir.path(), silent, None, 4));
    assert!(error.contains("chat.jsonl, line 1: the assistant's answer is empty"), "{error}");
    // Messages after the last answer are dropped.
    let more = TWO.replace('\n', " ").replace("]}", ", {\"role\": \"user\", \"content\": \"Bye\"}]}");
    let examples = load(dir.path(), &more, None, 99).unwrap();
    assert_eq!(shown(&examples, 0).0, of("user:\nHi\0\nassistant:\nHello.\0\nuser:\nAnd you?\0\nassistant:\nFine\0"));
    assert!(examples.truncation_warning().is_none());
}

#[test]
fn files_without_examples_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for content in ["", "\n  \n"] {
        let error = message(load(dir.path(), content, None, 9));
        assert!(error.contains("chat.jsonl has no examples: it must have at least one line"), "{error}");
    }
    let good = "{\"prompt\": \"a\", \"completion\": \"b\"}\n";
    let error = message(load(dir.path(), &format!("{good}\n{{\"a\": 1}}"), None, 9));
    assert!(error.contains("chat.jsonl, line 3: it has the keys \"a\""), "{error}");
    let error = message(load(dir.path(), &format!("{}nothing", good.repeat(600)), None, 9));
    assert!(error.contains("chat.jsonl, line 601: it is not a JSON object"), "{error}");
    let error = message(load(dir.path(), "{\"prompt\": \"\", \"completion\": \"\\u0000\"}", None, 9));
    assert!(error.contains("line 1: no token to learn"), "{error}");
    let model = model(None);
    let error = message(Examples::load(&dir.path().join("nowhere.jsonl"), None, &Text::new(None).unwrap(), 9, 256));
    assert!(error.contains("cannot read") && error.contains("nowhere.jsonl"), "{error}");
    fs::write(dir.path().join("chat.jsonl"), good).unwrap();
    let text = Text::new(Some(model.path())).unwrap();
    let error = message(Examples::load(&dir.path().join("chat.jsonl"), Some(model.path()), &text, 9, 3));
    assert!(error.contains("line 1: it has a token with id") && error.contains("vocabulary has 3 ids"), "{error}");
}

/// Some editors write a byte order mark. It is skipped on the first line alone.
#[test]
fn byte_order_mark_is_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let line = "{\"prompt\": \"a\", \"completion\": \"b\"}\n";
    let want = load(dir.path(), line, None, 9).unwrap().checksum();
    assert_eq!(load(dir.path(), &format!("\u{feff}{line}"), None, 9).unwrap().checksum(), want);
    assert_eq!(load(dir.path(), &format!("\u{feff}\n{line}"), None, 9).unwrap().checksum(), want);
    let error = message(load(dir.path(), &format!("{line}\u{feff}{line}"), None, 9));
    assert!(error.contains("chat.jsonl, line 2: it is not a JSON object"), "{error}");
}

#[test]
fn checksum_covers_tokens_masks_and_ends() {
    let sums: Vec<u64> = [
        &[(&[1u32, 2, 3][..], &[false, true, true][..])][..],
        &[(&[1, 2, 3], &[false, false, true])],
        &[(&[1, 2, 4], &[false, true, true])],
        &[(&[1, 2, 3], &[false, true, true]), (&[1, 2], &[false, true])],
        &[(&[1, 2, 3, 1], &[false, true, true, false]), (&[2], &[true])],
    ]
    .map(|examples| Examples::of(examples).checksum())
    .into();
    assert_eq!(sums.iter().collect::<std::collections::BTreeSet<_>>().len(), sums.len());
}

proptest! {
    /// Whatever a line holds, it is read or refused.
    #[test]
    fn no_line_panics(line in "\\PC{0,80}", content in "\\PC*", role in "user|assistant|system|x") {
        let reader = Reader::new(None);
        let _ = reader.read(&line);
        let says = |role: &str| serde_json::json!({ "role": role, "content": content });
        let line = serde_json::json!({ "messages": [says(&role), says("assistant")] });
        if let Ok(Marked { text, learnt, .. }) = reader.read(&line.to_string()) {
            prop_assert!(learnt.iter().all(|span| text.get(span.clone()).is_some()));
        }
    }
}
