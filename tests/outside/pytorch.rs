//! PyTorch reads this project's files, and reproduces the records in `tests/golden` and `tests/interop`.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{DType, Device, Module, Tensor};
use fsdp_candle::activation_checkpoint::CheckpointPolicy;
use fsdp_candle::{FullyShard, ShardedVarMap, World};
use fsdp_test_support::agent::Agent;
use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{convert, golden, golden_trajectory, program, run, train_golden, workspace};
use fsdp_tests_candle_transformers::original::models::{
    quantized_llama, quantized_phi3, quantized_qwen2, quantized_qwen3,
};
use fsdp_train::models::{Dropout, Head, ModelConfig, ModelOptions, Weights, build};
use libtest_mimic::Trial;
use serde_json::json;

use crate::need::{Need, llama_cpp, python, trials};
use crate::network::two_hosts;

/// Much longer than two ranks of PyTorch take on one busy core.
const LIMIT: Duration = Duration::from_secs(600);
const MODELS: [&str; 2] = ["llama_tiny", "gpt2_tiny"];
/// Models of `tests/golden/make.py`.
const FAMILIES: [&str; 15] = [
    "llama3_tiny",
    "mistral_tiny",
    "qwen2_tiny",
    "qwen3_tiny",
    "gemma2_tiny",
    "gemma3_text_tiny",
    "phi3_tiny",
    "mixtral_tiny",
    "qwen3_moe_tiny",
    "deepseek_v2_tiny",
    "deepseek_v3_tiny",
    "gpt_oss_tiny",
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
        transformers_has_the_logits_of_trained_mixtures,
        adapters_go_both_ways,
        adapters_of_each_kind_have_their_loss_or_are_refused,
        candle_computes_from_gguf_what_transformers_does,
        recorded_runs_are_reproduced,
        jinja_is_rendered_as_by_transformers,
        training_states_of_other_trainers_are_converted,
        merged_adapters_compute_what_peft_does,
        pytorch_resumes_tensor_parallel_runs,
        the_recorded_api_is_current,
        bench_peers_measures_the_same_models,
        several_forwards_need_less_memory_than_in_pytorch,
    ];
    all.extend(trials![&[Need::Pytorch, Need::LlamaCpp] => llama_cpp_computes_what_transformers_does]);
    all.extend(trials![&[Need::Pytorch, Need::Networks] => our_launcher_runs_pytorch_on_two_hosts]);
    all
}

