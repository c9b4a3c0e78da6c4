//! PyTorch itself reads what is ours, and is what `tests/golden` and `tests/interop` say it is.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{golden, golden_flags, golden_flags_of, launch, program, run, workspace};
use libtest_mimic::Trial;
use serde_json::json;

use crate::agent::Agent;
use crate::need::{Need, python, trial};
use crate::network::two_hosts;

/// Far longer than two ranks of PyTorch take on one busy core.
const LIMIT: Duration = Duration::from_secs(600);
const MODELS: [&str; 2] = ["llama_tiny", "gpt2_tiny"];
/// What `tests/golden/make.py` makes.
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
    vec![
        trial("pytorch::checkpoints_go_both_ways", &[Need::Pytorch], checkpoints_go_both_ways),
        trial("pytorch::a_run_of_ours_goes_on_there", &[Need::Pytorch], a_run_of_ours_goes_on_there),
        trial("pytorch::other_optimizers_go_both_ways", &[Need::Pytorch], other_optimizers_go_both_ways),
        trial("pytorch::transformers_reads_an_export", &[Need::Pytorch], transformers_reads_an_export),
        trial("pytorch::adapters_go_both_ways", &[Need::Pytorch], adapters_go_both_ways),
        trial(
            "pytorch::adapters_of_each_kind_have_their_loss_or_are_refused",
            &[Need::Pytorch],
            adapters_of_each_kind_have_their_loss_or_are_refused,
        ),
        trial("pytorch::transformers_reads_a_masked_model", &[Need::Pytorch], transformers_reads_a_masked_model),
        trial("pytorch::the_recorded_runs_come_again", &[Need::Pytorch], the_recorded_runs_come_again),
        trial("pytorch::tensor_parallel_runs_go_on_there", &[Need::Pytorch], tensor_parallel_runs_go_on_there),
        trial("pytorch::the_recorded_surface_is_there", &[Need::Pytorch], the_recorded_surface_is_there),
        trial(
            "pytorch::a_run_over_two_hosts_under_our_launcher",
            &[Need::Pytorch, Need::Networks],
            a_run_over_two_hosts_under_our_launcher,
        ),
    ]
}

/// A script of `tests`, run by the interpreter alone; returns what it printed.
fn script(name: &str, args: &[&Path]) -> String {
    let mut command = Command::new(python());
    command.arg(workspace().join("tests").join(name)).args(args);
    run(command, LIMIT).ok().stdout
}

/// A script of `tests/golden` that records, under our launcher.
fn record(mut launcher: Command, script: &str, out: &Path, args: &[&str]) -> Command {
    // As many ranks as a machine has cores, or more: threads of their own would only be in each other's way.
    launcher.env("PYTHON_EXEC", python()).env("OMP_NUM_THREADS", "1");
    launcher.arg(golden(script)).arg("--out").arg(out).args(args);
    launcher
}

fn record_on_two_ranks(out: &Path, args: &[&str]) {
    let mut launcher = Command::new(program("fsdp-launch"));
    launcher.arg("--nproc-per-node=2");
    run(record(launcher, "record.py", out, args), LIMIT).ok();
}

/// `train` for ten steps as PyTorch was recorded.
fn train_ten_steps(name: &str, flags: &[&str], dir: &Path) {
    let args = golden_flags_of(name, 10);
    let args: Vec<&str> = args.iter().map(String::as_str).chain(["--batch-size", "2"]).collect();
    launch(2, "train", &[&args, flags].concat(), dir).ok();
}

fn checkpoints_go_both_ways() {
    let printed = script("interop/interop.py", &[&program("fsdp-ckpt"), Path::new("convert")]);
    assert_eq!(printed.lines().filter(|line| line.starts_with("ok  ")).count(), 11, "{printed}");
}

