//! `train --task` reproduces transformers' and sentence-transformers' losses at any number of ranks, resumes, evaluates,
//! exports, and refuses bad input.

use std::fs;
use std::path::Path;

use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{Run, golden, json_lines, launch_script, merge_flags, read_text};
use serde_json::{Value, json};

/// Records of a step over all ranks.
const RECORDS: usize = 6;
/// Limit of differences from recorded runs. PyTorch differs from itself by up to 1.4e-6 in recorded runs of such sizes,
/// and rounding errors grow through the steps.
const NEAR: f64 = 2e-5;

/// Returns the flags of a recorded run of `tests/golden/record_texts.py`.
fn recorded_flags(run: &str) -> String {
    let texts = golden("texts");
    let (task, model) = run.split_once('_').unwrap();
    let file = match run {
        "classify_bert" => "labelled.csv",
        "classify_llama" => "single.jsonl",
        "embed_bert" => "triplets.jsonl",
        _ => "pairs.jsonl",
    };
    format!(
        "--task {task} --model {} --data {} --shuffle off --seq-len 24 --steps 20 --lr 1e-3 --weight-decay 0.1 \
         --clip-grad-norm 1.0 --lr-schedule constant --warmup-steps 0 --metrics metrics.jsonl",
        texts.join(model).display(),
        texts.join(file).display()
    )
}

fn train(run: &str, ranks: usize, flags: &str, dir: &Path) -> Run {
    let defaults = format!("{} --batch-size {}", recorded_flags(run), RECORDS / ranks);
    fsdp_test_support::train(ranks, &merge_flags(&defaults, flags), dir)
}

fn trajectory(run: &str, ranks: usize, flags: &str) -> Trajectory {
    let dir = tempfile::tempdir().unwrap();
    train(run, ranks, flags, dir.path()).ok();
    Trajectory::of_metrics(&dir.path().join("metrics.jsonl"))
}

fn reproduces(run: &str, splits: &[(usize, &str)]) {
    let recorded = Trajectory::recorded("texts", run);
    assert_eq!(recorded.0.len(), 20);
    for (ranks, flags) in splits {
        let difference = trajectory(run, *ranks, flags).difference(&recorded);
        assert!(difference.max() < NEAR, "{run}, {ranks} ranks {flags}: {difference:?}");
    }
}

#[test]
fn classifiers_have_the_losses_of_transformers() {
    let shared = [(2, "--context-parallel 2 --batch-size 6"), (4, "--context-parallel 2 --batch-size 3")];
    reproduces(
        "classify_bert",
        &[(1, ""), (2, ""), (2, "--batch-size 1 --grad-accum 3"), (3, ""), shared[0], shared[1]],
    );
    reproduces("classify_llama", &[(1, ""), (2, ""), (3, "--activation-checkpoint full"), shared[0], shared[1]]);
}

#[test]
fn embeddings_have_the_losses_of_sentence_transformers() {
    reproduces("embed_bert", &[(1, ""), (2, ""), (3, "")]);
    reproduces("embed_llama", &[(1, ""), (2, "--replicate 2")]);
}

/// Rows of a step are padded alike, so dropout does not depend on the ranks.
#[test]
fn runs_with_dropout_resume_at_other_numbers_of_ranks() {
    for run in ["classify_bert", "embed_bert"] {
        let flags = "--dropout 0.2 --shuffle on --steps 12";
        let whole = trajectory(run, 1, flags);
        let dir = tempfile::tempdir().unwrap();
        train(run, 2, &format!("{flags} --save-every 5 --checkpoint-dir saved"), dir.path()).ok();
        let two = Trajectory::of_metrics(&dir.path().join("metrics.jsonl"));
        assert!(two.difference(&whole).max() < NEAR, "{run}: {:?}", two.difference(&whole));
        train(run, 3, &format!("{flags} --resume saved/step-00000005"), dir.path()).ok();
        let resumed = Trajectory::of_metrics(&dir.path().join("metrics.jsonl"));
        let difference = resumed.difference(&whole);
        assert!(difference.max() < NEAR, "{run}: {difference:?}");
    }
}

