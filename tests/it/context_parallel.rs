//! `train --context-parallel`: ranks that share sequences train as one rank does, in every family and with every setting.

use std::fs;
use std::path::Path;

use fsdp_test_support::trajectory::{Difference, Trajectory};
use fsdp_test_support::{Run, golden, json_lines, merge_flags, tolerance, train_golden};
use serde_json::json;

use crate::sft;

/// Chunks of attention are summed in another order than whole sequences. BERT's norms differ by 2.8e-5 with dropout.
const NEAR: Difference = Difference { loss: 1e-5, grad_norm: 5e-5 };
/// Sequences of a step.
const SEQUENCES: usize = 6;

/// Trains a recorded model on random weights, on 24 tokens a sequence. `readers` ranks read different data.
fn train(model: &str, ranks: usize, readers: usize, flags: &str, dir: &Path) -> (Trajectory, Run) {
    let defaults = format!("--batch-size {} --seq-len 24 --seed 3 --init random", SEQUENCES / readers);
    let run = train_golden(model, ranks, &merge_flags(&defaults, flags), dir).ok();
    (Trajectory::of_metrics(&dir.join("metrics.jsonl")), run)
}

fn assert_near(ours: &Trajectory, want: &Trajectory, about: &str) {
    assert_eq!(ours.0.len(), want.0.len(), "{about}");
    let difference = ours.difference(want);
    assert!(difference.is_within(NEAR), "{about}: {difference:?}");
}

const FAMILIES: [&str; 15] = [
    "llama",
    "llama3",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "gpt2",
    "bert",
];

#[test]
fn every_family_trains_as_on_one_rank() {
    for name in FAMILIES {
        let dir = tempfile::tempdir().unwrap();
        let name = format!("{name}_tiny");
        let mask = if name == "bert_tiny" { "--mask-token 4" } else { "" };
        let (alone, of_one) = train(&name, 1, 1, &format!("--steps 20 {mask}"), dir.path());
        assert_eq!(alone.0.len(), 20);
        for (ranks, more) in [(2, "--context-parallel 2"), (4, "--context-parallel 4 --activation-checkpoint full")] {
            let (ours, run) = train(&name, ranks, 1, &format!("--steps 20 {mask} {more}"), dir.path());
            assert_near(&ours, &alone, &format!("{name}, {more}"));
            let sample = |run: &Run| run.stdout.lines().find(|line| line.contains("sample: ")).map(str::to_owned);
            assert_eq!(sample(&run), sample(&of_one), "{name}, {more}");
        }
    }
}

/// PyTorch 2.13 has no `context_parallel` on CPUs (its attention there has no sharding strategy), so these are its runs
/// with FSDP2, whose losses `context_parallel` would have.
#[test]
fn recorded_runs_of_pytorch_are_reproduced() {
    for name in FAMILIES {
        let name = format!("{name}_tiny");
        let sequences = if golden(&name).join("tokens.bin").exists() { 4 } else { 6 };
        // The balance of experts is that of each reader's batch.
        let (ranks, readers) =
            if ["mixtral_tiny", "qwen3_moe_tiny", "gpt_oss_tiny"].contains(&&*name) { (4, 2) } else { (2, 1) };
        let dir = tempfile::tempdir().unwrap();
        let flags = format!("--context-parallel 2 --batch-size {}", sequences / readers);
        train_golden(&name, ranks, &flags, dir.path()).ok();
        let ours = Trajectory::of_metrics(&dir.path().join("metrics.jsonl"));
        let difference = ours.difference(&Trajectory::recorded(&name, "run"));
        println!("{name}: {difference:?}");
        assert!(difference.is_within(tolerance::SAME), "{name}: {difference:?}");
    }
}

#[test]
fn meshes_and_settings_train_as_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    let (alone, _) = train("llama_tp_tiny", 1, 1, "--steps 8", dir.path());
    for (ranks, readers, more) in [
        (2, 1, "--context-parallel 2 --context-exchange heads"),
        (4, 1, "--context-parallel 4 --context-exchange heads"),
        (4, 2, "--context-parallel 2"),
        (3, 1, "--context-parallel 3 --batch-size 2 --grad-accum 3"),
        (4, 2, "--context-parallel 2 --replicate 2"),
        (4, 1, "--context-parallel 2 --tensor-parallel 2"),
        (4, 1, "--context-parallel 2 --tensor-parallel 2 --sequence-parallel --context-exchange heads"),
        (6, 3, "--context-parallel 2 --activation-checkpoint full --reshard-after-forward never"),
        (2, 1, "--context-parallel 2 --offload cpu --optimizer-in-backward unclipped --clip-grad-norm 0"),
    ] {
        let ours = match more.contains("unclipped") {
            true => {
                let unclipped = "--optimizer-in-backward unclipped --clip-grad-norm 0 --steps 8";
                let (alone, _) = train("llama_tp_tiny", 1, 1, unclipped, dir.path());
                let (ours, _) = train("llama_tp_tiny", ranks, readers, &format!("--steps 8 {more}"), dir.path());
                assert_near(&ours, &alone, more);
                continue;
            }
            false => train("llama_tp_tiny", ranks, readers, &format!("--steps 8 {more}"), dir.path()).0,
        };
        assert_near(&ours, &alone, more);
    }
}

