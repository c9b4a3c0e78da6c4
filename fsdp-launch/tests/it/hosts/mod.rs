//! Several launchers on this host that work as one.

mod agent;
mod losses;

use std::{fs, net::TcpListener};

use agent::start_first;
pub(crate) use agent::{agents_of, start};
use fsdp_test_support::agent::{Agent, free_port};
use rustix::process::Signal;

use crate::{assert_gone_soon, executable, finish, heartbeats::rank_program, launcher, sorted, without_times};

#[test]
fn every_rank_gets_its_place() {
    let options = agents_of("--nnodes=2 --rdzv-id=job", free_port());
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $ROLE_NAME \
    $ROLE_RANK/$ROLE_WORLD_SIZE \
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
            let message = format!("  starting all ranks again, restart {restart} of at most 2: 2 ranks on 2 nodes\n");
            assert!(without_times(text).contains(&format!("failed first, with exit code 5\n{message}")), "{text}");
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
        let message =
            "failed first, with exit code 5\n  starting all ranks again, restart 1 of at most 1: 2 ranks on 2 nodes\n";
        assert!(code == Some(0) && without_times(&text).contains(message), "{text}");
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
fn reports_missing_hosts() {
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
fn reports_another_program_at_the_endpoint() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = agents_of("--nnodes=2 --rdzv-conf=join_timeout=0.3", taken.local_addr().unwrap().port());
    let (code, text) = start(&options, &[], "true").finish();
    assert!(
        code == Some(1) && text.contains("another program listens there") && text.contains("another port"),
        "{text}"
    );
}

#[test]
fn accepts_extreme_keep_alive_intervals() {
    for interval in ["1e18", "1e-9"] {
        let conf = format!("--rdzv-conf=keep_alive_interval={interval},keep_alive_max_attempt=4000000000");
        let options = agents_of(&format!("--nnodes=2 {conf}"), free_port());
        let ended = [0, 1].map(|_| start(&options, &[], "true")).map(Agent::finish);
        assert!(ended.iter().all(|(code, text)| *code == Some(0) && text.is_empty()), "{ended:?}");
    }
}

#[test]
fn refuses_contradicting_launchers() {
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
fn logs_of_a_host_use_local_ranks() {
    let options = agents_of("--nnodes=2 --nproc-per-node=1 --rdzv-id=job", free_port());
    let dir = tempfile::tempdir().unwrap();
    let agents = ["a", "b"].map(|name| {
        let log_dir = format!("--log-dir={}", dir.path().join(name).display());
        start(&options, &[&log_dir, "--log-line-prefix-template=${local_rank}/${rank} "], "echo $RANK")
    });
    let texts = agents.map(|agent| agent.finish().1).concat();
    assert_eq!(sorted(&texts).iter().filter(|line| line.starts_with("0/")).count(), 2, "{texts}");
    let mut logged = ["a", "b"].map(|name| {
        // The directory's name includes the host, for hosts that share it.
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
fn exits_are_known_across_launchers_of_a_host() {
    // On one host, ranks of different launchers share memory.
    let options = agents_of("--nnodes=2 --nproc-per-node=1", free_port());
    for (ended, waits) in [(0, 1), (1, 0)] {
        let script = rank_program(&format!("rank_{ended}_does_not_join")).join(" ");
        for (code, text) in [0, 1].map(|_| start(&options, &[], &script)).map(Agent::finish) {
            let message =
                format!("it recorded: rank {waits}: rank(s) {ended} ended with exit code 0 before they joined");
            assert!(code == Some(3) && text.contains(&message), "{text}");
        }
    }
}