/// Runs a script of `tests` and returns its output.
fn script(name: &str, args: &[impl AsRef<OsStr>]) -> String {
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

/// Renders random expressions of the seed `FSDP_RANDOM_SEED`, and constructs of the templates of public models. Constructs
/// that are not supported are refused by name.
fn jinja_is_rendered_as_by_transformers() {
    let dir = tempfile::tempdir().unwrap();
    let recorded = dir.path().join("cases.json");
    let seed = std::env::var("FSDP_RANDOM_SEED").unwrap_or("7".into());
    let seed = script("interop/jinja.py", &[recorded.to_str().unwrap(), "--seed", &seed]);
    let cases: Vec<serde_json::Value> = serde_json::from_str(&fs::read_to_string(recorded).unwrap()).unwrap();
    assert!(cases.len() > 2000);
    let (mut refused, mut different) = (vec![], vec![]);
    for case in &cases {
        let source = case["template"].as_str().unwrap();
        fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
        let line = case["line"].as_str().unwrap();
        let prompts = line.contains("\"add_generation_prompt\": true");
        match (fsdp_train::data::chat_text(Some(dir.path()), line, prompts), case["text"].as_str()) {
            (Ok(text), Some(expected)) if text == expected => {}
            (Ok(text), _) => different.push(format!("{source}: {text:?}, but transformers: {case}")),
            (Err(error), Some(_)) => refused.push(format!("{source}: {error:#}")),
            (Err(_), None) => {}
        }
    }
    assert!(different.is_empty(), "{seed}{} of {} differ: {different:#?}", different.len(), cases.len());
    assert!(refused.len() * 8 < cases.len(), "{seed}{} of {} are refused: {refused:#?}", refused.len(), cases.len());
}

/// Each comes out right or is refused by name.
fn training_states_of_other_trainers_are_converted() {
    script("interop/training_states.py", &[program("fsdp-ckpt")]);
}

/// Random adapters, merged and trained from: each has PEFT's logits and loss, or is refused by name.
fn merged_adapters_compute_what_peft_does() {
    let [ckpt, train] = ["fsdp-ckpt", "train"].map(program);
    script("interop/merges.py", &[ckpt, train, "40".into()]);
}

/// `bench peers` fails if the models of both sides have different numbers of parameters.
fn bench_peers_measures_the_same_models() {
    let dir = tempfile::tempdir().unwrap();
    // A smaller model than that of `examples/configs`.
    let small = |name: &str, sizes: &[(&str, serde_json::Value)]| {
        let text = fs::read_to_string(workspace().join("examples/configs").join(name).join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        sizes.iter().for_each(|(key, value)| config[key] = value.clone());
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("config.json"), config.to_string()).unwrap();
        dir.path().join(name)
    };
    let resnet = small("resnet-18", &[("hidden_sizes", [64, 128, 256, 64].into())]);
    let sizes = [("vocab_size", 128), ("hidden_size", 64), ("intermediate_size", 96), ("num_hidden_layers", 2)];
    let mixtral = small("mixtral-123m", &sizes.map(|(key, size)| (key, size.into())));
    for (model, flags) in [
        (golden("llama_tiny"), "--seq 16 --lora-rank 2"),
        (golden("gpt2_tiny"), "--seq 16 --param-dtype bf16"),
        (golden("bert_tiny"), "--seq 16"),
        (mixtral, "--seq 16"),
        (resnet, "--image-size 32"),
    ] {
        let mut command = Command::new(program("bench"));
        command.args(["peers", "--rounds", "1", "--steps", "1", "--json", "--python"]).arg(python());
        command.arg("--model").arg(model).arg("--").args(flags.split(' '));
        let run = run(command, LIMIT).ok();
        let row: serde_json::Value = serde_json::from_str(run.stdout.lines().last().unwrap()).unwrap();
        for program in ["ours", "pytorch", "floor"] {
            assert!(row[program]["seconds"].as_f64().unwrap() > 0., "{program}: {row}");
        }
        assert!(
            row["ours"]["parameters"].is_u64() && row["ours"]["parameters"] == row["pytorch"]["parameters"],
            "{row}"
        );
    }
}

/// Three forwards before one backward.
fn several_forwards_need_less_memory_than_in_pytorch() {
    let bytes = |program: &Path, args: &[&str]| {
        let mut launcher = Command::new(fsdp_test_support::program("fsdp-launch"));
        launcher.env("PYTHON_EXEC", python()).env("OMP_NUM_THREADS", "1").arg("--nproc-per-node=2");
        launcher.arg(program).args(args).args(["--layers=4", "--width=256", "--passes=3"]);
        let stdout = run(launcher, LIMIT).ok().stdout;
        let report = stdout.lines().find_map(|line| line.find('{').map(|start| &line[start..])).unwrap();
        let report: serde_json::Value = serde_json::from_str(report).unwrap();
        (report["unit_bytes"].as_u64().unwrap(), report["transient_bytes"].as_u64().unwrap())
    };
    let (unit, ours) = bytes(&program("bench"), &["memory", "--mode=zero3", "--json"]);
    let theirs = bytes(&workspace().join("tests/interop/memory.py"), &[]);
    assert_eq!(unit, theirs.0);
    assert!(ours >= unit && ours <= theirs.1, "{ours} bytes, {} in PyTorch, a unit is {unit}", theirs.1);
}

/// llama.cpp runs our GGUF files of every architecture, and PEFT merges adapters to the same weights.
fn llama_cpp_computes_what_transformers_does() {
    let dir = tempfile::tempdir().unwrap();
    script("interop/gguf_models.py", &[dir.path()]);
    for part in ["logits", "bytes", "greedy", "merge"] {
        let mut command = Command::new(python());
        command.env("LLAMA_CPP", llama_cpp().unwrap()).env("OMP_NUM_THREADS", "2");
        command.arg(workspace().join("tests/interop/gguf.py")).arg(part).arg(program("fsdp-ckpt")).arg(dir.path());
        run(command, LIMIT).ok();
    }
}

/// Candle's quantized models run our GGUF files. They do not round activations in products with f16, so both types have
/// the limit of f32.
fn candle_computes_from_gguf_what_transformers_does() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["llama", "qwen2_plain", "qwen3", "phi3_plain"];
    let args = std::iter::once(dir.path().to_path_buf()).chain(names.map(PathBuf::from));
    script("interop/gguf_models.py", &args.collect::<Vec<_>>());
    for name in names {
        let model = dir.path().join(name);
        let expected = candle_core::npy::NpzTensors::new(model.join("expected.npz")).unwrap();
        let expected = |key: &str| expected.get(key).unwrap().unwrap();
        let tokens = expected("tokens").to_dtype(DType::U32).unwrap().to_vec1::<u32>().unwrap();
        for quantization in ["f32", "f16"] {
            let path = dir.path().join(format!("{name}-{quantization}.gguf"));
            let mut convert = Command::new(program("fsdp-ckpt"));
            convert.arg("convert").arg(&model).arg(&path).args(["--to", "gguf", "--quantize", quantization]);
            run(convert, LIMIT).ok();
            let found = candle_logits(name, &path, &tokens).unwrap();
            let expected = expected(quantization).flatten_all().unwrap();
            let spread = expected.var(0).unwrap().to_scalar::<f32>().unwrap().sqrt();
            let apart = (found - expected).unwrap().abs().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap() / spread;
            assert!(apart < 1e-4, "{name} {quantization}: logits differ by {apart:e} of their spread");
            println!("{name} {quantization}: logits differ by {apart:.1e} of their spread");
        }
    }
}

