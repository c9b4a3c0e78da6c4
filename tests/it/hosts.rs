//! Launchers on two hosts (network namespaces of this one, joined by a veth pair), and a run of `train` that shrinks and grows.

use std::{
    fs,
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use fsdp_tests::{golden, program};

const LIMIT: Duration = Duration::from_secs(100);

/// A network of its own, which goes when this is dropped or the test dies.
struct Host(Child);

impl Host {
    fn new() -> Option<Self> {
        // It lives until its stdin ends.
        let mut command = Command::new("unshare");
        command.args(["--net", "cat"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().ok()?;
        let of = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        let began = Instant::now();
        while of(child.id()) == of(std::process::id()) {
            // Where namespaces may not be made, it ends at once.
            if child.try_wait().ok()?.is_some() || began.elapsed() > LIMIT {
                return None;
            }
            sleep(Duration::from_millis(2));
        }
        Some(Host(child))
    }

    /// A command that runs there.
    fn command(&self, name: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--net", "--target", &self.0.id().to_string()]).arg(name);
        command
    }

    fn ip(&self, args: &str) -> bool {
        let mut command = self.command(Path::new("ip"));
        command.args(args.split(' ')).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Two hosts with the addresses 10.77.0.1 and 10.77.0.2; `None`, and a line that says so, where this process may not make them.
fn two_hosts() -> Option<[Host; 2]> {
    let made = Host::new().zip(Host::new()).and_then(|(first, second)| {
        let peer = second.0.id();
        let is_made = first.ip(&format!("link add fsdp0 type veth peer name fsdp0 netns {peer}"))
            && [&first, &second].iter().zip(1..).all(|(host, number)| {
                host.ip(&format!("address add 10.77.0.{number}/24 dev fsdp0"))
                    && host.ip("link set fsdp0 up")
                    && host.ip("link set lo up")
            });
        is_made.then_some([first, second])
    });
    if made.is_none() {
        println!("NOT RUN: two hosts need network namespaces, which this process may not make (root, unshare and ip)");
    }
    made
}

/// A launcher whose output goes to a file.
struct Agent {
    child: Child,
    output: tempfile::NamedTempFile,
}

impl Agent {
    fn start(mut command: Command) -> Self {
        let output = tempfile::NamedTempFile::new().unwrap();
        let file = fs::OpenOptions::new().append(true).open(output.path()).unwrap();
        let child = command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file).spawn().unwrap();
        Agent { child, output }
    }

    fn text(&self) -> String {
        fs::read_to_string(self.output.path()).unwrap()
    }

    fn wait_for(&self, part: &str, count: usize) {
        let began = Instant::now();
        while self.text().matches(part).count() < count {
            assert!(began.elapsed() < LIMIT, "{part:?} did not come {count} times:\n{}", self.text());
            sleep(Duration::from_millis(10));
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn finish(mut self) -> (Option<i32>, String) {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return (status.code(), self.text());
            }
            assert!(began.elapsed() < LIMIT, "the launcher did not end:\n{}", self.text());
            sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Processes with `marker` among their arguments.
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

/// `fsdp-launch` on `host` with two ranks that meet the others.
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

#[test]
fn ranks_of_two_hosts_meet() {
    let Some([first, second]) = two_hosts() else { return };
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

#[test]
fn a_host_that_is_killed_or_cut_off_is_done_without_until_it_is_back() {
    let Some([first, second]) = two_hosts() else { return };
    let dir = with_token();
    let marker = dir.path().to_str().unwrap();
    let options = "--nnodes=1:2 --rdzv-conf=last_call_timeout=1,keep_alive_interval=0.3,join_timeout=2";
    let stays = agent(&first, options, dir.path());
    let mut goes = agent(&second, options, dir.path());
    stays.wait_for("met 0,1,2,3 at 10.77.0.1 attempt 0", 2);

    goes.kill();
    stays.wait_for("of 1 hosts met 0,1 at 10.77.0.1 attempt 1", 2);
    // Of both attempts there is what the one host runs now.
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
    stays.wait_for("nothing was heard of its launcher for 900ms", 1);
    stays.wait_for("of 1 hosts met 0,1 at 10.77.0.1 attempt 3", 2);
    let (code, text) = cut_off.finish();
    assert!(
        code == Some(1) && text.contains("which holds the rendezvous, is gone: nothing was heard of it for 900ms"),
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

#[test]
fn shared_memory_between_hosts_is_refused_by_name() {
    let Some([first, second]) = two_hosts() else { return };
    let dir = with_token();
    let model = golden("llama_tiny");
    let agents = [&first, &second].map(|host| {
        let mut command = host.command(&program("fsdp-launch"));
        command.args(["--nnodes=2", "--rdzv-endpoint=10.77.0.1:29400"]);
        command.arg(format!("--rdzv-token-file={}", dir.path().join("token").display()));
        command.arg(program("train")).arg("--model").arg(&model).arg("--data").arg(model.join("tokens.bin"));
        Agent::start(command)
    });
    for agent in agents {
        let (code, text) = agent.finish();
        let parts = ["the 2 ranks run on 2 hosts, 1 on this one", "choose the nccl or the mpi backend (FSDP_BACKEND)"];
        assert!(code == Some(1) && parts.iter().all(|part| text.contains(part)), "{text}");
    }
}

/// `train` in `dir`, of twelve sequences a step, under launchers that are told `options`.
fn train(dir: &Path, options: &str, sequences: usize, metrics: &str) -> Agent {
    let model = golden("llama_tiny");
    let mut command = Command::new(program("fsdp-launch"));
    command.args(options.split(' ')).arg(program("train")).current_dir(dir).arg("--model").arg(&model);
    command.arg("--data").arg(model.join("tokens.bin")).args(["--init", "random", "--seq-len", "32", "--steps", "400"]);
    command.args(["--checkpoint-dir", "ckpt", "--save-every", "5", "--keep", "2", "--resume", "auto"]);
    command.args(["--batch-size", &sequences.to_string(), "--metrics", metrics]);
    Agent::start(command)
}

#[test]
fn a_training_run_goes_on_resharded_when_a_launcher_goes_and_when_it_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let options = format!(
        "--nnodes=1:2 --nproc-per-node=2 --rdzv-endpoint=127.0.0.1:{port} --rdzv-conf=last_call_timeout=0.5 --shutdown-timeout=2"
    );
    let stays = train(dir.path(), &options, 2, "metrics.jsonl");
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
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
    // One metrics file of one run: every step once, and what was learnt was not lost.
    let text = fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
    let records: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let steps: Vec<u64> = records.iter().map(|record| record["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=400).collect::<Vec<_>>());
    let loss = |range: std::ops::Range<usize>| {
        records[range.clone()].iter().map(|record| record["loss"].as_f64().unwrap()).sum::<f64>() / range.len() as f64
    };
    assert!(loss(390..400) < loss(0..10), "{} at first, {} in the end", loss(0..10), loss(390..400));
}
