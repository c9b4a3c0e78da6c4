//! `fsdp-launch status`.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use fsdp_test_support::agent::free_port;
use serde_json::Value;

use crate::{Running, TIMEOUT, executable, finish, heartbeats::rank_program, launcher};

/// Returns the run of this id as JSON, once it matches.
fn status_when(run: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let start = Instant::now();
    loop {
        let (code, stdout, stderr) = finish(&mut launcher(&["status", run, "--json"]));
        if code == Some(0) {
            let mut runs: Vec<Value> = serde_json::from_str(&stdout).unwrap();
            assert_eq!(runs.len(), 1, "{stdout}");
            let run = runs.remove(0);
            if wanted(&run) {
                return run;
            }
        }
        assert!(start.elapsed() < TIMEOUT, "{stdout}{stderr}");
        sleep(Duration::from_millis(10));
    }
}

#[test]
fn shows_the_activity_of_each_rank() {
    let id = format!("status-{}", std::process::id());
    let program = rank_program("stays_away");
    let mut args = vec!["--nproc-per-node=2", "--max-restarts=3", "--rdzv-id", &id];
    args.extend(program.iter().map(String::as_str));
    let launched = Running::start(&args);
    let is_stuck = |run: &Value| {
        run["ranks"][0]["told"]["collectives"][0]["name"] == "all_reduce"
            && run["ranks"][1]["told"]["doing"]["what"] == "forward layers.3"
    };
    let run = status_when(&id, is_stuck);
    assert_eq!((&run["run_id"], &run["launcher_pid"]), (&Value::from(&*id), &Value::from(launched.child.id())));
    assert_eq!((&run["attempt"], &run["restarts"], &run["max_restarts"]), (&0.into(), &0.into(), &3.into()));
    assert_eq!(run["program"], "/usr/bin/env");
    let rank = &run["ranks"][1];
    assert_eq!((&rank["rank"], &rank["told"]["pid"], &rank["process"]["pid"]), (&1.into(), &rank["pid"], &rank["pid"]));
    assert!(rank["told"]["beat"].as_f64().unwrap() >= 0. && rank["process"]["resident_bytes"].as_u64().unwrap() > 0);

    // By a prefix of the id, as text.
    let (code, stdout, stderr) = finish(&mut launcher(&["status", &id[..id.len() - 1]]));
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    for part in [
        format!("run {id}: /usr/bin/env FSDP_TEST_ROLE=stays_away "),
        format!("\n  launcher pid {}, attempt 0 for ", launched.child.id()),
        "restarts used: 0 of at most 3\n  rank  pid ".into(),
        "waits in all_reduce (collective 1 of \"world\") for ".into(),
        format!("\n  1     {}  ", rank["pid"]),
        " MiB   7     ".into(),
        "forward layers.3 for ".into(),
    ] {
        assert!(stdout.contains(&part), "{part:?} is not in {stdout}");
    }

    // An unknown id lists the known ones.
    let (code, stdout, stderr) = finish(&mut launcher(&["status", "no-such-run"]));
    assert_eq!((code, stdout.as_str()), (Some(1), ""));
    assert!(stderr.starts_with("fsdp-launch: no run \"no-such-run\": there are ") && stderr.contains(&id), "{stderr}");

    // A killed launcher is not shown.
    drop(launched);
    assert_eq!(finish(&mut launcher(&["status", &id])).0, Some(1));
}

#[test]
fn shows_the_attempt_after_a_restart() {
    let id = format!("restarted-{}", std::process::id());
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 3; sleep 1000";
    let _launched = Running::start(&["--max-restarts=1", "--rdzv-id", &id, "sh", "-c", script]);
    let run = status_when(&id, |run| run["attempt"] == 1);
    assert_eq!((&run["restarts"], &run["ranks"][0]["told"]["pid"]), (&1.into(), &Value::Null));
    assert_eq!(run["ranks"][0]["process"]["pid"], run["ranks"][0]["pid"]);
}

#[test]
fn shows_a_waiting_launcher() {
    let id = format!("waits-{}", std::process::id());
    let endpoint = format!("localhost:{}", free_port());
    let alone = ["--nnodes=2", "--rdzv-endpoint", &endpoint, "--rdzv-id", &id, "true"];
    let launched = Running::start(&alone);
    let run = status_when(&id, |run| !run["waiting"].is_null());
    let message =
        format!("waiting for other hosts at {endpoint} (an address that only launchers of this host reach): need 2");
    assert!(run["waiting"].as_str().unwrap().starts_with(&message), "{run}");
    assert_eq!((&run["launcher_pid"], &run["ranks"]), (&Value::from(launched.child.id()), &Value::Array(Vec::new())));
    let (code, stdout, stderr) = finish(&mut launcher(&["status", &id]));
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    let line = format!("launcher pid {}, before attempt 0 for ", launched.child.id());
    assert!(stdout.contains(&line) && stdout.contains(&format!("\n  {message}")), "{stdout}");
}

#[test]
fn reports_no_run_and_bad_input_in_one_line() {
    let empty = tempfile::tempdir().unwrap();
    for (args, code, part) in [
        (vec!["status"], 1, "this user has no running launch on this host"),
        (vec!["status", "x", "--json"], 1, "no run \"x\": this user has no running launch"),
        (vec!["status", "x", "y"], 2, "'y'"),
        (vec!["status", "--nproc-per-node=2"], 2, "--nproc-per-node"),
    ] {
        let (ended, stdout, stderr) = finish(launcher(&args).env("TMPDIR", empty.path()));
        assert_eq!((ended, stdout.as_str(), stderr.lines().count()), (Some(code), "", 1), "{args:?}: {stderr}");
        assert!(stderr.starts_with("fsdp-launch: ") && stderr.contains(part), "{stderr}");
    }
    let (code, _, stderr) = finish(launcher(&["status"]).env("TMPDIR", "/no/such/directory"));
    assert!(code == Some(1) && stderr.contains("directory for temporary files"), "{stderr}");
    // Options from the environment do not apply to `status`.
    let mut command = launcher(&["status"]);
    command.env("PET_NPROC_PER_NODE", "2").env("PET_ROLE", "it").env("TMPDIR", empty.path());
    assert_eq!(finish(&mut command).0, Some(1));
}

#[test]
fn a_program_named_status_runs_by_path() {
    let dir = tempfile::tempdir().unwrap();
    executable(dir.path().join("status"), "#!/bin/sh\necho itself \"$@\"\n");
    for args in [vec!["./status", "x"], vec!["--nproc-per-node=1", "./status", "x"]] {
        let (code, stdout, stderr) = finish(launcher(&args).current_dir(dir.path()));
        assert_eq!((code, stdout.as_str()), (Some(0), "[rank 0] itself x\n"), "{stderr}");
    }
    // After the program, `status` is an argument.
    assert_eq!(finish(&mut launcher(&["/bin/echo", "status"])).1, "[rank 0] status\n");
}
