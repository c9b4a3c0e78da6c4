//! Bad input ends every rank at once, with an error that names the thing and the way out; nothing stays behind.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fsdp_test_support::{Run, golden, launch, program, run};

/// A copy of the golden Llama in `dir/model` that a test may spoil.
fn model(dir: &Path) -> std::path::PathBuf {
    let model = dir.join("model");
    fs::create_dir(&model).unwrap();
    for file in ["config.json", "model.safetensors", "tokens.bin"] {
        fs::copy(golden("llama_tiny").join(file), model.join(file)).unwrap();
    }
    model
}

/// Trains on two ranks with these arguments added. Both ranks must say what is wrong, in these words.
fn fails(dir: &Path, args: &[&str], parts: &[&str]) {
    let mut all = args.to_vec();
    for (flag, value) in
        [("--steps", "2"), ("--batch-size", "1"), ("--seq-len", "32"), ("--checkpoint-dir", "checkpoints")]
    {
        if !args.contains(&flag) {
            all.extend([flag, value]);
        }
    }
    let run = launch(2, "train", &all, dir);
    let elapsed = run.elapsed;
    let text = run.refused(2, parts);
    assert!(elapsed < Duration::from_secs(30), "took {elapsed:?}");
    // The launcher's summary has it as well.
    let (_, summary) = text.split_once("it recorded: ").unwrap_or_else(|| panic!("nothing was recorded:\n{text}"));
    assert!(parts.iter().all(|part| summary.contains(part)), "{parts:?} not in the summary\n{text}");
    assert!(args.contains(&"--checkpoint-dir") || !dir.join("checkpoints").exists(), "a failed run left checkpoints");
}

fn with_model(spoil: impl Fn(&Path), args: &[&str], parts: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    spoil(&model);
    let mut all = vec!["--model", "model", "--data", "model/tokens.bin"];
    all.extend(args);
    fails(dir.path(), &all, parts);
}

fn edit(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from));
    fs::write(path, text.replace(from, to)).unwrap();
}

/// Rewrites the header of the weights file, keeping the data.
fn edit_weights(model: &Path, from: &str, to: &str) {
    let path = model.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap();
    assert!(header.contains(from), "{header}");
    let header = header.replace(from, to);
    let mut new = (header.len() as u64).to_le_bytes().to_vec();
    new.extend(header.as_bytes());
    new.extend(&bytes[8 + length..]);
    fs::write(path, new).unwrap();
}

#[test]
fn a_model_directory_without_config() {
    with_model(
        |model| fs::remove_file(model.join("config.json")).unwrap(),
        &[],
        &["model/config.json", "Hugging Face model directory"],
    );
}

#[test]
fn an_unknown_architecture() {
    with_model(
        |model| edit(&model.join("config.json"), "\"llama\"", "\"mamba\""),
        &[],
        &["\"mamba\" is not known", "known are llama, mistral, ", ", gpt2"],
    );
}

#[test]
fn a_mask_that_is_not_there_or_not_wanted() {
    let bert = |model: &Path| {
        for file in ["config.json", "model.safetensors"] {
            fs::copy(golden("bert_tiny").join(file), model.join(file)).unwrap();
        }
    };
    with_model(bert, &[], &["needs a mask token", "\"[MASK]\"", "--mask-token ID"]);
    with_model(bert, &["--mask-token", "137"], &["--mask-token 137", "137 ids, 0 to 136"]);
    for flag in [["--mask-token", "3"], ["--mlm-probability", "0.1"]] {
        with_model(|_| (), &flag, &[flag[0], "masked language models", "leave it out"]);
    }
}

#[test]
fn a_missing_weight() {
    with_model(
        |model| edit_weights(model, "model.norm.weight", "model.xorm.weight"),
        &[],
        &["model.norm.weight", "has no tensor", "config.json"],
    );
}

#[test]
fn a_weight_of_the_wrong_shape() {
    with_model(
        |model| edit(&model.join("config.json"), "\"intermediate_size\": 87", "\"intermediate_size\": 88"),
        &[],
        &["proj.weight", "[88, 32]", "[87, 32]"],
    );
}

#[test]
fn a_weight_of_the_wrong_dtype() {
    // The norm's 32 floats as 64 unsigned 16-bit numbers would not fit any parameter.
    with_model(
        |model| {
            edit_weights(model, "\"model.norm.weight\":{\"dtype\":\"F32\"", "\"model.norm.weight\":{\"dtype\":\"U32\"")
        },
        &[],
        &["model.norm.weight", "U32", "F32"],
    );
}

