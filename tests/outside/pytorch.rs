//! PyTorch reads this project's files, and reproduces the records in `tests/golden` and `tests/interop`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{convert, golden, golden_trajectory, program, run, train_golden, workspace};
use libtest_mimic::Trial;
use serde_json::json;

use crate::agent::Agent;
use crate::need::{Need, python, trials};
use crate::network::two_hosts;

/// Much longer than two ranks of PyTorch take on one busy core.
const LIMIT: Duration = Duration::from_secs(600);
const MODELS: [&str; 2] = ["llama_tiny", "gpt2_tiny"];
/// Models of `tests/golden/make.py`.
const FAMILIES: [&str; 12] = [
    "llama3_tiny",
    "mistral_tiny",
    "qwen2_tiny",
    "qwen3_tiny",
    "gemma2_tiny",
    "gemma3_text_tiny",
    "phi3_tiny",
    "mixtral_tiny",
    "qwen3_moe_tiny",
    "bert_tiny",
    "llama_tp_tiny",
    "llama_tp_tied_tiny",
];

pub(crate) fn trials() -> Vec<Trial> {
    let mut all = trials![&[Need::Pytorch] =>
        checkpoints_go_both_ways,
        pytorch_resumes_our_runs,
        other_optimizers_go_both_ways,
        transformers_reads_exports,
        adapters_go_both_ways,
        adapters_of_each_kind_have_their_loss_or_are_refused,
        recorded_runs_are_reproduced,
        pytorch_resumes_tensor_parallel_runs,
        the_recorded_api_is_current,
    ];
    all.extend(trials![&[Need::Pytorch, Need::Networks] => our_launcher_runs_pytorch_on_two_hosts]);
    all
}

/// Runs a script of `tests` and returns its output.
fn script(name: &str, args: &[&Path]) -> String {
    let mut command = Command::new(python());
    command.arg(workspace().join("tests").join(name)).args(args);
    run(command, LIMIT).ok().stdout
}

/// Makes a command that runs a recording script of `tests/golden` under our launcher.
fn record(mut launcher: Command, script: &str, out: &Path, args: &[&str]) -> Command {
    // More threads than cores would slow the ranks down.
    launcher.env("PYTHON_EXEC", python()).env("OMP_NUM_THREADS", "1");
    launcher.arg(golden(script)).arg("--out").arg(out).args(args);
    launcher
}

fn record_on_two_ranks(out: &Path, args: &[&str]) {
    let mut launcher = Command::new(program("fsdp-launch"));
    launcher.arg("--nproc-per-node=2");
    run(record(launcher, "record.py", out, args), LIMIT).ok();
}

fn train_ten_steps(name: &str, flags: &str, dir: &Path) {
    train_golden(name, 2, &format!("--steps 10 {flags}"), dir).ok();
}

/// Converts `saved/NAME/step-00000010` to PyTorch's format in `classic`.
fn convert_step_10(name: &str, dir: &Path) {
    let [from, to] = ["saved", "classic"].map(|kind| PathBuf::from(format!("{kind}/{name}/step-00000010")));
    convert(&from, &to, "torch-dcp", dir);
}

fn checkpoints_go_both_ways() {
    let printed = script("interop/interop.py", &[&program("fsdp-ckpt"), Path::new("convert")]);
    assert_eq!(printed.lines().filter(|line| line.starts_with("ok  ")).count(), 11, "{printed}");
}

/// PyTorch resumes from our checkpoints and from their conversions, with the losses of its own run.
fn pytorch_resumes_our_runs() {
    let dir = tempfile::tempdir().unwrap();
    for name in MODELS {
        train_ten_steps(name, &format!("--checkpoint-dir saved/{name}"), dir.path());
        convert_step_10(name, dir.path());
    }
    for kind in ["saved", "classic"] {
        let (from, out) = (dir.path().join(kind), dir.path().join(format!("from-{kind}")));
        record_on_two_ranks(&out, &["--runs", "run", "--from", from.to_str().unwrap()]);
        for name in MODELS {
            let steps = Trajectory::of_record(&out.join(name).join("run.json"));
            let difference = steps.difference(&Trajectory::recorded(name, "run").after(10));
            assert!(difference.max() < 2e-6, "{name}, {kind}: {difference:?}");
        }
    }
}