/// Returns the logits after each token by Candle's quantized model.
fn candle_logits(name: &str, path: &Path, tokens: &[u32]) -> candle_core::Result<Tensor> {
    let open = || {
        let mut file = File::open(path)?;
        anyhow::Ok((Content::read(&mut file)?, file))
    };
    let (mut content, mut file) = open().unwrap();
    let cpu = &Device::Cpu;
    // One token at a time: the models return logits of the last.
    let step = |forward: &mut dyn FnMut(&Tensor, usize) -> candle_core::Result<Tensor>| {
        let one = |(at, token): (usize, &u32)| forward(&Tensor::new(&[[*token]], cpu)?, at)?.flatten_all();
        Tensor::cat(&tokens.iter().enumerate().map(one).collect::<candle_core::Result<Vec<_>>>()?, 0)
    };
    match name {
        "llama" => {
            let mut model = quantized_llama::ModelWeights::from_gguf(content, &mut file, cpu)?;
            step(&mut |ids, at| model.forward(ids, at))
        }
        "qwen2_plain" => {
            let mut model = quantized_qwen2::ModelWeights::from_gguf(content, &mut file, cpu)?;
            step(&mut |ids, at| model.forward(ids, at))
        }
        "qwen3" => {
            // Without this key, Candle rounds the tables of rotary embeddings to f16: logits differ by 5.5e-3.
            content.metadata.insert("general.dtype".into(), Value::U32(0));
            let mut model = quantized_qwen3::ModelWeights::from_gguf(content, &mut file, cpu)?;
            step(&mut |ids, at| model.forward(ids, at))
        }
        _ => {
            let mut model = quantized_phi3::ModelWeights::from_gguf(false, content, &mut file, cpu)?;
            step(&mut |ids, at| model.forward(ids, at))
        }
    }
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
    let printed = script("interop/interop.py", &[program("fsdp-ckpt"), "convert".into()]);
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
    let (name, dir) = ("llama3_tiny", tempfile::tempdir().unwrap());
    // With Muon, PyTorch's own runs on one rank and on two differ by 6e-5.
    let runs = [
        ("run_sgd", "--lr 5e-2 --optimizer sgd --nesterov on", 2e-5),
        ("run_adam", "--optimizer adam", 2e-5),
        ("run_muon", "--optimizer muon", 4e-4),
    ];
    let recorded = |run: &str| Trajectory::recorded(name, run).after(10);
    let train = |flags: &str, own: &Path| {
        let flags = format!("--no-decay *norm*.weight,norm.weight {flags}");
        fs::create_dir_all(own).unwrap();
        golden_trajectory(name, 2, &flags, own)
    };
    for (run, flags, _) in runs {
        let saved = format!("saved/{name}/{run}");
        let to = dir.path().join(&saved).display().to_string();
        train(&format!("--steps 10 {flags} --checkpoint-dir {to}"), &dir.path().join(run));
        convert_step_10(&format!("{name}/{run}"), dir.path());
    }
    // PyTorch takes the learning rates from the checkpoint.
    let (classic, out) = (dir.path().join("classic"), dir.path().join("theirs"));
    let names = runs.map(|(run, ..)| run);
    let from = ["--from", classic.to_str().unwrap()];
    record_on_two_ranks(&out, &[&["--models", name, "--runs"], &names[..], &from].concat());
    for (run, _, near) in runs {
        let theirs = Trajectory::of_record(&out.join(name).join(run).with_extension("json"));
        let difference = theirs.difference(&recorded(run));
        assert!(difference.max() < near, "{run}, there: {difference:?}");
    }
    // PyTorch's SGD does not save the step, which `train` needs.
    record_on_two_ranks(&out, &[&["--models", name, "--runs"], &names[1..], &["--save", "10"]].concat());
    for (run, flags, near) in &runs[1..] {
        let theirs = out.join(name).join(format!("{run}-step-10"));
        let resume = format!("{flags} --resume {} --checkpoint-dir resumed", theirs.display());
        let ours = train(&resume, &dir.path().join("resumed").join(run));
        let difference = ours.difference(&recorded(run));
        assert!(difference.max() < *near, "{run}, here: {difference:?}");
    }
}

