//! `train --sft`: conversations and completions, at any number of ranks, resumed, evaluated; and what is refused.

use std::fs;
use std::path::Path;

use fsdp_test_support::{golden, launch};
use serde_json::{Value, json};

/// Questions and answers of several lengths.
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

/// A model directory of two small layers over bytes.
fn write_model(dir: &Path) {
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

/// Runs steps of six sequences, and returns what was measured and what was printed.
fn train(dir: &Path, ranks: usize, flags: &str, metrics: &str) -> (Vec<Value>, String) {
    let batch_size = (6 / ranks).to_string();
    let mut all: Vec<&str> = FLAGS.split(' ').chain(flags.split_whitespace()).collect();
    for (flag, value) in [("--batch-size", batch_size.as_str()), ("--seq-len", "96")] {
        if !all.contains(&flag) {
            all.extend([flag, value]);
        }
    }
    all.extend(["--metrics", metrics]);
    let run = launch(ranks, "train", &all, dir).ok();
    let text = fs::read_to_string(dir.join(metrics)).unwrap();
    (text.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), run.stdout)
}

/// The steps, or evaluations, with their losses.
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

/// However the batch is made up, with micro-batches of which some ranks learn much and others little, the step's loss
/// and its gradient are those of the mean over all tokens that count.
#[test]
fn losses_do_not_depend_on_ranks_and_resume_in_the_midst_of_an_epoch() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    let eval = "--eval others.jsonl --eval-every 4";
    // 60 examples make some thirty sequences: ten steps of six go into the second or third epoch.
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
    // In the midst of an epoch, with steps behind it that go over the end of that.
    train(dir.path(), 2, &format!("--steps 3 --checkpoint-dir two {eval}"), "two.jsonl");
    for ranks in [1, 2, 3] {
        let flags = format!("--steps 10 --resume two/step-00000003 {eval}");
        let (resumed, _) = train(dir.path(), ranks, &flags, "resumed.jsonl");
        assert_same(&losses(&resumed, "loss"), &steps[3..], &format!("{ranks} ranks"));
        assert_same(&losses(&resumed, "eval_loss"), &evals[1..], &format!("{ranks} ranks"));
    }
    // At the same number of ranks bit for bit.
    let (whole, _) = train(dir.path(), 2, &format!("--steps 8 {eval}"), "whole.jsonl");
    let flags = format!("--steps 8 --resume two/step-00000003 {eval}");
    let (resumed, _) = train(dir.path(), 2, &flags, "again.jsonl");
    assert_eq!(losses(&resumed, "loss"), losses(&whole, "loss")[3..]);
}

/// Packing moves examples, but changes nothing of them: with all of them in each step it is the same step.
#[test]
fn packed_examples_are_learnt_as_padded_ones() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    let chats = fs::read_to_string(dir.path().join("chats.jsonl")).unwrap();
    let few: Vec<&str> = chats.lines().take(8).collect();
    fs::write(dir.path().join("chats.jsonl"), few.join("\n")).unwrap();
    let run = |flags: &str| losses(&train(dir.path(), 2, &format!("--steps 6 {flags}"), "metrics.jsonl").0, "loss");
    let padded = run("--packing off --batch-size 4");
    assert_same(&run("--packing off --batch-size 1 --grad-accum 4 --shuffle off"), &padded, "accumulated");
    // Two sequences of 256 tokens have room for all eight.
    fs::write(
        dir.path().join("model/config.json"),
        fs::read_to_string(dir.path().join("model/config.json")).unwrap().replace("128", "256"),
    )
    .unwrap();
    assert_same(&run("--seq-len 256 --batch-size 1"), &padded, "packed");
}

/// The order of --data as it always was; shuffled it is another one, which resumes.
#[test]
fn streams_are_shuffled_when_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let model = golden("llama_tiny");
    let tokens = model.join("tokens.bin");
    let run = |ranks: usize, flags: &str, metrics: &str| {
        let batch_size = (6 / ranks).to_string();
        let mut all = vec!["--model", model.to_str().unwrap(), "--data", tokens.to_str().unwrap(), "--seq-len", "32"];
        all.extend(["--lr-schedule", "constant", "--batch-size", &batch_size, "--metrics", metrics]);
        all.extend(["--eval", tokens.to_str().unwrap()]);
        all.extend(flags.split(' '));
        launch(ranks, "train", &all, dir.path()).ok();
        let text = fs::read_to_string(dir.path().join(metrics)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>()
    };
    let plain = losses(&run(2, "--steps 3", "plain.jsonl"), "loss");
    assert_eq!(losses(&run(2, "--steps 3 --shuffle off", "off.jsonl"), "loss"), plain);
    let shuffled = run(2, "--steps 16 --shuffle on --save-every 9 --checkpoint-dir saved", "on.jsonl");
    assert_ne!(losses(&shuffled, "loss")[0].1, plain[0].1);
    // 80 sequences of 32 tokens: in the last of 14 rounds one rank has two, and the other none.
    let evals = losses(&shuffled, "eval_loss");
    assert_eq!((evals.len(), shuffled[0]["eval_tokens"].as_u64()), (2, Some(80 * 32)));
    for ranks in [1, 3] {
        let resumed = run(ranks, "--steps 16 --shuffle on --resume saved/step-00000009", "resumed.jsonl");
        assert_same(&losses(&resumed, "loss"), &losses(&shuffled, "loss")[9..], "resumed");
        assert_same(&losses(&resumed, "eval_loss"), &evals[1..], "resumed");
    }
}

