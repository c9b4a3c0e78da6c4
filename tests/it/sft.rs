//! `train --sft` learns conversations and completions at any number of ranks, resumes, evaluates, and refuses bad
//! input.

use std::fs;
use std::path::Path;

use fsdp_test_support::{edit_file, golden, json_lines, launch_script, merge_flags};
use serde_json::{Value, json};

/// Writes questions and answers of several lengths.
fn write_chats(path: &Path, first: usize, count: usize) {
    let lines: Vec<String> = (first..first + count)
        .map(|i| {
            let (question, answer) = (format!("{i} + 1?"), format!("It is {}{}", i + 1, ".".repeat(i * 7 % 13)));
            match i % 3 {
                0 => json!({ "prompt": format!("Q: {question} A: "), "completion": answer }),
                1 => json!({ "messages": [{ "role": "user", "content": question },
                    { "role": "assistant", "content": answer }] }),
                _ => json!({ "messages": [{ "role": "user", "content": question },
                    { "role": "assistant", "content": answer }, { "role": "user", "content": "Sure?" },
                    { "role": "assistant", "content": "Yes." }] }),
            }
            .to_string()
        })
        .collect();
    fs::write(path, lines.join("\n")).unwrap();
}

/// Writes the configuration of a model with two small layers over bytes.
pub(crate) fn write_model(dir: &Path) {
    let config = json!({ "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128,
        "initializer_range": 0.05 });
    fs::create_dir_all(dir.join("model")).unwrap();
    fs::write(dir.join("model/config.json"), config.to_string()).unwrap();
}

pub(crate) fn prepare(dir: &Path) {
    write_model(dir);
    write_chats(&dir.join("chats.jsonl"), 0, 60);
    write_chats(&dir.join("others.jsonl"), 100, 21);
}

const FLAGS: &str = "--model model --sft chats.jsonl --lr 3e-3 --lr-schedule constant --warmup-steps 0";

/// Trains on six sequences a step. Returns the metrics and standard output.
fn train(dir: &Path, ranks: usize, flags: &str, metrics: &str) -> (Vec<Value>, String) {
    let defaults = format!("{FLAGS} --batch-size {} --seq-len 96 --metrics {metrics}", 6 / ranks);
    let run = fsdp_test_support::train(ranks, &merge_flags(&defaults, flags), dir).ok();
    (json_lines(&dir.join(metrics)), run.stdout)
}

/// Returns the steps or evaluations with their losses.
fn losses(records: &[Value], key: &str) -> Vec<(u64, f64)> {
    let of = |record: &Value| Some((record["step"].as_u64()?, record[key].as_f64()?));
    records.iter().filter_map(of).collect()
}

fn assert_same(found: &[(u64, f64)], want: &[(u64, f64)], what: &str) {
    assert_eq!(found.len(), want.len(), "{what}");
    for ((step, loss), (want_step, want)) in found.iter().zip(want) {
        assert!(step == want_step && (loss - want).abs() < 1e-4 * want, "{what}: step {step}: {loss} for {want}");
    }
}