fn transformers_reads_exports() {
    let dir = tempfile::tempdir().unwrap();
    let mut pairs = vec![];
    for name in [MODELS[0], MODELS[1], "bert_tiny"] {
        let dir = dir.path().join(name);
        let theirs = dir.join("theirs");
        fs::create_dir_all(&theirs).unwrap();
        fs::copy(golden(name).join("config.json"), theirs.join("config.json")).unwrap();
        let weights = theirs.join("model.safetensors");
        let tokens = if name == "bert_tiny" {
            train_golden(name, 2, "--export-hf export", &dir).ok();
            fs::copy(golden(name).join("final.safetensors"), weights).unwrap();
            golden("tokens.bin")
        } else {
            train_ten_steps(name, "--export-hf export", &dir);
            convert(&golden(name).join("dcp_step10"), &theirs.join("weights"), "hf", &dir);
            fs::copy(theirs.join("weights/model.safetensors"), weights).unwrap();
            golden(name).join("tokens.bin")
        };
        pairs.extend([dir.join("export"), theirs, tokens]);
    }
    let printed = script("interop/export.py", &pairs);
    assert_eq!(printed.matches("ok  ").count(), 3, "{printed}");
}

/// Mixtures whose experts lived on four ranks, then on one.
fn transformers_has_the_logits_of_trained_mixtures() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = golden("tokens.bin");
    let ids: Vec<u32> =
        fs::read(&tokens).unwrap().chunks(2).map(|id| u16::from_le_bytes([id[0], id[1]]).into()).collect();
    let mut compared = vec![];
    for name in ["qwen3_moe_tiny", "deepseek_v2_tiny", "deepseek_v3_tiny", "gpt_oss_tiny"] {
        let dir = dir.path().join(name);
        fs::create_dir(&dir).unwrap();
        let flags = "--batch-size 2 --steps 10 --expert-parallel 4 --checkpoint-dir saved";
        train_golden(name, 4, flags, &dir).ok();
        train_golden(name, 1, "--resume saved/step-00000010 --export-hf export", &dir).ok();
        let logits = logits(&dir.join("export"), &ids[..4 * 32]);
        let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
        fs::write(dir.join("logits"), bytes).unwrap();
        compared.extend([dir.join("export"), tokens.clone(), dir.join("logits")]);
    }
    let printed = script("interop/logits.py", &compared);
    println!("{printed}");
    assert_eq!(printed.matches("ok  ").count(), 4, "{printed}");
}

