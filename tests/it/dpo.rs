//! `train --dpo` reproduces recorded runs of TRL's `DPOTrainer`, resumes, evaluates, and refuses bad input.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use fsdp_candle::World;
use fsdp_ckpt::hf::{self, HfModel};
use fsdp_ckpt::{TensorShard, TensorSource};
use fsdp_core::Buffer;
use fsdp_core::layout::Region;
use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{copy_golden, edit_file, golden, json_lines, merge_flags, read_text, tolerance};
use serde_json::Value;

/// The model of `tests/golden/record_dpo.py`.
const MODEL: &str = "llama3_tiny";
const REWARDS: [&str; 4] = ["rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"];

/// Trains as the recorded runs did, on four pairs a step.
fn run(ranks: usize, flags: &str, dir: &Path) -> fsdp_test_support::Run {
    let defaults = format!(
        "--model {} --dpo {} --shuffle off --seq-len 32 --steps 20 --batch-size {} --lr 1e-3 --weight-decay 0.1 \
         --lr-schedule constant --warmup-steps 0 --metrics metrics.jsonl",
        golden(MODEL).display(),
        golden("dpo/pairs.jsonl").display(),
        4 / ranks
    );
    fsdp_test_support::train(ranks, &merge_flags(&defaults, flags), dir)
}

/// Asserts that a run has the losses, gradient norms and rewards of a recorded one.
fn reproduces(recorded: &str, ranks: usize, flags: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let done = run(ranks, flags, dir.path()).ok();
    let metrics = dir.path().join("metrics.jsonl");
    let found = Trajectory::of_metrics(&metrics);
    assert_eq!(found.0.len(), 20);
    // TRL differs from itself by 4.5e-7 if it accumulates gradients.
    let difference = found.difference(&Trajectory::recorded("dpo", recorded));
    assert!(difference.is_within(tolerance::SAME), "{recorded}, {ranks} ranks, {flags}: {difference:?}");
    let record: Value = serde_json::from_str(&read_text(&golden("dpo").join(recorded).with_extension("json"))).unwrap();
    let of = |step: &Value, name: &str| step[name].as_f64().unwrap_or_else(|| panic!("no {name} in {step}"));
    for (found, expected) in json_lines(&metrics).iter().zip(record["trajectory"].as_array().unwrap()) {
        for name in REWARDS {
            let (found, expected) = (of(found, name), of(expected, name));
            assert!((found - expected).abs() < 2e-5, "{recorded}, {ranks} ranks, {flags}: {name}: {found} {expected}");
        }
    }
    done.stderr
}

#[test]
fn full_tuning_reproduces_trl() {
    let stderr = reproduces("run", 1, "");
    assert!(stderr.contains("pairs in") && stderr.contains("2 of these were dropped"), "{stderr}");
    assert!(stderr.contains("reward accuracy 0.75  margin 0.0225"), "{stderr}");
    reproduces("run", 2, "");
    reproduces("run", 4, "--dpo-beta 0.1 --replicate 2 --activation-checkpoint full");
    reproduces("run", 2, "--batch-size 1 --grad-accum 2");
}

#[test]
fn tensor_parallel_ranks_share_the_reference() {
    let dir = tempfile::tempdir().unwrap();
    let model = golden("llama_tp_tiny").display().to_string();
    let of = |ranks: usize, flags: &str| {
        run(ranks, &format!("--model {model} --steps 4 {flags}"), dir.path()).ok();
        Trajectory::of_metrics(&dir.path().join("metrics.jsonl"))
    };
    let one = of(1, "");
    for flags in ["--batch-size 4 --tensor-parallel 2", "--batch-size 4 --tensor-parallel 2 --sequence-parallel"] {
        let difference = of(2, flags).difference(&one);
        assert!(difference.is_within(tolerance::SAME), "{flags}: {difference:?}");
    }
}

/// Writes a model with adapters that add nothing, as a checkpoint to start from.
fn write_start(dir: &Path) {
    let base = HfModel::open(golden(MODEL)).unwrap();
    let adapters = HfModel::open_file(golden("dpo/adapters/adapter_model.safetensors")).unwrap();
    let read = |source: &HfModel, name: &str, factor: f32| {
        let shape = source.tensors()[name].shape.clone();
        let region = Region::whole(&shape);
        let mut bytes = vec![0; 4 * region.elements()];
        source.read(name, &region, &mut bytes).unwrap();
        let values = bytes.as_chunks().0.iter().map(|bytes| factor * f32::from_le_bytes(*bytes)).collect();
        let name = name.strip_prefix("base_model.model.").unwrap_or(name);
        TensorShard::whole(name, &shape, Arc::new(Buffer::F32(values)))
    };
    let names = adapters.tensors().keys();
    let adapters = names.map(|name| read(&adapters, name, if name.contains("lora_A") { 1. } else { 0. }));
    let tensors: Vec<_> = base.tensors().keys().map(|name| read(&base, name, 1.)).chain(adapters).collect();
    hf::export(dir, World::single().unwrap().group(), &tensors, &[]).unwrap();
}