#[test]
fn a_file_that_is_no_safetensors() {
    with_model(
        |model| fs::write(model.join("model.safetensors"), "not at all").unwrap(),
        &[],
        &["model.safetensors", "not a whole safetensors file"],
    );
}

#[test]
fn weights_that_are_not_there() {
    with_model(
        |model| fs::remove_file(model.join("model.safetensors")).unwrap(),
        &["--init", "pretrained"],
        &["model.safetensors", "--init random"],
    );
}

#[test]
fn token_ids_beyond_the_vocabulary() {
    with_model(
        |model| {
            let mut tokens = fs::read(model.join("tokens.bin")).unwrap();
            tokens[200..202].copy_from_slice(&131u16.to_le_bytes());
            fs::write(model.join("tokens.bin"), tokens).unwrap();
        },
        &[],
        &["131", "tokens.bin", "vocab"],
    );
}

#[test]
fn data_shorter_than_one_batch() {
    with_model(|model| fs::write(model.join("tokens.bin"), [1, 0, 2, 0]).unwrap(), &[], &["tokens.bin", "--seq-len"]);
}

#[test]
fn data_that_is_not_there() {
    with_model(|model| fs::remove_file(model.join("tokens.bin")).unwrap(), &[], &["tokens.bin"]);
}

#[test]
fn a_checkpoint_that_is_incomplete() {
    let dir = tempfile::tempdir().unwrap();
    model(dir.path());
    fs::create_dir(dir.path().join("half")).unwrap();
    fails(
        dir.path(),
        &["--model", "model", "--data", "model/tokens.bin", "--resume", "half"],
        &["half has no checkpoint", "no checkpoint.json (did the save finish?)"],
    );
}

#[test]
fn a_checkpoint_that_is_damaged() {
    let dir = tempfile::tempdir().unwrap();
    model(dir.path());
    let args = ["--model", "model", "--data", "model/tokens.bin", "--seq-len", "32", "--batch-size", "1"];
    launch(3, "train", &[&args[..], &["--steps", "1", "--checkpoint-dir", "other"]].concat(), dir.path()).ok();
    // A bit in the middle of a file, resumed at another number of ranks, where no rank reads a whole chunk.
    let file = dir.path().join("other/step-00000001/shard-00002-model-00001-of-00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).unwrap();
    let resume = ["--steps", "2", "--checkpoint-dir", "checkpoints", "--resume", "other/step-00000001"];
    let text = launch(2, "train", &[&args[..], &resume].concat(), dir.path()).failed();
    assert!(text.contains("shard-00002") && text.contains("is damaged"), "{text}");
}

#[test]
fn a_checkpoint_of_another_model() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let args = ["--model", "model", "--data", "model/tokens.bin", "--seq-len", "32", "--batch-size", "1"];
    launch(2, "train", &[&args[..], &["--steps", "1", "--checkpoint-dir", "other"]].concat(), dir.path()).ok();
    edit(&model.join("config.json"), "\"intermediate_size\": 87", "\"intermediate_size\": 88");
    let other = ["--model", "model", "--init", "random", "--data", "model/tokens.bin"];
    let changed = ["config.json's intermediate_size: it was 87, and is 88", "--resume-anyway"];
    let from = ["--resume", "other/step-00000001"];
    fails(dir.path(), &[&other[..], &from].concat(), &changed);
    let shapes = ["proj.weight", "[32, 87]", "[32, 88]"];
    fails(dir.path(), &[&other[..], &from, &["--resume-anyway"]].concat(), &shapes);
    // That is no damage: `auto` does not go on from an older one.
    fails(dir.path(), &[&other[..], &["--resume", "auto", "--checkpoint-dir", "other"]].concat(), &changed);
    assert!(dir.path().join("other/step-00000001/checkpoint.json").exists());
}

#[test]
fn a_sequence_longer_than_the_model_and_a_device_that_is_not_there() {
    with_model(|_| (), &["--seq-len", "129"], &["--seq-len 129", "128 positions"]);
    with_model(|_| (), &["--device", "cuda"], &["this build has no CUDA", "--features cuda", "choose the CPU"]);
}

/// The golden Llama in `dir/model` trained to step 2, with a checkpoint of every step in `dir/saved`.
fn trained(dir: &Path) {
    model(dir);
    let args = ["--model", "model", "--data", "model/tokens.bin", "--seq-len", "32", "--batch-size", "1"];
    let save = ["--steps", "2", "--save-every", "1", "--checkpoint-dir", "saved"];
    launch(2, "train", &[&args[..], &save].concat(), dir).ok();
}

