//! Launchers that work as one: several on this host, at a rendezvous on the loopback.

use std::{
    fs,
    mem::ManuallyDrop,
    net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use rustix::{
    net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt::set_socket_reuseaddr},
    process::{Pid, Signal, kill_process},
};

use crate::{
    TIMEOUT, assert_gone_soon, executable, finish, hear_signals, heartbeats::rank_program, launcher, sorted,
    without_times,
};

/// A port that nobody but who names it gets for as long as this program runs: a socket that does not listen holds it.
pub(crate) fn free_port() -> u16 {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    // As listeners have it, so that one may bind it too.
    set_socket_reuseaddr(&socket, true).unwrap();
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    // Never closed.
    let held = ManuallyDrop::new(TcpListener::from(socket));
    held.local_addr().unwrap().port()
}

/// One launcher, whose output goes to a file.
struct Agent {
    child: Child,
    output: tempfile::NamedTempFile,
}

impl Agent {
    /// With `options`, and a script for its ranks.
    fn start(options: &[&str], script: &str) -> Self {
        hear_signals();
        let output = tempfile::NamedTempFile::new().unwrap();
        let file = fs::OpenOptions::new().append(true).open(output.path()).unwrap();
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("fsdp-launch"));
        command.args(options).args(["/bin/sh", "-c", script]).env_remove("RUST_LOG");
        let child = command.stdout(file.try_clone().unwrap()).stderr(file).stdin(Stdio::null()).spawn().unwrap();
        let launcher = Pid::from_child(&child);
        std::thread::spawn(move || {
            sleep(TIMEOUT);
            kill_process(launcher, Signal::KILL).ok();
        });
        Agent { child, output }
    }

    fn text(&self) -> String {
        fs::read_to_string(self.output.path()).unwrap()
    }

    /// What the ranks printed so far.
    fn lines(&self) -> Vec<String> {
        self.text().lines().filter(|line| line.starts_with("[rank ")).map(str::to_owned).collect()
    }

    /// Waits until the launcher and its ranks have printed `part` so often.
    fn wait_for(&self, part: &str, count: usize) {
        let start = Instant::now();
        while self.text().matches(part).count() < count {
            assert!(start.elapsed() < TIMEOUT, "{part:?} did not come {count} times: {}", self.text());
            sleep(Duration::from_millis(5));
        }
    }

    /// Waits until its ranks are in an attempt with `world` ranks, not before attempt `first`, as a script with
    /// [`PLACE`] prints it; which attempt that is. How many attempts come before depends on when hosts come.
    fn attempt_of(&self, world: u32, first: u32) -> u32 {
        let mut found = None;
        let start = Instant::now();
        while found.is_none() {
            let attempts = self.lines().into_iter().filter_map(|line| {
                let (_, place) = line.split_once(&format!("world {world} attempt "))?;
                place.split(' ').next()?.parse().ok()
            });
            found = attempts.filter(|&attempt: &u32| attempt >= first).max();
            assert!(start.elapsed() < TIMEOUT, "no attempt {first} or later of {world} ranks: {}", self.text());
            sleep(Duration::from_millis(5));
        }
        found.unwrap()
    }

    /// The numbers behind `pid ` in what was printed.
    fn pids(&self) -> Vec<i32> {
        self.lines().iter().filter_map(|line| line.split(" pid ").nth(1)?.parse().ok()).collect()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// The exit code, and all that was printed.
    fn finish(mut self) -> (Option<i32>, String) {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < TIMEOUT, "the launcher did not end: {}", self.text());
            sleep(Duration::from_millis(5));
        };
        (status.code(), self.text())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Prints which attempt this is.
const PLACE: &str = "echo world $WORLD_SIZE attempt $FSDP_ATTEMPT restart $TORCHELASTIC_RESTART_COUNT";

/// `options` for all agents, as one text; the endpoint is added.
fn agents_of(options: &str, port: u16) -> Vec<String> {
    let mut all: Vec<String> = options.split(' ').map(str::to_owned).collect();
    all.push(format!("--rdzv-endpoint=localhost:{port}"));
    all
}

