//! Stores of threads, processes and groups.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use fsdp_core::{
    Error, ProcessGroup, RankEnv,
    process_group::{GroupStore, local},
    store::{MAX_VALUE_LEN, MemoryStore, Secret, Store, TcpStore},
};
use rustix::process::{Pid, Signal, kill_process};

use crate::processes::{all, start};

/// A limit that only a hang exceeds.
const LONG: Duration = Duration::from_secs(100);

/// Returns a port that is likely to be free.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn env(rank: usize, world_size: usize, port: u16) -> RankEnv {
    let run_id = format!("store test {}", std::process::id());
    RankEnv { rank, world_size, local_world_size: world_size, master_port: port, run_id, ..RankEnv::single() }
}

fn secret(env: &RankEnv) -> Secret {
    Secret::new(env, Some("a secret of the tests")).unwrap()
}

fn connect(rank: usize, world_size: usize, port: u16, timeout: Duration) -> Result<TcpStore, Error> {
    let env = env(rank, world_size, port);
    TcpStore::connect(&env, &secret(&env), timeout)
}

/// Increments a shared counter `count` times.
fn count_up(store: &dyn Store, count: u32) {
    let text = |number: u32| number.to_string().into_bytes();
    for _ in 0..count {
        let mut there = store.compare_set("count", None, &text(1)).unwrap();
        while let Some(seen) = there {
            let number: u32 = String::from_utf8(seen.clone()).unwrap().parse().unwrap();
            let before = store.compare_set("count", Some(&seen), &text(number + 1)).unwrap();
            there = before.filter(|before| *before != seen);
        }
    }
}

fn number(store: &dyn Store, key: &str) -> u32 {
    String::from_utf8(store.get(key, LONG).unwrap()).unwrap().parse().unwrap()
}

#[test]
fn threads_lose_no_increment() {
    let store = MemoryStore::default();
    thread::scope(|scope| (0..8).for_each(|_| drop(scope.spawn(|| count_up(&store, 50)))));
    assert_eq!(number(&store, "count"), 400);
}

#[test]
fn clients_lose_no_increment() {
    let port = free_port();
    let all_done = MemoryStore::default();
    thread::scope(|scope| {
        for rank in 0..6 {
            let all_done = &all_done;
            scope.spawn(move || {
                let store = connect(rank, 6, port, LONG).unwrap();
                thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(|| count_up(&store, 20)))));
                all_done.set(&rank.to_string(), b"").unwrap();
                // Rank 0 serves the store until all ranks are done.
                if rank == 0 {
                    (0..6).for_each(|rank| drop(all_done.get(&rank.to_string(), LONG).unwrap()));
                    assert_eq!(number(&store, "count"), 240);
                }
            });
        }
    });
}

#[test]
fn a_set_wakes_a_hundred_waiting_clients() {
    let port = free_port();
    let holder = connect(0, 101, port, LONG).unwrap();
    thread::scope(|scope| {
        let clients = (1..101).map(|rank| {
            scope.spawn(move || {
                let store = connect(rank, 101, port, LONG).unwrap();
                let value = store.get("late", LONG).unwrap();
                store.set(&format!("heard {rank}"), &value).unwrap();
            })
        });
        let clients: Vec<_> = clients.collect();
        thread::sleep(Duration::from_millis(50));
        holder.set("late", &[7; 20_000]).unwrap();
        (1..101).for_each(|rank| assert_eq!(holder.get(&format!("heard {rank}"), LONG).unwrap(), [7; 20_000]));
        clients.into_iter().for_each(|client| client.join().unwrap());
    });
}

#[test]
fn a_timeout_names_key_holder_and_seconds() {
    let port = free_port();
    let stores = [connect(0, 2, port, LONG).unwrap(), connect(1, 2, port, LONG).unwrap()];
    for (rank, store) in stores.iter().enumerate() {
        let began = Instant::now();
        let error = store.get("never", Duration::from_secs(1)).unwrap_err();
        assert!(began.elapsed() >= Duration::from_millis(980), "{:?}", began.elapsed());
        let Error::Store { seconds, .. } = &error else { panic!("{error:?}") };
        let told = format!(
            "rank {rank}: getting \"never\" in the store of rank 0 at 127.0.0.1:{port} failed after {seconds:.1} s: \
             no rank has set it"
        );
        assert!(error.to_string().starts_with(&told) && error.to_string().contains("FSDP_TIMEOUT_S"), "{error}");
    }
    let error = MemoryStore::default().get("never", Duration::ZERO).unwrap_err().to_string();
    assert!(error.starts_with("getting \"never\" in the store of this process failed after 0.0 s"), "{error}");
}