#[test]
fn what_is_in_the_way_of_a_checkpoint_shows_before_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    trained(dir.path());
    let common =
        ["--model", "model", "--data", "model/tokens.bin", "--checkpoint-dir", "saved", "--metrics", "steps.jsonl"];
    let fails = |more: &[&str], parts: &[&str]| {
        fails(dir.path(), &[&common[..], more].concat(), parts);
        assert!(!dir.path().join("steps.jsonl").exists(), "the run had begun");
    };
    fails(&[], &["saved/step-00000002 is a checkpoint of an earlier run", "--resume auto"]);
    // Going back a step would write over the one after it.
    fails(
        &["--resume", "saved/step-00000001", "--steps", "9", "--save-every", "1"],
        &["saved/step-00000002 is in the way", "a checkpoint of an earlier run", "another --checkpoint-dir"],
    );
    // Half of a checkpoint, in the way of an intermediate step and of the last. (With `auto` it is set aside:
    // tests/resume.rs.)
    fs::create_dir(dir.path().join("saved/step-00000006")).unwrap();
    for more in [["--steps", "9", "--save-every", "3"], ["--steps", "6", "--save-every", "0"]] {
        fails(
            &[&["--resume", "saved/step-00000002"][..], &more].concat(),
            &["saved/step-00000006 is in the way", "step 6", "did not finish", "remove it"],
        );
    }
    // No checkpoint at all, also for `auto`.
    fs::remove_dir(dir.path().join("saved/step-00000006")).unwrap();
    fs::write(dir.path().join("saved/step-00000006"), "").unwrap();
    fails(&["--resume", "auto", "--steps", "6"], &["saved/step-00000006 is in the way", "step 6", "remove it"]);
}

#[test]
fn an_export_that_would_overwrite_weights_shows_before_the_first_step() {
    with_model(|_| (), &["--export-hf", "model"], &["--export-hf model", "holds weights already", "another directory"]);
}

#[test]
fn curves_that_can_not_be_written_show_before_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    for logs in ["file", "file/below"] {
        let expected = format!("can't write --tensorboard {logs}");
        fails(dir.path(), &["--data", "file", "--tensorboard", logs], &[&expected, "irectory"]);
    }
}

#[test]
fn runs_at_the_same_time_have_directories_of_their_own_and_failed_ones_leave_none() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let args =
        ["--model", "model", "--data", "model/tokens.bin", "--seq-len", "32", "--batch-size", "1", "--steps", "1"];
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| launch(2, "train", &args, dir.path()).ok());
        }
    });
    for run in ["run-001", "run-002"] {
        assert!(dir.path().join("checkpoints").join(run).join("step-00000001/checkpoint.json").exists());
    }
    fs::remove_file(model.join("config.json")).unwrap();
    let text = launch(2, "train", &args, dir.path()).failed();
    // Sent SIGTERM, rank 0 can't clean up.
    assert!(!dir.path().join("checkpoints/run-003").exists() || text.contains("rank 0: ended by SIGTERM"), "{text}");
}

/// A launcher that ends with the test, however that ends.
struct Job(Child);

