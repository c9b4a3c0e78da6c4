//! `train --dropout` drops the same elements at every number of ranks, with tensor and sequence parallelism, activation
//! checkpointing, and after a resume.

use std::path::Path;

use fsdp_test_support::{golden, json_lines};

/// Trains on 12 sequences a step and returns the losses.
fn train(dir: &Path, model: &str, ranks: usize, steps: usize, more: &str) -> Vec<f64> {
    let words: Vec<&str> = more.split_whitespace().collect();
    let number_of = |flag: &str| {
        words.iter().position(|given| *given == flag).map_or(1, |at| words[at + 1].parse::<usize>().unwrap())
    };
    let batch_size = 12 * number_of("--tensor-parallel") / ranks / number_of("--grad-accum");
    let mask = if model == "bert_tiny" { "--mask-token 4" } else { "" };
    let flags = format!(
        "--model {} --init random --data {} --seq-len 16 --steps {steps} --lr 1e-3 --lr-schedule constant \
         --batch-size {batch_size} --metrics metrics.jsonl {mask} {more}",
        golden(model).display(),
        golden("tokens.bin").display()
    );
    // A resumed run would append to it.
    let _ = std::fs::remove_file(dir.join("metrics.jsonl"));
    fsdp_test_support::train(ranks, &flags, dir).ok();
    json_lines(&dir.join("metrics.jsonl")).iter().map(|line| line["loss"].as_f64().unwrap()).collect()
}

fn assert_near(got: &[f64], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() < 2e-5 * want, "{what}: {got} instead of {want}");
    }
}

#[test]
fn masks_depend_only_on_seed_and_data() {
    let dir = tempfile::tempdir().unwrap();
    for model in ["gpt2_tiny", "bert_tiny", "llama_tiny"] {
        let want = train(dir.path(), model, 1, 6, "--dropout 0.2");
        for (ranks, more) in [(2, ""), (3, "--grad-accum 2"), (4, "--replicate 2")] {
            let got = train(dir.path(), model, ranks, 6, &format!("--dropout 0.2 {more}"));
            assert_near(&got, &want, &format!("{model}, {ranks} ranks"));
        }
        // Checkpointed blocks give the same bits.
        let two = train(dir.path(), model, 2, 6, "--dropout 0.2");
        for again in ["full", "2 --checkpoint-keep linear,attention", "**.1 --checkpoint-keep attention"] {
            let more = format!("--dropout 0.2 --activation-checkpoint {again}");
            assert_eq!(train(dir.path(), model, 2, 6, &more), two, "{model}, {again}");
        }
        let none = train(dir.path(), model, 1, 6, "");
        let furthest = none.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0., f64::max);
        assert!(furthest > 1e-4, "{model}: {furthest}");
        // The model's configuration has no dropout.
        assert_eq!(train(dir.path(), model, 1, 6, "--dropout config"), none, "{model}");
    }
}

/// Micro-batches are padded to their longest sequence, so their widths differ.
#[test]
fn masks_of_padded_pairs_depend_only_on_seed_and_data() {
    let dir = tempfile::tempdir().unwrap();
    let metrics = dir.path().join("metrics.jsonl");
    let losses = |ranks: usize, accumulated: usize| -> Vec<f64> {
        let flags = format!(
            "--model {} --dpo {} --shuffle off --seq-len 32 --steps 3 --lr 1e-3 --lr-schedule constant --dropout 0.3 \
             --batch-size {} --grad-accum {accumulated} --metrics metrics.jsonl",
            golden("llama3_tiny").display(),
            golden("dpo/pairs.jsonl").display(),
            24 / ranks / accumulated
        );
        let _ = std::fs::remove_file(&metrics);
        fsdp_test_support::train(ranks, &flags, dir.path()).ok();
        json_lines(&metrics).iter().map(|line| line["loss"].as_f64().unwrap()).collect()
    };
    let want = losses(1, 1);
    // Without dropout, the model and its reference are equal in the first step.
    assert!((want[0] - std::f64::consts::LN_2).abs() > 1e-3, "the masks have no effect: {want:?}");
    for ranks in [1, 2, 3] {
        for accumulated in [1, 2, 4] {
            let got = losses(ranks, accumulated);
            let furthest = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0., f64::max);
            assert!(furthest < 1e-6, "{ranks} ranks, {accumulated} micro-batches: {got:?} instead of {want:?}");
        }
    }
}

#[test]
fn masks_resume() {
    let dir = tempfile::tempdir().unwrap();
    let want = train(dir.path(), "gpt2_tiny", 2, 6, "--dropout 0.3");
    assert_eq!(train(dir.path(), "gpt2_tiny", 2, 3, "--dropout 0.3 --checkpoint-dir run"), want[..3]);
    let resumed = "--dropout 0.3 --resume run/step-00000003";
    assert_eq!(train(dir.path(), "gpt2_tiny", 2, 6, resumed), want[3..]);
    assert_near(&train(dir.path(), "gpt2_tiny", 3, 6, resumed), &want[3..], "3 ranks");
}

/// Half of the attention weights are dropped, so that another mask has another loss.
#[test]
fn tensor_parallel_ranks_drop_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let model = "llama_tp_tiny";
    let want = train(dir.path(), model, 1, 4, "--dropout 0.5 --save-every 2 --checkpoint-dir one");
    for (ranks, parallel) in [
        (2, "--tensor-parallel 2"),
        (2, "--tensor-parallel 2 --sequence-parallel"),
        (4, "--tensor-parallel 2"),
        (4, "--tensor-parallel 4"),
        (4, "--tensor-parallel 4 --sequence-parallel"),
    ] {
        let what = format!("{ranks} ranks, {parallel}");
        let flags = format!("--dropout 0.5 {parallel}");
        assert_near(&train(dir.path(), model, ranks, 4, &flags), &want, &what);
        let resumed = format!("{flags} --resume one/step-00000002");
        assert_near(&train(dir.path(), model, ranks, 4, &resumed), &want[2..], &what);
    }
}

#[test]
fn evaluation_does_not_drop() {
    let dir = tempfile::tempdir().unwrap();
    let losses = |dropout: f64| {
        let flags = format!("--eval {} --steps 1 --eval-every 1 --lr 0.1", golden("tokens.bin").display());
        let more = format!("--model {} --dropout {dropout}", golden("gpt2_tiny").display());
        let flags = format!("{flags} {more} --data {} --seq-len 16", golden("tokens.bin").display());
        fsdp_test_support::train(2, &format!("{flags} --batch-size 2 --metrics eval.jsonl"), dir.path()).ok();
        let lines = json_lines(&dir.path().join("eval.jsonl"));
        lines.iter().filter_map(|line| line["eval_loss"].as_f64()).collect::<Vec<_>>()
    };
    let (without, with) = (losses(0.), losses(0.5));
    assert_eq!(without.len(), 2);
    // Both runs start with the same weights.
    assert!(without[0] == with[0] && without[1] != with[1], "{without:?} {with:?}");
}
