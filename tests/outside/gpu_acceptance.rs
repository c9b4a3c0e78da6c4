//! `scripts/gpu-acceptance` on CPUs runs its phases and reports failures.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use fsdp_test_support::agent::free_port;
use fsdp_test_support::{Run, program, run, workspace};
use libtest_mimic::Trial;
use serde_json::Value;

use crate::need::{Need, python, trials};

/// Much longer than a phase takes on one busy core.
const LIMIT: Duration = Duration::from_secs(900);

pub(crate) fn trials() -> Vec<Trial> {
    trials![&[Need::Pytorch] => passes_on_cpus, two_hosts_repeat_a_recorded_run, reports_failed_phases,
        doctests_pass]
}

/// Runs phases with the programs that the tests built.
fn acceptance(phases: &str, out: &Path, more: &[&str]) -> Run {
    let programs = program("train");
    let mut command = Command::new(python());
    command.arg(workspace().join("scripts/gpu-acceptance"));
    command.args(["--small", "--device", "cpu", "--gpus", "2", "--only", phases]).args(more);
    command.arg("--out").arg(out).arg("--python").arg(python());
    command.env("CARGO_TARGET_DIR", programs.ancestors().nth(2).unwrap());
    run(command, LIMIT)
}

fn report(out: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(out.join("report.json")).unwrap()).unwrap()
}

/// Returns a phase of a report.
fn phase<'a>(report: &'a Value, name: &str) -> &'a Value {
    report["phases"].as_array().unwrap().iter().find(|phase| phase["name"] == name).unwrap()
}

fn passes_on_cpus() {
    let dir = tempfile::tempdir().unwrap();
    acceptance("parity,memory,speed,overlap,pytorch", dir.path(), &[]).ok();
    let report = report(dir.path());
    for name in ["parity", "memory", "speed", "overlap", "pytorch"] {
        assert_eq!(phase(&report, name)["status"], "passed", "{report}");
    }
    let build = phase(&report, "build");
    assert_eq!((&build["status"], &build["why"]), (&"skipped".into(), &"not among --only".into()));
    let parity = &phase(&report, "parity")["result"];
    assert!(parity["rows"].as_array().unwrap().len() >= 16, "{parity}");
    let rows = phase(&report, "memory")["result"]["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 10);
    let rows = phase(&report, "speed")["result"]["rows"].as_array().unwrap();
    let ranks: Vec<_> = rows.iter().map(|row| row["ranks"].as_u64().unwrap()).collect();
    assert_eq!(ranks, [2, 1]);
    for row in rows {
        let (used, planned) = (row["peak_gib"].as_f64().unwrap(), row["planned_gib"].as_f64().unwrap());
        assert!((0.8..1.2).contains(&(planned / used)), "{row}");
    }
    let hidden = phase(&report, "overlap")["result"]["hidden_share"].as_f64().unwrap();
    assert!((0. ..=1.).contains(&hidden), "{hidden}");
    // Both train the same model on the same data from other weights. The loss is near the logarithm of the vocabulary.
    for loss in [&rows[0]["program"]["loss"], &phase(&report, "pytorch")["result"]["runs"][0]["program"]["loss"]] {
        assert!((4. ..7.).contains(&loss.as_f64().unwrap()), "{loss}");
    }
    let page = fs::read_to_string(dir.path().join("report.md")).unwrap();
    for words in ["No phase failed", "| zero3 | backward |", "PyTorch", "hidden behind compute"] {
        assert!(page.contains(words), "{words} not in\n{page}");
    }
}

fn two_hosts_repeat_a_recorded_run() {
    let dir = tempfile::tempdir().unwrap();
    let endpoint = format!("127.0.0.1:{}", free_port());
    let host = |rank: &str| {
        let out = dir.path().join(rank);
        acceptance("hosts", &out, &["--nnodes", "2", "--node-rank", rank, "--endpoint", &endpoint]).ok();
        report(&out)
    };
    let (first, second) = thread::scope(|scope| {
        let second = scope.spawn(|| host("1"));
        (host("0"), second.join().unwrap())
    });
    let row = &phase(&first, "hosts")["result"]["parity"];
    assert_eq!((&row["way"], &row["holds"]), (&"4 ranks on 2 hosts".into(), &true.into()), "{first}");
    assert_eq!(phase(&second, "hosts")["result"]["why"], "host 0 has the figures");
    // The other phases are those of host 0.
    assert_eq!(phase(&second, "speed")["status"], "skipped");
}

fn reports_failed_phases() {
    let (dir, model) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let config = r#"{"model_type": "llama", "hidden_size": 0, "num_hidden_layers": 1, "vocab_size": 256}"#;
    fs::write(model.path().join("config.json"), config).unwrap();
    let run = acceptance("speed", dir.path(), &["--model", model.path().to_str().unwrap()]);
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(run.stdout.contains("failed: speed"), "{run:?}");
    let report = report(dir.path());
    let speed = phase(&report, "speed");
    assert_eq!(speed["status"], "failed");
    // The program's own error.
    assert!(speed["why"].as_str().unwrap().contains("config.json"), "{speed}");
    assert!(fs::read_to_string(dir.path().join("report.md")).unwrap().contains("## Why speed failed"));
}

fn doctests_pass() {
    let mut command = Command::new(python());
    let examples = "import doctest, sys; from acceptance import drills, kernels, machine, over_nccl, trace; \
        modules = drills, kernels, machine, over_nccl, trace; \
        sys.exit(any(doctest.testmod(it).failed or not doctest.testmod(it).attempted for it in modules))";
    command.args(["-B", "-c", examples]).env("PYTHONPATH", workspace().join("scripts"));
    run(command, LIMIT).ok();
}