impl Drop for Job {
    fn drop(&mut self) {
        // Once it has ended there is nothing to kill.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether a process has joined a group: each has a thread that is named after it.
fn has_progress_thread(id: &u32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    tasks
        .filter_map(|task| fs::read_to_string(task.path().join("comm")).ok())
        .any(|name| name.starts_with("fsdp world:"))
}

/// Processes of this test's run, by the directory that they work in.
fn processes_in(dir: &Path) -> Vec<u32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries
        .filter_map(|entry| {
            let id = entry.file_name().to_str()?.parse().ok()?;
            (fs::read_link(entry.path().join("cwd")).ok()? == dir).then_some(id)
        })
        .collect()
}

#[test]
fn one_rank_that_dies_ends_the_others_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let work = dir.path().canonicalize().unwrap();
    model(&work);
    let job = Command::new(program("fsdp-launch"))
        .arg("--nproc-per-node=3")
        .arg(program("train"))
        .args([
            "--model",
            "model",
            "--data",
            "model/tokens.bin",
            "--seq-len",
            "32",
            "--batch-size",
            "1",
            "--steps",
            "1000000",
        ])
        .current_dir(&work)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut job = Job(job);
    let variable = |id: &u32, name: &str| {
        let environment = fs::read(format!("/proc/{id}/environ")).unwrap_or_default();
        let values = environment.split(|&byte| byte == 0);
        let prefix = format!("{name}=");
        values.filter_map(|var| std::str::from_utf8(var).ok()?.strip_prefix(&prefix).map(str::to_owned)).next()
    };
    // Once all ranks run with their progress threads, one of them dies.
    let start = Instant::now();
    let victim = loop {
        assert!(start.elapsed() < Duration::from_secs(60), "the ranks did not start");
        let running: Vec<u32> = processes_in(&work).into_iter().filter(has_progress_thread).collect();
        if running.len() == 3 {
            break running.into_iter().find(|id| variable(id, "RANK").as_deref() == Some("1")).unwrap();
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let port = variable(&victim, "MASTER_PORT").unwrap();
    let killed = Instant::now();
    assert!(Command::new("kill").args(["-9", &victim.to_string()]).status().unwrap().success());
    let status = loop {
        match job.0.try_wait().unwrap() {
            Some(status) => break status,
            None if killed.elapsed() > Duration::from_secs(10) => panic!("the others still ran 10 s after rank 1 died"),
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    assert_eq!(status.code(), Some(128 + 9));
    let mut text = String::new();
    std::io::Read::read_to_string(&mut job.0.stderr.take().unwrap(), &mut text).unwrap();
    assert!(text.contains("rank 1") && text.contains("SIGKILL"), "{text}");
    assert!(processes_in(&work).is_empty());
    // Memory is shared through descriptors and ends with the processes; the address at which the ranks met has a name.
    let sockets = fs::read_to_string("/proc/net/unix").unwrap();
    let ours = sockets.lines().filter(|line| line.contains("@fsdp-") && line.contains(&format!("-{port}-")));
    assert_eq!(ours.collect::<Vec<_>>(), [""; 0]);
}

/// Runs one rank of two by itself, without a launcher.
fn alone(rank: usize, port: u16, more: &[(&str, &str)], dir: &Path) -> Run {
    let mut command = Command::new(program("train"));
    command.args(["--steps", "1"]).current_dir(dir).env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
    command.env("LOCAL_RANK", rank.to_string()).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.env("TORCHELASTIC_RUN_ID", format!("alone {}", std::process::id())).env_remove("RUST_LOG");
    command.envs(more.iter().copied());
    run(command, Duration::from_secs(60))
}

#[test]
fn a_rank_that_waits_for_the_others_says_for_whom() {
    let dir = tempfile::tempdir().unwrap();
    for rank in [0, 1] {
        let port = 29_540 + rank as u16;
        let stderr = alone(rank, port, &[("FSDP_TIMEOUT_S", "9")], dir.path()).failed();
        let told = format!("rank {rank} waits for rank(s) {} at 127.0.0.1:{port}, for ", 1 - rank);
        assert_eq!(stderr.matches(&told).count(), 1, "{stderr}");
        assert!(stderr.contains("Error: can't join the other ranks: "), "{stderr}");
    }
}

#[test]
fn errors_of_the_user_come_without_a_backtrace() {
    let dir = tempfile::tempdir().unwrap();
    let backtraces = ("RUST_BACKTRACE", "1");
    let errors = dir.path().join("error.json");
    let recorded = ("TORCHELASTIC_ERROR_FILE", errors.to_str().unwrap());
    let stderr = alone(0, 29_542, &[("FSDP_TIMEOUT_S", "0.1"), backtraces, recorded], dir.path()).failed();
    assert!(stderr.lines().count() == 1 && stderr.contains("did not arrive"), "{stderr}");
    let error: serde_json::Value = serde_json::from_slice(&fs::read(&errors).unwrap()).unwrap();
    assert_eq!(format!("Error: {}", error["message"]["message"].as_str().unwrap()), stderr.trim_end());

    // An error that comes through Candle, and has a backtrace in its words.
    let model = model(dir.path());
    edit_weights(&model, "model.norm.weight", "model.xorm.weight");
    for args in [
        &["train", "--model", "model", "--data", "model/tokens.bin", "--seq-len", "32"][..],
        &["train", "--data", "gone"],
    ] {
        let mut command = Command::new(program(args[0]));
        command.args(&args[1..]).current_dir(dir.path()).envs([backtraces]);
        let stderr = run(command, Duration::from_secs(60)).failed();
        assert!(stderr.contains("Error: ") && !stderr.contains("   0: "), "{stderr}");
    }
    let mut command = Command::new(program("fsdp-ckpt"));
    let stderr = run(
        {
            command.args(["verify", "gone"]).envs([backtraces]);
            command
        },
        Duration::from_secs(60),
    )
    .failed();
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}