#[test]
fn refuses_other_secrets_jobs_and_attempts() {
    let port = free_port();
    let holder = connect(0, 2, port, LONG).unwrap();
    holder.set("key", b"value").unwrap();
    let ours = env(1, 2, port);
    let retried = RankEnv { attempt: 1, ..ours.clone() };
    let other = RankEnv { run_id: "another".into(), ..ours.clone() };
    for (env, secret, way_out) in [
        (&ours, Secret::new(&ours, Some("another secret of tests")), "give all ranks the same FSDP_STORE_SECRET"),
        (&ours, Secret::new(&ours, None), "start all ranks as one job, or give all of them the same"),
        (&retried, Ok(secret(&retried)), "give all ranks the same FSDP_STORE_SECRET"),
        (&other, Ok(secret(&other)), "give all ranks the same FSDP_STORE_SECRET"),
    ] {
        let Err(error) = TcpStore::connect(env, &secret.unwrap(), Duration::from_millis(200)) else {
            panic!("it was let in")
        };
        let error = error.to_string();
        let parts = ["rank 1: reaching the store of rank 0 at 127.0.0.1:", "did not accept the secret", way_out];
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        assert!(!error.contains("another secret of tests"), "{error}");
    }
    assert_eq!(connect(1, 2, port, LONG).unwrap().get("key", LONG).unwrap(), b"value");
}

#[test]
fn unauthenticated_connections_do_not_block_clients() {
    let port = free_port();
    let holder = connect(0, 2, port, LONG).unwrap();
    let mut silent = Vec::new();
    for len in (0..400).chain([4096, 70_000]) {
        let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let bytes: Vec<u8> = (0..len).map(|index| (index * 31 + len) as u8).collect();
        // The server may close the connection early.
        stranger.write_all(&bytes).ok();
        if len % 3 == 0 {
            silent.push(stranger);
            continue;
        }
        stranger.shutdown(Shutdown::Write).ok();
        stranger.set_read_timeout(Some(LONG)).unwrap();
        assert_eq!(stranger.read(&mut [0; 64]).unwrap_or(0), 0, "a stranger was answered");
    }
    let client = connect(1, 2, port, LONG).unwrap();
    client.set("key", b"value").unwrap();
    assert_eq!(holder.get("key", LONG).unwrap(), b"value");
}

#[test]
fn reports_an_absent_server_and_a_used_port() {
    let port = free_port();
    let Err(error) = connect(1, 2, port, Duration::from_millis(200)) else { panic!("it connected") };
    let parts = ["can't be reached", "refused", "MASTER_ADDR and MASTER_PORT"];
    assert!(parts.iter().all(|part| error.to_string().contains(part)), "{error}");
    let _taken = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let Err(error) = connect(0, 2, port, LONG) else { panic!("it listens") };
    assert!(error.to_string().contains("rank 0 can't listen there"), "{error}");
    let hosts = RankEnv { hosts: 2, ..env(1, 2, port) };
    let Err(error) = TcpStore::connect(&hosts, &secret(&hosts), LONG) else { panic!("it connected") };
    assert!(error.to_string().contains("127.0.0.1 is a loopback address, but the ranks run on 2 hosts"), "{error}");
}

#[test]
fn a_world_of_one_does_not_listen() {
    let port = free_port();
    let store = connect(0, 1, port, LONG).unwrap();
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
    store.set("key", b"value").unwrap();
    assert_eq!(store.compare_set("key", Some(b"value"), b"other").unwrap().unwrap(), b"value");
    assert_eq!(store.get("key", Duration::ZERO).unwrap(), b"other");
}

#[test]
fn dropping_the_server_ends_all_waits() {
    let port = free_port();
    let holder = connect(0, 2, port, LONG).unwrap();
    let client = connect(1, 2, port, LONG).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| client.get("never", LONG));
        thread::sleep(Duration::from_millis(50));
        drop(holder);
        let error = waiting.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("getting \"never\"") && error.contains("rank 0 has ended"), "{error}");
    });
    // Later requests fail as well.
    let error = client.set("key", b"value").unwrap_err().to_string();
    assert!(error.contains("setting \"key\"") && error.contains("rank 0 has ended"), "{error}");
}

#[test]
fn pending_requests_are_answered_before_the_server_stops() {
    for _ in 0..50 {
        let port = free_port();
        let holder = connect(0, 2, port, LONG).unwrap();
        let client = connect(1, 2, port, LONG).unwrap();
        thread::scope(|scope| {
            let setting = scope.spawn(|| client.set("done", b""));
            holder.get("done", LONG).unwrap();
            drop(holder);
            setting.join().unwrap().unwrap();
        });
    }
}

