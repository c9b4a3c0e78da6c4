//! `train --expert-parallel`: experts on different ranks train as experts on all of them, with every setting.

use std::fs;
use std::path::Path;

use fsdp_ckpt::TensorSource;
use fsdp_ckpt::hf::HfModel;
use fsdp_test_support::trajectory::{Difference, Trajectory};
use fsdp_test_support::{
    copy_golden, golden, golden_trajectory, json_lines, merge_flags, read_text, tolerance, train_golden,
};

use crate::golden::{ends_as_recorded, values};

/// Rows of a batch are summed in another order, by the experts and in their gradients.
const NEAR: Difference = Difference { loss: 2e-5, grad_norm: 2e-5 };

#[test]
fn recorded_runs_of_mixtures_are_reproduced() {
    for name in ["mixtral_tiny", "qwen3_moe_tiny", "deepseek_v2_tiny", "deepseek_v3_tiny", "gpt_oss_tiny"] {
        for ranks in [2, 3] {
            // Where the loss has the balance of each rank's experts, each number of ranks has a recorded run.
            let run = match ranks == 2 || name.starts_with("deepseek") {
                true => "run".into(),
                false => format!("run_of_{ranks}"),
            };
            let recorded = Trajectory::recorded(name, &run);
            let dir = tempfile::tempdir().unwrap();
            let flags = format!("--export-hf export --expert-parallel {ranks}");
            let difference = golden_trajectory(name, ranks, &flags, dir.path()).difference(&recorded);
            println!("{name}, {ranks} ranks: {difference:?}");
            assert!(difference.max() < 5e-6, "{name}, {ranks} ranks: {difference:?}");
            if run == "run" {
                ends_as_recorded(name, dir.path());
            }
        }
    }
}

/// Trains a recorded model for some steps.
fn train(name: &str, ranks: usize, flags: &str, dir: &Path) -> Trajectory {
    let defaults = format!("--steps 20 --batch-size {} --seq-len 24 --seed 3 --init random", 8 / ranks);
    golden_trajectory(name, ranks, &merge_flags(&defaults, flags), dir)
}

#[test]
fn settings_train_as_without_expert_parallelism() {
    let data = golden("examples.jsonl");
    let sft = format!("--sft {}", data.display());
    let dpo = format!("--init pretrained --dpo {} --seq-len 32", golden("dpo/pairs.jsonl").display());
    let near_in_bf16 = Difference { loss: 3e-3, grad_norm: 5e-2 };
    for (name, ranks, experts, flags, near) in [
        ("mixtral_tiny", 2, 2, "--activation-checkpoint full --grad-accum 2", NEAR),
        // Muon multiplies in bf16, where a last bit becomes a part in 256.
        ("mixtral_tiny", 3, 3, "--steps 6 --batch-size 2 --optimizer muon", Difference { loss: 1e-4, grad_norm: 5e-3 }),
        ("qwen3_moe_tiny", 4, 4, "", NEAR),
        ("qwen3_moe_tiny", 4, 2, "--replicate 2", NEAR),
        ("qwen3_moe_tiny", 4, 2, "--shard-optimizer-over-replicas --replicate 2", NEAR),
        ("qwen3_moe_tiny", 4, 2, "--reshard-after-forward never --prefetch 2", NEAR),
        ("qwen3_moe_tiny", 4, 2, "--offload cpu --optimizer adamw8bit", NEAR),
        ("qwen3_moe_tiny", 4, 4, "--optimizer-in-backward unclipped --clip-grad-norm 0", NEAR),
        ("qwen3_moe_tiny", 4, 2, "--lora-rank 3 --lora-targets all-linear --lr 1e-2", NEAR),
        ("qwen3_moe_tiny", 4, 4, "--param-dtype bf16", near_in_bf16),
        ("qwen3_moe_tiny", 2, 2, &sft, NEAR),
        ("deepseek_v2_tiny", 4, 4, "--activation-checkpoint full", NEAR),
        ("deepseek_v3_tiny", 4, 2, "--grad-accum 2 --batch-size 1", NEAR),
        ("deepseek_v3_tiny", 4, 2, "--replicate 2 --lora-rank 3 --lora-targets all-linear --lr 1e-2", NEAR),
        ("deepseek_v3_tiny", 2, 2, &sft, NEAR),
        ("gpt_oss_tiny", 4, 4, "--activation-checkpoint full", NEAR),
        ("gpt_oss_tiny", 4, 2, "--replicate 2 --lora-rank 3 --lora-targets all-linear --lr 1e-2", NEAR),
        ("gpt_oss_tiny", 2, 2, "--grad-accum 2 --batch-size 2", NEAR),
        ("qwen3_moe_tiny", 4, 2, &dpo, NEAR),
        ("mixtral_tiny", 4, 2, "--base nf4 --lora-rank 3 --lora-targets all-linear --lr 1e-2", NEAR),
        // Codes have a scale for each shard, and other ranks have other shards.
        ("qwen3_moe_tiny", 4, 2, "--all-gather float8", Difference { loss: 3e-3, grad_norm: 3e-2 }),
    ] {
        let (with, without) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let ours = train(name, ranks, &format!("{flags} --expert-parallel {experts}"), with.path());
        let want = train(name, ranks, flags, without.path());
        assert_eq!((ours.0.len(), ours.0.len() >= 6), (want.0.len(), true), "{name} {flags}");
        let difference = ours.difference(&want);
        println!("{name}, {ranks} ranks, N = {experts}, {flags}: {difference:?}");
        assert!(difference.is_within(near), "{name}, {ranks} ranks, N = {experts}, {flags}: {difference:?}");
    }
}

