use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::*;
use crate::data::{BatchShape, Batches, Source};

fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/golden/chat").join(name)
}

/// Loads lines, with the tokenizer and the template of `model`, or as bytes.
fn load(lines: &str, model: Option<&Path>, seq_len: usize) -> Result<Pairs> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pairs.jsonl");
    fs::write(&file, lines).unwrap();
    let vocab_size = if model.is_some() { 330 } else { 256 };
    Pairs::load(
        &file,
        model,
        &Text::new(model).unwrap(),
        PairOptions { seq_len, vocab_size, multiple: 1, shuffle: None },
    )
}

/// Returns a model directory with the recorded tokenizer and this chat template, if any.
fn model_of(template: Option<&str>) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(recorded(name), dir.path().join(name)).unwrap();
    }
    if let Some(template) = template {
        fs::copy(recorded(&format!("{template}.jinja")), dir.path().join("chat_template.jinja")).unwrap();
    }
    dir
}

fn refused(lines: &str, model: Option<&Path>, seq_len: usize) -> String {
    format!("{:#}", load(lines, model, seq_len).err().unwrap())
}

/// Returns the tokens of an example, and how many of them are the prompt.
fn tokens(pairs: &Pairs, example: usize) -> (Vec<u32>, usize) {
    let example = pairs.examples.get(example);
    let begin = example.learnt.iter().take_while(|&&learnt| !learnt).count();
    assert!(example.learnt[begin..].iter().all(|&learnt| learnt));
    (example.tokens.to_vec(), begin)
}

#[test]
fn tokens_are_those_of_trl() {
    let cases = fs::read_to_string(recorded("preferences.json")).unwrap();
    let cases: Vec<serde_json::Value> = serde_json::from_str(&cases).unwrap();
    assert_eq!(cases.len(), 15);
    for case in cases {
        let model = model_of(case["template"].as_str());
        let pairs = load(&case["line"].to_string(), Some(model.path()), 1000).unwrap();
        assert_eq!(pairs.len(), 1, "{case}");
        let ids = |part: &str| serde_json::from_value::<Vec<u32>>(case[part].clone()).unwrap();
        for (example, part) in ["chosen", "rejected"].into_iter().enumerate() {
            let expected = ([ids("prompt"), ids(part)].concat(), ids("prompt").len().max(1));
            assert_eq!(tokens(&pairs, example), expected, "{part}: {case}");
        }
    }
}

#[test]
fn pairs_are_cut_or_dropped() {
    let line = |prompt: &str, chosen: &str, rejected: &str| {
        serde_json::json!({ "prompt": prompt, "chosen": chosen, "rejected": rejected }).to_string()
    };
    let lines = [
        line("abc", "d", "e"),
        line("abc", "defghijk", "e"),
        // The prompt fills the sequence.
        line("abcdefghi", "j", "k"),
        // The completions differ after the cut only.
        line("ab", "cdefghi-", "cdefghi+"),
        line("", "ab", "cd"),
    ];
    let pairs = load(&lines.join("\n\n"), None, 8).unwrap();
    assert_eq!(pairs.len(), 3);
    assert_eq!(tokens(&pairs, 0), (b"abcd\0".map(u32::from).to_vec(), 3));
    assert_eq!(tokens(&pairs, 2), (b"abcdefghi".map(u32::from).to_vec(), 3));
    assert_eq!(tokens(&pairs, 3), (b"abce\0".map(u32::from).to_vec(), 3));
    // Nothing predicts the first token.
    assert_eq!(tokens(&pairs, 4), (b"ab\0".map(u32::from).to_vec(), 1));
    let warning = pairs.truncation_warning().unwrap();
    assert!(warning.starts_with("3 of the 5 pairs in ") && warning.contains("; 2 of these were dropped"), "{warning}");
    assert!(load(&lines[0], None, 8).unwrap().truncation_warning().is_none());
    let error = refused(&lines[2], None, 8);
    assert!(error.contains("nothing is left to learn of the 1 pairs") && error.contains("larger --seq-len"), "{error}");
}