/// PyTorch resumes our runs with other optimizers and parameter groups, and `train` resumes PyTorch's.
fn other_optimizers_go_both_ways() {
    let name = "llama3_tiny";
    // With Muon, PyTorch's own runs on one rank and on two differ by 6e-5.
    for (run, flags, near) in [
        ("run_sgd", "--lr 5e-2 --optimizer sgd --nesterov on", 2e-5),
        ("run_adam", "--optimizer adam", 2e-5),
        ("run_muon", "--optimizer muon", 4e-4),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let recorded = Trajectory::recorded(name, run).after(10);
        let train = |steps: usize, more: &str| {
            let flags = format!("--steps {steps} --no-decay *norm*.weight,norm.weight {flags} {more}");
            train_golden(name, 2, &flags, dir.path()).ok();
        };
        train(10, &format!("--checkpoint-dir saved/{name}"));
        convert_step_10(name, dir.path());
        // PyTorch takes the learning rates from the checkpoint.
        let (classic, out) = (dir.path().join("classic"), dir.path().join("theirs"));
        record_on_two_ranks(&out, &["--models", name, "--runs", run, "--from", classic.to_str().unwrap()]);
        let theirs = Trajectory::of_record(&out.join(name).join(run).with_extension("json"));
        let difference = theirs.difference(&recorded);
        assert!(difference.max() < near, "{run}, there: {difference:?}");
        // PyTorch's SGD does not save the step, which `train` needs.
        if run != "run_sgd" {
            record_on_two_ranks(&out, &["--models", name, "--runs", run, "--save", "10"]);
            let theirs = out.join(name).join(format!("{run}-step-10"));
            train(20, &format!("--resume {}", theirs.display()));
            // The file begins with the ten steps of the first run.
            let ours = Trajectory::of_metrics(&dir.path().join("metrics.jsonl")).after(10);
            let difference = ours.difference(&recorded);
            assert!(difference.max() < near, "{run}, here: {difference:?}");
        }
    }
}

fn transformers_reads_exports() {
    for name in [MODELS[0], MODELS[1], "bert_tiny"] {
        let dir = tempfile::tempdir().unwrap();
        let theirs = dir.path().join("theirs");
        fs::create_dir(&theirs).unwrap();
        fs::copy(golden(name).join("config.json"), theirs.join("config.json")).unwrap();
        let weights = theirs.join("model.safetensors");
        let tokens = if name == "bert_tiny" {
            train_golden(name, 2, "--export-hf export", dir.path()).ok();
            fs::copy(golden(name).join("final.safetensors"), weights).unwrap();
            golden("tokens.bin")
        } else {
            train_ten_steps(name, "--export-hf export", dir.path());
            convert(&golden(name).join("dcp_step10"), &theirs.join("weights"), "hf", dir.path());
            fs::copy(theirs.join("weights/model.safetensors"), weights).unwrap();
            golden(name).join("tokens.bin")
        };
        let printed = script("interop/export.py", &[&dir.path().join("export"), &theirs, &tokens]);
        assert!(printed.starts_with("ok  "), "{printed}");
    }
}

