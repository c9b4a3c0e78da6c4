//! `train` on several hosts with a network and a shared file system.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use fsdp_test_support::{Run, golden, golden_flags, launch, program, run, trajectory::Trajectory};
use libtest_mimic::Trial;

use crate::need::{Need, trials};
use crate::way::Way;

const NEEDS: &[Need] = &[Need::Networks, Need::Mpi];
/// Much longer than a test takes.
const LIMIT: Duration = Duration::from_secs(300);

pub(crate) fn trials() -> Vec<Trial> {
    let mut all =
        trials![&[Need::Networks] => ranks_without_mpi_reproduce_recorded_runs: || reproduces(Way::WithoutMpi)];
    all.extend(trials![NEEDS =>
        open_mpi_reproduces_recorded_runs: || reproduces(Way::OpenMpi),
        mpich_reproduces_recorded_runs: || reproduces(Way::Mpich),
        fsdp_launch_reproduces_recorded_runs: || reproduces(Way::Ours),
        four_hosts_reproduce_a_recorded_run,
        slow_networks_keep_the_bits_and_carry_the_expected_bytes,
        a_host_without_the_shared_directory_is_named,
    ]);
    all
}

/// Returns the flags of a recorded run on `ranks` ranks.
fn flags(name: &str, ranks: usize) -> Vec<String> {
    let mut flags = golden_flags(name);
    flags.extend(["--batch-size".into(), (4 / ranks).to_string(), "--metrics".into(), "metrics.jsonl".into()]);
    flags
}

fn train(
    way: Way,
    options: &[&str],
    hosts_and_ranks: (usize, usize),
    prefix: &[&str],
    more: &[&str],
    flags: &[String],
    dir: &Path,
) -> Run {
    let program = program("train");
    let args: Vec<&str> = prefix
        .iter()
        .copied()
        .chain([program.to_str().unwrap()])
        .chain(flags.iter().map(String::as_str))
        .chain(more.iter().copied())
        .collect();
    run(way.start(options, hosts_and_ranks, &[], &args, dir), LIMIT)
}

/// Returns the same run on one host, over shared memory.
fn on_one_host(name: &str, ranks: usize) -> Trajectory {
    static KNOWN: Mutex<BTreeMap<(String, usize), Trajectory>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.entry((name.to_string(), ranks)).or_insert_with(|| launched(ranks, &flags(name, ranks))).clone()
}

fn launched(ranks: usize, flags: &[String]) -> Trajectory {
    let dir = tempfile::tempdir().unwrap();
    launch(ranks, "train", &flags.iter().map(String::as_str).collect::<Vec<_>>(), dir.path()).ok();
    Trajectory::of_metrics(&dir.path().join("metrics.jsonl"))
}

/// Returns the bytes that node1 has sent, as `--count` prints them.
fn sent(run: &Run) -> u64 {
    let sent = run.stderr.lines().filter_map(|line| line.strip_prefix("node1 sent ")?.split(' ').next());
    let sent: Vec<u64> = sent.map(|bytes| bytes.parse().unwrap()).collect();
    assert_eq!(sent.len(), 1, "{run:?}");
    sent[0]
}

/// Losses and norms are near the recorded run's and have the bits of one host. One rank resumes from the shared
/// checkpoint.
fn reproduces(way: Way) {
    // The messages depend on the model, and not on the launcher.
    let names = if way == Way::OpenMpi { &["llama_tiny", "gpt2_tiny"][..] } else { &["llama_tiny"] };
    for &name in names {
        for ranks_a_host in [1, 2] {
            let ranks = 2 * ranks_a_host;
            let dir = tempfile::tempdir().unwrap();
            let saves = ["--checkpoint-dir", "saved", "--save-every", "10"];
            let run = train(way, &["--count"], (2, ranks_a_host), &[], &saves, &flags(name, ranks), dir.path()).ok();
            let ours = Trajectory::of_metrics(&dir.path().join("metrics.jsonl"));
            let difference = ours.difference(&Trajectory::recorded(name, "run"));
            assert!(difference.max() < 2e-5, "{way:?}, {name}, 2 hosts of {ranks_a_host}: {difference:?}");
            assert_eq!(ours, on_one_host(name, ranks), "{way:?}, {name}, 2 hosts of {ranks_a_host}");
            // The ranks did not communicate through this machine's memory.
            let size = fs::metadata(golden(name).join("model.safetensors")).unwrap().len();
            assert!(sent(&run) > 20 * size / 2, "for a model of {size}: {run:?}");

            if ranks > 2 && name == "llama_tiny" && way != Way::WithoutMpi {
                // Without the hierarchy, each rank sends to every other rank.
                let (dir, flat) = (tempfile::tempdir().unwrap(), ["env", "FSDP_HIERARCHY=0"]);
                train(way, &[], (2, ranks_a_host), &flat, &[], &flags(name, ranks), dir.path()).ok();
                assert_eq!(ours, Trajectory::of_metrics(&dir.path().join("metrics.jsonl")), "{way:?}, flat");
            }
            if ranks > 2 {
                let mut flags = flags(name, 1);
                flags.extend(["--resume".into(), dir.path().join("saved/step-00000010").display().to_string()]);
                let difference = launched(1, &flags).difference(&Trajectory::recorded(name, "run").after(10));
                assert!(difference.max() < 2e-5, "{way:?}, {name}, resumed on one host: {difference:?}");
            }
        }
    }
}