/// PyTorch resumes from our files as they are, and from what `convert` makes of them; the losses are those of a run
/// that PyTorch did alone.
fn a_run_of_ours_goes_on_there() {
    let dir = tempfile::tempdir().unwrap();
    for name in MODELS {
        let saved = format!("saved/{name}");
        train_ten_steps(name, &["--checkpoint-dir", &saved], dir.path());
        let (from, to) = (format!("{saved}/step-00000010"), format!("classic/{name}/step-00000010"));
        let mut convert = Command::new(program("fsdp-ckpt"));
        convert.args(["convert", &from, &to, "--to", "torch-dcp", "--world-size", "3"]).current_dir(dir.path());
        run(convert, LIMIT).ok();
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

/// Several groups, of several optimizers: PyTorch goes on with what we have saved, and we with what PyTorch has.
fn other_optimizers_go_both_ways() {
    let name = "llama3_tiny";
    let groups = ["--no-decay", "*norm*.weight,norm.weight", "--batch-size", "3"];
    // With Muon, PyTorch's own runs on one rank and on two differ by 6e-5.
    for (run, lr, flags, near) in [
        ("run_sgd", "5e-2", &["--optimizer", "sgd", "--nesterov", "on"][..], 2e-5),
        ("run_adam", "1e-3", &["--optimizer", "adam"], 2e-5),
        ("run_muon", "1e-3", &["--optimizer", "muon"], 4e-4),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let recorded = Trajectory::recorded(name, run).after(10);
        let train = |steps: usize, more: &[&str]| {
            let mut args = golden_flags_of(name, steps);
            let at = args.iter().position(|flag| flag == "--lr").unwrap();
            args[at + 1] = lr.into();
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            launch(2, "train", &[&args, &groups[..], flags, more].concat(), dir.path()).ok();
        };
        train(10, &["--checkpoint-dir", &format!("saved/{name}")]);
        let (from, to) = (format!("saved/{name}/step-00000010"), format!("classic/{name}/step-00000010"));
        let mut convert = Command::new(program("fsdp-ckpt"));
        convert.args(["convert", &from, &to, "--to", "torch-dcp", "--world-size", "3"]).current_dir(dir.path());
        fsdp_test_support::run(convert, LIMIT).ok();
        // Its learning rates are those of the checkpoint.
        let (classic, out) = (dir.path().join("classic"), dir.path().join("theirs"));
        record_on_two_ranks(&out, &["--models", name, "--runs", run, "--from", classic.to_str().unwrap()]);
        let theirs = Trajectory::of_record(&out.join(name).join(run).with_extension("json"));
        let difference = theirs.difference(&recorded);
        assert!(difference.max() < near, "{run}, there: {difference:?}");
        // PyTorch's SGD does not count steps, from which `train` knows how far it was.
        if run != "run_sgd" {
            record_on_two_ranks(&out, &["--models", name, "--runs", run, "--save", "10"]);
            let theirs = out.join(name).join(format!("{run}-step-10"));
            train(20, &["--metrics", "metrics.jsonl", "--resume", theirs.to_str().unwrap()]);
            let difference = Trajectory::of_metrics(&dir.path().join("metrics.jsonl")).difference(&recorded);
            assert!(difference.max() < near, "{run}, here: {difference:?}");
        }
    }
}

fn transformers_reads_an_export() {
    for name in MODELS {
        let dir = tempfile::tempdir().unwrap();
        train_ten_steps(name, &["--export-hf", "export"], dir.path());
        // The same model as PyTorch saved it, beside the configuration that it was made from.
        let theirs = dir.path().join("theirs");
        fs::create_dir(&theirs).unwrap();
        fs::copy(golden(name).join("config.json"), theirs.join("config.json")).unwrap();
        let mut convert = Command::new(program("fsdp-ckpt"));
        convert.arg("convert").arg(golden(name).join("dcp_step10")).arg(theirs.join("weights")).args(["--to", "hf"]);
        run(convert, LIMIT).ok();
        fs::copy(theirs.join("weights/model.safetensors"), theirs.join("model.safetensors")).unwrap();
        let printed =
            script("interop/export.py", &[&dir.path().join("export"), &theirs, &golden(name).join("tokens.bin")]);
        assert!(printed.starts_with("ok  "), "{printed}");
    }
}

/// PEFT loads what is exported, and its own adapters are trained on: the loss of the same data is the same there.
fn adapters_go_both_ways() {
    for name in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let model = golden(name);
        let first_loss = |from: &str| {
            let metrics = format!("{from}.jsonl");
            let mut args = golden_flags(name);
            let steps = args.iter().position(|arg| arg == "--steps").unwrap();
            args[steps + 1] = "1".into();
            let more = ["--batch-size", "2", "--lora-from", from, "--metrics", &metrics];
            let args: Vec<&str> = args.iter().map(String::as_str).chain(more).collect();
            launch(2, "train", &args, dir.path()).ok();
            Trajectory::of_metrics(&dir.path().join(metrics)).0[0].loss
        };
        train_ten_steps(name, &["--lora-rank=3", "--lora-targets=all-linear", "--export-hf=ours"], dir.path());
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

/// `train` has PEFT's loss with the kinds of adapters that it takes, and refuses the other kinds of PEFT.
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
    // PEFT makes not all of them for GPT-2's `Conv1D`.
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
            let mut args = golden_flags_of(name, 1);
            args.extend(["--batch-size", "2", "--metrics", "metrics.jsonl", "--lora-from", kind].map(String::from));
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let run = launch(2, "train", &args, dir.path());
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

fn transformers_reads_a_masked_model() {
    let name = "bert_tiny";
    let dir = tempfile::tempdir().unwrap();
    let args = golden_flags(name);
    let args: Vec<&str> =
        args.iter().map(String::as_str).chain(["--batch-size", "3", "--export-hf", "export"]).collect();
    launch(2, "train", &args, dir.path()).ok();
    let theirs = dir.path().join("theirs");
    fs::create_dir(&theirs).unwrap();
    for (from, to) in [("config.json", "config.json"), ("final.safetensors", "model.safetensors")] {
        fs::copy(golden(name).join(from), theirs.join(to)).unwrap();
    }
    let printed = script("interop/export.py", &[&dir.path().join("export"), &theirs, &golden("tokens.bin")]);
    assert!(printed.starts_with("ok  "), "{printed}");
}

/// `record.py` makes the files in `tests/golden`. In half precision another processor rounds in other places, and so
/// weights may become other ones of 8 bits.
fn the_recorded_runs_come_again() {
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

/// A run of ours on (tp 4) goes on in PyTorch on (dp 2, tp 2), which has loaded what we saved, to the bit. Its runs are
/// those that were recorded.
fn tensor_parallel_runs_go_on_there() {
    let dir = tempfile::tempdir().unwrap();
    let name = "llama_tp_tiny";
    let args = golden_flags_of(name, 10);
    let saved = format!("saved/{name}");
    let own = ["--batch-size", "6", "--tensor-parallel", "4", "--sequence-parallel", "--checkpoint-dir", &saved];
    let args: Vec<&str> = args.iter().map(String::as_str).chain(own).collect();
    launch(4, "train", &args, dir.path()).ok();
    let (from, to) = (format!("{saved}/step-00000010"), format!("classic/{name}/step-00000010"));
    let mut convert = Command::new(program("fsdp-ckpt"));
    convert.args(["convert", &from, &to, "--to", "torch-dcp", "--world-size", "3"]).current_dir(dir.path());
    run(convert, LIMIT).ok();
    let mut launcher = Command::new(program("fsdp-launch"));
    launcher.arg("--nproc-per-node=4");
    let classic = dir.path().join("classic");
    let more = ["--models", name, "--runs", "dp2_tp2_sequence", "--checkpoints", "--from", classic.to_str().unwrap()];
    run(record(launcher, "record_parallel.py", dir.path(), &more), LIMIT).ok();
    let theirs = dir.path().join(name);
    let difference = Trajectory::of_record(&theirs.join("dp2_tp2_sequence.json"))
        .difference(&Trajectory::recorded(name, "dp2_tp2_sequence").after(10));
    assert!(difference.max() < 5e-6, "{difference:?}");
    // What it had loaded, as it saved it again.
    let mut diff = Command::new(program("fsdp-ckpt"));
    diff.args(["diff", "--json"]).args([&dir.path().join(&from), &theirs.join("dcp_step10")]);
    let printed = run(diff, LIMIT).stdout;
    let found: serde_json::Value = serde_json::from_str(&printed).unwrap();
    // 21 parameters, each with two moments and a count of steps.
    assert_eq!(found["equal"], 84, "{printed}");
    assert_eq!((&found["only_a"], &found["only_b"]), (&json!([]), &json!([])), "{printed}");
    assert_eq!(found["differing"], json!({}), "{printed}");
}

fn the_recorded_surface_is_there() {
    script("interop/surface.py", &[Path::new("--check")]);
}

fn a_run_over_two_hosts_under_our_launcher() {
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
