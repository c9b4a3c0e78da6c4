//! A resume with settings that differ from the checkpoint's gives a warning or an error.

use std::fs;
use std::path::Path;

use fsdp_ckpt::SaveState;
use fsdp_core::MeshLayout;
use fsdp_core::process_group::local;
use fsdp_test_support::{Run, edit_file, golden, merge_flags};
use serde_json::json;

const SAVED: &str = "saved/step-00000001";
const WARNING: &str = "warning: this run differs from the run that saved the checkpoint:";
/// The error without `--resume-anyway`.
const REFUSED: &str = "its settings do not fit this run:";
const ANYWAY: &str = "--resume-anyway";

/// Makes a directory with data and a model without weights.
fn directory() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("model")).unwrap();
    for file in ["model/config.json", "tokens.bin"] {
        fs::copy(golden("llama_tiny").join(Path::new(file).file_name().unwrap()), dir.path().join(file)).unwrap();
    }
    dir
}

/// Trains on one rank.
fn train(dir: &Path, flags: &str) -> Run {
    let defaults = "--model model --data tokens.bin --seq-len 32 --batch-size 4 --lr-schedule constant";
    fsdp_test_support::train(1, &merge_flags(defaults, flags), dir)
}

/// Resumes for one step.
fn resume(dir: &Path, flags: &str) -> Run {
    train(dir, &format!("--steps 2 --resume {SAVED} {flags}"))
}

/// Returns the lines of the warning about changed settings.
fn warnings(run: Run) -> Vec<String> {
    let stderr = run.ok().stderr;
    let lines = stderr.lines().map(|line| line.trim_start_matches("[rank 0]").strip_prefix(' ').unwrap_or(line));
    let block = lines.skip_while(|line| !line.contains(WARNING)).skip(1);
    block.map_while(|line| line.strip_prefix("  ")).map(str::to_owned).collect()
}

#[test]
fn changed_settings_are_warnings() {
    let dir = directory();
    train(dir.path(), "--steps 1 --checkpoint-dir saved").ok();
    let tokens = fs::read(dir.path().join("tokens.bin")).unwrap();
    fs::write(dir.path().join("copy.bin"), &tokens).unwrap();
    fs::write(dir.path().join("less.bin"), &tokens[..tokens.len() - 2]).unwrap();
    let cases: [(&str, &[&str]); 16] = [
        // Equal settings, and settings that do not change the training.
        ("", &[]),
        ("--data copy.bin", &[]),
        ("--seed 7 --steps 3 --save-every 1 --prefetch 2 --batch-size 2 --grad-accum 2", &[]),
        ("--data less.bin", &["the data: it was 2561 tokens with checksum "]),
        ("--seq-len 16", &["--seq-len: it was 32, and is 16"]),
        ("--shuffle on --seed 7", &["the order of the data: it was as it stands, and is shuffled, by --seed 7"]),
        ("--batch-size 8", &["the sequences of a step: it was 4, and is 8"]),
        ("--dropout 0.1", &["--dropout: it was none, and is attention 0.1, by --seed 42"]),
        ("--lr 1e-2", &["the optimizer's lr: it was 0.002, and is 0.01"]),
        ("--betas 0.9,0.9", &["the optimizer's betas: it was [0.9,0.95], and is [0.9,0.9]"]),
        ("--optimizer adam", &["--optimizer: it was adamw, and is adam", "the optimizer's decoupled_weight_decay: "]),
        (
            "--no-decay *norm*.weight",
            &[
                "--no-decay: it was [], and is [\"*norm*.weight\"]",
                "the optimizer's weight_decay: it was 0.1, and is 0.1 and 0.0",
            ],
        ),
        ("--lr-schedule cosine", &["--lr-schedule: it was constant, and is cosine, over 2 steps"]),
        ("--warmup-steps 0", &["--warmup-steps: it was 10, and is 0"]),
        ("--clip-grad-norm 0", &["--clip-grad-norm: it was 1, and is 0"]),
        ("--param-dtype bf16", &["--param-dtype: it was f32, and is bf16"]),
    ];
    for (flags, parts) in cases {
        let steps = if flags.contains("--steps") { "" } else { "--steps 2" };
        let run = train(dir.path(), &format!("{steps} --resume {SAVED} {flags}"));
        let lines = warnings(run);
        let are_expected = lines.iter().zip(parts).all(|(line, part)| line.starts_with(part));
        assert!(are_expected && lines.len() == parts.len(), "{flags}: {lines:#?}");
    }
    let data = warnings(resume(dir.path(), "--data less.bin")).remove(0);
    let parts = [" (tokens.bin), and is 2560 tokens with checksum ", " (less.bin)"];
    assert!(parts.iter().all(|part| data.contains(part)), "{data}");
    // Several changes are one warning.
    let lines = warnings(resume(dir.path(), "--seq-len 16 --lr 1e-2 --clip-grad-norm 0"));
    assert_eq!(lines.len(), 3, "{lines:#?}");
}

