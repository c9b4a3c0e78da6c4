//! The tcp backend with ranks as processes, which `processes::run_as_a_rank` starts.

use std::{
    net::{TcpListener, TcpStream},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use fsdp_core::{
    Buffer, Error, ProcessGroup, RankEnv, ReduceOp,
    channel::{Channel, Key},
    process_group::{Guarantees, Options, tcp},
};
use fsdp_test_support::{
    conformance,
    ranks::{self, Job},
};
use rustix::process::{Pid, Signal, kill_process};

use crate::processes::{all, die};

/// A limit that only a hang exceeds.
const LONG: Duration = Duration::from_secs(60);

/// Returns a port that is likely to be free.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn command(role: &str, rank: (usize, usize), port: u16) -> Command {
    let mut command = ranks::command("processes::run_as_a_rank", &format!("tcp {role}"), rank, port);
    command.env("FSDP_STORE_SECRET", "a secret of the tests");
    command
}

fn start(role: &str, ranks: impl IntoIterator<Item = (usize, usize)>) -> Job {
    let port = free_port();
    Job::start(ranks.into_iter().map(|rank| command(role, rank, port)))
}

/// Runs a rank's part of a test.
pub(crate) fn take_part(role: &str, env: &RankEnv) -> String {
    if let Some(trial) = role.strip_prefix("conforms ") {
        return conformance::take_part(trial, &|options| tcp::connect(env, options));
    }
    let host = format!("node{}", env.rank / 2);
    let timeout = if role == "is_impatient" { Duration::from_millis(700) } else { LONG };
    let world = match tcp::connect(env, Options::default().with_timeout(timeout).with_host(host)) {
        Ok(world) => world,
        Err(error) => return error.to_string(),
    };
    match role {
        "computes" | "is_impatient" => {
            let ranks = world.gather_values(vec![world.rank() as i64]);
            ranks.map_or_else(|error| error.to_string(), |ranks| format!("{ranks:?}"))
        }
        "shows_sums" => sums(&world),
        "exits_after_the_last_collective" => {
            world.barrier().wait().unwrap();
            println!("says: done");
            // Does not leave the group.
            std::process::exit(0);
        }
        "loses_rank_1" | "loses_rank_0" => {
            world.barrier().wait().unwrap();
            if role.ends_with(&env.rank.to_string()) {
                // The hub in rank 0 may have notes of the barrier left.
                thread::sleep(Duration::from_millis(300));
                die()
            }
            let began = Instant::now();
            let error = world.barrier().wait().unwrap_err();
            format!("after {} s: {error}", began.elapsed().as_secs())
        }
        "loses_rank_0_in_a_group_without_it" => {
            let group = world.split(usize::from(world.rank() > 0), 0).unwrap();
            if env.rank == 0 {
                thread::sleep(Duration::from_millis(300));
                die()
            }
            // The group may complete some collectives first.
            loop {
                if let Err(error) = group.barrier().wait() {
                    return error.to_string();
                }
            }
        }
        "outlives_rank_0" => {
            let group = world.split(usize::from(world.rank() > 0), 0).unwrap();
            drop(world);
            if env.rank > 0 {
                for _ in 0..20 {
                    thread::sleep(Duration::from_millis(20));
                    group.barrier().wait().unwrap();
                }
            }
            "done".into()
        }
        "is_stopped" => {
            // Rank 1 is stopped from outside meanwhile, and goes on.
            for _ in 0..60 {
                thread::sleep(Duration::from_millis(50));
                world.barrier().wait().unwrap();
            }
            "done".into()
        }
        "moves_much" => {
            let len = 3 << 20;
            let values = (0..len).map(|i| (i % 1000 * (env.rank + 1)) as f32).collect();
            let sum = world.all_reduce(vec![Buffer::F32(values)], ReduceOp::Sum).wait().unwrap();
            let ranks = (1..=env.world_size).sum::<usize>();
            let expected: Vec<f32> = (0..len).map(|i| (i % 1000 * ranks) as f32).collect();
            (sum == [Buffer::F32(expected)]).to_string()
        }
        other => panic!("no role {other}"),
    }
}