/// New adapters: the reference is the base below them.
#[test]
fn new_adapters_reproduce_trl() {
    let dir = tempfile::tempdir().unwrap();
    let start = dir.path().join("start");
    write_start(&start);
    for ranks in [1, 2] {
        let flags = format!("--lora-rank 3 --lora-alpha 6 --dpo-beta 0.3 --resume {}", start.display());
        reproduces("run_lora", ranks, &flags);
    }
}

/// Trained adapters: the reference is a copy of the model with them.
#[test]
fn trained_adapters_reproduce_trl() {
    for ranks in [1, 2] {
        reproduces("run_lora_from", ranks, &format!("--lora-from {}", golden("dpo/adapters").display()));
    }
}

/// Returns the measurements of each step that do not depend on time, and of each evaluation.
fn numbers(dir: &Path) -> Vec<Value> {
    let timed = ["step_time_s", "tokens_per_s", "peak_mem_bytes", "eval_time_s"];
    let mut records = json_lines(&dir.join("metrics.jsonl"));
    for record in &mut records {
        record.as_object_mut().unwrap().retain(|key, _| !timed.contains(&key.as_str()));
    }
    records
}

#[test]
fn resumed_runs_have_the_same_bits() {
    for flags in ["", "--lora-rank 2 --lora-targets all-linear --lr 1e-2"] {
        let dir = tempfile::tempdir().unwrap();
        let eval = golden("dpo/pairs.jsonl").display().to_string();
        let flags = format!("--shuffle on --dropout 0.1 --eval {eval} --eval-every 4 {flags}");
        run(2, &format!("--steps 8 --save-every 4 --checkpoint-dir saved {flags}"), dir.path()).ok();
        let whole = numbers(dir.path());
        // The metrics of later steps are replaced.
        run(2, &format!("--steps 8 --resume saved/step-00000004 --checkpoint-dir other {flags}"), dir.path()).ok();
        assert_eq!(numbers(dir.path()), whole, "{flags}");
        // Ranks share 80 pairs. Before the first step, the model is the reference.
        let (first, last) = (&whole[0], &whole[whole.len() - 1]);
        assert_eq!(first["eval_rewards/margins"], 0.);
        assert!((first["eval_loss"].as_f64().unwrap() - 2f64.ln()).abs() < 1e-6, "{first}");
        assert!(
            last["eval_loss"].as_f64().unwrap() < 2f64.ln() - 5e-5
                && last["eval_rewards/accuracies"].as_f64() > Some(0.5)
        );
        assert!(last.get("eval_perplexity").is_none() && last["eval_tokens"].as_u64() > Some(1000), "{last}");
    }
}

/// The last round of an evaluation has fewer pairs than ranks and rows.
#[test]
fn evaluation_does_not_depend_on_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let pairs = read_text(&golden("dpo/pairs.jsonl"));
    let few: Vec<&str> = pairs.lines().take(5).collect();
    fs::write(dir.path().join("few.jsonl"), few.join("\n")).unwrap();
    let mut all = [1, 2, 4].map(|ranks| {
        run(ranks, "--steps 2 --lr 1e-2 --eval few.jsonl --gradcheck", dir.path()).ok();
        numbers(dir.path()).pop().unwrap()
    });
    let first = all[0].clone();
    assert_eq!((&first["step"], &first["eval_tokens"]), (&2.into(), &all[1]["eval_tokens"].clone()));
    for record in &mut all {
        for name in REWARDS.map(|name| format!("eval_{name}")).into_iter().chain(["eval_loss".to_owned()]) {
            let (found, expected) = (record[&name].as_f64().unwrap(), first[&name].as_f64().unwrap());
            assert!((found - expected).abs() < 2e-5, "{name}: {found} {expected}");
        }
    }
}

/// The reference is read from --model again, so other weights there would change the loss.
#[test]
fn another_reference_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    copy_golden(MODEL, &model);
    run(2, "--model model --steps 2 --checkpoint-dir saved --export-hf tuned", dir.path()).ok();
    fs::copy(dir.path().join("tuned/model.safetensors"), model.join("model.safetensors")).unwrap();
    let resumed = run(2, "--model model --steps 3 --resume saved/step-00000002 --checkpoint-dir other", dir.path());
    resumed.refused(2, &["its settings do not fit this run", "the first weights: it was ", "--resume-anyway"]);
}