/// Returns the logits of a model in a directory for four sequences.
fn logits(directory: &Path, ids: &[u32]) -> Vec<f32> {
    let (world, mut config) = (World::single().unwrap(), ModelConfig::from_dir(directory).unwrap());
    let weights = Weights::open(directory, &mut config, Head::Vocabulary).unwrap().unwrap();
    let vars = ShardedVarMap::of_world(&world).unwrap();
    vars.init_with(weights.initializer()).unwrap();
    let (checkpoints, dropout) = (CheckpointPolicy::none(), Dropout::default());
    let options = ModelOptions { dtype: DType::F32, positions: 32, checkpoints, dropout, parallel: None };
    let model = build(&config, &FullyShard::new(&vars), &vars, options).unwrap();
    let ids = Tensor::new(ids, &Device::Cpu).unwrap().reshape((4, ())).unwrap();
    let logits = model.call_with(ids, |model, ids| model.forward(&ids)).unwrap();
    logits.flatten_all().unwrap().to_vec1().unwrap()
}

/// PEFT loads exported adapters, and `train` loads PEFT's. Both have the same loss on the same data.
fn adapters_go_both_ways() {
    let dir = tempfile::tempdir().unwrap();
    let mut commands = vec![];
    for name in MODELS {
        let (dir, model) = (dir.path().join(name), golden(name));
        let (ours, theirs, tokens) = (dir.join("ours"), dir.join("theirs"), model.join("tokens.bin"));
        fs::create_dir(&dir).unwrap();
        train_ten_steps(name, "--lora-rank=3 --lora-targets=all-linear --export-hf=ours", &dir);
        let next = || PathBuf::from("+");
        commands.extend([next(), "make".into(), model.clone(), theirs.clone()]);
        for from in [ours, theirs] {
            commands.extend([next(), "loss".into(), model.clone(), from, tokens.clone()]);
        }
    }
    let printed = script("interop/adapters.py", &commands);
    let mut lines = printed.lines();
    for name in MODELS {
        for from in ["ours", "theirs"] {
            let (theirs, names): (f64, Vec<String>) = serde_json::from_str(lines.next().unwrap()).unwrap();
            let flags = format!("--steps 1 --lora-from {from}");
            let ours = golden_trajectory(name, 2, &flags, &dir.path().join(name)).0[0].loss;
            assert!((ours / theirs - 1.).abs() < 2e-6, "{name}, {from}: {ours} here, {theirs} there");
            // Seven linear layers in each of Llama's two blocks, four in each of GPT-2's, two matrices each.
            assert_eq!(names.len(), if name == "llama_tiny" { 28 } else { 16 }, "{names:?}");
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
    let models = [("llama_tiny", &[][..]), ("gpt2_tiny", &of_gpt2)];
    let dir = tempfile::tempdir().unwrap();
    let mut commands: Vec<PathBuf> = vec![];
    for (name, kinds) in models {
        let model = golden(name);
        let tokens = model.join("tokens.bin");
        commands.extend(["+".into(), "kinds".into(), model, dir.path().join(name), tokens]);
        commands.extend(kinds.iter().map(PathBuf::from));
    }
    let printed = script("interop/adapters.py", &commands);
    for ((name, kinds), line) in models.into_iter().zip(printed.lines()) {
        let dir = dir.path().join(name);
        let losses: serde_json::Map<String, serde_json::Value> = serde_json::from_str(line).unwrap();
        assert_eq!(losses.len(), if kinds.is_empty() { 9 + refused.len() } else { kinds.len() });
        for (kind, theirs) in &losses {
            let run = train_golden(name, 2, &format!("--steps 1 --lora-from {kind}"), &dir);
            if let Some((_, key)) = refused.iter().find(|(refused, _)| refused == kind) {
                run.refused(2, &[&format!("adapter_config.json: {key} is ")]);
                continue;
            }
            run.ok();
            let ours = Trajectory::of_metrics(&dir.join("metrics.jsonl")).0[0].loss;
            let theirs = theirs.as_f64().unwrap();
            assert!((ours / theirs - 1.).abs() < 2e-6, "{name}, {kind}: {ours} here, {theirs} there");
        }
    }
}

/// `record.py` reproduces the files in `tests/golden`. Other processors round differently in half precision, and
/// weights may get other 8-bit codes.
fn recorded_runs_are_reproduced() {
    let out = tempfile::tempdir().unwrap();
    record_on_two_ranks(out.path(), &[&["--models"][..], &MODELS, &FAMILIES].concat());
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
    script("interop/surface.py", &["--check"]);
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
