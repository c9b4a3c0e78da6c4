//! After a rank's death or a lost network, ranks on other hosts end soon and name the lost ranks.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use fsdp_test_support::{agent::Agent, golden, golden_flags, program, trajectory::Trajectory};
use libtest_mimic::Trial;
use rustix::process::{Pid, Signal, kill_process};

use crate::need::{Need, trials};
use crate::way::Way;

const NEEDS: &[Need] = &[Need::Networks, Need::Mpi];
/// Much longer than a test takes.
const LIMIT: Duration = Duration::from_secs(300);
/// Timeout of the ranks in seconds. It also covers a slow start on a busy machine.
const TIMEOUT: &str = "15";

pub(crate) fn trials() -> Vec<Trial> {
    let mut all = trials![&[Need::Networks] =>
        a_killed_rank_ends_a_job_without_mpi: || killed(Way::WithoutMpi),
        a_cut_network_ends_ranks_without_mpi: || cut_off(Way::WithoutMpi),
    ];
    all.extend(trials![NEEDS =>
        a_killed_rank_ends_a_job_of_open_mpi: || killed(Way::OpenMpi),
        a_killed_rank_ends_a_job_of_mpich: || killed(Way::Mpich),
        a_killed_rank_ends_a_job_of_fsdp_launch: || killed(Way::Ours),
        a_cut_network_ends_ranks_of_open_mpi: || cut_off(Way::OpenMpi),
        a_cut_network_ends_ranks_of_mpich: || cut_off(Way::Mpich),
        a_cut_network_ends_ranks_of_fsdp_launch: || cut_off(Way::Ours),
        fsdp_launch_resumes_from_the_newest_checkpoint: resumes,
        the_remaining_host_continues_alone: continues_alone,
    ]);
    all
}

/// Starts a long run on two hosts with two ranks each. Rank N under `mpirun` writes stderr to `said.N`.
fn start(way: Way, options: &[&str], more: &[&str], steps: &str, dir: &Path) -> Agent {
    let model = golden("llama_tiny").display().to_string();
    let script = format!("exec \"$0\" \"$@\" 2>said.${}", way.rank_variable());
    let train = program("train");
    let data = format!("{model}/tokens.bin");
    // Our launcher prints the ranks' output.
    let wrapper: &[&str] = if way.is_ours() { &[] } else { &["sh", "-c", &script] };
    let flags = format!(
        "--model {model} --data {data} --seq-len 32 --steps {steps} --batch-size 1 --metrics metrics.jsonl \
         --checkpoint-dir saved --save-every 10 --keep 2 --resume auto"
    );
    let args: Vec<&str> = [train.to_str().unwrap()].into_iter().chain(flags.split(' ')).collect();
    let mut command: Command = way.start(options, (2, 2), more, &[wrapper, &args].concat(), dir);
    command.env("FSDP_TIMEOUT_S", TIMEOUT);
    Agent::start(command)
}

fn wait_until(what: &str, agent: &mut Agent, is_so: impl Fn() -> bool) -> Duration {
    let began = Instant::now();
    loop {
        let is_over = agent.has_ended() || began.elapsed() > LIMIT;
        if is_so() {
            return began.elapsed();
        }
        assert!(!is_over, "{what} did not come:\n{}", agent.text());
        sleep(Duration::from_millis(10));
    }
}

fn checkpoints(dir: &Path) -> usize {
    fs::read_dir(dir.join("saved")).map_or(0, |saved| {
        saved.filter(|entry| entry.as_ref().is_ok_and(|entry| entry.path().join("checkpoint.json").exists())).count()
    })
}

/// Finds the `train` process of a rank in `dir`.
fn process(way: Way, rank: usize, dir: &Path) -> Option<Pid> {
    let marker = format!("{}={rank}", way.rank_variable());
    let is_it = |process: &PathBuf| {
        let environment = fs::read(process.join("environ")).unwrap_or_default();
        fs::read_link(process.join("exe")).is_ok_and(|exe| exe == program("train"))
            && fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd == dir)
            && environment.split(|&byte| byte == 0).any(|variable| variable == marker.as_bytes())
    };
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| Some(entry.ok()?.path()));
    let process = processes.filter(|process| process.join("environ").exists()).find(is_it)?;
    Pid::from_raw(process.file_name()?.to_str()?.parse().ok()?)
}

/// The remaining ranks or their launcher name the dead rank and its host.
fn killed(way: Way) {
    let dir = tempfile::tempdir().unwrap();
    // With ULFM, Open MPI reports the death to the ranks instead of ending them.
    let more: &[&str] = if way == Way::OpenMpi { &["--with-ft", "ulfm"] } else { &[] };
    let mut agent = start(way, &[], more, "1000000", dir.path());
    wait_until("a checkpoint", &mut agent, || checkpoints(dir.path()) > 0);
    kill_process(process(way, 3, dir.path()).unwrap(), Signal::KILL).unwrap();
    let began = Instant::now();
    let text = if way == Way::OpenMpi {
        // With ULFM, `mpirun` may stay after all ranks have ended.
        let are_gone = || (0..4).all(|rank| process(way, rank, dir.path()).is_none());
        wait_until("the end of all ranks", &mut agent, are_gone);
        agent.text()
    } else {
        let (code, text) = agent.finish();
        assert!(code.is_some_and(|code| code != 0), "{way:?}: {text}");
        text
    };
    let took = began.elapsed();
    let said = said(dir.path());
    let is_said = match way {
        Way::OpenMpi => said.contains("rank 3 on node1 died"),
        // MPICH ends the other ranks before they print an error, or crashes in them (11 is SIGSEGV).
        Way::Mpich => {
            let ended = |host: &str, code: u8| text.contains(&format!("RUNNING AT {host}\n=   EXIT CODE: {code}\n"));
            ended("node1", 9) || ["node0", "node1"].into_iter().any(|host| ended(host, 11))
        }
        // The launchers may see another rank's failure first: MPICH can crash in it.
        Way::Ours | Way::WithoutMpi => {
            let is_first = text.contains("rank 3 (pid ") && text.contains(" on node1) failed first");
            is_first || text.contains("rank 3: failed too, killed by SIGKILL")
        }
    };
    assert!(is_said, "{way:?}: {text}\n{said}");
    println!("{way:?}: ended {:.1} s after a rank was killed", took.as_secs_f64());
}