fn four_hosts_reproduce_a_recorded_run() {
    let dir = tempfile::tempdir().unwrap();
    train(Way::OpenMpi, &[], (4, 1), &[], &[], &flags("llama_tiny", 4), dir.path()).ok();
    let ours = Trajectory::of_metrics(&dir.path().join("metrics.jsonl"));
    let difference = ours.difference(&Trajectory::recorded("llama_tiny", "run"));
    assert!(difference.max() < 2e-5, "{difference:?}");
    assert_eq!(ours, on_one_host("llama_tiny", 4));
}

/// A rank gathers each unit in forward, gathers each except the root again in backward, and reduces each once. Each
/// collective sends half of the unit to the other rank.
fn slow_networks_keep_the_bits_and_carry_the_expected_bytes() {
    const CONFIG: &str = r#"{"model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048,
        "max_position_embeddings": 64}"#;
    let (hidden, inner, layers, key_values, vocabulary) = (256, 512, 4, 128, 2048);
    let root = 2 * vocabulary * hidden + hidden;
    let block = 2 * hidden * hidden + 2 * key_values * hidden + 3 * hidden * inner + 2 * hidden;
    let parameters = 2 * root + 3 * layers * block;
    let a_step = (parameters * size_of::<f32>() / 2) as u64;

    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), CONFIG).unwrap();
    let model = dir.path().display().to_string();
    let data = golden("llama_tiny").join("tokens.bin").display().to_string();
    let flags = |steps: &str| {
        let flags = ["--model", &model, "--data", &data, "--init", "random", "--seq-len", "32", "--batch-size", "2"];
        flags.into_iter().chain(["--metrics", "metrics.jsonl", "--steps", steps]).map(String::from).collect::<Vec<_>>()
    };
    // Both runs also send checkpoint plans and the sample's gathers.
    let of_steps = |steps: &str| {
        let options = ["--rate", "1gbit", "--count"];
        sent(&train(Way::OpenMpi, &options, (2, 1), &[], &[], &flags(steps), dir.path()).ok())
    };
    let few = of_steps("2");
    fs::remove_file(dir.path().join("metrics.jsonl")).unwrap();
    let many = of_steps("8");
    let carried = (many - few) / 6;
    let share = carried as f64 / a_step as f64;
    // TCP adds headers and retransmissions.
    assert!((0.97..1.1).contains(&share), "{carried} bytes a step, and {a_step} by the formula: {share}");
    println!("{carried} bytes a step and rank on the network, {a_step} by the formula: {share:.4}");
    assert_eq!(Trajectory::of_metrics(&dir.path().join("metrics.jsonl")), launched(2, &flags("8")));
}

fn a_host_without_the_shared_directory_is_named() {
    for way in [Way::OpenMpi, Way::Mpich, Way::Ours] {
        let dir = tempfile::tempdir().unwrap();
        let saved = dir.path().join("saved");
        fs::create_dir(&saved).unwrap();
        let local = ["--local", saved.to_str().unwrap()];
        let args = ["--checkpoint-dir", "saved"];
        let run = train(way, &local, (2, 1), &[], &args, &flags("llama_tiny", 2), dir.path());
        let text = format!("{}\n{}", run.stdout, run.stderr);
        let parts = [
            "rank 1 failed to write a file there",
            "can't write to --checkpoint-dir saved",
            "on a file system that all hosts share",
        ];
        assert!(run.code != Some(0) && parts.iter().all(|part| text.contains(part)), "{way:?}: {text}");
        assert!(!dir.path().join("metrics.jsonl").exists(), "{way:?}: {text}");
    }
}