/// Evaluations, samples and GGUF files are those of a run without expert parallelism.
#[test]
fn evaluations_and_exports_are_those_without_expert_parallelism() {
    let run = |more: &str, dir: &Path| {
        let flags = format!(
            "--steps 4 --batch-size 2 --seed 3 --eval {} --eval-every 2 --export-gguf model.gguf {more}",
            golden("tokens.bin").display()
        );
        let run = train_golden("mixtral_tiny", 3, &flags, dir).ok();
        let evaluated = json_lines(&dir.join("metrics.jsonl")).into_iter();
        let losses: Vec<f64> = evaluated.filter_map(|record| record["eval_loss"].as_f64()).collect();
        let samples = run.stdout.lines().filter(|line| line.contains("sample")).map(str::to_owned);
        (losses, samples.collect::<Vec<_>>(), fs::read(dir.join("model.gguf")).unwrap())
    };
    let (with, without) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (losses, samples, file) = run("--expert-parallel 3", with.path());
    let (want, want_samples, want_file) = run("", without.path());
    assert_eq!((losses.len(), samples), (want.len(), want_samples));
    assert!(
        losses.len() >= 2 && losses.iter().zip(&want).all(|(a, b)| (a / b - 1.).abs() < 2e-5),
        "{losses:?}, {want:?}"
    );
    assert_eq!(file.len(), want_file.len());
    let floats = |file: &[u8]| -> Vec<f32> {
        // The tensors are at the end of the file.
        let tail = file.chunks_exact(4).rev().take(file.len() / 8);
        tail.map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect()
    };
    let (ours, theirs) = (floats(&file), floats(&want_file));
    let difference = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0., f32::max);
    assert!(difference < 1e-4 * theirs.iter().fold(0., |most, x| x.abs().max(most)), "{difference}");
}

