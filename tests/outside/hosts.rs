//! Launchers on two hosts, and a run of `train` with a changing number of ranks.

use std::{
    fs,
    net::TcpStream,
    path::Path,
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use fsdp_test_support::{
    agent::{Agent, free_port},
    golden, json_lines, program,
};
use libtest_mimic::Trial;

use crate::need::{Need, trials};
use crate::network::{Host, two_hosts};

const LIMIT: Duration = Duration::from_secs(100);

pub(crate) fn trials() -> Vec<Trial> {
    let mut all = trials![&[Need::Networks] =>
        ranks_of_two_hosts_meet,
        continues_without_a_killed_or_disconnected_host,
        refuses_shared_memory_between_hosts,
    ];
    all.extend(trials![&[] => resumes_resharded_when_a_launcher_leaves_and_returns]);
    all
}

/// Returns the command lines that contain `marker`.
fn processes_with(marker: &str) -> Vec<String> {
    let all = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok());
    let command_lines = all.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let texts = command_lines.map(|bytes| String::from_utf8_lossy(&bytes).replace('\0', " "));
    texts.filter(|text| text.contains(marker)).collect()
}

fn assert_gone_soon(marker: &str) {
    let began = Instant::now();
    while !processes_with(marker).is_empty() {
        assert!(began.elapsed() < LIMIT, "still there: {:?}", processes_with(marker));
        sleep(Duration::from_millis(10));
    }
}

/// Starts `fsdp-launch` on `host` with two ranks that connect to the others.
fn agent(host: &Host, options: &str, dir: &Path) -> Agent {
    let mut command = host.command(&program("fsdp-launch"));
    command.args(["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29400"]);
    command.arg(format!("--rdzv-token-file={}", dir.join("token").display())).args(options.split(' '));
    command.arg("--no-python").arg(env!("CARGO_BIN_EXE_meeting-rank")).arg(dir.join("done"));
    Agent::start(command)
}

fn with_token() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("token"), "0123456789abcdef0123456789abcdef").unwrap();
    dir
}

fn ranks_of_two_hosts_meet() {
    let [first, second] = two_hosts().unwrap();
    let dir = with_token();
    let agents = [agent(&first, "--nnodes=2", dir.path()), agent(&second, "--nnodes=2", dir.path())];
    agents.iter().for_each(|agent| agent.wait_for("met 0,1,2,3 at 10.77.0.1 attempt 0", 2));
    fs::write(dir.path().join("done"), "").unwrap();
    for (node, agent) in agents.into_iter().enumerate() {
        let (code, text) = agent.finish();
        assert_eq!(code, Some(0), "{text}");
        for local_rank in 0..2 {
            let rank = 2 * node + local_rank;
            let line = format!("[rank {rank}] rank {rank} local {local_rank}/2 node {node} of 2 hosts met 0,1,2,3 ");
            assert!(text.contains(&line), "{line:?} is not in\n{text}");
        }
    }
}

fn continues_without_a_killed_or_disconnected_host() {
    let [first, second] = two_hosts().unwrap();
    let dir = with_token();
    let marker = dir.path().to_str().unwrap();
    let options = "--nnodes=1:2 --rdzv-conf=last_call_timeout=1,keep_alive_interval=0.3,join_timeout=2";
    let stays = agent(&first, options, dir.path());
    let mut goes = agent(&second, options, dir.path());
    stays.wait_for("met 0,1,2,3 at 10.77.0.1 attempt 0", 2);

    goes.kill();
    stays.wait_for("of 1 hosts met 0,1 at 10.77.0.1 attempt 1", 2);
    // Only the current attempt's ranks on the remaining host run.
    assert_eq!(
        processes_with(marker)
            .iter()
            .filter(|line| line.contains("meeting-rank") && !line.contains("fsdp-launch"))
            .count(),
        2
    );

    let cut_off = agent(&second, options, dir.path());
    cut_off.wait_for("met 0,1,2,3 at 10.77.0.1 attempt 2", 2);
    assert!(second.ip("link set fsdp0 down"));
    stays.wait_for("no message from its launcher for 900ms", 1);
    stays.wait_for("of 1 hosts met 0,1 at 10.77.0.1 attempt 3", 2);
    let (code, text) = cut_off.finish();
    assert!(
        code == Some(1) && text.contains("which serves the rendezvous, is gone: no message from it for 900ms"),
        "{text}"
    );

    assert!(second.ip("link set fsdp0 up"));
    let back = agent(&second, options, dir.path());
    back.wait_for("met 0,1,2,3 at 10.77.0.1 attempt 4", 2);
    fs::write(dir.path().join("done"), "").unwrap();
    for agent in [stays, back] {
        let (code, text) = agent.finish();
        assert_eq!(code, Some(0), "{text}");
    }
    assert_gone_soon(marker);
}