/// Starts the one that holds the rendezvous.
fn start_first(options: &[String], more: &[&str], script: &str) -> Agent {
    let agent = start(options, more, script);
    let endpoint = options.iter().find_map(|option| option.strip_prefix("--rdzv-endpoint=")).unwrap();
    let began = Instant::now();
    while TcpStream::connect(endpoint).is_err() {
        assert!(began.elapsed() < TIMEOUT, "nobody listens at {endpoint}");
        sleep(Duration::from_millis(2));
    }
    agent
}

fn start(options: &[String], more: &[&str], script: &str) -> Agent {
    let mut all: Vec<&str> = options.iter().map(String::as_str).collect();
    all.extend(more);
    Agent::start(&all, script)
}

#[test]
fn every_rank_finds_its_place_among_all() {
    let options = agents_of("--nnodes=2 --rdzv-id=job", free_port());
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $ROLE_NAME $ROLE_RANK/$ROLE_WORLD_SIZE \
                  $TORCHELASTIC_RUN_ID $FSDP_HOSTS $MASTER_ADDR:$MASTER_PORT";
    let second = start(&options, &["--nproc-per-node=1", "--node-rank=1"], script);
    let first = start(&options, &["--nproc-per-node=2", "--node-rank=0", "--role=writer"], script);
    let (first, second) = (first.finish(), second.finish());
    assert_eq!((first.0, second.0), (Some(0), Some(0)), "{first:?} {second:?}");
    let all = [first.1, second.1].concat();
    let (_, master) = all.lines().next().unwrap().rsplit_once(' ').unwrap();
    assert!(master.strip_prefix("localhost:").is_some_and(|port| port.parse::<u16>().is_ok()), "{master}");
    let expected = [
        format!("[rank 0] 0/3 0/2 0/2 writer 0/2 job 1 {master}"),
        format!("[rank 1] 1/3 1/2 0/2 writer 1/2 job 1 {master}"),
        format!("[rank 2] 2/3 0/1 1/2 default 0/1 job 1 {master}"),
    ];
    assert_eq!(sorted(&all), expected);
}

#[test]
fn a_failure_ends_all_hosts_with_its_exit_code_and_is_told_on_each() {
    let options = agents_of("--nnodes=2 --nproc-per-node=2", free_port());
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let script = format!(
        "echo pid $$; if [ $RANK = 3 ]; then until [ -e {} ]; do sleep 0.02; done; \
         echo '{{\"message\": \"no data\"}}' > $TORCHELASTIC_ERROR_FILE; exit 7; fi; sleep 300",
        go.display()
    );
    let agents = [0, 1].map(|_| start(&options, &[], &script));
    let pids: Vec<i32> = agents
        .iter()
        .flat_map(|agent| {
            agent.wait_for("pid", 2);
            agent.pids()
        })
        .collect();
    fs::write(go, "").unwrap();
    for (code, text) in agents.map(Agent::finish) {
        assert_eq!(code, Some(7), "{text}");
        assert!(
            text.contains("rank 3 (pid ") && text.contains("failed first, with exit code 7\n  it recorded: no data"),
            "{text}"
        );
    }
    assert_gone_soon(&pids);
}

#[test]
fn all_hosts_start_again_together_until_restarts_are_used_up() {
    let options = agents_of("--nnodes=2 --nproc-per-node=1 --max-restarts=2", free_port());
    let script = "echo attempt $FSDP_ATTEMPT; [ $RANK = $((FSDP_ATTEMPT % 2)) ] && exit 5; sleep 300";
    let ended = [0, 1].map(|_| start(&options, &[], script)).map(Agent::finish);
    for (code, text) in &ended {
        assert_eq!(*code, Some(5), "{text}");
        for restart in 1..=2 {
            let told = format!("  starting all ranks again, restart {restart} of at most 2: 2 ranks on 2 nodes\n");
            assert!(without_times(text).contains(&format!("failed first, with exit code 5\n{told}")), "{text}");
        }
        assert!(!text.contains("the hosts have changed"), "{text}");
        assert!(text.contains("restarts used: 2 of at most 2\n  attempt 0: rank 0 (pid "), "{text}");
    }
    let all = ended.map(|(_, text)| text).concat();
    assert!((0..3).all(|attempt| all.contains(&format!("[rank {}] attempt {attempt}\n", attempt % 2))), "{all}");
}