/// Each rank has the sinks of its heads.
#[test]
fn sinks_train_by_heads_as_on_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    let (alone, _) = train("gpt_oss_tiny", 1, 1, "--steps 8", dir.path());
    let (ours, _) = train("gpt_oss_tiny", 2, 1, "--steps 8 --context-parallel 2 --context-exchange heads", dir.path());
    assert_near(&ours, &alone, "sinks by heads");
}

/// Dropout, packed documents, adapters and the balance of experts.
#[test]
fn what_depends_on_positions_is_that_of_one_rank() {
    let lines = |dir: &Path| {
        let line = |index: usize| format!("{{\"text\": \"{}\"}}\n", "word ".repeat(index % 9 + 1));
        fs::write(dir.join("lines.jsonl"), (0..200).map(line).collect::<String>()).unwrap();
    };
    for (model, flags) in [
        ("llama", "--dropout 0.2"),
        ("gpt2", "--dropout 0.2"),
        ("bert", "--dropout 0.2 --mask-token 4"),
        ("mixtral", "--data lines.jsonl --pack documents"),
        ("gemma2", "--data lines.jsonl --pack documents"),
        ("gpt2", "--data lines.jsonl --pack documents"),
        ("llama", "--lora-rank 3 --lora-targets all-linear --lr 1e-2"),
        ("qwen3_moe", "--dropout 0.1"),
        ("gpt_oss", "--data lines.jsonl --pack documents --dropout 0.1"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        lines(dir.path());
        let name = format!("{model}_tiny");
        // The recorded models have no tokenizer, so tokens are bytes.
        let flags = format!("--steps 6 --seq-len 48 {flags}");
        let (alone, _) = train(&name, 1, 1, &flags, dir.path());
        for (ranks, readers, more) in [(2, 1, "--context-parallel 2"), (6, 2, "--context-parallel 3")] {
            let (ours, _) = train(&name, ranks, readers, &format!("{flags} {more}"), dir.path());
            // The balance of experts is that of each reader's batch.
            let want = if readers > 1 { train(&name, readers, readers, &flags, dir.path()).0 } else { alone.clone() };
            assert_near(&ours, &want, &format!("{name}, {flags} {more}"));
        }
        if model == "llama" || model == "gpt2" {
            let heads = format!("{flags} --context-parallel 2 --context-exchange heads");
            assert_near(&train(&name, 2, 1, &heads, dir.path()).0, &alone, &format!("{name}, {heads}"));
        }
    }
}

/// Examples share sequences with padding, and are evaluated and sampled.
#[test]
fn examples_and_their_evaluation_are_those_of_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    sft::prepare(dir.path());
    let run = |ranks: usize, readers: usize, more: &str| {
        let flags = "--model model --sft chats.jsonl --eval others.jsonl --seq-len 96 --steps 6 --lr 3e-3 \
                     --lr-schedule constant --warmup-steps 0 --eval-every 3 --metrics metrics.jsonl";
        let flags = format!("{flags} --batch-size {} {more}", 6 / readers);
        fsdp_test_support::train(ranks, &flags, dir.path()).ok();
        let records = json_lines(&dir.path().join("metrics.jsonl"));
        let of = |key: &str| records.iter().filter_map(|record| record[key].as_f64()).collect::<Vec<_>>();
        [of("loss"), of("grad_norm"), of("eval_loss"), of("eval_tokens")]
    };
    let alone = run(1, 1, "");
    assert!(alone[0].len() == 6 && alone[2].len() == 3);
    for (ranks, readers, more) in
        [(2, 1, "--context-parallel 2"), (4, 2, "--context-parallel 2"), (3, 1, "--context-parallel 3")]
    {
        let found = run(ranks, readers, more);
        assert_eq!(found[3], alone[3], "{more}");
        for (found, want) in found.iter().flatten().zip(alone.iter().flatten()) {
            assert!((found - want).abs() < 2e-5 * want.max(1.), "{ranks} ranks, {more}: {found}, not {want}");
        }
    }
}

/// All targets are on one rank of two. Experts add their balance to the loss.
#[test]
fn ranks_without_targets_have_no_weight() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({ "model_type": "mixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256, "max_position_embeddings": 128,
        "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": true, "router_aux_loss_coef": 0.5 });
    fs::create_dir(dir.path().join("model")).unwrap();
    fs::write(dir.path().join("model/config.json"), config.to_string()).unwrap();
    // Bytes 3 to 11 of 96 are learnt: in the first chunk of four.
    let line = |index: usize| json!({ "prompt": "a b", "completion": format!("c{index:07}") }).to_string() + "\n";
    fs::write(dir.path().join("short.jsonl"), (0..12).map(line).collect::<String>()).unwrap();
    let losses = |ranks: usize| {
        let flags = format!(
            "--model model --sft short.jsonl --packing off --shuffle off --seq-len 96 --steps 4 --batch-size 2 --lr 1e-3 \
             --lr-schedule constant --warmup-steps 0 --metrics metrics.jsonl --context-parallel {ranks}"
        );
        fsdp_test_support::train(ranks, &flags, dir.path()).ok();
        Trajectory::of_metrics(&dir.path().join("metrics.jsonl"))
    };
    let alone = losses(1);
    assert_eq!(alone.0.len(), 4);
    assert_near(&losses(2), &alone, "two ranks");
    assert_near(&losses(4), &alone, "four ranks");
}

