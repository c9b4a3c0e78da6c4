//! `train --dropout`: the same elements at every number of processes, however these share layers and sequences, under
//! activation checkpoints, and after a resume.

use std::path::Path;

use fsdp_test_support::{golden, launch};
use serde_json::Value;

/// Runs steps of 12 sequences each; returns their losses.
fn train(dir: &Path, model: &str, ranks: usize, steps: usize, more: &[&str]) -> Vec<f64> {
    let mask: &[&str] = if model == "bert_tiny" { &["--mask-token", "4"] } else { &[] };
    let (model, tokens) = (golden(model), golden("tokens.bin"));
    let number_of = |flag: &str| {
        let at = more.iter().position(|given| *given == flag);
        at.map_or(1, |at| more[at + 1].parse::<usize>().unwrap())
    };
    let batch_size = (12 * number_of("--tensor-parallel") / ranks / number_of("--grad-accum")).to_string();
    let (steps, metrics) = (steps.to_string(), dir.join("metrics.jsonl"));
    let mut args = vec!["--model", model.to_str().unwrap(), "--init", "random", "--data", tokens.to_str().unwrap()];
    args.extend(["--seq-len", "16", "--steps", &steps, "--lr", "1e-3", "--lr-schedule", "constant"]);
    args.extend(["--batch-size", &batch_size, "--metrics", metrics.to_str().unwrap()]);
    args.extend(mask);
    args.extend(more);
    // A run that goes on would go on in it.
    let _ = std::fs::remove_file(&metrics);
    launch(ranks, "train", &args, dir).ok();
    let text = std::fs::read_to_string(&metrics).unwrap();
    text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap()).collect()
}

fn assert_near(got: &[f64], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() < 2e-5 * want, "{what}: {got} instead of {want}");
    }
}

#[test]
fn what_is_dropped_depends_on_nothing_but_the_seed_and_the_data() {
    let dir = tempfile::tempdir().unwrap();
    let dropout = ["--dropout", "0.2"];
    for model in ["gpt2_tiny", "bert_tiny", "llama_tiny"] {
        let want = train(dir.path(), model, 1, 6, &dropout);
        for (ranks, more) in [(2, &[][..]), (3, &["--grad-accum", "2"][..]), (4, &["--replicate", "2"][..])] {
            let got = train(dir.path(), model, ranks, 6, &[&dropout[..], more].concat());
            assert_near(&got, &want, &format!("{model}, {ranks} ranks"));
        }
        // To the bit: run again, all blocks or one of them, with what they keep.
        let two = train(dir.path(), model, 2, 6, &dropout);
        let keeps = ["2", "--checkpoint-keep", "linear,attention"];
        for again in [&["full"][..], &keeps, &["**.1", "--checkpoint-keep", "attention"]] {
            let more = [&dropout[..], &["--activation-checkpoint"], again].concat();
            assert_eq!(train(dir.path(), model, 2, 6, &more), two, "{model}, {again:?}");
        }
        let none = train(dir.path(), model, 1, 6, &[]);
        let furthest = none.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0., f64::max);
        assert!(furthest > 1e-4, "{model}: {furthest}");
        // The configuration has none.
        assert_eq!(train(dir.path(), model, 1, 6, &["--dropout", "config"]), none, "{model}");
    }
}

#[test]
fn a_resumed_run_drops_what_the_undisturbed_one_does() {
    let dir = tempfile::tempdir().unwrap();
    let want = train(dir.path(), "gpt2_tiny", 2, 6, &["--dropout", "0.3"]);
    let saved = ["--dropout", "0.3", "--checkpoint-dir", "run"];
    assert_eq!(train(dir.path(), "gpt2_tiny", 2, 3, &saved), want[..3]);
    let resumed = ["--dropout", "0.3", "--resume", "run/step-00000003"];
    assert_eq!(train(dir.path(), "gpt2_tiny", 2, 6, &resumed), want[3..]);
    assert_near(&train(dir.path(), "gpt2_tiny", 3, 6, &resumed), &want[3..], "3 ranks");
}

/// Half of the attention's weights, so that other masks are other losses by far.
#[test]
fn ranks_that_share_layers_and_sequences_drop_what_one_rank_does() {
    let dir = tempfile::tempdir().unwrap();
    let (model, dropout) = ("llama_tp_tiny", ["--dropout", "0.5"]);
    let saves = ["--save-every", "2", "--checkpoint-dir", "one"];
    let want = train(dir.path(), model, 1, 4, &[&dropout[..], &saves].concat());
    let sequence = Some("--sequence-parallel");
    let ways = [(2, "2", None), (2, "2", sequence), (4, "2", None), (4, "4", None), (4, "4", sequence)];
    for (ranks, tensor, sequence) in ways {
        let parallel: Vec<&str> = ["--tensor-parallel", tensor].into_iter().chain(sequence).collect();
        let what = format!("{ranks} ranks, {parallel:?}");
        assert_near(&train(dir.path(), model, ranks, 4, &[&dropout[..], &parallel].concat()), &want, &what);
        // The masks go on where layers are shared out from the third step on.
        let resume = ["--resume", "one/step-00000002"];
        let resumed = train(dir.path(), model, ranks, 4, &[&dropout[..], &parallel, &resume].concat());
        assert_near(&resumed, &want[2..], &what);
    }
}

#[test]
fn an_evaluation_drops_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = golden("tokens.bin");
    let losses = |dropout: &str| {
        let metrics = dir.path().join("metrics.jsonl");
        let model = golden("gpt2_tiny");
        let mut args = vec!["--model", model.to_str().unwrap(), "--data", tokens.to_str().unwrap(), "--seq-len", "16"];
        args.extend(["--batch-size", "2", "--metrics", metrics.to_str().unwrap(), "--lr", "0.1"]);
        args.extend(["--eval", tokens.to_str().unwrap(), "--steps", "1", "--eval-every", "1", "--dropout", dropout]);
        launch(2, "train", &args, dir.path()).ok();
        let text = std::fs::read_to_string(&metrics).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        lines.iter().filter_map(|line| line["eval_loss"].as_f64()).collect::<Vec<_>>()
    };
    let (without, with) = (losses("0"), losses("0.5"));
    assert_eq!(without.len(), 2);
    // Before the first step the weights are the same.
    assert!(without[0] == with[0] && without[1] != with[1], "{without:?} {with:?}");
}
