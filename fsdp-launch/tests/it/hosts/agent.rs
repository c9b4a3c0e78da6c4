//! Launchers of a test with several launchers.

use std::{net::TcpStream, process::Command};

use fsdp_test_support::agent::Agent;

use crate::{hear_signals, wait_for};

/// Starts a launcher with `options`, and a script as its ranks.
fn launch(options: &[&str], script: &str) -> Agent {
    hear_signals();
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("fsdp-launch"));
    command.args(options).args(["/bin/sh", "-c", script]).env_remove("RUST_LOG");
    Agent::start(command)
}

/// Waits for an attempt, from `first` on, with `world` ranks, and returns its number. The script must run [`PLACE`].
/// The number of earlier attempts depends on when hosts join.
pub(crate) fn attempt_of(agent: &Agent, world: u32, first: u32) -> u32 {
    let find = || {
        let attempts = agent.lines().into_iter().filter_map(|line| {
            let (_, place) = line.split_once(&format!("world {world} attempt "))?;
            place.split(' ').next()?.parse().ok()
        });
        attempts.filter(|&attempt: &u32| attempt >= first).max()
    };
    agent.poll(&format!("no attempt {first} or later of {world} ranks"), find)
}

/// Prints the attempt.
pub(crate) const PLACE: &str = "echo world $WORLD_SIZE attempt $FSDP_ATTEMPT restart $TORCHELASTIC_RESTART_COUNT";

/// Splits `options` and adds the endpoint.
pub(crate) fn agents_of(options: &str, port: u16) -> Vec<String> {
    let mut all: Vec<String> = options.split(' ').map(str::to_owned).collect();
    all.push(format!("--rdzv-endpoint=localhost:{port}"));
    all
}

/// Starts the launcher that serves the rendezvous.
pub(crate) fn start_first(options: &[String], more: &[&str], script: &str) -> Agent {
    let agent = start(options, more, script);
    let endpoint = options.iter().find_map(|option| option.strip_prefix("--rdzv-endpoint=")).unwrap();
    wait_for(|| TcpStream::connect(endpoint).ok(), || format!("no launcher listens on {endpoint}"));
    agent
}

pub(crate) fn start(options: &[String], more: &[&str], script: &str) -> Agent {
    let mut all: Vec<&str> = options.iter().map(String::as_str).collect();
    all.extend(more);
    launch(&all, script)
}