#[test]
fn a_host_whose_ranks_had_succeeded_is_told_why_they_start_again() {
    let options = agents_of("--nnodes=2 --nproc-per-node=1 --max-restarts=1", free_port());
    let script = "[ $FSDP_ATTEMPT = 1 ] && exit 0; [ $RANK = 0 ] && exit 0; echo waits; read -r _ < $FIFO; exit 5";
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let script = script.replace("$FIFO", &fifo.display().to_string());
    let agents = [0, 1].map(|rank| start(&options, &[&format!("--node-rank={rank}")], &script));
    agents[1].wait_for("waits", 1);
    fs::write(&fifo, "go\n").unwrap();
    for (code, text) in agents.map(Agent::finish) {
        let told =
            "failed first, with exit code 5\n  starting all ranks again, restart 1 of at most 1: 2 ranks on 2 nodes\n";
        assert!(code == Some(0) && without_times(&text).contains(told), "{text}");
    }
}

#[test]
fn a_run_shrinks_when_a_host_is_killed_and_grows_when_it_comes_back() {
    let options = agents_of("--nnodes=1:2 --nproc-per-node=1 --rdzv-conf=last_call_timeout=0.5", free_port());
    let dir = tempfile::tempdir().unwrap();
    let flag = dir.path().join("enough");
    let script = format!("{PLACE}; echo pid $$; until [ -e {} ]; do sleep 0.02; done", flag.display());
    let first = start_first(&options, &[], &script);
    let second = start(&options, &[], &script);
    let both = first.attempt_of(2, 0);
    second.wait_for("pid", 1);
    let lost = second.pids();
    second.signal(Signal::KILL);
    assert_eq!(first.attempt_of(1, both), both + 1);
    assert_gone_soon(&lost);
    let third = start(&options, &[], &script);
    assert_eq!([&first, &third].map(|agent| agent.attempt_of(2, both + 1)), [both + 2; 2]);
    fs::write(flag, "").unwrap();
    let (code, text) = first.finish();
    assert_eq!((code, third.finish().0), (Some(0), Some(0)), "{text}");
    assert!(text.contains("is gone: its launcher has ended\n  starting all ranks again: 1 rank on 1 node\n"), "{text}");
    assert!(text.contains("has joined\n  starting all ranks again: 2 ranks on 2 nodes\n"), "{text}");
}

#[test]
fn a_host_that_must_not_be_missing_is_replaced_within_the_restarts() {
    let options = agents_of("--nnodes=2 --nproc-per-node=1 --max-restarts=1", free_port());
    let script = "echo world $WORLD_SIZE attempt $FSDP_ATTEMPT; [ $FSDP_ATTEMPT = 1 ] || sleep 300";
    let first = start_first(&options, &[], script);
    let second = start(&options, &[], script);
    second.wait_for("attempt 0", 1);
    second.signal(Signal::TERM);
    let (code, text) = second.finish();
    assert!(code == Some(143) && text.contains("stopped by SIGTERM"), "{text}");
    let third = start(&options, &[], script);
    let (code, text) = first.finish();
    assert_eq!((code, third.finish().0), (Some(0), Some(0)), "{text}");
    assert!(
        text.contains("its launcher was stopped by SIGTERM\n  starting all ranks again, restart 1 of at most 1"),
        "{text}"
    );
}

#[test]
fn the_host_of_the_rendezvous_may_come_back() {
    let options = agents_of("--nnodes=2 --nproc-per-node=1 --max-restarts=3", free_port());
    let script = "echo attempt $FSDP_ATTEMPT; echo pid $$; [ $FSDP_ATTEMPT = 1 ] || sleep 300";
    let first = start_first(&options, &["--rdzv-conf=is_host=true"], script);
    let second = start(&options, &["--rdzv-conf=is_host=false"], script);
    [&first, &second].into_iter().for_each(|agent| agent.wait_for("pid", 1));
    let pids = [first.pids(), second.pids()].concat();
    first.signal(Signal::KILL);
    second.wait_for("which holds the rendezvous, is gone", 1);
    assert_gone_soon(&pids);
    let third = start(&options, &["--rdzv-conf=is_host=true"], script);
    let (code, text) = second.finish();
    assert_eq!((code, third.finish().0), (Some(0), Some(0)), "{text}");
    assert!(text.contains("] attempt 1\n"), "{text}");
}

