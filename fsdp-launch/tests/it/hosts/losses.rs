//! Hosts that are lost and come back, the one that serves the rendezvous too.

use std::{fs, thread::sleep, time::Duration};

use rustix::process::Signal;

use super::agent::{Agent, PLACE, agents_of, free_port, start, start_first};
use crate::assert_gone_soon;

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
    second.wait_for("which serves the rendezvous, is gone", 1);
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
    // The second takes long to end its ranks, and finds the new coordinator with ranks of its own, in its first
    // attempt.
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