/// Runs a rank of the tests below.
pub(crate) fn take_part(role: &str, env: &RankEnv) -> String {
    let store = TcpStore::connect(env, &Secret::from_env(env).unwrap(), LONG).unwrap();
    match role {
        "outlive" | "outwait" if env.rank == 0 => {
            let pid = rustix::process::getpid().as_raw_pid();
            store.set("pid of the holder", pid.to_string().as_bytes()).unwrap();
            // Wait until all clients wait.
            (1..env.world_size).for_each(|rank| drop(store.get(&format!("waits {rank}"), LONG).unwrap()));
            thread::sleep(Duration::from_millis(100));
            let signal = if role == "outlive" { Signal::KILL } else { Signal::STOP };
            kill_process(rustix::process::getpid(), signal).unwrap();
            // Another thread may receive the signal first.
            loop {
                thread::park();
            }
        }
        _ => {
            let holder = Pid::from_raw(number(&store, "pid of the holder") as i32).unwrap();
            store.set(&format!("waits {}", env.rank), b"").unwrap();
            let timeout = if role == "outlive" { LONG } else { Duration::from_secs(2) };
            let error = store.get("never", timeout).unwrap_err();
            // The test waits for the stopped process to end.
            if role == "outwait" {
                kill_process(holder, Signal::KILL).unwrap();
            }
            error.to_string()
        }
    }
}

#[test]
fn a_killed_server_ends_every_wait() {
    let outcomes = start("store outlive", free_port(), all(3)).outcomes();
    assert!(outcomes[0].contains("signal: 9"), "{outcomes:?}");
    for (rank, outcome) in outcomes.iter().enumerate().skip(1) {
        let told = format!("rank {rank}: getting \"never\" in the store of rank 0 at ");
        assert!(outcome.starts_with(&told) && outcome.contains("rank 0 has ended, and the store with it"), "{outcome}");
    }
}

#[test]
fn requests_to_a_stopped_server_time_out() {
    let outcomes = start("store outwait", free_port(), all(2)).outcomes();
    assert!(outcomes[0].contains("signal: 9"), "{outcomes:?}");
    assert!(
        outcomes[1].starts_with("rank 1: getting \"never\"") && outcomes[1].contains("does not answer"),
        "{outcomes:?}"
    );
}

#[test]
fn group_store_applies_calls_in_rank_order() {
    local::run(4, |group| {
        let store = GroupStore::new(&group);
        let own = group.rank().to_string();
        store.set("same", own.as_bytes()).unwrap();
        store.set(&own, own.as_bytes()).unwrap();
        assert_eq!(store.get("same", Duration::ZERO).unwrap(), b"3");
        assert_eq!(store.get(&((group.rank() + 1) % 4).to_string(), Duration::ZERO).unwrap().len(), 1);
        // Exactly one rank is first.
        let before = store.compare_set("first", None, own.as_bytes()).unwrap();
        assert_eq!(before.as_deref(), (group.rank() > 0).then_some(&b"0"[..]));
        let before = store.compare_set("first", Some(b"0"), own.as_bytes()).unwrap().unwrap();
        assert_eq!(before, if group.rank() < 2 { b"0" } else { b"1" });
        assert_eq!(group.differing_ranks(&store.get("first", Duration::ZERO).unwrap()).unwrap(), Vec::<usize>::new());
    });
}

#[test]
fn group_store_errors_stay_on_their_rank() {
    local::run(2, |group| {
        let store = GroupStore::new(&group);
        let error = store.get("never", Duration::from_secs(1000)).unwrap_err().to_string();
        let told = format!("rank {}: getting \"never\" in the store of the group \"world\"", group.rank());
        assert!(error.starts_with(&told) && error.contains("no rank has set it"), "{error}");
        let long = vec![0; MAX_VALUE_LEN * group.rank() + 1];
        assert_eq!(store.set("long", &long).is_err(), group.rank() == 1);
        assert_eq!(store.get("long", Duration::ZERO).unwrap().len(), 1);
        // The group is still usable.
        group.barrier().wait().unwrap();
    });
}

#[test]
fn a_group_of_one_has_a_store() {
    let store = GroupStore::new(&ProcessGroup::single_rank(Duration::from_secs(60)).unwrap());
    store.set("a", b"b").unwrap();
    assert_eq!(store.get("a", Duration::ZERO).unwrap(), b"b");
}
