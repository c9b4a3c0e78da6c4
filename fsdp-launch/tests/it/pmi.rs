//! PMI between the launcher and ranks that are bash scripts; and the store's secret.

use std::fs;

use fsdp_test_support::agent::{Agent, free_port};

use crate::{
    Running, assert_gone_soon, finish,
    hosts::{agents_of, start},
    launcher, sorted, wait_for, without_times,
};

/// Bash functions that speak PMI.
const SPEAKS: &str = "ask() { echo \"$1\" >&$PMI_FD; read -r answer <&$PMI_FD; }; \
    init() { ask 'cmd=init pmi_version=1 pmi_subversion=1'; ask cmd=get_my_kvsname; kvs=${answer##*kvsname=}; }; \
    put() { ask \"cmd=put kvsname=$kvs key=$1 value=$2\"; }; \
    get() { ask \"cmd=get kvsname=$kvs key=$1\"; }; ";

/// Starts one of two launchers with two ranks each.
fn two_hosts(options: &str, script: &str) -> [(Option<i32>, String); 2] {
    let options = agents_of(format!("--nnodes=2 --nproc-per-node=2 {options}").trim(), free_port());
    let script = format!("{SPEAKS}{script}");
    [0, 1].map(|rank| of_bash(&options, rank, &script)).map(Agent::finish)
}

fn of_bash(options: &[String], node_rank: usize, script: &str) -> Agent {
    // Use bash, not the agent's sh.
    let script = format!("exec bash -c '{}'", script.replace('\'', r"'\''"));
    start(options, &[&format!("--node-rank={node_rank}")], &script)
}

fn of_one_host(ranks: &str, script: &str) -> (Option<i32>, String, String) {
    finish(&mut launcher(&["--nproc-per-node", ranks, "bash", "-c", &format!("{SPEAKS}{script}")]))
}

#[test]
fn two_hosts_exchange_entries() {
    // 8 values of 4000 bytes do not fit one message between launchers.
    let script = "init; for i in 1 2 3 4 5 6 7 8; do put big$i.$PMI_RANK $(printf \"%04000d\" $i); done; \
        put card$PMI_RANK \"card of $RANK\"; ask cmd=barrier_in; \
        for r in 0 1 2 3; do get card$r; cards=\"$cards ${answer##*value=},\"; get big8.$r; [ ${#answer} = 4038 ] && \
        cards=\"$cards whole\"; done; \
        get PMI_process_mapping; echo \"$PMI_RANK of $PMI_SIZE:$cards ${answer##*value=}\"; \
        ask cmd=barrier_in; ask cmd=get_universe_size; echo ${answer##*size=}; ask cmd=finalize";
    let ended = two_hosts("", script);
    let all = ended.map(|(code, text)| {
        assert_eq!(code, Some(0), "{text}");
        text
    });
    let all = all.concat();
    let cards = "card of 0, whole card of 1, whole card of 2, whole card of 3, whole (vector,(0,2,2))";
    let message = |rank| [format!("[rank {rank}] {rank} of 4: {cards}"), format!("[rank {rank}] 4")];
    let expected: Vec<String> = (0..4).flat_map(message).collect();
    assert_eq!(sorted(&all), expected);
}

#[test]
fn a_restart_begins_with_an_empty_space() {
    let script = "init; get old; found=${answer#*msg=}; ask cmd=barrier_in; [ $PMI_RANK = 0 ] && put old value; \
        ask cmd=barrier_in; get old; echo \"attempt ${kvs##*_}: ${found%% *}, ${answer##* }\"; ask cmd=barrier_in; \
        [ $FSDP_ATTEMPT$PMI_RANK = 03 ] && exit 5; [ $FSDP_ATTEMPT = 0 ] && sleep 300; ask cmd=finalize";
    let ended = two_hosts("--max-restarts=1", script);
    let all = ended.map(|(code, text)| {
        assert_eq!(code, Some(0), "{text}");
        text
    });
    let all = all.concat();
    for rank in 0..4 {
        for attempt in [0, 1] {
            let message = format!("[rank {rank}] attempt {attempt}: key_not_found, value=value\n");
            assert!(all.contains(&message), "{message} is not in {all}");
        }
    }
}

#[test]
fn a_rank_that_aborts_ends_all_hosts_with_its_message() {
    let script = "init; ask cmd=barrier_in; if [ $PMI_RANK = 3 ]; then \
        echo 'cmd=abort exitcode=13 message=no such data' >&$PMI_FD; exit 13; fi; sleep 300";
    for (code, text) in two_hosts("", script) {
        assert_eq!(code, Some(13), "{text}");
        let message =
            "failed first, with exit code 13\n  it recorded: it called MPI_Abort with exit code 13: no such data";
        assert!(text.contains("rank 3 (pid ") && text.contains(message), "{text}");
    }
    // MPI_Abort with exit code 0 is still a failure, and the launcher ends the rank.
    let (code, _, stderr) = of_one_host("2", "echo 'cmd=abort exitcode=0' >&$PMI_FD; exit 0");
    assert!(code == Some(1) && stderr.contains("it called MPI_Abort with exit code 0"), "{stderr}");
    let (code, _, stderr) = of_one_host("1", "echo 'cmd=abort exitcode=7' >&$PMI_FD; exec sleep 300");
    assert!(code == Some(7) && stderr.contains("it called MPI_Abort with exit code 7"), "{stderr}");
}