#[test]
fn incompatible_settings_need_resume_anyway() {
    let dir = directory();
    train(dir.path(), "--steps 1 --checkpoint-dir saved").ok();
    let refused = |flags: &str, line: &str| {
        let stderr = resume(dir.path(), flags).failed();
        assert!([REFUSED, line, ANYWAY].iter().all(|part| stderr.contains(part)), "{flags}: {line:?} not in\n{stderr}");
        let lines = warnings(resume(dir.path(), &format!("{flags} {ANYWAY}")));
        assert!(lines.iter().any(|warning| warning == line), "{flags}: {lines:#?}");
    };
    refused("--optimizer sgd --momentum 0", "the kind of --optimizer: it was Adam, and is SGD");
    refused("--optimizer sgd", "the kind of --optimizer: it was Adam, and is SGD");
    let stderr = resume(dir.path(), &format!("--optimizer sgd {ANYWAY}")).ok().stderr;
    assert!(stderr.contains("with a fresh optimizer: it holds exp_avg, exp_avg_sq, step of"), "{stderr}");

    // A resumed run does not draw weights.
    let config = dir.path().join("model/config.json");
    edit_file(&config, "\"initializer_range\": 0.02", "\"initializer_range\": 0.5");
    assert_eq!(warnings(resume(dir.path(), "")), [""; 0]);
    edit_file(&config, "\"rope_theta\": 10000.0", "\"rope_theta\": 77.0");
    refused("", "config.json's rope_parameters.rope_theta: it was 10000.0, and is 77.0");
    edit_file(&config, "\"rope_theta\": 77.0", "\"rope_theta\": 10000.0");
    edit_file(&config, "\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 1e-06");
    refused("", "config.json's rms_norm_eps: it was 0.00001, and is 1e-6");
}

#[test]
fn other_adapters_are_refused() {
    let dir = directory();
    let weights = golden("llama_tiny").join("model.safetensors");
    fs::copy(weights, dir.path().join("model/model.safetensors")).unwrap();
    train(dir.path(), "--steps 1 --checkpoint-dir saved --lora-rank 2 --lora-alpha 4").ok();
    assert_eq!(warnings(resume(dir.path(), "--lora-rank 2 --lora-alpha 4")), [""; 0]);
    let alpha = "the adapters' alpha: it was 4, and is 8";
    let stderr = resume(dir.path(), "--lora-rank 2 --lora-alpha 8").failed();
    assert!(stderr.contains(REFUSED) && stderr.contains(alpha), "{stderr}");
    assert_eq!(warnings(resume(dir.path(), "--lora-rank 2 --lora-alpha 8 --resume-anyway")), [alpha]);
    let stderr = resume(dir.path(), "--lora-rank 4 --lora-alpha 4").failed();
    assert!(stderr.contains("the adapters' rank: it was 2, and is 4"), "{stderr}");
}

/// Checkpoints of PyTorch and of older versions have no record of settings.
#[test]
fn checkpoints_without_a_record_resume_silently() {
    let dir = directory();
    let model = golden("llama_tp_tiny");
    let (model, saved) = (model.display(), model.join("dcp_step10").display().to_string());
    let run = train(dir.path(), &format!("--model {model} --init random --steps 11 --resume {saved}")).ok();
    assert!(run.stderr.contains("at step 10") && !run.stderr.contains("warning"), "{}", run.stderr);
}

#[test]
fn a_malformed_record_is_refused() {
    let dir = directory();
    let values = [("step", json!(1)), ("sequences", json!(4)), ("train.run", json!(5))];
    let values = values.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    let state = SaveState { mesh: MeshLayout::new(&[("dp", 1)]).unwrap(), tensors: vec![], values };
    local::run(1, |group| fsdp_ckpt::save(dir.path().join("odd"), &group, &state).map(drop)).remove(0).unwrap();
    let stderr = train(dir.path(), "--steps 2 --resume odd").failed();
    let told = ["its value `train.run` is not a record of settings", "pass --resume-anyway"];
    assert!(told.iter().all(|part| stderr.contains(part)), "{stderr}");
}