/// Returns the bits of sums that depend on the order of additions.
fn sums(world: &ProcessGroup) -> String {
    let value = |i: usize| ((i * 37 + world.rank() * 11) as f32).sin() * 1e3;
    let buffers = vec![Buffer::F32((0..2000).map(value).collect())];
    let sums = world.all_reduce(buffers, ReduceOp::Avg).wait().unwrap();
    let bits = sums[0].bytes().iter().fold(0u64, |hash, &byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    format!("{bits:x}")
}

#[test]
fn processes_conform() {
    conformance::run(Guarantees::ALL, &|trial| start(&format!("conforms {}", trial.name), all(trial.size)).outcomes());
}

#[test]
fn sums_have_the_bits_of_other_backends() {
    for size in [2, 3, 4] {
        let expected = fsdp_core::process_group::local::run(size, |world| sums(&world));
        assert_eq!(start("shows_sums", all(size)).outcomes(), expected);
    }
}

#[test]
fn large_buffers_move_in_steps() {
    assert_eq!(start("moves_much", all(3)).outcomes(), vec!["true"; 3]);
}

#[test]
fn a_killed_rank_is_named_at_once_on_all_ranks() {
    for outcome in start("loses_rank_1", all(4)).outcomes().iter().enumerate().filter(|(rank, _)| *rank != 1) {
        let text = outcome.1;
        let is_so = text.contains("in group \"world\" failed: rank 1 on node0 died. See the output of rank 1");
        assert!(is_so && ["after 0 s", "after 1 s"].iter().any(|soon| text.starts_with(soon)), "{text}");
    }
}

#[test]
fn the_death_of_rank_0_is_named_too() {
    for text in &start("loses_rank_0", all(3)).outcomes()[1..] {
        let is_so = text.contains("failed: rank 0 on node0 died. See the output of rank 0");
        assert!(is_so && ["after 0 s", "after 1 s"].iter().any(|soon| text.starts_with(soon)), "{text}");
    }
    for text in &start("loses_rank_0_in_a_group_without_it", all(3)).outcomes()[1..] {
        let parts = ["barrier (collective", "of rank 0 at 127.0.0.1:", "which forwards what ranks send, has ended"];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}

#[test]
fn ranks_may_outlive_rank_0_and_exit_right_after_their_last_collective() {
    assert_eq!(start("outlives_rank_0", all(3)).outcomes(), vec!["done"; 3]);
    for _ in 0..5 {
        assert_eq!(start("exits_after_the_last_collective", all(3)).outcomes(), vec!["done"; 3]);
    }
}

/// As in a debugger.
#[test]
fn a_stopped_rank_is_waited_for() {
    let job = start("is_stopped", all(3));
    let pid = Pid::from_child(&job.0[1]);
    thread::sleep(Duration::from_millis(1000));
    kill_process(pid, Signal::STOP).unwrap();
    thread::sleep(Duration::from_millis(1500));
    kill_process(pid, Signal::CONT).unwrap();
    assert_eq!(job.outcomes(), vec!["done"; 3]);
}

#[test]
fn missing_ranks_are_named() {
    for text in start("is_impatient", [(0, 4), (2, 4)]).outcomes() {
        let is_so = text.contains("rank(s) [1, 3] did not join rank 0 at 127.0.0.1:");
        assert!(is_so && text.contains("within 10.0 s") && text.contains("FSDP_TIMEOUT_S"), "{text}");
    }
    let text = &start("is_impatient", [(1, 2)]).outcomes()[0];
    assert!(text.contains("it can't be reached") && text.contains("rank 0 at 127.0.0.1:"), "{text}");
}

#[test]
fn a_rank_that_dies_while_ranks_meet_is_named() {
    let mut job = start("computes", [(0, 3), (1, 3)]);
    thread::sleep(Duration::from_millis(500));
    job.0[1].kill().unwrap();
    let outcomes = job.outcomes();
    assert!(outcomes[0].contains("rank 1 died, or left, while the ranks met"), "{outcomes:?}");
}

#[test]
fn ranks_of_different_sizes_and_duplicates_are_refused() {
    for text in start("computes", [(0, 2), (1, 3)]).outcomes() {
        assert!(text.contains("has a world size of") && text.contains("and another rank has"), "{text}");
    }
    let outcomes = start("computes", [(0, 3), (1, 3), (1, 3)]).outcomes();
    assert!(outcomes.iter().all(|text| text.contains("two processes say they are rank 1")), "{outcomes:?}");
}

/// Rank 0 ends only once the other process has read why the ranks cannot meet.
#[test]
fn a_refused_process_that_writes_much_before_it_reads_gets_the_reason() {
    let port = free_port();
    let of_rank_0 = Job::start([command("computes", (0, 2), port)]);
    // The messages of `process_group/tcp/message.rs`, from a rank of a world of three.
    let frame = |kind: u8, bytes: &[u8]| {
        let len = (bytes.len() as u32 + 1).to_le_bytes();
        [&len[..], &[kind], bytes].concat()
    };
    let numbers: Vec<u8> = [1_u32, 3, 1, 65536].iter().flat_map(|number| number.to_le_bytes()).collect();
    let join = frame(0, &[&numbers[..], b"node1"].concat());
    let note = frame(1, &[&[0; 12][..], &vec![7; 60_000]].concat());
    let key = Key::derive(&format!("fsdp store 1\n0\ntest {}", std::process::id()), b"a secret of the tests");
    let mut peer = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break Channel::connect(stream, &key).unwrap(),
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    };
    peer.writer.send(&join).unwrap();
    // Rank 0 has the reason by then, and its program ends.
    thread::sleep(Duration::from_millis(1500));
    for _ in 0..500 {
        peer.writer.send(&note).unwrap();
    }
    let mut told = String::new();
    while !told.contains("has a world size of") {
        told.push_str(&String::from_utf8_lossy(peer.reader.receive(LONG).unwrap()));
    }
    drop(peer);
    // The rank that joins second is refused.
    let outcomes = of_rank_0.outcomes();
    for text in [&told, &outcomes[0]] {
        let is_so = text.contains("rank 1 has a world size of 3, and another rank has 2")
            || text.contains("rank 0 has a world size of 2, and another rank has 3");
        assert!(is_so, "{told} {outcomes:?}");
    }
}

#[test]
fn another_secret_is_refused() {
    let port = free_port();
    let mut commands: Vec<_> = all(2).map(|rank| command("is_impatient", rank, port)).collect();
    commands[1].env("FSDP_STORE_SECRET", "another secret of the tests");
    let outcomes = Job::start(commands).outcomes();
    let parts = ["did not accept the secret", "give all ranks the same FSDP_STORE_SECRET"];
    assert!(parts.iter().all(|part| outcomes[1].contains(part)), "{outcomes:?}");
    assert!(outcomes[0].contains("rank(s) [1] did not join"), "{outcomes:?}");
}

#[test]
fn a_port_in_use_and_an_address_that_others_do_not_reach_are_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let env = RankEnv { world_size: 2, local_world_size: 2, master_port: port, ..RankEnv::single() };
    let of = |env: &RankEnv| match tcp::connect(env, Options::default()) {
        Err(error @ Error::Store { .. }) => error.to_string(),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it connected"),
    };
    let text = of(&env);
    assert!(text.contains("rank 0 can't listen there") && text.contains("MASTER_PORT to a free port"), "{text}");
    let text = of(&RankEnv { hosts: 2, ..env });
    assert!(text.contains("127.0.0.1 is a loopback address, but the ranks run on 2 hosts"), "{text}");
}
