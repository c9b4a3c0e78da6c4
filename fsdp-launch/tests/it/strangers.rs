//! The rendezvous port refuses connections without the token.

use std::{
    collections::VecDeque,
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    thread,
    time::Duration,
};

use fsdp_test_support::agent::free_port;
use rustix::process::Signal;

use crate::{Running, finish, launcher};

/// Starts a launcher that waits for a second one. Returns it with its port and token file.
fn waiting(dir: &std::path::Path) -> (Running, u16, String) {
    let port = free_port();
    let token = dir.join("token");
    fs::write(&token, "a secret of 32 bytes, or about it").unwrap();
    let token = token.to_str().unwrap().to_owned();
    let endpoint = format!("127.0.0.1:{port}");
    let options = ["--nnodes=2", "--rdzv-endpoint", &endpoint, "--rdzv-token-file", &token, "sh", "-c", "echo go"];
    let launcher = Running::start(&options);
    while TcpStream::connect(&endpoint).is_err() {
        std::thread::sleep(Duration::from_millis(2));
    }
    (launcher, port, token)
}

/// Reproducible pseudo-random bytes.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

fn status_kib(pid: u32, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse().unwrap()
}

#[test]
fn ten_thousand_unauthenticated_connections_cost_little() {
    let dir = tempfile::tempdir().unwrap();
    let (launcher, port, token) = waiting(dir.path());
    let pid = launcher.child.id();
    let before = status_kib(pid, "VmRSS:");
    let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
    let mut answered = 0;
    for round in 0..10_000 {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { panic!("round {round}: nobody listens") };
        // Less than a handshake, its length, more, and much more.
        let len = match round % 4 {
            0 => noise.next() % 48,
            1 => 48,
            2 => 48 + noise.next() % 100,
            _ => noise.next() % 70_000,
        };
        let bytes: Vec<u8> = (0..len).map(|_| noise.next() as u8).collect();
        // The launcher may close the connection early.
        stream.write_all(&bytes).ok();
        stream.shutdown(std::net::Shutdown::Write).ok();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut answer = [0; 64];
        answered += stream.read(&mut answer).unwrap_or(0);
    }
    assert_eq!(answered, 0, "a stranger was answered");
    let (now, threads) = (status_kib(pid, "VmRSS:"), status_kib(pid, "Threads:"));
    println!("resident: {before} KiB before, {now} KiB after; {threads} threads");
    assert!(now < before + (16 << 10), "{before} KiB before, {now} KiB after");

    // Another token is refused with a reason; the right one is accepted.
    let other = dir.path().join("other");
    fs::write(&other, "another secret, as long as the one").unwrap();
    let endpoint = format!("127.0.0.1:{port}");
    let options = |token: &str| {
        [
            "--nnodes=2",
            "--rdzv-conf=join_timeout=1",
            "--rdzv-endpoint",
            &endpoint,
            "--rdzv-token-file",
            token,
            "sh",
            "-c",
            "echo go",
        ]
        .map(str::to_owned)
    };
    let run = |token: &str| {
        let options = options(token);
        finish(&mut launcher_of(&options))
    };
    let (code, stdout, stderr) = run(other.to_str().unwrap());
    assert!(code == Some(1) && stdout.is_empty() && stderr.contains("did not accept the secret"), "{stdout} {stderr}");
    let (code, stdout, stderr) = run(&token);
    assert_eq!((code, stdout.as_str()), (Some(0), "[rank 1] go\n"), "{stderr}");
    assert_eq!(launcher.wait().code(), Some(0));
}

fn launcher_of(options: &[String]) -> assert_cmd::Command {
    launcher(&options.iter().map(String::as_str).collect::<Vec<_>>())
}

/// As a stopped launcher: the kernel accepts connections. Another token would be an error after ten seconds.
#[test]
fn a_launcher_that_does_not_answer_is_tried_again() {
    let (dir, silent) = (tempfile::tempdir().unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    let endpoint = silent.local_addr().unwrap().to_string();
    let token = dir.path().join("token");
    fs::write(&token, "a secret of 32 bytes, or about it").unwrap();
    let meeting = ["--nnodes=2", "--rdzv-conf=join_timeout=16", "--rdzv-endpoint", &endpoint];
    let options = [&meeting[..], &["--rdzv-token-file", token.to_str().unwrap(), "sh", "-c", "echo go"]].concat();
    let (code, stdout, stderr) = finish(&mut launcher(&options));
    let parts = ["no launcher was reached at", "within 16s: the peer does not answer"];
    let is_told = parts.iter().all(|part| stderr.contains(part));
    assert!(code == Some(1) && stdout.is_empty() && is_told, "{stdout} {stderr}");
}

#[test]
fn silent_connections_do_not_block_an_agent() {
    let dir = tempfile::tempdir().unwrap();
    let (launcher, port, token) = waiting(dir.path());
    // Keep 200 connections open, and replace closed ones.
    let (stop, stopped) = mpsc::channel::<()>();
    let strangers = thread::spawn(move || {
        let mut silent = VecDeque::new();
        while let Err(mpsc::TryRecvError::Empty) = stopped.try_recv() {
            silent.extend(TcpStream::connect(("127.0.0.1", port)));
            if silent.len() > 200 {
                silent.pop_front();
                thread::sleep(Duration::from_millis(1));
            }
        }
    });
    thread::sleep(Duration::from_millis(300));
    let endpoint = format!("127.0.0.1:{port}");
    let options = ["--nnodes=2", "--rdzv-endpoint", &endpoint, "--rdzv-token-file", &token, "sh", "-c", "echo go"];
    let (code, stdout, stderr) = finish(&mut self::launcher(&options));
    assert_eq!((code, stdout.as_str()), (Some(0), "[rank 1] go\n"), "{stderr}");
    assert_eq!(launcher.wait().code(), Some(0));
    drop(stop);
    strangers.join().unwrap();
}

#[test]
fn listens_on_the_endpoint_only() {
    let listens = |pid: u32| -> Vec<String> {
        let tcp = ["tcp", "tcp6"].map(|name| fs::read_to_string(format!("/proc/{pid}/net/{name}")).unwrap()).concat();
        let fds = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        let links = fds.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
        let inodes: Vec<String> = links
            .filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
            .collect();
        let fields = tcp.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        // 0A is LISTEN.
        fields
            .filter(|fields| fields.get(3) == Some(&"0A") && inodes.iter().any(|inode| inode == fields[9]))
            .map(|fields| fields[1].to_owned())
            .collect()
    };
    let dir = tempfile::tempdir().unwrap();
    let (launcher, port, _) = waiting(dir.path());
    assert_eq!(listens(launcher.child.id()), [format!("0100007F:{port:04X}")]);
    launcher.signal(Signal::TERM);
    assert_eq!(launcher.wait().code(), Some(143));

    let mut launcher = Running::start(&["sh", "-c", "echo $$; sleep 300"]);
    launcher.pids(1);
    assert!(listens(launcher.child.id()).is_empty());
}