/// Sequences, and the layers of attention and of experts, are split over other ranks.
#[test]
fn experts_live_on_ranks_beside_other_parallelism() {
    for (name, ranks, flags) in [
        ("qwen3_moe_tiny", 4, "--context-parallel 2"),
        ("qwen3_moe_even", 4, "--tensor-parallel 2"),
        ("qwen3_moe_even", 4, "--tensor-parallel 2 --sequence-parallel"),
        ("qwen3_moe_even", 8, "--context-parallel 2 --tensor-parallel 2"),
        ("deepseek_v2_tiny", 4, "--context-parallel 2"),
        ("deepseek_v3_even", 4, "--tensor-parallel 2 --sequence-parallel"),
        ("gpt_oss_tiny", 4, "--context-parallel 2"),
        ("gpt_oss_even", 4, "--tensor-parallel 2 --sequence-parallel"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model");
        let recorded = name.replace("even", "tiny");
        copy_golden(&recorded, &model);
        if name.ends_with("even") {
            let path = model.join("config.json");
            let config = [
                ("intermediate_size\": 11", "intermediate_size\": 12"),
                ("\"intermediate_size\": 43", "\"intermediate_size\": 44"),
                ("\"vocab_size\": 131", "\"vocab_size\": 132"),
            ];
            let config = config.iter().fold(read_text(&path), |text, (from, to)| text.replace(from, to));
            fs::write(path, config).unwrap();
        }
        let readers = ranks / if flags.contains("--context-parallel 2 --tensor-parallel 2") { 4 } else { 2 };
        let run = |more: &str, dir: &Path| {
            let flags = format!(
                "--model {} --steps 20 --batch-size {} --seq-len 24 --seed 3 --init random {flags} {more}",
                model.display(),
                8 / readers
            );
            golden_trajectory(&recorded, ranks, &flags, dir)
        };
        let (with, without) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let difference = run("--expert-parallel 2", with.path()).difference(&run("", without.path()));
        println!("{name}, {ranks} ranks, {flags}: {difference:?}");
        assert!(difference.is_within(NEAR), "{name}, {ranks} ranks, {flags}: {difference:?}");
    }
}

/// Runs that continue with other numbers of ranks with experts export the same model.
#[test]
fn checkpoints_resume_with_other_ranks_of_experts() {
    let dir = tempfile::tempdir().unwrap();
    let export = "--batch-size 1 --export-hf export";
    let flags = format!("{export} --save-every 10 --checkpoint-dir saved --expert-parallel 4");
    let whole = train("qwen3_moe_tiny", 4, &flags, dir.path());
    let exported = HfModel::open(dir.path().join("export")).unwrap();
    let step = dir.path().join("saved/step-00000010");
    for more in ["--expert-parallel 4", "--expert-parallel 2", "", "--replicate 2 --expert-parallel 2"] {
        let to = tempfile::tempdir().unwrap();
        let resumed = train("qwen3_moe_tiny", 4, &format!("{export} --resume {} {more}", step.display()), to.path());
        let difference = resumed.difference(&whole.after(10));
        assert!(difference.is_within(tolerance::SAME), "{more}: {difference:?}");
        let model = HfModel::open(to.path().join("export")).unwrap();
        assert_eq!(model.names().count(), exported.names().count());
        for name in exported.names() {
            let shape = &exported.index().tensor(name).unwrap().shape;
            let [ours, want] =
                [&model, &exported].map(|of| values(shape, |region, bytes| of.read(name, region, bytes).unwrap()));
            let largest = want.iter().fold(0f32, |most, value| most.max(value.abs()));
            let apart = ours.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(apart <= 1e-4 * largest, "{more}: {name}: {apart} of {largest}");
            if more == "--expert-parallel 4" {
                assert_eq!((difference.max(), apart), (0., 0.), "other bits");
            }
        }
    }
}

#[test]
fn flags_that_do_not_fit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (name, ranks, flags, parts) in [
        (
            "llama_tiny",
            2,
            "--expert-parallel 2",
            &["--expert-parallel 2", "this model has no experts", "leave it out"][..],
        ),
        ("mixtral_tiny", 4, "--expert-parallel 4", &["--expert-parallel 4", "more than the model's 3 experts"]),
        ("qwen3_moe_tiny", 3, "--expert-parallel 2", &["--expert-parallel 2 does not divide the 3 processes"]),
        (
            "qwen3_moe_tiny",
            4,
            "--expert-parallel 4 --replicate 2",
            &["--expert-parallel 4 does not divide the 2 processes that shard a replica"],
        ),
        ("qwen3_moe_tiny", 2, "--expert-parallel 0", &["--expert-parallel"]),
    ] {
        let run = train_golden(name, ranks, &format!("--steps 1 {flags} --batch-size 1"), dir.path());
        assert_ne!(run.code, Some(0), "{name} {flags}");
        let said = format!("{}{}", run.stdout, run.stderr);
        parts.iter().for_each(|part| assert!(said.contains(part), "{part} is not in {said}"));
    }
    assert!(fs::read_dir(dir.path()).unwrap().all(|entry| !entry.unwrap().path().join("step-00000001").exists()));
}
