//! Lost and returning hosts, including the host of the rendezvous.

use std::{fs, thread::sleep, time::Duration};

use rustix::process::Signal;

use fsdp_test_support::agent::{Agent, free_port};

use super::agent::{PLACE, agents_of, attempt_of, start, start_first};
use crate::assert_gone_soon;

#[test]
fn a_run_shrinks_when_a_host_is_killed_and_grows_when_it_comes_back() {
    let options = agents_of("--nnodes=1:2 --nproc-per-node=1 --rdzv-conf=last_call_timeout=0.5", free_port());
    let dir = tempfile::tempdir().unwrap();
    let flag = dir.path().join("enough");
    let script = format!("{PLACE}; echo pid $$; until [ -e {} ]; do sleep 0.02; done", flag.display());
    let first = start_first(&options, &[], &script);
    let second = start(&options, &[], &script);
    let both = attempt_of(&first, 2, 0);
    second.wait_for("pid", 1);
    let lost = second.pids();
    second.signal(Signal::KILL);
    assert_eq!(attempt_of(&first, 1, both), both + 1);
    assert_gone_soon(&lost);
    let third = start(&options, &[], &script);
    assert_eq!([&first, &third].map(|agent| attempt_of(agent, 2, both + 1)), [both + 2; 2]);
    fs::write(flag, "").unwrap();
    let (code, text) = first.finish();
    assert_eq!((code, third.finish().0), (Some(0), Some(0)), "{text}");
    assert!(text.contains("is gone: its launcher has ended\n  starting all ranks again: 1 rank on 1 node\n"), "{text}");
    assert!(text.contains("has joined\n  starting all ranks again: 2 ranks on 2 nodes\n"), "{text}");
}

#[test]
fn a_required_host_is_replaced_at_the_cost_of_a_restart() {
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
    second.wait_for("which serves the rendezvous, is gone", 1);
    assert_gone_soon(&pids);
    let third = start(&options, &["--rdzv-conf=is_host=true"], script);
    let (code, text) = second.finish();
    assert_eq!((code, third.finish().0), (Some(0), Some(0)), "{text}");
    assert!(text.contains("] attempt 1\n"), "{text}");
}

#[test]
fn losing_the_rendezvous_ends_a_run_without_restarts() {
    let options = agents_of("--nnodes=2 --nproc-per-node=1", free_port());
    let script = "echo pid $$; sleep 300";
    let first = start_first(&options, &["--rdzv-conf=is_host=true"], script);
    let second = start(&options, &["--rdzv-conf=is_host=false"], script);
    [&first, &second].into_iter().for_each(|agent| agent.wait_for("pid", 1));
    let pids = [first.pids(), second.pids()].concat();
    first.signal(Signal::KILL);
    let (code, text) = second.finish();
    assert!(
        code == Some(1)
            && text.contains(
                "which serves the rendezvous, is gone: the connection was closed\n  that \
            costs a restart, and all of --max-restarts 0 are used"
            ),
        "{text}"
    );
    assert_gone_soon(&pids);
}

#[test]
fn an_elastic_run_survives_the_loss_of_the_rendezvous() {
    let options = agents_of("--nnodes=1:2 --nproc-per-node=1 --rdzv-conf=last_call_timeout=0.5", free_port());
    let dir = tempfile::tempdir().unwrap();
    let flag = dir.path().join("enough");
    let script = format!("{PLACE}; until [ -e {} ]; do sleep 0.02; done", flag.display());
    let first = start_first(&options, &[], &script);
    let second = start(&options, &[], &script);
    let both = attempt_of(&second, 2, 0);
    first.signal(Signal::KILL);
    assert_eq!(attempt_of(&second, 1, both), both + 1);
    // The new launcher takes over the count of the others.
    let third = start(&options, &[], &script);
    assert_eq!([&second, &third].map(|agent| attempt_of(agent, 2, both + 1)), [both + 2; 2]);
    fs::write(flag, "").unwrap();
    let (code, text) = second.finish();
    assert_eq!((code, third.finish().0), (Some(0), Some(0)), "{text}");
    assert!(text.contains("restart 0") && !text.contains("restart 1"), "{text}");
}

#[test]
fn a_new_coordinator_takes_over_the_attempt_count() {
    // The second launcher's ranks end slowly: it finds the new coordinator with a first attempt of its own.
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
    let [both, _] = [&first, &second].map(|agent| attempt_of(agent, 2, 0));
    first.signal(Signal::KILL);
    fs::write(dir.path().join("later"), "").unwrap();
    let third = start(&options, &[], &script);
    assert_eq!(attempt_of(&third, 1, 0), 0);
    fs::write(dir.path().join("other"), "").unwrap();
    assert_eq!([&second, &third].map(|agent| attempt_of(agent, 2, both + 1)), [both + 1; 2]);
    fs::write(dir.path().join("enough"), "").unwrap();
    for (code, text) in [second, third].map(Agent::finish) {
        assert_eq!(code, Some(0), "{text}");
    }
}

#[test]
fn an_elastic_run_survives_several_stopped_hosts() {
    let options = agents_of("--nnodes=1:3 --rdzv-conf=last_call_timeout=0.5", free_port());
    let dir = tempfile::tempdir().unwrap();
    let flag = dir.path().join("told");
    // Hosts may join too late for the first attempt.
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
    // It is stopping its ranks because of the lost host.
    second.wait_for("asked", 1);
    second.signal(Signal::TERM);
    // Usually the launcher handles the signal before its ranks have ended; the result is the same.
    sleep(Duration::from_millis(100));
    fs::write(flag, "").unwrap();
    assert_eq!(second.finish().0, Some(143));
    let (code, text) = first.finish();
    assert!(code == Some(0) && text.contains("world 1 attempt "), "{text}");
}
