//! `train` with names on the hub, whose server is this test: ranks of a host download once, and none waits for ever.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::hub::{Answer, Hub};
use fsdp_test_support::{Run, golden, json_lines, program, run};

/// A hub with a recorded model and its tokens.
fn hub() -> Hub {
    let read = |name: &str| fs::read(golden("llama_tiny").join(name)).unwrap();
    Hub::start([
        ("org/llama/config.json", read("config.json")),
        ("org/llama/model.safetensors", read("model.safetensors")),
        ("org/llama/pytorch_model.bin", vec![0; 1000]),
        ("datasets/org/tokens/data/tokens.bin", read("tokens.bin")),
    ])
}

const NAMES: &str = "--model org/llama --data org/tokens:data/tokens.bin";
const FLAGS: &str = "--seq-len 32 --batch-size 1 --steps 1 --checkpoint-dir saved";

/// Runs a script as each of `ranks` ranks. `$0` is the path of `train`.
fn launch(hub: &Hub, ranks: usize, script: &str, dir: &Path) -> Run {
    let mut command = Command::new(program("fsdp-launch"));
    command.arg(format!("--nproc-per-node={ranks}")).args(["/bin/sh", "-c", script]).arg(program("train"));
    command.env("HF_ENDPOINT", hub.endpoint()).env("HF_HOME", dir.join("home")).env("NO_PROXY", "127.0.0.1");
    command.current_dir(dir);
    run(command, Duration::from_secs(240))
}

fn train(hub: &Hub, ranks: usize, flags: &str, dir: &Path) -> Run {
    launch(hub, ranks, &format!("exec \"$0\" {FLAGS} {flags}"), dir)
}

#[test]
fn eight_ranks_download_once_and_train_as_from_paths() {
    let (hub, dir) = (hub(), tempfile::tempdir().unwrap());
    let named = train(&hub, 8, &format!("{NAMES} --metrics named.jsonl"), dir.path()).ok();
    assert!(named.stderr.contains("of org/llama@main and others from 127.0.0.1:"), "{}", named.stderr);
    let requests = hub.requests();
    let sent = |part: &str| requests.iter().filter(|one| one.method == "GET" && one.path.contains(part)).count();
    let blobs = requests.iter().filter(|request| request.is_cdn).count();
    assert_eq!((sent("config.json"), blobs, sent("tokens.bin"), sent("pytorch")), (1, 1, 1, 0), "{requests:?}");

    fs::remove_dir_all(dir.path().join("saved")).unwrap();
    let model = golden("llama_tiny");
    let paths = format!("--model {0} --data {0}/tokens.bin --metrics paths.jsonl", model.display());
    train(&hub, 8, &paths, dir.path()).ok();
    let loss = |file: &str| json_lines(&dir.path().join(file))[0]["loss"].as_f64().unwrap();
    assert_eq!(loss("named.jsonl"), loss("paths.jsonl"));
    assert!(hub.requests().is_empty(), "a path was looked up on the hub");

    // Adapters name the model, not the path in the cache.
    fs::remove_dir_all(dir.path().join("saved")).unwrap();
    let stderr = train(&hub, 2, &format!("{NAMES} --lora-rank 2 --export-hf adapters"), dir.path()).ok().stderr;
    assert!(!stderr.contains("downloading"), "{stderr}");
    let config = fs::read_to_string(dir.path().join("adapters/adapter_config.json")).unwrap();
    assert!(config.contains("\"base_model_name_or_path\": \"org/llama\""), "{config}");
}

