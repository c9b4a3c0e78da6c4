//! `train` with checkpoints on the server, on ranks without a shared directory.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use fsdp_test_support::need::missing;
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::Value;
use tempfile::TempDir;

use crate::saves::names;
use crate::server_root;

/// Environment variable with the path of `train`, built with `--features object-store`.
const PROGRAM: &str = "FSDP_TESTS_STORE_TRAIN";
const RUN: &str = "s3://bucket/trained/run";

pub(crate) fn trial() -> Trial {
    Trial::ignorable_test("train_goes_on_from_the_store", || -> Result<Completion, Failed> {
        match std::env::var_os(PROGRAM) {
            Some(program) => resumes(Path::new(&program)),
            None => return missing(format!("{PROGRAM} names no train that was built with --features object-store")),
        }
        Ok(Completion::Completed)
    })
}

/// Ranks in their own directories.
struct Ranks {
    program: PathBuf,
    dirs: [TempDir; 2],
}

impl Ranks {
    /// Runs all ranks. Returns their stderr, and whether all succeeded.
    fn train(&self, steps: usize, more: &[&str], env: &[(&str, &str)]) -> (String, bool) {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/llama_tiny");
        let start = |rank: usize| {
            let mut command = Command::new(&self.program);
            command.arg("--model").arg(&model).arg("--data").arg(model.join("tokens.bin"));
            command.args("--seq-len 32 --batch-size 2 --lr 1e-3 --lr-schedule constant --save-every 2".split(' '));
            command.args(["--metrics", "metrics.jsonl", "--steps", &steps.to_string()]).args(more);
            let own = [("RANK", rank.to_string()), ("LOCAL_RANK", rank.to_string())];
            let all = [("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("FSDP_TIMEOUT_S", "60")];
            let id = format!("store test {}", std::process::id());
            command.envs(own).envs(all).env("TORCHELASTIC_RUN_ID", id).envs(env.iter().copied());
            command.current_dir(self.dirs[rank].path()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let _ = std::fs::remove_file(self.dirs[0].path().join("metrics.jsonl"));
        let outputs: Vec<Output> =
            [start(0), start(1)].into_iter().map(|child| child.wait_with_output().unwrap()).collect();
        let said = outputs.iter().map(|output| String::from_utf8_lossy(&output.stderr)).collect();
        (said, outputs.iter().all(|output| output.status.success()))
    }

    /// Returns the losses of the last run, by step.
    fn losses(&self) -> Vec<(u64, f64)> {
        let text = std::fs::read_to_string(self.dirs[0].path().join("metrics.jsonl")).unwrap();
        let step = |line: &str| {
            let step: Value = serde_json::from_str(line).unwrap();
            (step["step"].as_u64().unwrap(), step["loss"].as_f64().unwrap())
        };
        text.lines().map(step).collect()
    }
}

/// Returns the run's prefixes that hold objects.
fn steps() -> Vec<String> {
    names("trained/run").into_iter().filter(|step| !names(&format!("trained/run/{step}")).is_empty()).collect()
}

fn resumes(program: &Path) {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let ranks = Ranks { program: program.to_path_buf(), dirs };
    let to_store = ["--checkpoint-dir", RUN, "--keep", "2"];
    let fails = |steps: usize, more: &[&str], env: &[(&str, &str)], part: &str| {
        let (said, ok) = ranks.train(steps, more, env);
        assert!(!ok && said.contains(part), "{part:?} not in {said}");
        assert!(!ranks.dirs[0].path().join("metrics.jsonl").exists(), "a step was taken: {said}");
    };
    let ends_well = |steps: usize, more: &[&str], part: &str| {
        let (said, ok) = ranks.train(steps, more, &[]);
        assert!(ok && said.contains(part), "{part:?} not in {said}");
    };

    // A run on a shared disk, to compare with.
    let disk = tempfile::tempdir().unwrap();
    ends_well(12, &["--checkpoint-dir", disk.path().to_str().unwrap(), "--keep", "1"], "");
    let undisturbed = ranks.losses();

    // A missing store is an error before the first step.
    let nowhere = [("AWS_ENDPOINT", "http://127.0.0.1:1"), ("FSDP_STORE_TIMEOUT_S", "1")];
    fails(6, &to_store, &nowhere, "can't write to --checkpoint-dir s3://bucket/trained/run (rank 0 failed to ");
    fails(6, &[&to_store[..], &["--checkpoint-local"]].concat(), &[], "a directory of each host needs a directory of");

    ends_well(6, &to_store, "");
    assert_eq!(steps(), ["step-00000004", "step-00000006"]);
    fails(8, &to_store, &[], "/step-00000006 is a checkpoint of an earlier run: pass --resume auto");

    // Files of a killed save do not block saves, also in the background.
    let place = server_root().join("objects/bucket/trained/run/step-00000008");
    std::fs::create_dir_all(&place).unwrap();
    std::fs::write(place.join("shard-00001-model-00001-of-00001.save-dead-1.safetensors"), "half").unwrap();
    let auto = [&to_store[..], &["--resume", "auto"]].concat();
    let from = |step: usize| format!("resumed from {RUN}/step-{step:08} at step {step}");
    ends_well(10, &[&auto[..], &["--async-save"]].concat(), &from(6));
    assert_eq!(ranks.losses(), undisturbed[6..10]);
    assert_eq!(steps(), ["step-00000008", "step-00000010"]);
    assert_eq!(names("trained/run/step-00000008").len(), 3);
    let path = format!("{RUN}/step-00000008");
    let again = [&to_store[..], &["--resume", &path]].concat();
    fails(10, &again, &[], "/step-00000010 already exists, and this run saves a checkpoint there at step 10");

    // A damaged checkpoint is quarantined in the store.
    let place = server_root().join("objects/bucket/trained/run/step-00000010");
    let shard = names("trained/run/step-00000010").into_iter().find(|name| name.starts_with("shard-00002")).unwrap();
    let mut bytes = std::fs::read(place.join(&shard)).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(place.join(&shard), bytes).unwrap();
    ends_well(12, &auto, &from(8));
    assert_eq!(ranks.losses(), undisturbed[8..]);
    assert_eq!(steps(), ["step-00000010", "step-00000010.damaged", "step-00000012"]);

    // The ranks' disks hold no checkpoints.
    let there = ranks.dirs.each_ref().map(|dir| crate::world::list(dir.path()));
    assert_eq!(there, [vec!["metrics.jsonl".to_string()], vec![]]);
}