#[test]
fn without_restarts_the_loss_of_the_rendezvous_is_the_end() {
    let options = agents_of("--nnodes=2 --nproc-per-node=1", free_port());
    let script = "echo pid $$; sleep 300";
    let first = start_first(&options, &["--rdzv-conf=is_host=true"], script);
    let second = start(&options, &["--rdzv-conf=is_host=false"], script);
    [&first, &second].into_iter().for_each(|agent| agent.wait_for("pid", 1));
    let pids = [first.pids(), second.pids()].concat();
    first.signal(Signal::KILL);
    let (code, text) = second.finish();
    assert!(
        code == Some(1) && text.contains("which holds the rendezvous, is gone: the connection was closed\n  that costs a restart, and all of --max-restarts 0 are used"),
        "{text}"
    );
    assert_gone_soon(&pids);
}

#[test]
fn an_elastic_run_goes_on_without_the_host_of_its_rendezvous_and_without_a_restart() {
    let options = agents_of("--nnodes=1:2 --nproc-per-node=1 --rdzv-conf=last_call_timeout=0.5", free_port());
    let dir = tempfile::tempdir().unwrap();
    let flag = dir.path().join("enough");
    let script = format!("{PLACE}; until [ -e {} ]; do sleep 0.02; done", flag.display());
    let first = start_first(&options, &[], &script);
    let second = start(&options, &[], &script);
    let both = second.attempt_of(2, 0);
    first.signal(Signal::KILL);
    assert_eq!(second.attempt_of(1, both), both + 1);
    // It brings no count of its own, and is heard by those who have one.
    let third = start(&options, &[], &script);
    assert_eq!([&second, &third].map(|agent| agent.attempt_of(2, both + 1)), [both + 2; 2]);
    fs::write(flag, "").unwrap();
    let (code, text) = second.finish();
    assert_eq!((code, third.finish().0), (Some(0), Some(0)), "{text}");
    assert!(text.contains("restart 0") && !text.contains("restart 1"), "{text}");
}

#[test]
fn a_new_coordinator_ends_its_ranks_for_one_that_counted_further() {
    // The second takes long to end its ranks, and finds the new coordinator with ranks of its own, in its first attempt.
    let options =
        agents_of("--nnodes=1:2 --nproc-per-node=1 --max-restarts=9 --rdzv-conf=last_call_timeout=0.5", free_port());
    let dir = tempfile::tempdir().unwrap();
    let enough = dir.path().join("enough");
    let (other, later) = (dir.path().join("other"), dir.path().join("later"));
    let (enough, other, later) = (enough.display(), other.display(), later.display());
    let script = format!(
        "case $WORLD_SIZE$TORCHELASTIC_RESTART_COUNT in 20) [ -e {later} ] || exit 5;; \
         21) trap 'until [ -e {other} ]; do sleep 0.02; done; exit 1' TERM;; esac; \
         {PLACE}; until [ -e {enough} ]; do sleep 0.02; done"
    );
    let first = start_first(&options, &[], &script);
    let second = start(&options, &[], &script);
    let [both, _] = [&first, &second].map(|agent| agent.attempt_of(2, 0));
    first.signal(Signal::KILL);
    fs::write(dir.path().join("later"), "").unwrap();
    let third = start(&options, &[], &script);
    assert_eq!(third.attempt_of(1, 0), 0);
    fs::write(dir.path().join("other"), "").unwrap();
    assert_eq!([&second, &third].map(|agent| agent.attempt_of(2, both + 1)), [both + 1; 2]);
    fs::write(dir.path().join("enough"), "").unwrap();
    for (code, text) in [second, third].map(Agent::finish) {
        assert_eq!(code, Some(0), "{text}");
    }
}