#[test]
fn names_bad_input_and_the_fix() {
    let dir = tempfile::tempdir().unwrap();
    copy_golden(MODEL, &dir.path().join("model"));
    copy_golden("bert_tiny", &dir.path().join("bert"));
    let with = |name: &str, content: &str| fs::write(dir.path().join(name), content).unwrap();
    with("empty.jsonl", "");
    with("half.jsonl", r#"{"prompt": "a", "chosen": "b"}"#);
    with("equal.jsonl", r#"{"prompt": "a", "chosen": "b", "rejected": "b"}"#);
    with("long.jsonl", r#"{"prompt": "a long prompt", "chosen": "b", "rejected": "c"}"#);
    with("one.jsonl", r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#);
    with("four.jsonl", &[r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#; 4].join("\n"));
    let refused = |flags: &str, parts: &[&str]| {
        let flags = format!("--seq-len 12 --steps 2 --batch-size 2 --checkpoint-dir checkpoints {flags}");
        fsdp_test_support::train(2, &flags, dir.path()).refused(2, parts);
    };
    for (flags, parts) in [
        ("--dpo empty.jsonl", &["--dpo: empty.jsonl has no pairs", "a line is {\"prompt\""][..]),
        ("--dpo half.jsonl", &["half.jsonl, line 1: it has no \"rejected\", only the keys \"chosen\", \"prompt\""]),
        ("--dpo equal.jsonl", &["equal.jsonl, line 1: chosen and rejected are equal", "remove the line"]),
        ("--dpo long.jsonl", &["nothing is left to learn of the 1 pairs in long.jsonl", "use a larger --seq-len"]),
        ("--dpo one.jsonl", &["1 pairs of one.jsonl, but one step needs 4"]),
        ("--dpo nowhere.jsonl", &["cannot read nowhere.jsonl", "No such file"]),
        ("--dpo four.jsonl --eval half.jsonl", &["--eval: half.jsonl, line 1: it has no \"rejected\""]),
        ("--dpo one.jsonl --init random", &["--dpo and --init random exclude each other"]),
        ("--dpo one.jsonl --packing on", &["--packing needs --sft"]),
        ("--dpo one.jsonl --mask-token 3", &["--mask-token is for masked language models"]),
        ("--data one.jsonl --dpo-beta 0.2", &["--dpo-beta needs --dpo"]),
        ("--dpo one.jsonl --sft one.jsonl", &["--dpo and --sft exclude each other"]),
        ("--dpo one.jsonl --data one.jsonl", &["--dpo and --data exclude each other"]),
        ("--dpo one.jsonl --dpo-beta 0", &["--dpo-beta", "above 0"]),
    ] {
        refused(&format!("--model model {flags}"), parts);
    }
    refused("--dpo one.jsonl", &["--dpo needs --model DIR with weights"]);
    refused("--dpo one.jsonl --model bert --mask-token 131", &["--dpo is for models that continue text, found a bert"]);
    fs::remove_file(dir.path().join("model/model.safetensors")).unwrap();
    refused("--dpo one.jsonl --model model", &["--dpo needs the weights of a trained model", "model.safetensors"]);
}

/// The pairs are messages, formatted by the model's template, or in the plain format with an end token.
#[test]
fn conversations_are_tuned() {
    let dir = tempfile::tempdir().unwrap();
    let chat = golden("chat");
    let model = dir.path().join("model");
    copy_golden(MODEL, &model);
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(chat.join(name), model.join(name)).unwrap();
    }
    fs::copy(chat.join("chatml.jinja"), model.join("chat_template.jinja")).unwrap();
    edit_file(&model.join("config.json"), "\"vocab_size\": 131", "\"vocab_size\": 330");
    let line = |i: usize| {
        let message = |role: &str, content: String| serde_json::json!({ "role": role, "content": content });
        let question = message("user", format!("{i} + 1?"));
        let answer = |answer: String| serde_json::json!([question, message("assistant", answer)]);
        serde_json::json!({ "chosen": answer(format!("{}", i + 1)), "rejected": answer("the".into()) }).to_string()
    };
    let lines: Vec<String> = (0..20).map(line).collect();
    fs::write(dir.path().join("pairs.jsonl"), lines.join("\n")).unwrap();
    // Random weights of the larger vocabulary, by one step of another kind.
    let data = lines.join("\n");
    fs::write(dir.path().join("text.txt"), data).unwrap();
    let first = "--model model --init random --data text.txt --seq-len 32 --steps 1 --export-hf start";
    fsdp_test_support::train(1, first, dir.path()).ok();
    fs::copy(model.join("chat_template.jinja"), dir.path().join("start/chat_template.jinja")).unwrap();
    let run = run(2, "--model start --dpo pairs.jsonl --seq-len 100 --steps 12", dir.path()).ok();
    let prompt = r#"sample: "system\nYou are a helpful assistant.\nuser\n0 + 1?\nassistant\n" -> "#;
    assert!(run.stdout.contains(prompt), "{}", run.stdout);
    let steps = json_lines(&dir.path().join("metrics.jsonl"));
    let last = steps.last().unwrap();
    assert!(last["rewards/accuracies"] == 1. && last["rewards/margins"].as_f64() > Some(0.05), "{last}");
}
