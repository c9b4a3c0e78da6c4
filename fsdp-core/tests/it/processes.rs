//! The shm backend with ranks as processes. Each test runs this binary again for each rank, with the name of a role.

use std::time::Duration;

use fsdp_core::{
    ProcessGroup, RankEnv,
    process_group::{Options, shm},
};
use fsdp_test_support::{
    conformance,
    ranks::{self, Job, ROLE, port},
};

pub(crate) fn start(role: &str, port: u16, ranks: impl IntoIterator<Item = (usize, usize)>) -> Job {
    Job::start(ranks.into_iter().map(|rank| ranks::command("processes::run_as_a_rank", role, rank, port)))
}

pub(crate) fn all(size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..size).map(move |rank| (rank, size))
}

/// Not a test: entry point of the processes that the tests start.
#[test]
fn run_as_a_rank() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let env = RankEnv::from_env().unwrap();
    if let Some(trial) = role.strip_prefix("conforms ") {
        println!("says: {}", conformance::take_part(trial, &|options| shm::connect(&env, options)));
        return;
    }
    #[cfg(feature = "tcp")]
    if let Some(role) = role.strip_prefix("tcp ") {
        println!("says: {}", crate::tcp::take_part(role, &env));
        return;
    }
    #[cfg(feature = "tcp")]
    if let Some(role) = role.strip_prefix("store ") {
        println!("says: {}", crate::store::take_part(role, &env));
        return;
    }
    let timeout = if role == "is_impatient" { Duration::from_millis(700) } else { Duration::from_secs(60) };
    let options = Options::default().with_timeout(timeout).with_chunk_bytes(32 << 10);
    let said = match shm::connect(&env, options) {
        Err(error) => format!("{error}"),
        Ok(world) => match role.as_str() {
            "computes" | "is_impatient" => computes(world),
            "loses_one_in_a_split" => loses_one_in_a_split(world),
            "exits_after_the_last_collective" => {
                world.barrier().wait().unwrap();
                println!("says: done");
                // Does not leave the group.
                std::process::exit(0);
            }
            "shows_who_it_met" => {
                format!("{:?}", world.gather_values(vec![env.master_port.into()] as Vec<u32>).unwrap())
            }
            other => panic!("no role {other}"),
        },
    };
    println!("says: {said}");
}

fn computes(world: ProcessGroup) -> String {
    assert_eq!(world.gather_values(vec![world.rank() as i64]).unwrap().len(), world.size());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("/dev/shm"), "{maps}");
    "done".into()
}

pub(crate) fn die() -> ! {
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    unreachable!("killed")
}

fn loses_one_in_a_split(world: ProcessGroup) -> String {
    if world.rank() == 0 {
        // The other half can meet. The first rank of this half never starts its rendezvous.
        std::thread::scope(|scope| {
            // Forgotten, so that a group that is created in time is not left before the rank dies.
            scope.spawn(|| std::mem::forget(world.split(0, 0)));
            std::thread::sleep(Duration::from_millis(1));
            die()
        })
    }
    for _ in 0..3 {
        match world.split(world.rank() / 2, 0) {
            Ok(group) => match group.barrier().wait() {
                Ok(_) => {}
                Err(error) => return format!("lost: {error}"),
            },
            Err(error) => return format!("lost: {error}"),
        }
    }
    "nothing was lost".into()
}

#[test]
fn shared_memory_has_no_name() {
    assert_eq!(start("computes", port(), all(2)).outcomes(), vec!["done"; 2]);
}

#[test]
fn a_rank_killed_while_a_group_is_split_does_not_hang_the_others() {
    for outcome in &start("loses_one_in_a_split", port(), all(4)).outcomes()[1..] {
        // The message depends on the progress of the split.
        let is_named =
            ["died", "left the group", "disconnected"].iter().any(|how| outcome.contains(&format!("rank 0 {how}")));
        assert!(outcome.starts_with("lost: ") && is_named, "{outcome}");
    }
}

#[test]
fn a_process_may_exit_right_after_its_last_collective() {
    for _ in 0..5 {
        assert_eq!(start("exits_after_the_last_collective", port(), all(3)).outcomes(), vec!["done"; 3]);
    }
}

#[test]
fn different_world_sizes_are_refused_on_all_ranks() {
    for outcome in start("computes", port(), [(0, 2), (1, 3)]).outcomes() {
        assert!(outcome.contains("rank 1 has a world size of 3 but rank 0 has 2"), "{outcome}");
    }
}

#[test]
fn duplicate_ranks_are_refused_on_all_ranks() {
    for outcome in start("computes", port(), [(0, 3), (1, 3), (1, 3)]).outcomes() {
        assert!(outcome.contains("two processes say they are rank 1"), "{outcome}");
    }
}

#[test]
fn missing_ranks_are_named() {
    for outcome in start("is_impatient", port(), [(0, 4), (2, 4)]).outcomes() {
        assert!(outcome.contains("rank(s) [1, 3] did not connect within 0.7 s"), "{outcome}");
    }
    let outcomes = start("is_impatient", port(), [(1, 2)]).outcomes();
    assert!(outcomes[0].contains("rank 1: rank(s) [0] did not connect"), "{outcomes:?}");
}

#[test]
fn a_rank_that_dies_while_ranks_meet_is_named() {
    let port = port();
    let mut job = start("computes", port, [(0, 3), (1, 3)]);
    // The meeting can't be complete; whenever rank 1 is killed, rank 0 either names it or never saw it and is told by
    // the third.
    std::thread::sleep(Duration::from_millis(300));
    job.0[1].kill().unwrap();
    let outcomes = job.outcomes();
    assert!(outcomes[0].contains("rank 1 disconnected"), "{outcomes:?}");
}

#[test]
fn jobs_side_by_side_do_not_meet() {
    let ports = [port(), port(), port()];
    let jobs: Vec<_> = ports.iter().map(|&port| start("shows_who_it_met", port, all(2))).collect();
    for (port, job) in ports.iter().zip(jobs) {
        assert_eq!(job.outcomes(), vec![format!("[{port}, {port}]"); 2]);
    }
}

#[test]
fn a_rank_outside_its_world_is_refused() {
    for (rank, world_size) in [(1, 1), (0, 0), (2, 2)] {
        let env = RankEnv { rank, world_size, local_world_size: world_size, ..RankEnv::single() };
        let Err(error) = shm::connect(&env, Options::default()) else { panic!("it connected") };
        assert!(error.to_string().contains(&format!("rank {rank} is outside a world of {world_size}")), "{error}");
    }
}

#[test]
fn jobs_on_several_hosts_are_refused_with_advice() {
    let env = RankEnv { world_size: 4, local_world_size: 2, hosts: 2, ..RankEnv::single() };
    let Err(error) = shm::connect(&env, Options::default()) else { panic!("it connected") };
    let text = error.to_string();
    let parts = ["the 4 ranks run on 2 hosts, 2 on this one", "or mpirun", "FSDP_BACKEND=mpi", "all ranks on one host"];
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
}