#[test]
fn a_host_of_the_rendezvous_that_can_not_start_its_ranks_costs_restarts_too() {
    let options =
        agents_of("--nnodes=1:2 --nproc-per-node=1 --max-restarts=1 --rdzv-conf=last_call_timeout=0.5", free_port());
    let guest =
        start(&options, &["--rdzv-conf=is_host=false,last_call_timeout=0.5"], "echo attempt $FSDP_ATTEMPT; sleep 300");
    let dir = tempfile::tempdir().unwrap();
    let program = executable(dir.path().join("program"), "#!/no/such/interpreter\n").display().to_string();
    let host = |()| {
        let mut args: Vec<&str> = options.iter().map(String::as_str).collect();
        args.extend(["--rdzv-conf=is_host=true,last_call_timeout=30", &program]);
        let (code, _, stderr) = finish(&mut launcher(&args));
        assert!(code == Some(1) && stderr.contains("could not be started"), "{stderr}");
    };
    host(());
    host(());
    let (code, text) = guest.finish();
    assert!(code == Some(1) && text.contains("could not be started"), "{text}");
    assert!(text.contains("restarts used: 1 of at most 1"), "{text}");
}

#[test]
fn a_host_that_can_not_start_its_ranks_does_not_restart_the_others_for_ever() {
    let options =
        agents_of("--nnodes=1:2 --nproc-per-node=1 --max-restarts=1 --rdzv-conf=last_call_timeout=0.5", free_port());
    let options = &options[..];
    let first = start_first(options, &[], "echo attempt $FSDP_ATTEMPT; sleep 300");
    first.wait_for("attempt 0", 1);
    let dir = tempfile::tempdir().unwrap();
    let program = executable(dir.path().join("program"), "#!/no/such/interpreter\n");
    for attempt in [2, 4] {
        let mut args: Vec<&str> = options.iter().map(String::as_str).collect();
        let program = program.display().to_string();
        args.push(&program);
        let (code, _, stderr) = finish(&mut launcher(&args));
        assert_eq!(code, Some(1), "{stderr}");
        assert!(stderr.contains("could not be started") && stderr.contains("interpreter"), "{stderr}");
        if attempt == 2 {
            first.wait_for("attempt 2", 1);
        }
    }
    let (code, text) = first.finish();
    assert!(code == Some(1) && text.contains("restarts used: 1 of at most 1"), "{text}");
    assert_eq!(text.matches("could not be started from").count(), 3, "{text}");
}

#[test]
fn who_waits_in_vain_says_for_whom() {
    let port = free_port();
    let alone = agents_of("--nnodes=2 --rdzv-conf=join_timeout=0.3", port);
    let (code, text) = start(&alone, &[], "true").finish();
    assert!(
        code == Some(1) && text.contains("only 1 of at least 2 nodes (") && text.contains("join_timeout"),
        "{text}"
    );
    let (code, text) = start(&alone, &["--rdzv-conf=join_timeout=0.3,is_host=false"], "true").finish();
    assert!(code == Some(1) && text.contains(&format!("no launcher was reached at localhost:{port}")), "{text}");
}

#[test]
fn another_program_at_the_endpoint_is_told() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = agents_of("--nnodes=2 --rdzv-conf=join_timeout=0.3", taken.local_addr().unwrap().port());
    let (code, text) = start(&options, &[], "true").finish();
    assert!(code == Some(1) && text.contains("is no launcher of this user") && text.contains("another port"), "{text}");
}

#[test]
fn signs_of_life_may_be_as_rare_or_as_frequent_as_one_likes() {
    for interval in ["1e18", "1e-9"] {
        let conf = format!("--rdzv-conf=keep_alive_interval={interval},keep_alive_max_attempt=4000000000");
        let options = agents_of(&format!("--nnodes=2 {conf}"), free_port());
        let ended = [0, 1].map(|_| start(&options, &[], "true")).map(Agent::finish);
        assert!(ended.iter().all(|(code, text)| *code == Some(0) && text.is_empty()), "{ended:?}");
    }
}