fn refuses_shared_memory_between_hosts() {
    // Shared memory was requested, or MPI is missing.
    let ways = [
        ("FSDP_BACKEND", "shm", ["the 2 ranks run on 2 hosts, 1 on this one", "with FSDP_BACKEND=mpi"]),
        ("FSDP_MPI_LIBRARY", "/nowhere.so", ["FSDP_MPI_LIBRARY=\"/nowhere.so\" can't be used", "unset the variable"]),
    ];
    let [first, second] = two_hosts().unwrap();
    let dir = with_token();
    let model = golden("llama_tiny");
    for (name, value, parts) in ways {
        let agents = [&first, &second].map(|host| {
            let mut command = host.command(&program("fsdp-launch"));
            command.args(["--nnodes=2", "--rdzv-endpoint=10.77.0.1:29400"]).env(name, value);
            command.arg(format!("--rdzv-token-file={}", dir.path().join("token").display()));
            command.arg(program("train")).arg("--model").arg(&model).arg("--data").arg(model.join("tokens.bin"));
            Agent::start(command)
        });
        for agent in agents {
            let (code, text) = agent.finish();
            assert!(code == Some(1) && parts.iter().all(|part| text.contains(part)), "{text}");
        }
    }
}

/// Starts `train` in `dir` under a launcher with `options`.
fn train(dir: &Path, options: &str, sequences: usize, metrics: &str) -> Agent {
    let model = golden("llama_tiny");
    let mut command = Command::new(program("fsdp-launch"));
    command.args(options.split(' ')).arg(program("train")).current_dir(dir).arg("--model").arg(&model);
    command.arg("--data").arg(model.join("tokens.bin")).args(["--init", "random", "--seq-len", "32", "--steps", "400"]);
    command.args(["--checkpoint-dir", "ckpt", "--save-every", "5", "--keep", "2", "--resume", "auto"]);
    command.args(["--batch-size", &sequences.to_string(), "--metrics", metrics]);
    Agent::start(command)
}

fn resumes_resharded_when_a_launcher_leaves_and_returns() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let options = format!(
        "--nnodes=1:2 --nproc-per-node=2 --rdzv-endpoint=127.0.0.1:{port} --rdzv-conf=last_call_timeout=0.5 \
            --shutdown-timeout=2"
    );
    let stays = train(dir.path(), &options, 2, "metrics.jsonl");
    let began = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(began.elapsed() < LIMIT, "nobody listens at port {port}:\n{}", stays.text());
        sleep(Duration::from_millis(5));
    }
    let mut goes = train(dir.path(), &options, 2, "metrics.jsonl");
    let checkpoints = || {
        let steps = fs::read_dir(dir.path().join("ckpt"))
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_prefix("step-")?.parse::<u64>().ok());
        steps.max().unwrap_or(0)
    };
    let wait_beyond = |step: u64| {
        let began = Instant::now();
        while checkpoints() <= step {
            assert!(began.elapsed() < LIMIT, "no checkpoint after step {step}:\n{}", stays.text());
            sleep(Duration::from_millis(10));
        }
        checkpoints()
    };
    let first = wait_beyond(0);
    goes.kill();
    stays.wait_for("starting all ranks again: 2 ranks on 1 node", 1);
    let second = wait_beyond(first + 5);
    let back = train(dir.path(), &options, 2, "metrics.jsonl");
    stays.wait_for("starting all ranks again: 4 ranks on 2 nodes", 1);
    wait_beyond(second + 5);
    let (code, text) = stays.finish();
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = back.finish();
    assert_eq!(code, Some(0), "{text}");
    assert_eq!(checkpoints(), 400);
    // The metrics have every step once, and training progressed.
    let records = json_lines(&dir.path().join("metrics.jsonl"));
    let steps: Vec<u64> = records.iter().map(|record| record["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=400).collect::<Vec<_>>());
    let loss = |range: std::ops::Range<usize>| {
        records[range.clone()].iter().map(|record| record["loss"].as_f64().unwrap()).sum::<f64>() / range.len() as f64
    };
    assert!(loss(390..400) < loss(0..10), "{} at first, {} in the end", loss(0..10), loss(390..400));
}