/// Returns the ranks' stderr.
fn said(dir: &Path) -> String {
    let of = |rank: usize| fs::read_to_string(dir.join(format!("said.{rank}"))).unwrap_or_default();
    (0..4).map(|rank| format!("rank {rank}: {}\n", of(rank))).collect()
}

/// Ranks on both sides of the cut end within their timeout and name the missing ranks. Both `mpirun` keep waiting for
/// the other host: TCP gives up after 15 minutes.
fn cut_off(way: Way) {
    let dir = tempfile::tempdir().unwrap();
    let cut = dir.path().join("cut");
    let option = format!("node1:{}", cut.display());
    let more: &[&str] = if way.is_ours() { &["--rdzv-conf=keep_alive_interval=3"] } else { &[] };
    let mut agent = start(way, &["--cut", &option], more, "1000000", dir.path());
    wait_until("a checkpoint", &mut agent, || checkpoints(dir.path()) > 0);
    fs::write(&cut, "").unwrap();
    let are_gone = || (0..4).all(|rank| process(way, rank, dir.path()).is_none());
    let took = wait_until("the end of all ranks", &mut agent, are_gone);
    let (text, said) = (agent.text(), said(dir.path()));
    println!("{way:?}: its ranks ended {:.1} s after the cut", took.as_secs_f64());
    // Our launchers end the ranks before their timeout.
    let is_said = |host: &str| {
        let names = |line: &str| line.contains("waited for rank(s) [") && line.contains(&format!("] on {host}"));
        said.lines().any(names)
    };
    if way.is_ours() {
        let (code, text) = agent.finish();
        let is_named = text.contains("node node1 is gone: no message from its launcher for 9s");
        assert!(is_named && code.is_some_and(|code| code != 0), "{text}");
    } else {
        // MPICH 5.0.2 sometimes crashes when it sends to a lost host. The ranks of the other host still say what is lost.
        let is_crashed = way == Way::Mpich && text.contains("EXIT CODE: 11");
        let hosts = ["node0", "node1"].into_iter().filter(|host| is_said(host)).count();
        assert!(hosts == 2 || is_crashed && hosts == 1, "{way:?}: {text}\n{said}");
    }
}

fn resumes() {
    let dir = tempfile::tempdir().unwrap();
    let mut agent = start(Way::Ours, &[], &["--max-restarts=1"], "300", dir.path());
    wait_until("a checkpoint", &mut agent, || checkpoints(dir.path()) > 0);
    kill_process(process(Way::Ours, 3, dir.path()).unwrap(), Signal::KILL).unwrap();
    let (code, text) = agent.finish();
    assert_eq!(code, Some(0), "{text}\n{}", said(dir.path()));
    assert!(text.contains("starting all ranks again, restart 1 of at most 1"), "{text}");
    let numbers: Vec<u64> =
        Trajectory::of_metrics(&dir.path().join("metrics.jsonl")).0.iter().map(|step| step.number).collect();
    assert_eq!(numbers, (1..=300).collect::<Vec<_>>());
}

/// One host of two loses its network. The other host continues with the same sequences a step.
fn continues_alone() {
    let dir = tempfile::tempdir().unwrap();
    let first = dir.path().join("saved/step-00000005/checkpoint.json");
    let cut = format!("node1:{}", first.display());
    // A slow network leaves most steps after the cut.
    let options = ["--rate", "10mbit", "--cut", &cut];
    let more = [
        "--nnodes=1:2",
        "--max-restarts=3",
        "--shutdown-timeout=2",
        "--rdzv-conf=keep_alive_interval=0.5,last_call_timeout=1",
    ];
    let train = program("train");
    let script = "exec \"$0\" \"$@\" --batch-size $((4 / WORLD_SIZE))";
    let mut args = vec!["sh".to_string(), "-c".into(), script.into(), train.display().to_string()];
    args.extend(golden_flags("llama_tiny"));
    let saves = "--metrics metrics.jsonl --checkpoint-dir saved --save-every 5 --resume auto";
    args.extend(saves.split(' ').map(String::from));
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut command = Way::Ours.start(&options, (2, 1), &more, &args, dir.path());
    command.env("FSDP_TIMEOUT_S", TIMEOUT);
    let mut agent = Agent::start(command);
    agent.wait_for("checkpoint: saved/step-00000020", 1);
    // The disconnected launcher would wait for the other.
    agent.kill();
    let text = agent.text();
    let parts = ["node node1 is gone", "starting all ranks again: 1 rank on 1 node", "node1 is off the network"];
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    let ours = Trajectory::of_metrics(&dir.path().join("metrics.jsonl"));
    let difference = ours.difference(&Trajectory::recorded("llama_tiny", "run"));
    assert!(difference.max() < 2e-5, "{difference:?}: {text}");
}