#[test]
fn several_hosts_that_are_stopped_at_once_are_no_reason_for_the_others_to_end() {
    let options = agents_of("--nnodes=1:3 --rdzv-conf=last_call_timeout=0.5", free_port());
    let dir = tempfile::tempdir().unwrap();
    let flag = dir.path().join("told");
    // Hosts may come too late for the first attempt, which is then smaller.
    let script = format!(
        "flag={}; asked() {{ echo asked; until [ -e $flag ]; do sleep 0.02; done; exit 0; }}; \
         if [ $WORLD_SIZE = 3 ]; then trap asked TERM; fi; \
         {PLACE}; until [ $WORLD_SIZE = 1 ] && [ -e $flag ]; do sleep 0.02; done",
        flag.display()
    );
    let first = start_first(&options, &[], &script);
    let others = [0, 1].map(|_| start(&options, &["--shutdown-timeout=60"], &script));
    [&first, &others[0], &others[1]].into_iter().for_each(|agent| agent.wait_for("world 3", 1));
    let [second, third] = others;
    third.signal(Signal::KILL);
    // It is about to end its ranks for the others' sake.
    second.wait_for("asked", 1);
    second.signal(Signal::TERM);
    // Most often it hears that before its ranks have ended; the outcome is the same.
    sleep(Duration::from_millis(100));
    fs::write(flag, "").unwrap();
    assert_eq!(second.finish().0, Some(143));
    let (code, text) = first.finish();
    assert!(code == Some(0) && text.contains("world 1 attempt "), "{text}");
}

#[test]
fn launchers_that_contradict_each_other_are_refused_by_name() {
    let options = agents_of("--nnodes=2 --rdzv-id=a --node-rank=0", free_port());
    let first = start_first(&options, &[], "true");
    let others = [
        (vec!["--nnodes=1:2"], "--nnodes 2, not 1:2"),
        (vec!["--rdzv-id=b"], "the run here is \"a\", not \"b\""),
        (vec!["--max-restarts=1"], "--max-restarts 0, not 1"),
        (vec![], "--node-rank 0 is taken by "),
    ];
    for (more, part) in others {
        let replaced = |option: &&String| !more.iter().any(|new| option.split('=').next() == new.split('=').next());
        let options: Vec<String> = options.iter().filter(replaced).cloned().collect();
        let (code, text) = start(&options, &more, "true").finish();
        assert!(code == Some(1) && text.contains(part) && text.contains("refused this one"), "{text}");
    }
    first.signal(Signal::INT);
    assert_eq!(first.finish().0, Some(130));
}

#[test]
fn logs_of_a_host_are_by_its_local_ranks() {
    let options = agents_of("--nnodes=2 --nproc-per-node=1 --rdzv-id=job", free_port());
    let dir = tempfile::tempdir().unwrap();
    let agents = ["a", "b"].map(|name| {
        let log_dir = format!("--log-dir={}", dir.path().join(name).display());
        start(&options, &[&log_dir, "--log-line-prefix-template=${local_rank}/${rank} "], "echo $RANK")
    });
    let texts = agents.map(|agent| agent.finish().1).concat();
    assert_eq!(sorted(&texts).iter().filter(|line| line.starts_with("0/")).count(), 2, "{texts}");
    let mut logged = ["a", "b"].map(|name| {
        // The host's name stands behind the run's, for hosts that share a directory.
        let run = fs::read_dir(dir.path().join(name)).unwrap().next().unwrap().unwrap();
        assert!(run.file_name().to_string_lossy().starts_with("job_"), "{run:?}");
        fs::read_to_string(run.path().join("attempt_0/0/stdout.log")).unwrap()
    });
    logged.sort();
    assert_eq!(logged, ["0\n", "1\n"]);
}

#[test]
fn dry_run_shows_a_host_of_several() {
    let line = "--nnodes=2 --node-rank=1 --nproc-per-node=2 --rdzv-endpoint=localhost:29400 --dry-run true";
    let output = launcher(&line.split(' ').collect::<Vec<_>>()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    for part in ["# host 1 of 2", "# rank 2\n", "# rank 3\n", "WORLD_SIZE=4 ", "GROUP_RANK=1 "] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}

#[test]
fn ranks_of_several_launchers_wait_for_nobody_who_has_ended() {
    // On one host, where ranks of different launchers meet.
    let options = agents_of("--nnodes=2 --nproc-per-node=1", free_port());
    for (ended, waits) in [(0, 1), (1, 0)] {
        let script = rank_program(&format!("rank_{ended}_does_not_join")).join(" ");
        for (code, text) in [0, 1].map(|_| start(&options, &[], &script)).map(Agent::finish) {
            let told = format!("it recorded: rank {waits}: rank(s) {ended} ended with exit code 0 before they joined");
            assert!(code == Some(3) && text.contains(&told), "{text}");
        }
    }
}