/// A step's loss and gradient are means over all counted tokens, however they are distributed over ranks.
#[test]
fn losses_do_not_depend_on_ranks_and_resume_within_an_epoch() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    let eval = "--eval others.jsonl --eval-every 4";
    // 60 examples are about thirty sequences, so ten steps of six reach the second or third epoch.
    let (one, stdout) = train(dir.path(), 1, &format!("--steps 10 --checkpoint-dir one {eval}"), "one.jsonl");
    let (steps, evals) = (losses(&one, "loss"), losses(&one, "eval_loss"));
    assert_eq!(steps.len(), 10);
    assert_eq!(evals.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [0, 4, 8, 10]);
    assert!(evals[3].1 < 0.9 * evals[0].1, "{evals:?}");
    let perplexity = one[0]["eval_perplexity"].as_f64().unwrap();
    assert!((perplexity - evals[0].1.exp()).abs() < 1e-9 && one[0]["eval_tokens"].as_u64().unwrap() > 100);
    assert!(stdout.contains(r#"sample before training: "user:\n100 + 1?"#), "{stdout}");
    assert!(stdout.contains(" sample: \""), "{stdout}");

    for (ranks, flags) in [
        (2, "--batch-size 3"),
        (3, "--batch-size 2"),
        (2, "--batch-size 1 --grad-accum 3"),
        (3, "--batch-size 1 --grad-accum 2 --activation-checkpoint full"),
    ] {
        let (other, _) = train(dir.path(), ranks, &format!("--steps 10 {flags} {eval}"), "other.jsonl");
        assert_same(&losses(&other, "loss"), &steps, flags);
        assert_same(&losses(&other, "eval_loss"), &evals, flags);
    }
    // In the middle of an epoch, followed by steps into the next one.
    train(dir.path(), 2, &format!("--steps 3 --checkpoint-dir two {eval}"), "two.jsonl");
    for ranks in [1, 2, 3] {
        let flags = format!("--steps 10 --resume two/step-00000003 {eval}");
        let (resumed, _) = train(dir.path(), ranks, &flags, "resumed.jsonl");
        assert_same(&losses(&resumed, "loss"), &steps[3..], &format!("{ranks} ranks"));
        assert_same(&losses(&resumed, "eval_loss"), &evals[1..], &format!("{ranks} ranks"));
    }
    // Bit for bit at the same number of ranks.
    let (whole, _) = train(dir.path(), 2, &format!("--steps 8 {eval}"), "whole.jsonl");
    let flags = format!("--steps 8 --resume two/step-00000003 {eval}");
    let (resumed, _) = train(dir.path(), 2, &flags, "again.jsonl");
    assert_eq!(losses(&resumed, "loss"), losses(&whole, "loss")[3..]);
}

/// Packing does not change the examples: steps over all examples are equal.
#[test]
fn packing_equals_padding() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    let chats = fs::read_to_string(dir.path().join("chats.jsonl")).unwrap();
    let few: Vec<&str> = chats.lines().take(8).collect();
    fs::write(dir.path().join("chats.jsonl"), few.join("\n")).unwrap();
    let run = |flags: &str| losses(&train(dir.path(), 2, &format!("--steps 6 {flags}"), "metrics.jsonl").0, "loss");
    let padded = run("--packing off --batch-size 4");
    assert_same(&run("--packing off --batch-size 1 --grad-accum 4 --shuffle off"), &padded, "accumulated");
    // Two sequences of 256 tokens hold all eight examples.
    edit_file(&dir.path().join("model/config.json"), "128", "256");
    assert_same(&run("--seq-len 256 --batch-size 1"), &padded, "packed");
}

/// `--data` keeps its order unless it is shuffled. A shuffled order resumes.
#[test]
fn shuffles_streams() {
    let dir = tempfile::tempdir().unwrap();
    let model = golden("llama_tiny").display().to_string();
    let run = |ranks: usize, flags: &str, metrics: &str| {
        let flags = format!(
            "--model {model} --data {model}/tokens.bin --eval {model}/tokens.bin --seq-len 32 --lr-schedule constant \
             --batch-size {} --metrics {metrics} {flags}",
            6 / ranks
        );
        fsdp_test_support::train(ranks, &flags, dir.path()).ok();
        json_lines(&dir.path().join(metrics))
    };
    let plain = losses(&run(2, "--steps 3", "plain.jsonl"), "loss");
    assert_eq!(losses(&run(2, "--steps 3 --shuffle off", "off.jsonl"), "loss"), plain);
    let shuffled = run(2, "--steps 16 --shuffle on --save-every 9 --checkpoint-dir saved", "on.jsonl");
    assert_ne!(losses(&shuffled, "loss")[0].1, plain[0].1);
    // 80 sequences of 32 tokens: in the last of 14 rounds, one rank has two sequences and the other none.
    let evals = losses(&shuffled, "eval_loss");
    assert_eq!((evals.len(), shuffled[0]["eval_tokens"].as_u64()), (2, Some(80 * 32)));
    for ranks in [1, 3] {
        let resumed = run(ranks, "--steps 16 --shuffle on --resume saved/step-00000009", "resumed.jsonl");
        assert_same(&losses(&resumed, "loss"), &losses(&shuffled, "loss")[9..], "resumed");
        assert_same(&losses(&resumed, "eval_loss"), &evals[1..], "resumed");
    }
}

