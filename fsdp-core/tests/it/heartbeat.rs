//! Status pages of rank processes. Each test runs this binary again for each rank, and reads the status pages while the
//! ranks run and after they ended.

use std::{
    io::{Read, Write},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use fsdp_core::{
    Buffer, RankEnv, ReduceOp,
    heartbeat::{self, Age, Progress, Snapshot, StatusPage, VARIABLE},
    process_group::{self, Options},
};
use fsdp_test_support::ranks::{self, ROLE};
use rustix::process::{Pid, Signal, kill_process};

/// A limit that only a hang exceeds.
const HANG: Duration = Duration::from_secs(60);

struct Rank {
    child: Child,
    page: StatusPage,
}

/// Starts two ranks that run `role`.
fn start(role: &str, timeout: &str) -> [Rank; 2] {
    let port = ranks::port();
    [0, 1].map(|rank| {
        let page = StatusPage::new().unwrap();
        let mut command = ranks::command("heartbeat::run_as_a_rank", role, (rank, 2), port);
        command.env("FSDP_TIMEOUT_S", timeout).env(VARIABLE, page.path());
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        Rank { child, page }
    })
}

impl Rank {
    /// Returns the first snapshot that matches.
    fn until(&self, wanted: impl Fn(&Snapshot) -> bool) -> Snapshot {
        let start = Instant::now();
        loop {
            let snapshot = self.page.snapshot();
            if wanted(&snapshot) {
                return snapshot;
            }
            assert!(start.elapsed() < HANG, "{snapshot:#?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Lets the rank continue, and returns what it prints after "says: ".
    fn end(&mut self) -> String {
        drop(self.child.stdin.take());
        let mut text = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        text.lines().find_map(|line| Some(line.split_once("says: ")?.1.to_string())).unwrap_or(text)
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn doing(snapshot: &Snapshot) -> &str {
    snapshot.doing.as_ref().map_or("", |doing| &doing.what)
}

/// Not a test: the program of the ranks.
#[test]
fn run_as_a_rank() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let wait_for_stdin = || std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    let env = RankEnv::from_env().unwrap();
    let world = process_group::init(&env, Options::default()).unwrap();
    world.barrier().wait().unwrap();
    heartbeat::step(if env.world_size == 1 { 1 } else { 7 });
    let said = if env.rank == 1 {
        let _outer = heartbeat::span("evaluation", "");
        {
            let _inner = heartbeat::span("forward", "layers.3");
            // Neither another thread's span nor a child with the inherited page is shown.
            std::thread::spawn(|| drop(heartbeat::span("saving", ""))).join().unwrap();
            if role == "starts_a_child" {
                let child = Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", "heartbeat::run_as_a_rank", "--nocapture"])
                    .env(ROLE, "waits")
                    .env("RANK", "0")
                    .env("WORLD_SIZE", "1")
                    .stdin(Stdio::piped())
                    .output();
                assert!(child.unwrap().status.success());
            }
            wait_for_stdin();
        }
        "done".to_string()
    } else {
        let summed = world.all_reduce(vec![Buffer::F32(vec![1.])], ReduceOp::Sum).wait();
        let said = summed.map_or_else(|error| error.to_string(), |buffers| format!("{buffers:?}"));
        wait_for_stdin();
        said
    };
    println!("says: {said}");
    std::io::stdout().flush().unwrap();
    // Exits without leaving the group.
    std::process::exit(0);
}

#[test]
fn status_pages_show_waiting_and_missing_ranks() {
    let [mut waits, stays_away] = start("waits", "60");
    let snapshot = waits.until(|snapshot| snapshot.collectives.iter().any(|it| it.name == "all_reduce"));
    let [collective] = &snapshot.collectives[..] else { panic!("{snapshot:#?}") };
    assert_eq!((collective.group.as_str(), collective.rank, collective.size), ("world", 0, 2));
    assert_eq!((collective.sequence, collective.progress, collective.torn), (1, Progress::Running, false));
    assert_eq!(snapshot.pid, Some(waits.child.id()));
    assert!(snapshot.step.is_some_and(|step| step.number == 7));

    let snapshot = stays_away.until(|snapshot| doing(snapshot) == "forward layers.3");
    let [collective] = &snapshot.collectives[..] else { panic!("{snapshot:#?}") };
    assert_eq!((collective.name.as_str(), collective.sequence, collective.progress), ("barrier", 0, Progress::Done));
    assert!(snapshot.beat.is_some());

    // The page of a killed process stays readable.
    kill_process(Pid::from_child(&stays_away.child), Signal::KILL).unwrap();
    let lost = waits.end();
    assert!(lost.contains("rank 1 died"), "{lost}");
    assert_eq!(doing(&stays_away.page.snapshot()), "forward layers.3");
}

#[test]
fn a_timeout_names_the_missing_ranks() {
    let [mut waits, mut stays_away] = start("times_out", "3");
    let snapshot = waits.until(|snapshot| snapshot.collectives.iter().any(|it| it.progress == Progress::TimedOut));
    assert_eq!(snapshot.collectives[0].missing, [1]);
    assert_eq!(doing(&stays_away.page.snapshot()), "forward layers.3");
    assert_eq!(stays_away.end(), "done");
    assert!(waits.end().contains("timed out"));
}

#[test]
fn a_child_does_not_write_its_parents_page() {
    let [waits, mut has_child] = start("starts_a_child", "60");
    assert_eq!(has_child.end(), "done");
    let snapshot = has_child.page.snapshot();
    assert_eq!(snapshot.pid, Some(has_child.child.id()));
    assert!(snapshot.step.is_some_and(|step| step.number == 7));
    drop(waits);
}

#[test]
fn a_stopped_rank_has_no_heartbeat_until_continued() {
    let [waits, mut stopped] = start("stops", "60");
    stopped.until(|snapshot| doing(snapshot) == "forward layers.3");
    let pid = Pid::from_child(&stopped.child);
    kill_process(pid, Signal::STOP).unwrap();
    stopped.until(|snapshot| snapshot.beat > Some(Age(Duration::from_millis(1500))));
    kill_process(pid, Signal::CONT).unwrap();
    stopped.until(|snapshot| snapshot.beat < Some(Age(Duration::from_millis(500))));
    assert_eq!(stopped.end(), "done");
    drop(waits);
}
