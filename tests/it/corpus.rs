//! `train --data` mixes corpora of several formats, resumes in them, trains on what `train prepare` wrote, and refuses bad
//! input.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{Run, json_lines, merge_flags, program, run, workspace};
use serde_json::{Value, json};

use crate::sft::write_model;

/// Writes JSON Lines whose lengths differ.
fn write_lines(path: &Path, count: usize) {
    let line = |index: usize| {
        let words: String = (0..index * 31 % 60).map(|word| format!(" {}", index * word % 97)).collect();
        format!("{}\n", json!({ "text": format!("document {index}:{words}") }))
    };
    fs::write(path, (0..count).map(line).collect::<String>()).unwrap();
}

/// Writes a model, JSON Lines and Parquet.
fn write_corpora() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path());
    write_lines(&dir.path().join("lines.jsonl"), 200);
    let parquet = workspace().join("examples/corpus/testdata/delta.parquet");
    fs::copy(parquet, dir.path().join("rows.parquet")).unwrap();
    dir
}

const FLAGS: &str = "--model model --seq-len 64 --lr 3e-3 --lr-schedule constant --warmup-steps 0 --shuffle on";
const MIXTURE: &str = "--data lines.jsonl:0.7,*.parquet:0.3";

/// Trains on twelve sequences a step. Returns the metrics.
fn train(dir: &Path, ranks: usize, flags: &str) -> Vec<Value> {
    let defaults = format!("{FLAGS} --batch-size {} --metrics metrics.jsonl", 12 / ranks);
    fsdp_test_support::train(ranks, &merge_flags(&defaults, flags), dir).ok();
    json_lines(&dir.join("metrics.jsonl"))
}

fn losses(records: &[Value]) -> Vec<f64> {
    records.iter().filter_map(|record| record["loss"].as_f64()).collect()
}

fn assert_near(found: &[f64], want: &[f64], what: &str) {
    assert_eq!(found.len(), want.len(), "{what}");
    for (step, (loss, want)) in found.iter().zip(want).enumerate() {
        assert!((loss - want).abs() < 1e-6 * want.max(1.), "{what}: step {step}: {loss} for {want}");
    }
}

#[test]
fn mixtures_do_not_depend_on_ranks_and_resume() {
    let dir = write_corpora();
    for pack in ["stream", "documents"] {
        let flags = format!("{MIXTURE} --pack {pack} --steps 8");
        let whole = train(dir.path(), 1, &flags);
        let expected = losses(&whole);
        assert_eq!(expected.len(), 8);
        let sources = &whole[7]["sources"];
        let tokens: Vec<u64> = (0..2).map(|source| sources[source]["tokens"].as_u64().unwrap()).collect();
        assert_eq!(tokens.iter().sum::<u64>(), 8 * 12 * 64);
        assert!((tokens[0] as f64 - 0.7 * 8. * 12. * 64.).abs() <= 64., "{tokens:?}");
        // An epoch has 690 tokens, and the share is 1843.
        assert_eq!((sources[1]["name"].as_str(), sources[1]["epochs"].as_u64()), (Some("*.parquet"), Some(2)));
        assert!(whole[7]["data_wait_s"].as_f64().unwrap() >= 0.);
        for (ranks, more) in [(2, ""), (3, "--batch-size 2 --grad-accum 2"), (4, "")] {
            let found = losses(&train(dir.path(), ranks, &format!("{flags} {more}")));
            assert_near(&found, &expected, &format!("{pack}, {ranks} ranks"));
        }
        train(dir.path(), 2, &merge_flags(&flags, &format!("--steps 3 --checkpoint-dir {pack}")));
        fs::remove_file(dir.path().join("metrics.jsonl")).unwrap();
        let resumed = train(dir.path(), 3, &format!("{flags} --resume {pack}/step-00000003"));
        assert_near(&losses(&resumed), &expected[3..], &format!("{pack}, resumed"));
        assert_eq!(resumed[4]["sources"], *sources);
    }
    // The ranks of one model read the same rows.
    let flags = format!("{MIXTURE} --steps 8");
    let expected = losses(&train(dir.path(), 1, &flags));
    let parallel = losses(&train(dir.path(), 2, &format!("{flags} --tensor-parallel 2 --batch-size 12")));
    let differences = parallel.iter().zip(&expected).map(|(found, want)| (found - want).abs());
    assert!(differences.fold(0., f64::max) < 1e-4, "{parallel:?}");
    // The error for another file names it. The run may begin at the start of the file.
    write_lines(&dir.path().join("lines.jsonl"), 201);
    let resume = format!("{FLAGS} {flags} --batch-size 6 --pack documents --resume documents/step-00000003");
    let refused = fsdp_test_support::train(2, &resume, dir.path());
    refused.refused(2, &["can't resume from", "lines.jsonl had ", "--resume-anyway begins at the start of the data"]);
    let anew = fsdp_test_support::train(2, &format!("{resume} --resume-anyway"), dir.path()).ok();
    assert!(anew.stderr.contains("from the start of the data: "), "{}", anew.stderr);
}

