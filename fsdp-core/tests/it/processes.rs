//! The shm backend with ranks as processes. Each test runs this binary again for each rank, with the name of a role.

use std::{
    io::Read,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU16, Ordering},
    time::{Duration, Instant},
};

use fsdp_core::{
    Buffer, DType, Error, ProcessGroup, RankEnv, ReduceOp,
    process_group::{Options, shm},
};
use fsdp_test_support::conformance;

/// Longer than any test takes.
const HANG: Duration = Duration::from_secs(100);

/// Processes that run a role and print one line each.
pub(crate) struct Job(Vec<Child>);

/// Returns a new port for each job of this process. Other processes have other run ids.
pub(crate) fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

pub(crate) fn start(role: &str, port: u16, ranks: impl IntoIterator<Item = (usize, usize)>) -> Job {
    let children = ranks.into_iter().map(|(rank, size)| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "processes::run_as_a_rank", "--nocapture", "--test-threads=1"])
            .env("FSDP_TEST_ROLE", role)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", size.to_string())
            .env("MASTER_PORT", port.to_string())
            .env("TORCHELASTIC_RUN_ID", format!("test {}", std::process::id()))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    });
    Job(children.collect())
}

impl Job {
    /// Returns the text that each rank printed after "says: ", or its exit status.
    pub(crate) fn outcomes(mut self) -> Vec<String> {
        let started = Instant::now();
        self.0
            .iter_mut()
            .map(|child| {
                let status = loop {
                    match child.try_wait().unwrap() {
                        Some(status) => break status,
                        None if started.elapsed() > HANG => {
                            child.kill().unwrap();
                            return "hung".to_string();
                        }
                        None => std::thread::sleep(Duration::from_millis(5)),
                    }
                };
                let mut text = String::new();
                child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
                child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
                match text.lines().find_map(|line| line.split_once("says: ")) {
                    Some((_, said)) => said.to_string(),
                    None => format!("{status}: {text}"),
                }
            })
            .collect()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

pub(crate) fn all(size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..size).map(move |rank| (rank, size))
}

/// Not a test: entry point of the processes that the tests start.
#[test]
fn run_as_a_rank() {
    let Ok(role) = std::env::var("FSDP_TEST_ROLE") else { return };
    let env = RankEnv::from_env().unwrap();
    if let Some(trial) = role.strip_prefix("conforms ") {
        println!("says: {}", conformance::take_part(trial, &|options| shm::connect(&env, options)));
        return;
    }
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
            "loses_one" => loses_one(world),
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

fn die() -> ! {
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    unreachable!("killed")
}

fn loses_one(world: ProcessGroup) -> String {
    for round in 0.. {
        if world.rank() == 1 && round == 5 {
            // Dies during a large collective.
            let work = world.all_reduce(vec![Buffer::zeros(DType::F32, 50 << 20)], ReduceOp::Sum);
            drop(work);
            die();
        }
        let len = if round == 5 { 50 << 20 } else { 1000 };
        match world.all_reduce(vec![Buffer::zeros(DType::F32, len)], ReduceOp::Sum).wait() {
            Ok(_) => {}
            Err(error @ Error::PeerLost { peer: 1, .. }) => {
                assert!(world.barrier().wait().is_err());
                return format!("lost: {error}");
            }
            Err(error) => return format!("unexpected: {error:?}"),
        }
    }
    unreachable!("the loop ends by an error")
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
fn a_killed_rank_is_named_by_all_others() {
    for size in [2, 4] {
        let outcomes = start("loses_one", port(), all(size)).outcomes();
        for (rank, outcome) in outcomes.iter().enumerate() {
            match rank {
                1 => assert!(outcome.contains("signal: 9"), "{outcome}"),
                _ => assert!(outcome.contains("lost: ") && outcome.contains("rank 1 died. "), "{outcome}"),
            }
        }
    }
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
