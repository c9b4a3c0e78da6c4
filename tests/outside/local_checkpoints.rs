//! `train` on two hosts without a shared directory for checkpoints.

use std::{fs, path::Path, process::Command, time::Duration};

use fsdp_test_support::{Run, file_names, golden_flags_of, launch, program, run, trajectory::Trajectory};
use libtest_mimic::Trial;

use crate::need::{Need, trials};
use crate::way::Way;

const NEEDS: &[Need] = &[Need::Networks, Need::Mpi];
/// Much longer than a test takes.
const LIMIT: Duration = Duration::from_secs(300);
/// Script of each host. The host's disk is lost at its end. The script keeps its contents in `parts` for the next run
/// if the run succeeded.
const ON_A_HOST: &str = r#"own=parts/$(hostname); mkdir -p $own; cp -a $own/. saved/
    "$0" "$@" 2>said.$(hostname); code=$?
    [ $code -ne 0 ] || { rm -r $own; cp -a saved $own; }; exit $code"#;

pub(crate) fn trials() -> Vec<Trial> {
    trials![NEEDS =>
        open_mpi_resumes_from_parts_on_both_hosts: || resumes(Way::OpenMpi),
        fsdp_launch_resumes_from_parts_on_both_hosts: || resumes(Way::Ours),
        refuses_hosts_that_share_a_directory,
    ]
}

fn flags(ranks: usize, steps: usize) -> Vec<String> {
    let mut flags = golden_flags_of("llama_tiny", steps);
    flags.extend(["--batch-size", if ranks == 1 { "4" } else { "2" }, "--metrics", "metrics.jsonl"].map(String::from));
    flags
}

/// Trains on two hosts with a rank each. Rank 0 is on host `first`.
fn train(way: Way, options: &[&str], first: usize, steps: usize, more: &[&str], dir: &Path) -> Run {
    let (program, flags) = (program("train"), flags(2, steps));
    let script = if options.is_empty() { r#"exec "$0" "$@""# } else { ON_A_HOST };
    let args: Vec<&str> = ["sh", "-c", script, program.to_str().unwrap()]
        .into_iter()
        .chain(flags.iter().map(String::as_str))
        .chain(["--checkpoint-dir", "saved", "--checkpoint-local"])
        .chain(more.iter().copied())
        .collect();
    let started = way.start(options, (2, 1), &[], &args, dir);
    // `PET_NODE_RANK` fixes the order of our launchers.
    let mut command = Command::new(started.get_program());
    for arg in started.get_args() {
        match arg.to_str() {
            Some("node0:29400") => command.arg(format!("node{first}:29400")),
            Some("each") => {
                let place = format!(r#"PET_NODE_RANK=$(((HOST_NUMBER + {first}) % 2)) exec "$0" "$@""#);
                command.args(["each", "sh", "-c", &place])
            }
            _ => command.arg(arg),
        };
    }
    for (name, value) in started.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.current_dir(dir);
    run(command, LIMIT)
}

fn ckpt(args: &[&str], dir: &Path) -> Run {
    let mut command = Command::new(program("fsdp-ckpt"));
    command.args(args).current_dir(dir);
    run(command, LIMIT)
}

/// After a host died during a save, both hosts resume from the previous step. Copied together, their parts are an
/// ordinary checkpoint.
fn resumes(way: Way) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let saved = dir.join("saved");
    fs::create_dir(&saved).unwrap();
    let (local, more) = (["--local", saved.to_str().unwrap()], ["--save-every", "5", "--keep", "2"]);
    let part = |host: usize| dir.join(format!("parts/node{host}"));
    let said = |host: usize| fs::read_to_string(dir.join(format!("said.node{host}"))).unwrap();

    train(way, &local, 0, 10, &more, dir).ok();
    for host in 0..2 {
        assert_eq!(file_names(&part(host)), ["step-00000005", "step-00000010"]);
        let shard = format!("shard-{:05}-model-00001-of-00001.safetensors", host + 1);
        assert_eq!(file_names(&part(host).join("step-00000005")), ["checkpoint.json".to_string(), shard]);
    }
    fs::remove_dir_all(part(1).join("step-00000010")).unwrap();

    let auto = [&more[..], &["--resume", "auto"]].concat();
    train(way, &local, 0, 20, &auto, dir).ok();
    assert!(said(0).contains("resumed from saved/step-00000005 at step 5"), "{}", said(0));
    let lost = "no host has the file of rank 1 from node1";
    assert!(said(0).contains(lost) && !said(1).contains(lost), "{} {}", said(0), said(1));
    assert_eq!(file_names(&part(0)), ["step-00000010.damaged", "step-00000015", "step-00000020"]);
    assert_eq!(file_names(&part(1)), ["step-00000015", "step-00000020"]);
    // The metrics keep the first five steps of the first run.
    let resumed = Trajectory::of_metrics(&dir.join("metrics.jsonl"));
    let other = tempfile::tempdir().unwrap();
    launch(2, "train", &flags(2, 20).iter().map(String::as_str).collect::<Vec<_>>(), other.path()).ok();
    assert_eq!(resumed, Trajectory::of_metrics(&other.path().join("metrics.jsonl")), "{way:?}");

    if way == Way::Ours {
        fs::remove_file(dir.join("metrics.jsonl")).unwrap();
        let run = train(way, &local, 1, 25, &auto, dir);
        let text = said(0) + &said(1);
        let at = dir.join("saved/step-00000020").display().to_string();
        let parts = [
            "can't resume from saved/step-00000020",
            "saved/step-00000020 is one host's part of a checkpoint: it lacks the file of rank ",
            &format!(":{at}/ {at}/`"),
        ];
        assert!(run.code != Some(0) && parts.iter().all(|part| text.contains(part)), "{run:?}\n{text}");
        assert!(!dir.join("metrics.jsonl").exists());
    }

    let run = ckpt(&["verify", "parts/node0/step-00000015"], dir);
    assert!(run.code == Some(1) && run.stderr.contains("lacks the file of rank 1 from node1"), "{run:?}");
    for host in [1, 0] {
        let status = Command::new("cp").arg("-a").arg(part(host)).arg(dir.join("together")).arg("-T").status();
        assert!(status.unwrap().success());
    }
    let run = ckpt(&["verify", "together/step-00000015"], dir).ok();
    assert!(run.stdout.contains("step-00000015: ok, "), "{run:?}");
    let alone = tempfile::tempdir().unwrap();
    let mut flags = flags(1, 20);
    flags.extend(["--resume".into(), dir.join("together/step-00000015").display().to_string()]);
    launch(1, "train", &flags.iter().map(String::as_str).collect::<Vec<_>>(), alone.path()).ok();
    let resumed = Trajectory::of_metrics(&alone.path().join("metrics.jsonl"));
    let difference = resumed.difference(&Trajectory::recorded("llama_tiny", "run").after(15));
    assert!(difference.max() < 2e-5, "{way:?}, resumed by one: {difference:?}");
}

fn refuses_hosts_that_share_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let run = train(Way::Mpich, &[], 0, 10, &[], dir.path());
    let text = format!("{}\n{}", run.stdout, run.stderr);
    let parts = [
        "rank 0 failed to write a file there: node0 and node1 share the directory saved",
        "leave --checkpoint-local out if they share it",
    ];
    assert!(run.code != Some(0) && parts.iter().all(|part| text.contains(part)), "{text}");
    assert!(!dir.path().join("metrics.jsonl").exists() && !dir.path().join("saved").exists());
}