fn prepare(dir: &Path, flags: &str) -> Run {
    let mut command = Command::new(program("train"));
    command.arg("prepare").args(flags.split_whitespace()).current_dir(dir);
    run(command, Duration::from_secs(60))
}

#[test]
fn prepared_corpora_have_the_losses_of_streams() {
    let dir = write_corpora();
    // 200 documents are one block of a stream, so both are in the order of the file.
    let flags = "--shuffle off --steps 5";
    let streamed = train(dir.path(), 2, &format!("{flags} --data lines.jsonl --eval lines.jsonl"));
    let printed = prepare(dir.path(), "--data lines.jsonl --out tokens --model model --json").ok().stdout;
    let summary: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!((summary["documents"].as_u64(), summary["token_bits"].as_u64()), (Some(200), Some(16)));
    let prepared = train(dir.path(), 2, &format!("{flags} --data tokens --eval tokens"));
    assert_eq!(losses(&prepared), losses(&streamed));
    for key in ["eval_loss", "eval_tokens"] {
        let of = |records: &[Value]| records.iter().filter_map(|record| record[key].as_f64()).collect::<Vec<_>>();
        assert!(of(&prepared).len() == 2 && of(&prepared) == of(&streamed), "{key}");
    }
    let again = prepare(dir.path(), "--data lines.jsonl --out tokens --model model").ok().stdout;
    assert!(again.contains("1 shards, 1 of them from an earlier run"), "{again}");
    write_lines(&dir.path().join("lines.jsonl"), 201);
    let changed = prepare(dir.path(), "--data lines.jsonl --out tokens --model model").failed();
    assert!(changed.contains("has changed since tokens was begun: lines.jsonl had"), "{changed}");
}

#[test]
fn names_bad_corpora_and_the_fix() {
    let dir = write_corpora();
    let write = |name: &str, content: &str| fs::write(dir.path().join(name), content).unwrap();
    write("chats.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n");
    write("pairs.jsonl", "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}\n");
    write("page.parquet", "<html>404</html>");
    write("broken.jsonl", "{\"text\": \"a\"}\n{\"text\": \n");
    write("text.txt", &"words and more words\n".repeat(100));
    for (flags, parts) in [
        (
            "--data chats.jsonl",
            &["--data: chats.jsonl, line 1: the record does not have a field `text`", "--sft FILE"][..],
        ),
        ("--data pairs.jsonl", &["--data: pairs.jsonl, line 1", "--dpo FILE"]),
        ("--data page.parquet", &["--data: page.parquet is not a Parquet file", "Download it again"]),
        ("--data broken.jsonl", &["broken.jsonl, line 2: invalid JSON"]),
        ("--data lines.jsonl:0.5,rows.parquet", &["`rows.parquet` has no weight"]),
        ("--data lines.jsonl:0.5,none.jsonl:0.5", &["--data: cannot read none.jsonl", "org/dataset[@revision]:file"]),
        ("--sft org/data:*.jsonl", &["--sft reads one file, but *.jsonl is a pattern"]),
        ("--data lines.jsonl --text-field body", &["the record does not have a field `body`", "--text-field NAME"]),
        ("--data text.txt --text-field body", &["--text-field body is for records", "leave the flag out"]),
        ("--data *.json", &["no file matches *.json"]),
        ("--data lines.jsonl --eval chats.jsonl", &["--eval: chats.jsonl, line 1"]),
    ] {
        let flags = format!("{FLAGS} --batch-size 1 --steps 1 {flags}");
        fsdp_test_support::train(2, &flags, dir.path()).refused(2, parts);
    }
    let error = prepare(dir.path(), "--data chats.jsonl --out tokens").failed();
    assert!(error.contains("Error: chats.jsonl, line 1: the record does not have a field `text`"), "{error}");
}
