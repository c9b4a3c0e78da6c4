//! Every family of decoders trains as on one rank, and so does what is not the plain run: evaluation, samples,
//! examples of several lengths, other dtypes, checks of gradients.

use std::fs;
use std::path::Path;

use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{Run, golden, launch, tolerance};

use super::{SEQUENCE, assert_near, train_on};
use crate::sft;

/// Odd numbers in the models of `tests/golden/make.py`, and even ones.
const EVEN: [(&str, &str); 4] = [
    ("\"intermediate_size\": 43", "\"intermediate_size\": 44"),
    ("\"intermediate_size\": 19", "\"intermediate_size\": 20"),
    ("\"moe_intermediate_size\": 11", "\"moe_intermediate_size\": 12"),
    ("\"vocab_size\": 131", "\"vocab_size\": 132"),
];

/// The configuration of a recorded model whose numbers two divides, in `dir/model`.
fn even_model(name: &str, dir: &Path) {
    let mut text = fs::read_to_string(golden(name).join("config.json")).unwrap();
    for (odd, even) in EVEN {
        text = text.replace(odd, even);
    }
    fs::create_dir(dir.join("model")).unwrap();
    fs::write(dir.join("model/config.json"), text).unwrap();
}

/// What a run prints of itself: the sample of its model.
fn sample(run: &Run) -> &str {
    run.stdout.lines().find(|line| line.contains("sample: ")).unwrap()
}

#[test]
fn every_family_trains_as_on_one_rank() {
    for name in ["mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe"] {
        let name = format!("{name}_tiny");
        let dir = tempfile::tempdir().unwrap();
        even_model(&name, dir.path());
        let train = |ranks: usize, more: &[&str]| {
            let common = ["--model", "model", "--steps", "5", "--seed", "3"];
            train_on(ranks, &name, 1, &[&common[..], more].concat(), dir.path())
        };
        let (alone, run) = train(1, &[]);
        let parallel = ["--tensor-parallel", "2"];
        for more in [&parallel[..], &[&parallel[..], &[SEQUENCE, "--activation-checkpoint", "full"]].concat()] {
            let (ours, of_two) = train(2, more);
            assert_near(&ours, &alone, &format!("{name}, {}", more.join(" ")));
            assert_eq!(sample(&of_two), sample(&run), "{name}");
        }
    }
}

/// Of 62 ids, whose sequence is padded to 65 where five share it out; sequences of training are shorter.
#[test]
fn samples_are_as_long_as_on_one_rank_whatever_divides_them() {
    let dir = tempfile::tempdir().unwrap();
    let mut text = fs::read_to_string(golden("llama_tp_tiny").join("config.json")).unwrap();
    for (of_two, of_five) in [
        ("\"intermediate_size\": 88", "\"intermediate_size\": 85"),
        ("\"num_attention_heads\": 4", "\"num_attention_heads\": 5"),
        ("\"num_key_value_heads\": 4", "\"num_key_value_heads\": 5"),
        ("\"vocab_size\": 132", "\"vocab_size\": 135"),
    ] {
        assert!(text.contains(of_two));
        text = text.replace(of_two, of_five);
    }
    fs::create_dir(dir.path().join("model")).unwrap();
    fs::write(dir.path().join("model/config.json"), text).unwrap();
    let train = |ranks: usize, more: &[&str]| {
        let common = ["--model", "model", "--steps", "2", "--seed", "3", "--seq-len", "40"];
        train_on(ranks, "llama_tp_tiny", 1, &[&common[..], more].concat(), dir.path())
    };
    let (alone, run) = train(1, &[]);
    let (ours, of_five) = train(5, &["--tensor-parallel", "5", SEQUENCE]);
    assert_near(&ours, &alone, "five ranks");
    assert_eq!(sample(&of_five), sample(&run));
}

#[test]
fn adapters_are_trained_as_on_one_rank() {
    for targets in ["q_proj,v_proj,down_proj", "all-linear"] {
        let dir = tempfile::tempdir().unwrap();
        let train = |ranks: usize, more: &[&str]| {
            let common = ["--lora-rank", "3", "--lora-targets", targets, "--steps", "8", "--lr", "1e-2"];
            train_on(ranks, "llama_tp_tied_tiny", 1, &[&common[..], more].concat(), dir.path()).0
        };
        let alone = train(1, &[]);
        for more in [&["--tensor-parallel", "2"][..], &["--tensor-parallel", "2", SEQUENCE]] {
            assert_near(&train(2, more), &alone, &format!("{targets}, {}", more.join(" ")));
        }
    }
}