#[test]
fn pairs_are_those_of_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    let pairs = |ranks: usize, flags: &str| {
        let defaults = format!(
            "--model {} --dpo {} --eval {} --shuffle off --seq-len 32 --steps 6 --batch-size 4 --lr 1e-3 --lr-schedule \
             constant --warmup-steps 0 --metrics metrics.jsonl",
            golden("llama3_tiny").display(),
            golden("dpo/pairs.jsonl").display(),
            golden("dpo/pairs.jsonl").display()
        );
        fsdp_test_support::train(ranks, &merge_flags(&defaults, flags), dir.path()).ok();
        json_lines(&dir.path().join("metrics.jsonl"))
    };
    let alone = pairs(1, "");
    for (ranks, flags) in [(2, "--context-parallel 2"), (4, "--context-parallel 2 --batch-size 2")] {
        let found = pairs(ranks, flags);
        for (found, want) in found.iter().zip(&alone) {
            for key in ["loss", "grad_norm", "rewards/margins", "eval_loss", "eval_rewards/margins"] {
                let (found, want) = (found[key].as_f64(), want[key].as_f64());
                let near = found.zip(want).is_none_or(|(found, want)| (found - want).abs() < 2e-5 * want.abs().max(1.));
                assert!(near && found.is_some() == want.is_some(), "{flags}: {key}: {found:?}, not {want:?}");
            }
        }
    }
}

#[test]
fn checkpoints_resume_at_any_number_of_ranks_per_sequence() {
    let dir = tempfile::tempdir().unwrap();
    let same = "--dropout 0.1 --lr-schedule constant --warmup-steps 0";
    let (alone, _) = train("gpt2_tiny", 1, 1, &format!("--steps 6 {same}"), dir.path());
    let first = format!("--steps 3 {same} --context-parallel 2 --checkpoint-dir saved");
    train("gpt2_tiny", 4, 2, &first, dir.path());
    for (ranks, readers, more) in [(3, 1, "--context-parallel 3"), (2, 2, ""), (2, 1, "--context-parallel 2")] {
        fs::remove_file(dir.path().join("metrics.jsonl")).unwrap();
        let flags = format!("--steps 6 {same} --resume saved/step-00000003 {more}");
        let (ours, _) = train("gpt2_tiny", ranks, readers, &flags, dir.path());
        assert_near(&ours, &Trajectory(alone.0[3..].to_vec()), &format!("{ranks} ranks, {more}"));
    }
}

#[test]
fn half_precision_stays_near_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    for (dtype, near) in [("bf16", tolerance::BF16), ("f16", tolerance::F16)] {
        let flags = format!("--steps 6 --param-dtype {dtype}");
        let (alone, _) = train("llama_tiny", 1, 1, &flags, dir.path());
        for more in ["--context-parallel 2", "--context-parallel 2 --context-exchange heads"] {
            let (ours, _) = train("llama_tiny", 2, 1, &format!("{flags} {more}"), dir.path());
            let difference = ours.difference(&alone);
            assert!(difference.is_within(near), "{dtype}, {more}: {difference:?}");
        }
    }
}

#[test]
fn bad_settings_are_refused_with_a_way_out() {
    let dir = tempfile::tempdir().unwrap();
    for (ranks, flags, parts) in [
        (2, "--context-parallel 2 --seq-len 30", &["a multiple of 2 N", "pass a multiple"][..]),
        (
            2,
            "--context-parallel 2 --task embed --data a.jsonl",
            &["--context-parallel is for --task language and classify"],
        ),
        (2, "--context-exchange heads", &["--context-exchange needs --context-parallel", "leave it out"]),
        (2, "--context-parallel 3", &["--context-parallel 3 does not divide the 2 processes"]),
        (4, "--context-parallel 4 --tensor-parallel 2", &["--context-parallel 4 times --tensor-parallel 2"]),
    ] {
        let flags = merge_flags("--seq-len 24 --steps 1", flags);
        fsdp_test_support::train(ranks, &flags, dir.path()).refused(ranks, parts);
    }
    // Two key heads, three processes.
    let run = train_golden(
        "llama3_tiny",
        3,
        "--seq-len 24 --context-parallel 3 --context-exchange heads --batch-size 1",
        dir.path(),
    );
    run.refused(3, &["--context-exchange heads splits the model's", "use --context-exchange gather"]);
}
