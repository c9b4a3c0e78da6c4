//! Tensor-parallel ranks train every decoder family as one rank does, with evaluation, samples, supervised examples,
//! other dtypes and gradient checks.

use std::fs;
use std::path::Path;

use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{Run, golden, json_lines, launch, read_text, tolerance};

use super::{SEQUENCE, assert_near, train_on};
use crate::sft;

/// Flags of two tensor-parallel ranks.
const TWO: [&str; 2] = ["--tensor-parallel 2", "--tensor-parallel 2 --sequence-parallel"];
/// Odd sizes in the models of `tests/golden/make.py`, and even sizes.
const EVEN: [(&str, &str); 4] = [
    ("\"intermediate_size\": 43", "\"intermediate_size\": 44"),
    ("\"intermediate_size\": 19", "\"intermediate_size\": 20"),
    ("intermediate_size\": 11", "intermediate_size\": 12"),
    ("\"vocab_size\": 131", "\"vocab_size\": 132"),
];

/// Writes the configuration of a recorded model with some fields replaced to `dir/model`.
fn divisible_model(name: &str, fields: &[(&str, &str)], dir: &Path) {
    let mut text = read_text(&golden(name).join("config.json"));
    for (from, to) in fields {
        text = text.replace(from, to);
    }
    fs::create_dir(dir.join("model")).unwrap();
    fs::write(dir.join("model/config.json"), text).unwrap();
}

/// Returns the model's sample that a run prints.
fn sample(run: &Run) -> &str {
    run.stdout.lines().find(|line| line.contains("sample: ")).unwrap()
}

#[test]
fn every_family_trains_as_on_one_rank() {
    let families = ["mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe"];
    for name in families.into_iter().chain(["deepseek_v2", "deepseek_v3", "gpt_oss"]) {
        let name = format!("{name}_tiny");
        let dir = tempfile::tempdir().unwrap();
        divisible_model(&name, &EVEN, dir.path());
        let train = |ranks: usize, more: &str| {
            train_on(ranks, &name, 1, &format!("--model model --steps 5 --seed 3 {more}"), dir.path())
        };
        let (alone, run) = train(1, "");
        for more in ["--tensor-parallel 2", "--tensor-parallel 2 --sequence-parallel --activation-checkpoint full"] {
            let (ours, of_two) = train(2, more);
            assert_near(&ours, &alone, &format!("{name}, {more}"));
            assert_eq!(sample(&of_two), sample(&run), "{name}");
        }
    }
}

/// A sample of 62 ids is padded to 65 for five ranks. Training sequences are shorter.
#[test]
fn samples_of_any_length_are_those_of_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    let five = [
        ("\"intermediate_size\": 88", "\"intermediate_size\": 85"),
        ("\"num_attention_heads\": 4", "\"num_attention_heads\": 5"),
        ("\"num_key_value_heads\": 4", "\"num_key_value_heads\": 5"),
        ("\"vocab_size\": 132", "\"vocab_size\": 135"),
    ];
    divisible_model("llama_tp_tiny", &five, dir.path());
    let train = |ranks: usize, more: &str| {
        let flags = format!("--model model --steps 2 --seed 3 --seq-len 40 {more}");
        train_on(ranks, "llama_tp_tiny", 1, &flags, dir.path())
    };
    let (alone, run) = train(1, "");
    let (ours, of_five) = train(5, "--tensor-parallel 5 --sequence-parallel");
    assert_near(&ours, &alone, "five ranks");
    assert_eq!(sample(&of_five), sample(&run));
}

#[test]
fn adapters_train_as_on_one_rank() {
    for targets in ["q_proj,v_proj,down_proj", "all-linear"] {
        let dir = tempfile::tempdir().unwrap();
        let train = |ranks: usize, more: &str| {
            let flags = format!("--lora-rank 3 --lora-targets {targets} --steps 8 --lr 1e-2 {more}");
            train_on(ranks, "llama_tp_tied_tiny", 1, &flags, dir.path()).0
        };
        let alone = train(1, "");
        for more in TWO {
            assert_near(&train(2, more), &alone, &format!("{targets}, {more}"));
        }
    }
}

/// Returns the losses and token counts of evaluations.
fn evaluations(dir: &Path) -> Vec<(f64, u64)> {
    let records = json_lines(&dir.join("metrics.jsonl")).into_iter();
    records.filter_map(|record| Some((record["eval_loss"].as_f64()?, record["eval_tokens"].as_u64()?))).collect()
}