/// A chat template of the model's own, and the gradients of what is learnt by it.
#[test]
fn the_models_template_and_tokenizer_are_used() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    let model = dir.path().join("model");
    let chat = golden("chat");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(chat.join(name), model.join(name)).unwrap();
    }
    fs::copy(chat.join("chatml.jinja"), model.join("chat_template.jinja")).unwrap();
    let config = fs::read_to_string(model.join("config.json")).unwrap();
    fs::write(model.join("config.json"), config.replace("\"vocab_size\":256", "\"vocab_size\":330")).unwrap();
    write_chats(&dir.path().join("chats.jsonl"), 1, 60);
    let (records, stdout) = train(dir.path(), 2, "--steps 2 --gradcheck --seq-len 128", "metrics.jsonl");
    assert_eq!(losses(&records, "loss").len(), 2);
    // Special tokens are not shown.
    let prompt = r#"sample: "system\nYou are a helpful assistant.\nuser\n1 + 1?\nassistant\n" -> "#;
    assert!(stdout.contains(prompt), "{stdout}");
}

fn refused(dir: &Path, flags: &str, parts: &[&str]) {
    let mut all: Vec<&str> = flags.split(' ').collect();
    all.extend(["--steps", "2", "--batch-size", "2", "--checkpoint-dir", "checkpoints"]);
    launch(2, "train", &all, dir).refused(2, parts);
}

#[test]
fn bad_input_is_named_with_the_way_out() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    let chats = fs::read_to_string(dir.path().join("chats.jsonl")).unwrap();
    let with = |name: &str, content: &str| fs::write(dir.path().join(name), content).unwrap();
    with("empty.jsonl", "");
    with("broken.jsonl", &format!("{chats}\n{{\"messages\": [\n"));
    with("keys.jsonl", "{\"text\": \"a\"}");
    with("silent.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}");
    with("short.jsonl", chats.lines().next().unwrap());
    let base = "--model model --seq-len 96";
    for (flags, parts) in [
        ("--sft empty.jsonl", &["empty.jsonl has no examples", "at least one line"][..]),
        ("--sft broken.jsonl", &["broken.jsonl, line 61: it is not a JSON object", "{\"messages\": "]),
        ("--sft keys.jsonl", &["keys.jsonl, line 1: it has the keys \"text\"; a line is"]),
        ("--sft silent.jsonl", &["silent.jsonl, line 1: there is no message with the role \"assistant\""]),
        ("--sft short.jsonl", &["1 examples of short.jsonl make 1 sequences, but one step needs 4", "more examples"]),
        ("--sft nowhere.jsonl", &["cannot read nowhere.jsonl", "No such file"]),
        ("--sft chats.jsonl --eval nowhere.jsonl", &["--eval: cannot read nowhere.jsonl"]),
        ("--sft chats.jsonl --eval keys.jsonl", &["--eval: keys.jsonl, line 1: it has the keys"]),
        ("--data chats.jsonl --eval empty.jsonl", &["--eval: the data to evaluate on is too short: 0 tokens"]),
        ("--sft chats.jsonl --data chats.jsonl", &["--sft <FILE>", "cannot be used with", "--data <PATH>"]),
        ("--sft chats.jsonl --eval-every 2", &["--eval <PATH>"]),
    ] {
        refused(dir.path(), &format!("{base} {flags}"), parts);
    }
    with("model/chat_template.jinja", "{{ messages");
    refused(dir.path(), &format!("{base} --sft chats.jsonl"), &["chat_template.jinja is not a valid Jinja template"]);
    with("model/chat_template.jinja", "{{ raise_exception('no ' + messages[0].role + ' here') }}");
    refused(
        dir.path(),
        &format!("{base} --sft chats.jsonl"),
        &["chats.jsonl, line 2: the chat template in model/chat_template.jinja refuses it: no user here"],
    );
}

/// Ranks that would learn something else are told so, though they read the same words.
#[test]
fn ranks_that_learn_different_things_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    fs::create_dir(dir.path().join("other")).unwrap();
    fs::copy(dir.path().join("model/config.json"), dir.path().join("other/config.json")).unwrap();
    let all = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}";
    fs::write(dir.path().join("other/chat_template.jinja"), all).unwrap();
    let flags = FLAGS.replace("--model model", "--steps 1 --seq-len 96");
    let script = format!("case $RANK in 1) own=other;; *) own=model;; esac; exec \"$0\" {flags} --model $own");
    let mut command = std::process::Command::new(fsdp_test_support::program("fsdp-launch"));
    command.args(["--nproc-per-node=2", "/bin/sh", "-c", &script]).arg(fsdp_test_support::program("train"));
    command.current_dir(dir.path());
    let run = fsdp_test_support::run(command, std::time::Duration::from_secs(60));
    run.refused(2, &["the ranks disagree on the data (rank 0: 60 examples with checksum "]);
}