/// The losses of evaluations, and of how many tokens.
fn evaluations(dir: &Path) -> Vec<(f64, u64)> {
    let text = fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    let records = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let evaluations = records.filter(|record| record.get("eval_loss").is_some());
    evaluations.map(|r| (r["eval_loss"].as_f64().unwrap(), r["eval_tokens"].as_u64().unwrap())).collect()
}

/// Examples share sequences, the last of which are not there for each reader, and the answers before and after training
/// are written token by token, however many these are.
#[test]
fn examples_are_learnt_measured_and_answered_as_on_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    sft::prepare(dir.path());
    let run = |ranks: usize, readers: usize, more: &str| {
        let flags = "--model model --sft chats.jsonl --eval others.jsonl --seq-len 96 --steps 6 --lr 3e-3 \
                     --lr-schedule constant --warmup-steps 0 --eval-every 3 --metrics metrics.jsonl";
        let batch_size = format!("--batch-size {}", 6 / readers);
        let args: Vec<&str> = [flags, &batch_size, more].iter().flat_map(|flags| flags.split_whitespace()).collect();
        let run = launch(ranks, "train", &args, dir.path()).ok();
        let steps = fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
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
    let last = |ranks: usize, more: &[&str]| {
        let args = ["step", "--model", &model, "--seq", "32", "--steps", "2", "--json"];
        let stdout = launch(ranks, "bench", &[&args[..], more].concat(), dir.path()).ok().stdout;
        let report: serde_json::Value = serde_json::from_str(&stdout[stdout.find('{').unwrap()..]).unwrap();
        ["loss", "grad_norm"].map(|key| report[key].as_f64().unwrap())
    };
    let alone = last(1, &[]);
    for more in [&["--tensor-parallel", "2"][..], &["--tensor-parallel", "2", SEQUENCE]] {
        let near = last(2, more).iter().zip(alone).all(|(found, want)| (found / want - 1.).abs() < 5e-6);
        assert!(near, "{more:?}: {:?}, not {alone:?}", last(2, more));
    }
}

/// Weights are random, so that both start from the same whatever the mesh.
#[test]
fn gradients_are_those_of_the_loss() {
    for (name, more) in [("llama_tp_tied_tiny", &[][..]), ("llama_tp_tiny", &[SEQUENCE]), ("qwen3_tiny", &[SEQUENCE])] {
        let dir = tempfile::tempdir().unwrap();
        even_model(name, dir.path());
        let flags = ["--model", "model", "--steps", "1", "--gradcheck", "--tensor-parallel", "2"];
        let (_, run) = train_on(4, name, 2, &[&flags, more].concat(), dir.path());
        assert!(run.stderr.contains("gradcheck: the gradients of 3 units are right"), "{name}: {}", run.stderr);
    }
}

#[test]
fn dtypes_and_8_bit_gathers_are_as_far_from_f32_as_without() {
    let name = "llama_tp_tiny";
    let want = Trajectory::recorded(name, "run");
    for (flags, near) in [
        (["--param-dtype", "bf16", "--reduce-dtype", "f32"], tolerance::BF16),
        (["--param-dtype", "f16", "--reduce-dtype", "f16"], tolerance::F16),
        (["--all-gather", "float8", "--param-dtype", "f32"], tolerance::FLOAT8),
    ] {
        let difference = |ranks, more: &[&str]| {
            let dir = tempfile::tempdir().unwrap();
            let (ours, _) = train_on(ranks, name, ranks.min(2), &[&flags[..], more].concat(), dir.path());
            ours.difference(&want)
        };
        let (alone, parallel) = (difference(2, &[]), difference(4, &["--tensor-parallel", "2", SEQUENCE]));
        assert!(parallel.loss < 3. * alone.loss + near.loss, "{flags:?}: {parallel:?}, {alone:?} without");
        assert!(parallel.grad_norm < 3. * alone.grad_norm + near.grad_norm, "{flags:?}: {parallel:?}, {alone:?}");
        // It was rounded at all.
        assert!(parallel.grad_norm > alone.grad_norm / 10., "{flags:?}: {parallel:?}, {alone:?} without");
    }
}