/// Examples share sequences, and not all readers have a last one. Samples before and after training are generated token
/// by token.
#[test]
fn examples_train_evaluate_and_sample_as_on_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    sft::prepare(dir.path());
    let run = |ranks: usize, readers: usize, more: &str| {
        let flags = "--model model --sft chats.jsonl --eval others.jsonl --seq-len 96 --steps 6 --lr 3e-3 \
                     --lr-schedule constant --warmup-steps 0 --eval-every 3 --metrics metrics.jsonl";
        let flags = format!("{flags} --batch-size {} {more}", 6 / readers);
        let run = fsdp_test_support::train(ranks, &flags, dir.path()).ok();
        let steps = read_text(&dir.path().join("metrics.jsonl"));
        let steps: Vec<&str> = steps.lines().filter(|line| !line.contains("eval_loss")).collect();
        fs::write(dir.path().join("steps.jsonl"), steps.join("\n")).unwrap();
        let samples: Vec<String> =
            run.stdout.lines().filter(|line| line.contains("sample")).map(str::to_owned).collect();
        (Trajectory::of_metrics(&dir.path().join("steps.jsonl")), evaluations(dir.path()), samples)
    };
    let (alone, measured, samples) = run(1, 1, "");
    assert!(measured.len() == 3 && samples.len() == 2, "{measured:?}, {samples:?}");
    for (ranks, readers, more) in
        [(2, 1, "--tensor-parallel 2"), (4, 2, "--tensor-parallel 2 --sequence-parallel --replicate 2")]
    {
        let (ours, found, said) = run(ranks, readers, more);
        assert_near(&ours, &alone, more);
        assert_eq!(said, samples, "{more}");
        for ((loss, tokens), (want, of)) in found.iter().zip(&measured) {
            assert!((loss / want - 1.).abs() < 5e-6 && tokens == of, "{more}: {found:?}, not {measured:?}");
        }
    }
}

#[test]
fn bench_steps_as_on_one_rank() {
    let model = golden("llama_tp_tiny").display().to_string();
    let dir = tempfile::tempdir().unwrap();
    let last = |ranks: usize, more: &str| {
        let args = ["step", "--model", &model, "--seq", "32", "--steps", "2", "--json"];
        let args: Vec<&str> = args.into_iter().chain(more.split_whitespace()).collect();
        let stdout = launch(ranks, "bench", &args, dir.path()).ok().stdout;
        let report: serde_json::Value = serde_json::from_str(&stdout[stdout.find('{').unwrap()..]).unwrap();
        ["loss", "grad_norm"].map(|key| report[key].as_f64().unwrap())
    };
    let alone = last(1, "");
    for more in TWO {
        let near = last(2, more).iter().zip(alone).all(|(found, want)| (found / want - 1.).abs() < 5e-6);
        assert!(near, "{more}: {:?}, not {alone:?}", last(2, more));
    }
}

#[test]
fn gradients_pass_gradcheck() {
    for (name, more, units) in
        [("llama_tp_tied_tiny", "", 3), ("llama_tp_tiny", SEQUENCE, 4), ("qwen3_tiny", SEQUENCE, 3)]
    {
        let dir = tempfile::tempdir().unwrap();
        divisible_model(name, &EVEN, dir.path());
        let flags = format!("--model model --steps 1 --gradcheck --tensor-parallel 2 {more}");
        let (_, run) = train_on(4, name, 2, &flags, dir.path());
        let words = format!("gradcheck: the gradients of {units} units are right");
        assert!(run.stderr.contains(&words), "{name}: {}", run.stderr);
    }
}

#[test]
fn low_precision_is_as_far_from_f32_as_without() {
    let name = "llama_tp_tiny";
    let want = Trajectory::recorded(name, "run");
    for (flags, near) in [
        ("--param-dtype bf16 --reduce-dtype f32", tolerance::BF16),
        ("--param-dtype f16 --reduce-dtype f16", tolerance::F16),
        ("--all-gather float8", tolerance::FLOAT8),
    ] {
        let difference = |ranks, more: &str| {
            let dir = tempfile::tempdir().unwrap();
            let (ours, _) = train_on(ranks, name, ranks.min(2), &format!("{flags} {more}"), dir.path());
            ours.difference(&want)
        };
        let (alone, parallel) = (difference(2, ""), difference(4, "--tensor-parallel 2 --sequence-parallel"));
        assert!(parallel.loss < 3. * alone.loss + near.loss, "{flags}: {parallel:?}, {alone:?} without");
        assert!(parallel.grad_norm < 3. * alone.grad_norm + near.grad_norm, "{flags}: {parallel:?}, {alone:?}");
        assert!(parallel.grad_norm > alone.grad_norm / 10., "{flags}: {parallel:?}, {alone:?} without");
    }
}