/// PEFT loads exported adapters, and `train` loads PEFT's. Both have the same loss on the same data.
fn adapters_go_both_ways() {
    for name in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let model = golden(name);
        let first_loss =
            |from: &str| golden_trajectory(name, 2, &format!("--steps 1 --lora-from {from}"), dir.path()).0[0].loss;
        train_ten_steps(name, "--lora-rank=3 --lora-targets=all-linear --export-hf=ours", dir.path());
        script("interop/adapters.py", &[Path::new("make"), &model, &dir.path().join("theirs")]);
        for from in ["ours", "theirs"] {
            let adapters = dir.path().join(from);
            let printed =
                script("interop/adapters.py", &[Path::new("loss"), &model, &adapters, &model.join("tokens.bin")]);
            let (loss, names) = printed.split_once('\n').unwrap();
            let theirs: f64 = loss.parse().unwrap();
            let ours = first_loss(from);
            assert!((ours / theirs - 1.).abs() < 2e-6, "{name}, {from}: {ours} here, {theirs} there");
            // Seven linear layers in each of Llama's two blocks, four in each of GPT-2's, two matrices each.
            assert_eq!(names.lines().count(), if name == "llama_tiny" { 28 } else { 16 }, "{names}");
        }
    }
}

/// `train` has PEFT's loss with supported kinds of adapters, and refuses the others.
fn adapters_of_each_kind_have_their_loss_or_are_refused() {
    let refused = [
        ("pissa", "init_lora_weights"),
        ("pissa_niter", "init_lora_weights"),
        ("olora", "init_lora_weights"),
        ("mica", "init_lora_weights"),
        ("rslora", "use_rslora"),
        ("dora", "use_dora"),
        ("rank_pattern", "rank_pattern"),
        ("alpha_pattern", "alpha_pattern"),
        ("bias", "bias"),
        ("lora_bias", "lora_bias"),
        ("saved_modules", "modules_to_save"),
        ("tokens", "trainable_token_indices"),
    ];
    // PEFT does not support all kinds for GPT-2's `Conv1D`.
    let of_gpt2 = ["plain", "transposed", "excluded", "some_layers", "of_a_pattern", "pissa"];
    for (name, kinds) in [("llama_tiny", &[][..]), ("gpt2_tiny", &of_gpt2)] {
        let dir = tempfile::tempdir().unwrap();
        let model = golden(name);
        let tokens = model.join("tokens.bin");
        let mut args = vec![Path::new("kinds"), &model, dir.path(), &tokens];
        args.extend(kinds.iter().map(Path::new));
        let losses: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(&script("interop/adapters.py", &args)).unwrap();
        assert_eq!(losses.len(), if kinds.is_empty() { 9 + refused.len() } else { kinds.len() });
        for (kind, theirs) in &losses {
            let run = train_golden(name, 2, &format!("--steps 1 --lora-from {kind}"), dir.path());
            if let Some((_, key)) = refused.iter().find(|(refused, _)| refused == kind) {
                run.refused(2, &[&format!("adapter_config.json: {key} is ")]);
                continue;
            }
            run.ok();
            let (ours, theirs) =
                (Trajectory::of_metrics(&dir.path().join("metrics.jsonl")).0[0].loss, theirs.as_f64().unwrap());
            assert!((ours / theirs - 1.).abs() < 2e-6, "{name}, {kind}: {ours} here, {theirs} there");
        }
    }
}

/// `record.py` reproduces the files in `tests/golden`. Other processors round differently in half precision, and weights
/// may get other 8-bit codes.
fn recorded_runs_are_reproduced() {
    let out = tempfile::tempdir().unwrap();
    record_on_two_ranks(out.path(), &[]);
    for name in MODELS {
        let mut runs = 0;
        for entry in fs::read_dir(out.path().join(name)).unwrap() {
            let file = entry.unwrap().path();
            let run = file.file_stem().unwrap().to_str().unwrap();
            let difference = Trajectory::of_record(&file).difference(&Trajectory::recorded(name, run));
            let (loss, grad_norm) = match run {
                "run" => (2e-6, 2e-6),
                _ if run.contains("_f16_") => (3e-5, 7e-4),
                _ if run.contains("float8") => (2e-5, 5e-4),
                _ => (2e-4, 2.5e-3),
            };
            assert!(difference.loss < loss && difference.grad_norm < grad_norm, "{name}, {run}: {difference:?}");
            runs += 1;
        }
        assert_eq!(runs, 10);
    }
    record_on_two_ranks(out.path(), &[&["--models"][..], &FAMILIES].concat());
    for name in FAMILIES {
        for run in ["run", "run_padding", "run_padded"]
            .into_iter()
            .filter(|run| golden(name).join(run).with_extension("json").exists())
        {
            let again = Trajectory::of_record(&out.path().join(name).join(run).with_extension("json"));
            let difference = again.difference(&Trajectory::recorded(name, run));
            assert!(difference.max() < 2e-5, "{name}, {run}: {difference:?}");
        }
    }
}