#[test]
fn bad_lines_are_named() {
    let answer = r#"[{"role": "assistant", "content": "a"}]"#;
    for (lines, expected) in [
        ("", "pairs.jsonl has no pairs: it must have at least one line. a line is {\"prompt\""),
        ("[]", "line 1: it is not a JSON object"),
        ("{}", "line 1: it has no keys; a line is"),
        (r#"{"prompt": "a", "chosen": "b"}"#, r#"it has no "rejected", only the keys "chosen", "prompt"; a line is"#),
        (r#"{"prompt": "a", "rejected": "b", "chosen": null}"#, r#"it has no "chosen""#),
        (r#"{"prompt": "a", "chosen": "b", "rejected": "b"}"#, "chosen and rejected are equal"),
        (r#"{"prompt": 1, "chosen": "b", "rejected": "c"}"#, "are number, string, string: expected only texts"),
        (
            &format!(r#"{{"prompt": "a", "chosen": {answer}, "rejected": "c"}}"#),
            "are string, sequence, string: expected only texts, or only lists of messages",
        ),
        (&format!(r#"{{"prompt": [], "chosen": {answer}, "rejected": []}}"#), "in \"rejected\": rejected is empty"),
        (
            &format!(r#"{{"prompt": {answer}, "chosen": {answer}, "rejected": [{{"content": "c"}}]}}"#),
            "in \"rejected\": message 1 needs a role",
        ),
        (
            r#"{"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]}"#,
            "chosen and rejected begin with different messages, so there is no prompt",
        ),
        (
            &format!(r#"{{"prompt": {answer}, "chosen": {answer}, "rejected": [{{"role": "user", "content": "c"}}]}}"#),
            "rejected: no message after the prompt has the role \"assistant\"",
        ),
    ] {
        let error = refused(lines, None, 100);
        assert!(error.contains(expected), "{lines}: {error}");
    }
    let model = model_of(None);
    fs::write(model.path().join("tokenizer_config.json"), "{}").unwrap();
    let line =
        format!(r#"{{"prompt": {answer}, "chosen": {answer}, "rejected": [{{"role": "assistant", "content": "b"}}]}}"#);
    let error = refused(&line, Some(model.path()), 100);
    assert!(error.contains("has no chat template, and the built-in format needs an eos_token"), "{error}");
}

/// Without a template, messages have the same format as for `--sft`.
#[test]
fn messages_without_a_template_are_formatted_plainly() {
    let line = r#"{"prompt": [{"role": "user", "content": "Hi"}], "chosen": [{"role": "assistant", "content": "A"}],
        "rejected": [{"role": "assistant", "content": "B"}]}"#;
    let pairs = load(&line.replace('\n', " "), None, 100).unwrap();
    let (chosen, begin) = tokens(&pairs, 0);
    assert_eq!(chosen, b"user:\nHi\0\nassistant:\nA\0\n".map(u32::from));
    assert_eq!(begin, chosen.len() - 3);
}

#[test]
fn rows_of_a_micro_batch_are_as_long_as_the_longest() {
    let lines: Vec<String> =
        (0..5).map(|i| format!(r#"{{"prompt": "{i}", "chosen": "{}", "rejected": "b"}}"#, "a".repeat(i + 1))).collect();
    let shape = BatchShape { world_size: 2, rank: 1, batch_size: 2, grad_accum: 1, seq_len: 20 };
    let batches = Batches::new(Source::Pairs(load(&lines.join("\n"), None, 20).unwrap()), shape).unwrap();
    assert_eq!((batches.sequences_per_step(), batches.counted(0).unwrap()), (4, 4));
    let read = batches.micro_batch(0, 0).unwrap();
    // The third and the fourth pair: "2aaa\0" and "3aaaa\0", each with "b\0" as rejected.
    assert_eq!((read.filled, read.pairs, read.counted), (vec![4, 2, 5, 2], Some(2), 4 + 2 + 5 + 2));
    assert_eq!(read.inputs[..10], b"2aaa\x002b\0\0\0".map(u32::from));
    let ignored = [IGNORED; 3];
    assert_eq!(read.targets[..5], [97, 97, 97, 0, IGNORED]);
    assert_eq!((&read.targets[5..7], &read.targets[7..10]), (&[98, 0][..], &ignored[..]));
    assert_eq!(batches.tokens(0), (2 + 3 + 4 + 5) + 4 * 2);
    // The fifth pair is rank 0's, so rank 1 has only empty rows.
    let rest = batches.pass(1).unwrap();
    assert_eq!((rest.filled, rest.pairs, rest.counted), (vec![0; 4], Some(0), 0));
    assert_eq!(rest.inputs.len(), 4);
    // The next epoch continues with the first pair.
    assert_eq!(batches.micro_batch(4, 0).unwrap().inputs[0], u32::from(b'1'));
    let few = BatchShape { batch_size: 3, ..shape };
    let error = Batches::new(Source::Pairs(load(&lines.join("\n"), None, 20).unwrap()), few).err().unwrap().to_string();
    assert!(error.contains("5 pairs of") && error.contains("one step needs 6"), "{error}");
}