/// Returns the evaluations, without their durations.
fn evaluations(dir: &Path) -> Vec<Value> {
    let records = json_lines(&dir.join("metrics.jsonl")).into_iter().filter(|record| record["eval_loss"].is_number());
    records
        .map(|mut record| {
            record.as_object_mut().unwrap().remove("eval_time_s");
            record
        })
        .collect()
}

/// Seven records on up to three ranks: the last round is uneven, or a rank has no record in it.
#[test]
fn evaluations_do_not_depend_on_ranks() {
    for (run, score) in [("classify_bert", "eval_macro_f1"), ("embed_llama", "eval_cosine")] {
        let dir = tempfile::tempdir().unwrap();
        let data = golden("texts").join(if run == "classify_bert" { "labelled.csv" } else { "pairs.jsonl" });
        let lines = read_text(&data);
        let header = usize::from(run == "classify_bert");
        let few: Vec<&str> = lines.lines().take(7 + header).collect();
        let name = format!("few.{}", data.extension().unwrap().to_str().unwrap());
        fs::write(dir.path().join(&name), few.join("\n")).unwrap();
        let flags = format!("--eval {name} --eval-every 10 --lr 1e-2");
        let mut all = vec![];
        for ranks in [1, 2, 3] {
            let stderr = train(run, ranks, &flags, dir.path()).ok().stderr;
            assert!(stderr.contains("over 7 records") && stderr.contains("accuracy"), "{stderr}");
            all.push(evaluations(dir.path()));
        }
        assert_eq!(all[0].iter().map(|record| record["step"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 10, 20]);
        for (one, other) in all[0].iter().zip(&all[1]).chain(all[0].iter().zip(&all[2])) {
            assert_eq!((&one["eval_records"], &other["eval_records"]), (&json!(7), &json!(7)));
            // Scores of seven records are equal, or rounding has changed a near tie.
            for key in ["eval_loss", score] {
                let (one, other) = (one[key].as_f64().unwrap(), other[key].as_f64().unwrap());
                assert!((one - other).abs() < 1e-2 * one.abs(), "{run}, {key}: {one} and {other}");
            }
        }
        let loss = |at: usize| all[0][at]["eval_loss"].as_f64().unwrap();
        assert!(loss(2) < loss(0), "{run}: {:?}", all[0]);
    }
}

/// The classifier of a checkpoint without one starts from random weights, and the export has it.
#[test]
fn new_classifiers_are_exported() {
    let dir = tempfile::tempdir().unwrap();
    let data = "text,label\ngood film,yes\nbad film,no\nnice song,yes\nawful book,no\n";
    fs::write(dir.path().join("data.csv"), data).unwrap();
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(golden("bert_tiny").join(file), model.join(file)).unwrap();
    }
    fs::copy(golden("texts/bert/tokenizer.json"), model.join("tokenizer.json")).unwrap();
    let flags = "--task classify --model model --data data.csv --seq-len 16 --steps 30 --lr 1e-2 --batch-size 2 \
                 --eval data.csv --metrics metrics.jsonl --export-hf out";
    let run = fsdp_test_support::train(2, flags, dir.path()).ok();
    assert!(run.stderr.contains("has no classifier.weight: starting from a random one"), "{}", run.stderr);
    assert!(run.stdout.contains("sample before training: \"good film\" -> \""), "{}", run.stdout);
    let last = evaluations(dir.path()).pop().unwrap();
    assert_eq!((&last["eval_accuracy"], &last["eval_macro_f1"]), (&json!(1.), &json!(1.)), "{last}");
    let config: Value = serde_json::from_str(&read_text(&dir.path().join("out/config.json"))).unwrap();
    assert_eq!(config["architectures"], json!(["BertForSequenceClassification"]));
    assert_eq!(config["id2label"], json!({ "0": "no", "1": "yes" }));
    // The export is a classifier with these labels.
    let again = merge_flags(flags, "--model out --export-hf again --steps 1 --lr 1e-9");
    let run = fsdp_test_support::train(1, &again, dir.path()).ok();
    assert!(!run.stderr.contains("has no classifier"), "{}", run.stderr);
    assert_eq!(evaluations(dir.path())[0]["eval_accuracy"], 1.);
}