/// PyTorch on (dp 2, tp 2) resumes a run on (tp 4) with the same bits and repeats the recorded run.
fn pytorch_resumes_tensor_parallel_runs() {
    let dir = tempfile::tempdir().unwrap();
    let name = "llama_tp_tiny";
    let parallel = "--batch-size 6 --tensor-parallel 4 --sequence-parallel";
    train_golden(name, 4, &format!("--steps 10 {parallel} --checkpoint-dir saved/{name}"), dir.path()).ok();
    convert_step_10(name, dir.path());
    let mut launcher = Command::new(program("fsdp-launch"));
    launcher.arg("--nproc-per-node=4");
    let classic = dir.path().join("classic");
    let more = ["--models", name, "--runs", "dp2_tp2_sequence", "--checkpoints", "--from", classic.to_str().unwrap()];
    run(record(launcher, "record_parallel.py", dir.path(), &more), LIMIT).ok();
    let theirs = dir.path().join(name);
    let difference = Trajectory::of_record(&theirs.join("dp2_tp2_sequence.json"))
        .difference(&Trajectory::recorded(name, "dp2_tp2_sequence").after(10));
    assert!(difference.max() < 5e-6, "{difference:?}");
    // PyTorch saved the loaded state again.
    let mut diff = Command::new(program("fsdp-ckpt"));
    diff.args(["diff", "--json"])
        .args([&dir.path().join(format!("saved/{name}/step-00000010")), &theirs.join("dcp_step10")]);
    let printed = run(diff, LIMIT).stdout;
    let found: serde_json::Value = serde_json::from_str(&printed).unwrap();
    // 21 parameters, each with two moments and a count of steps.
    assert_eq!(found["equal"], 84, "{printed}");
    assert_eq!((&found["only_a"], &found["only_b"]), (&json!([]), &json!([])), "{printed}");
    assert_eq!(found["differing"], json!({}), "{printed}");
}

fn the_recorded_api_is_current() {
    script("interop/surface.py", &[Path::new("--check")]);
}

fn our_launcher_runs_pytorch_on_two_hosts() {
    let hosts = two_hosts().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    fs::write(&token, "0123456789abcdef0123456789abcdef").unwrap();
    let agents = hosts.each_ref().map(|host| {
        let mut launcher = host.command(&program("fsdp-launch"));
        launcher.args(["--nnodes=2", "--nproc-per-node=1", "--rdzv-endpoint=10.77.0.1:29400", "--rdzv-token-file"]);
        launcher.arg(&token).env("GLOO_SOCKET_IFNAME", "fsdp0");
        Agent::start(record(launcher, "record.py", dir.path(), &["--models", "llama_tiny", "--runs", "run"]))
    });
    let ends = agents.map(Agent::finish);
    assert!(ends.iter().all(|(code, _)| *code == Some(0)), "{ends:#?}");
    let steps = Trajectory::of_record(&dir.path().join("llama_tiny/run.json"));
    let difference = steps.difference(&Trajectory::recorded("llama_tiny", "run"));
    assert!(difference.max() < 2e-6, "{difference:?}");
}
