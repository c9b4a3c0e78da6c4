//! `train` on ranks of several hosts, which have a network and files in common.

use std::{collections::BTreeMap, fs, path::Path, sync::Mutex, time::Duration};

use fsdp_tests::{Run, golden_flags, launch, program, run, trajectory::Trajectory};
use libtest_mimic::Trial;

use crate::need::{Need, trial};
use crate::way::Way;

const NEEDS: &[Need] = &[Need::Networks, Need::Mpi];
/// Far longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(300);

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("across_hosts::open_mpi_reproduces_the_recorded_runs", NEEDS, || reproduces(Way::OpenMpi)),
        trial("across_hosts::mpich_reproduces_the_recorded_runs", NEEDS, || reproduces(Way::Mpich)),
        trial("across_hosts::fsdp_launch_reproduces_the_recorded_runs", NEEDS, || reproduces(Way::Ours)),
        trial(
            "across_hosts::a_host_without_the_shared_directory_is_named_before_the_first_step",
            NEEDS,
            a_host_without_the_shared_directory_is_named_before_the_first_step,
        ),
    ]
}

/// The flags of a recorded run on so many ranks.
fn flags(name: &str, ranks: usize) -> Vec<String> {
    let mut flags = golden_flags(name);
    flags.extend(["--batch-size".into(), (4 / ranks).to_string(), "--metrics".into(), "metrics.jsonl".into()]);
    flags
}

fn train(way: Way, options: &[&str], ranks: usize, more: &[&str], flags: &[String], dir: &Path) -> Run {
    let program = program("train");
    let args: Vec<&str> = [program.to_str().unwrap()]
        .into_iter()
        .chain(flags.iter().map(String::as_str))
        .chain(more.iter().copied())
        .collect();
    run(way.start(options, (2, ranks), &[], &args, dir), LIMIT)
}

/// The run by shared memory, on one host.
fn on_one_host(name: &str, ranks: usize) -> Trajectory {
    static KNOWN: Mutex<BTreeMap<(String, usize), Trajectory>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap();
    let run = || {
        let dir = tempfile::tempdir().unwrap();
        let flags = flags(name, ranks);
        launch(ranks, "train", &flags.iter().map(String::as_str).collect::<Vec<_>>(), dir.path()).ok();
        Trajectory::of_metrics(&dir.path().join("metrics.jsonl"))
    };
    known.entry((name.to_string(), ranks)).or_insert_with(run).clone()
}

/// Losses and norms are those of the record within rounding, and to the bit those of one host; what was saved in the
/// directory that the hosts share goes on there, on fewer ranks.
fn reproduces(way: Way) {
    for name in ["llama_tiny", "gpt2_tiny"] {
        for ranks_a_host in [1, 2] {
            let ranks = 2 * ranks_a_host;
            let dir = tempfile::tempdir().unwrap();
            let saves = ["--checkpoint-dir", "saved", "--save-every", "10"];
            let run = train(way, &["--count"], ranks_a_host, &saves, &flags(name, ranks), dir.path()).ok();
            let ours = Trajectory::of_metrics(&dir.path().join("metrics.jsonl"));
            let difference = ours.difference(&Trajectory::recorded(name, "run"));
            assert!(difference.max() < 2e-5, "{way:?}, {name}, 2 hosts of {ranks_a_host}: {difference:?}");
            assert_eq!(ours, on_one_host(name, ranks), "{way:?}, {name}, 2 hosts of {ranks_a_host}");
            // They have not met in the memory of this machine.
            let sent = run.stderr.lines().filter_map(|line| line.strip_prefix("node1 sent ")?.split(' ').next());
            let sent: Vec<u64> = sent.map(|bytes| bytes.parse().unwrap()).collect();
            let size = fs::metadata(fsdp_tests::golden(name).join("model.safetensors")).unwrap().len();
            assert!(sent.len() == 1 && sent[0] > 20 * size / 2, "{sent:?} bytes for a model of {size}: {run:?}");

            if ranks > 2 {
                let other = tempfile::tempdir().unwrap();
                let mut flags = flags(name, 1);
                flags.extend(["--resume".into(), dir.path().join("saved/step-00000010").display().to_string()]);
                launch(1, "train", &flags.iter().map(String::as_str).collect::<Vec<_>>(), other.path()).ok();
                let resumed = Trajectory::of_metrics(&other.path().join("metrics.jsonl"));
                let difference = resumed.difference(&Trajectory::recorded(name, "run").after(10));
                assert!(difference.max() < 2e-5, "{way:?}, {name}, resumed on one host: {difference:?}");
            }
        }
    }
}

fn a_host_without_the_shared_directory_is_named_before_the_first_step() {
    for way in [Way::OpenMpi, Way::Mpich, Way::Ours] {
        let dir = tempfile::tempdir().unwrap();
        let saved = dir.path().join("saved");
        fs::create_dir(&saved).unwrap();
        let local = ["--local", saved.to_str().unwrap()];
        let args = ["--checkpoint-dir", "saved"];
        let run = train(way, &local, 1, &args, &flags("llama_tiny", 2), dir.path());
        let text = format!("{}\n{}", run.stdout, run.stderr);
        let parts = [
            "rank 1 failed to write a file there",
            "can't write to --checkpoint-dir saved",
            "on a file system that all hosts share",
        ];
        assert!(run.code != Some(0) && parts.iter().all(|part| text.contains(part)), "{way:?}: {text}");
        // No step was run, and nothing was left.
        assert!(!dir.path().join("metrics.jsonl").exists(), "{way:?}: {text}");
        assert_eq!(fs::read_dir(&saved).unwrap().count(), 0);
    }
}