#[test]
fn a_rank_that_says_nonsense_is_named() {
    for (said, part) in [
        ("GET / HTTP/1.1", "it sent over PMI \"GET / HTTP/1.1\", which is not a command of PMI-1"),
        ("cmd=get_maxes", "it sent a PMI command before init"),
        ("cmd=init", "it sent over PMI \"cmd=init\", which lacks pmi_version="),
    ] {
        let script = format!("[ $RANK = 1 ] && echo '{said}' >&$PMI_FD; exec sleep 300");
        let (code, _, stderr) = of_one_host("2", &script);
        let stderr = without_times(&stderr);
        assert!(code == Some(143) && stderr.contains("rank 1 (pid ") && stderr.contains(part), "{stderr}");
        assert!(stderr.contains("\n  rank 0: ended by SIGTERM"), "{stderr}");
    }
}

#[test]
fn an_exit_during_a_barrier_is_a_failure() {
    let (code, _, stderr) = of_one_host("2", "init; [ $RANK = 1 ] && exit 0; ask cmd=barrier_in; sleep 300");
    assert_eq!(code, Some(1), "{stderr}");
    let message = "with exit code 0\n  it recorded: it left MPI, but rank 0 waits for it";
    assert!(stderr.contains("rank 1 (pid ") && stderr.contains(message), "{stderr}");
    // The rank's own failure is reported.
    let (code, _, stderr) = of_one_host("2", "init; [ $RANK = 1 ] && exit 5; ask cmd=barrier_in; sleep 300");
    assert!(code == Some(5) && !stderr.contains("it recorded"), "{stderr}");
    // A rank of another host.
    let script = "[ $PMI_RANK -lt 2 ] && exit 0; init; ask cmd=barrier_in; sleep 300";
    for (code, text) in two_hosts("", script) {
        let message = "has ended its ranks while those of other hosts wait for them in a barrier of MPI";
        assert!(code == Some(1) && text.contains(message), "{text}");
    }
}

#[test]
fn leftover_processes_with_the_connection_end() {
    let script = "setsid sleep 300 & echo pid $!; init; ask cmd=barrier_in; ask cmd=finalize";
    let (code, stdout, stderr) = of_one_host("2", script);
    assert_eq!(code, Some(0), "{stderr}");
    let pids: Vec<i32> = stdout.lines().map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
    assert_eq!(pids.len(), 2);
    assert_gone_soon(&pids);
}

#[test]
fn ranks_share_a_secret_that_is_not_visible() {
    let dir = tempfile::tempdir().unwrap();
    let options = agents_of("--nnodes=2 --nproc-per-node=2", free_port());
    let script = "echo secret $FSDP_STORE_SECRET";
    let mut secrets: Vec<String> = [0, 1]
        .map(|rank| of_bash(&options, rank, script))
        .map(Agent::finish)
        .into_iter()
        .flat_map(|(_, text)| text.lines().map(|line| line.rsplit(' ').next().unwrap().to_owned()).collect::<Vec<_>>())
        .collect();
    assert_eq!(secrets.len(), 4, "{secrets:?}");
    secrets.dedup();
    assert!(secrets.len() == 1 && secrets[0].len() == 64, "{secrets:?}");

    // The variable of an outer launcher is not passed on.
    let secret = dir.path().join("secret");
    let script = format!("echo $FSDP_STORE_SECRET > {}; echo ready; exec sleep 300", secret.display());
    let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin!("fsdp-launch"));
    command.args(["sh", "-c", &script]).env("TMPDIR", dir.path()).env("RUST_LOG", "trace");
    command.env("FSDP_STORE_SECRET", "that of another run");
    let run = Agent::start(command);
    let secret_of_rank = || {
        let text = fs::read_to_string(&secret).ok()?;
        let is_ready = text.ends_with('\n') && run.text().contains("ready");
        is_ready.then(|| text.trim().to_owned())
    };
    let text = wait_for(secret_of_rank, || "the rank did not start");
    assert_eq!(text.len(), 64);
    // Neither output, nor files, nor the command line, nor `status` contain it.
    fs::remove_file(&secret).unwrap();
    let seen = std::process::Command::new("grep").args(["-r", &text]).arg(dir.path()).output().unwrap();
    assert!(seen.stdout.is_empty() && !run.text().contains(&text), "{seen:?}");
    let line = fs::read(format!("/proc/{}/cmdline", run.id())).unwrap();
    assert!(!String::from_utf8_lossy(&line).contains(&text));
    let (_, stdout, stderr) = finish(&mut launcher(&["--dry-run", "--nproc-per-node=2", "true"]));
    assert!(!stdout.contains("FSDP_STORE_SECRET") && stderr.is_empty(), "{stdout}");
}

#[test]
fn a_rank_inherits_only_its_own_socket() {
    let mut launcher = Running::start(&["--nproc-per-node=3", "bash", "-c", "ls -l /proc/$$/fd | grep -c socket:"]);
    // Each rank has its own socket, and no other.
    for _ in 0..3 {
        assert!(launcher.line().ends_with("] 1"));
    }
    assert_eq!(launcher.wait().code(), Some(0));
}