/// Trains with the model's own chat template, and checks the gradients.
#[test]
fn uses_the_models_template_and_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    let model = dir.path().join("model");
    let chat = golden("chat");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(chat.join(name), model.join(name)).unwrap();
    }
    fs::copy(chat.join("chatml.jinja"), model.join("chat_template.jinja")).unwrap();
    edit_file(&model.join("config.json"), "\"vocab_size\":256", "\"vocab_size\":330");
    write_chats(&dir.path().join("chats.jsonl"), 1, 60);
    let (records, stdout) = train(dir.path(), 2, "--steps 2 --gradcheck --seq-len 128", "metrics.jsonl");
    assert_eq!(losses(&records, "loss").len(), 2);
    // Samples do not show special tokens.
    let prompt = r#"sample: "system\nYou are a helpful assistant.\nuser\n1 + 1?\nassistant\n" -> "#;
    assert!(stdout.contains(prompt), "{stdout}");
}

fn refused(dir: &Path, flags: &str, parts: &[&str]) {
    let flags = format!("--model model --seq-len 96 --steps 2 --batch-size 2 --checkpoint-dir checkpoints {flags}");
    fsdp_test_support::train(2, &flags, dir).refused(2, parts);
}

#[test]
fn names_bad_input_and_the_fix() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    let chats = fs::read_to_string(dir.path().join("chats.jsonl")).unwrap();
    let with = |name: &str, content: &str| fs::write(dir.path().join(name), content).unwrap();
    with("empty.jsonl", "");
    with("broken.jsonl", &format!("{chats}\n{{\"messages\": [\n"));
    with("keys.jsonl", "{\"text\": \"a\"}");
    with("silent.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}");
    with("text.txt", &"words and more words\n".repeat(100));
    with("empty.txt", "");
    with("short.jsonl", chats.lines().next().unwrap());
    for (flags, parts) in [
        ("--sft empty.jsonl", &["empty.jsonl has no examples", "at least one line"][..]),
        ("--sft broken.jsonl", &["broken.jsonl, line 61: it is not a JSON object", "{\"messages\": "]),
        ("--sft keys.jsonl", &["keys.jsonl, line 1: it has the keys \"text\"; a line is"]),
        ("--sft silent.jsonl", &["silent.jsonl, line 1: no message has the role \"assistant\""]),
        ("--sft short.jsonl", &["1 examples of short.jsonl make 1 sequences, but one step needs 4", "more examples"]),
        ("--sft nowhere.jsonl", &["cannot read nowhere.jsonl", "No such file"]),
        ("--sft chats.jsonl --eval nowhere.jsonl", &["--eval: cannot read nowhere.jsonl"]),
        ("--sft chats.jsonl --eval keys.jsonl", &["--eval: keys.jsonl, line 1: it has the keys"]),
        ("--data text.txt --eval empty.txt", &["--eval: the data to evaluate on is too short: 0 tokens"]),
        ("--sft chats.jsonl --data chats.jsonl", &["--sft and --data exclude each other"]),
        ("--sft chats.jsonl --eval-every 2", &["--eval-every needs --eval"]),
    ] {
        refused(dir.path(), flags, parts);
    }
    with("model/chat_template.jinja", "{{ messages");
    refused(dir.path(), "--sft chats.jsonl", &["chat_template.jinja is not a valid Jinja template"]);
    with("model/chat_template.jinja", "{{ raise_exception('no ' + messages[0].role + ' here') }}");
    refused(
        dir.path(),
        "--sft chats.jsonl",
        &["chats.jsonl, line 2: the chat template in model/chat_template.jinja refuses it: no user here"],
    );
}

/// The ranks read the same file with different chat templates.
#[test]
fn refuses_ranks_with_different_templates() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    fs::create_dir(dir.path().join("other")).unwrap();
    fs::copy(dir.path().join("model/config.json"), dir.path().join("other/config.json")).unwrap();
    let all = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}";
    fs::write(dir.path().join("other/chat_template.jinja"), all).unwrap();
    let flags = FLAGS.replace("--model model", "--steps 1 --seq-len 96");
    let script = format!("case $RANK in 1) own=other;; *) own=model;; esac; exec \"$0\" {flags} --model $own");
    let run = launch_script(2, &script, dir.path());
    run.refused(2, &["the ranks disagree on the data (rank 0: 60 examples with checksum "]);
}