#[test]
fn adapters_and_classifier_are_exported() {
    let dir = tempfile::tempdir().unwrap();
    train("classify_bert", 2, "--steps 2 --lora-rank 2 --lora-targets all-linear --export-hf out", dir.path()).ok();
    let config: Value = serde_json::from_str(&read_text(&dir.path().join("out/adapter_config.json"))).unwrap();
    assert_eq!(
        (&config["task_type"], &config["modules_to_save"]),
        (&json!("SEQ_CLS"), &json!(["classifier", "pooler"]))
    );
    let weights = fsdp_ckpt::SafetensorsFile::open(dir.path().join("out/adapter_model.safetensors")).unwrap();
    let names: Vec<&str> = weights.names().collect();
    assert!(names.contains(&"base_model.model.classifier.weight"), "{names:?}");
    assert!(names.contains(&"base_model.model.bert.encoder.layer.0.attention.self.query.lora_A.weight"), "{names:?}");
}

#[test]
fn bad_input_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    write("unknown.csv", "text,label\ngood,positive\nbad,worst\n");
    write("columns.csv", "text,class\ngood,positive\n");
    write("empty.jsonl", "\n");
    write("short.csv", "text,label\ngood,positive\n");
    write(
        "half.jsonl",
        "{\"anchor\": \"a\", \"positive\": \"b\", \"negative\": \"c\"}\n{\"anchor\": \"a\", \"positive\": \"b\"}\n",
    );
    write("list.jsonl", "{\"text\": [1], \"label\": 0}\n");
    write("data.txt", "text");
    for (run, flags, message) in [
        (
            "classify_bert",
            "--eval unknown.csv",
            "unknown.csv, line 3: the label \"worst\" is not known; the labels are negative, neutral, positive",
        ),
        ("classify_bert", "--data unknown.csv", "the label \"worst\" is not known"),
        ("classify_bert", "--data columns.csv", "line 2: it has the columns \"class\", \"text\"; expected the columns"),
        ("classify_bert", "--data empty.jsonl", "empty.jsonl has no records"),
        ("classify_bert", "--data short.csv", "are fewer than one step needs, which is 6"),
        ("classify_bert", "--data list.jsonl", "line 1: \"text\" is a list, but must be text"),
        ("classify_bert", "--data data.txt", "must end in .jsonl, .json, .parquet or .csv"),
        ("classify_bert", "--seq-len 3", "--seq-len 3 has no room for a text beside 3 special tokens"),
        ("classify_bert", "--mask-token 4", "--mask-token is for --task language"),
        ("classify_llama", "--tensor-parallel 2 --batch-size 6", "--tensor-parallel is for --task language"),
        ("embed_bert", "--data half.jsonl", "line 2: it has no negative, unlike line 1"),
        ("embed_bert", "--data short.csv", "it has the columns \"label\", \"text\"; expected"),
    ] {
        train(run, 2, flags, dir.path()).refused(2, &[message]);
    }
    let nothing = fsdp_test_support::train(1, "--task embed", dir.path());
    nothing.refused(1, &["--task embed needs --data FILE"]);
}

/// Ranks with other labels or data, and a rank that fails, end the run on all ranks.
#[test]
fn ranks_must_read_the_same() {
    let dir = tempfile::tempdir().unwrap();
    for (rank, labels) in [("a b"), ("a c")].iter().enumerate() {
        let rows: String = labels.split(' ').map(|label| format!("good,{label}\nbad,{label}\n")).collect();
        fs::write(dir.path().join(format!("{rank}.csv")), format!("text,label\n{rows}")).unwrap();
    }
    let flags = "--task classify --batch-size 1 --seq-len 8 --steps 1";
    let differs = launch_script(2, &format!("exec $0 {flags} --data $RANK.csv"), dir.path());
    differs.refused(2, &["the ranks disagree on", "the labels (rank 0: a, b; rank 1: a, c)"]);
    let missing = launch_script(2, &format!("exec $0 {flags} --data 0.csv$([ $RANK = 1 ] && echo x)"), dir.path());
    let stderr = missing.failed();
    assert!(stderr.contains("0.csvx") && !stderr.contains("panicked"), "{stderr}");
}