#[test]
fn sources_of_a_mixture_are_paths_or_patterns_of_a_dataset() {
    let dir = tempfile::tempdir().unwrap();
    let lines = |name: &str| -> Vec<u8> {
        (0..40).flat_map(|index| format!("{{\"text\": \"{name} {index}\"}}\n").into_bytes()).collect()
    };
    let hub = Hub::start([
        ("datasets/org/texts/data/a.jsonl", lines("a")),
        ("datasets/org/texts/data/b.jsonl", lines("b")),
        ("datasets/org/texts/README.md", b"two files".to_vec()),
    ]);
    fs::create_dir(dir.path().join("texts")).unwrap();
    for name in ["a", "b"] {
        fs::write(dir.path().join(format!("texts/{name}.jsonl")), lines(name)).unwrap();
    }
    fs::write(dir.path().join("own.jsonl"), lines("own")).unwrap();
    let losses = |sources: &str| {
        fs::remove_file(dir.path().join("metrics.jsonl")).unwrap_or_default();
        // Quoted, so that the shell does not expand the pattern.
        let flags = format!("--data '{sources}' --seq-len 32 --batch-size 1 --steps 3 --metrics metrics.jsonl");
        launch(&hub, 2, &format!("exec \"$0\" {flags}"), dir.path()).ok();
        let records = json_lines(&dir.path().join("metrics.jsonl"));
        records.iter().filter_map(|record| record["loss"].as_f64()).collect::<Vec<_>>()
    };
    let named = losses("own.jsonl:0.25,org/texts:data/*.jsonl:0.75");
    assert_eq!(named.len(), 3);
    assert_eq!(named, losses("own.jsonl:0.25,texts/*.jsonl:0.75"));
    assert_ne!(named, losses("own.jsonl:0.25,org/texts:data/b.jsonl:0.75"));
}

#[test]
fn a_path_wins_and_ranks_agree_on_it() {
    let (hub, dir) = (hub(), tempfile::tempdir().unwrap());
    let model = dir.path().join("here/org/llama");
    fs::create_dir_all(&model).unwrap();
    for name in ["config.json", "model.safetensors", "tokens.bin"] {
        fs::copy(golden("llama_tiny").join(name), model.join(name)).unwrap();
    }
    let flags = format!("{FLAGS} --model org/llama --data {}", model.join("tokens.bin").display());
    launch(&hub, 2, &format!("cd here && exec \"$0\" {flags}"), dir.path()).ok();
    assert!(hub.requests().is_empty());
    let saved = dir.path().join("saved").display().to_string();
    let apart = format!("if [ $RANK = 0 ]; then cd here; fi; exec \"$0\" {}", flags.replace("saved", &saved));
    let parts = [
        "the ranks disagree on the source of --model",
        "rank 0: a path",
        "rank 1: the hub: org/llama",
        "the same paths",
    ];
    launch(&hub, 2, &apart, dir.path()).refused(2, &parts);
    assert!(hub.requests().is_empty());
}

#[test]
fn all_ranks_end_with_the_error_of_the_one_that_downloads() {
    let (hub, dir) = (hub(), tempfile::tempdir().unwrap());
    hub.script(|request| if request.is_cdn { Answer::Corrupt } else { Answer::Normal });
    let parts = ["rank 0 on host ", "sent `model.safetensors` of org/llama@main with SHA-256", "Start again"];
    train(&hub, 4, NAMES, dir.path()).refused(4, &parts);
    let neither = ["--model: cannot read nothing", "No such file or directory on this host", "org/name[@revision]"];
    train(&hub, 2, "--model nothing", dir.path()).refused(2, &neither);
}

/// The rank that downloads is killed while the server sends nothing.
#[test]
fn no_rank_waits_for_a_killed_one() {
    let (hub, dir) = (hub(), tempfile::tempdir().unwrap());
    let stalled = dir.path().join("stalled");
    let mark = stalled.clone();
    hub.script(move |request| {
        if !request.is_cdn {
            return Answer::Normal;
        }
        fs::write(&mark, "").unwrap();
        Answer::Stall(1000)
    });
    let script = format!(
        "if [ $RANK != 0 ]; then exec \"$0\" {FLAGS} {NAMES}; fi; \"$0\" {FLAGS} {NAMES} & \
         while [ ! -e stalled ]; do sleep 0.1; done; sleep 1; kill -9 $!; sleep 30"
    );
    let run = launch(&hub, 3, &script, dir.path());
    let text = run.failed();
    assert!(text.contains("a rank left while the ranks waited for downloads"), "{text}");
    assert!(stalled.exists());
    // Another run goes on with the bytes that came.
    hub.requests();
    hub.script(|_| Answer::Normal);
    train(&hub, 2, NAMES, dir.path()).ok();
    assert!(hub.requests().iter().any(|one| one.headers.get("range").is_some_and(|range| range == "bytes=1000-")));
}
