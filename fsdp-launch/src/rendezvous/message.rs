//! The messages between agents and the coordinator.

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, TcpListener},
    time::Duration,
};

use fsdp_core::channel::random_secret;
use serde::{Deserialize, Serialize};

use crate::{FailedAttempt, Failure, RankReport, RendezvousSpec};

/// Id of an agent, in the order of joining.
pub(crate) type AgentId = u64;

/// A PMI entry: key and value.
pub(crate) type KeyValue = (String, String);

/// Description of an agent's host and options.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NodeInfo {
    /// Name of the host, for messages.
    pub(crate) host: String,
    /// Equal for agents whose ranks can share memory.
    pub(crate) machine: String,
    pub(crate) node_rank: Option<u32>,
    /// Number of ranks.
    pub(crate) ranks: usize,
    pub(crate) role: String,
    /// Address for other hosts, if `--local-addr` gives one.
    pub(crate) address: Option<String>,
    /// `MASTER_ADDR` if rank 0 is here and the user gave one.
    pub(crate) master_addr: Option<String>,
    /// `MASTER_PORT` if rank 0 is here: given, or recently free.
    pub(crate) master_port: u16,
    pub(crate) run_id: Option<String>,
    pub(crate) nnodes: (u32, u32),
    /// Keep-alive settings; `None` on a single host.
    pub(crate) keep_alive: Option<KeepAlive>,
    pub(crate) max_restarts: u32,
    /// `--shutdown-timeout`.
    pub(crate) grace: Duration,
    /// Attempts under earlier coordinators.
    pub(crate) attempts: u32,
    /// Restarts used under earlier coordinators.
    pub(crate) restarts: u32,
}

/// Messages of an agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum FromAgent {
    /// Asks to take part. Always the first message; the agent has no running ranks.
    Join(Box<NodeInfo>),
    /// A rank has exited with code 0.
    RankDone { attempt: u32, rank: usize },
    /// PMI entries of its ranks.
    PmiPut { attempt: u32, entries: Vec<KeyValue> },
    /// All of its ranks are in the PMI barrier.
    PmiBarrier { attempt: u32 },
    /// A rank failed first; the agent is stopping the others.
    Failed { attempt: u32, report: Box<RankReport> },
    /// The ranks could not all be started; none is left. The last message.
    NotStarted { attempt: u32, why: String },
    /// All ranks of an attempt have ended, or cannot be killed.
    AttemptEnded { attempt: u32, result: AttemptResult, master_port: u16 },
    /// The launcher was asked to end, and is stopping its ranks.
    Leaving { attempt: u32, why: String },
    /// The agent leaves; its ranks have ended, or cannot be killed.
    Leave { why: String },
    /// Keep-alive.
    Ping,
}

/// Result of an attempt on one host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum AttemptResult {
    /// Every rank exited with code 0.
    Succeeded,
    /// This rank failed.
    Failed { report: Box<RankReport>, may_restart: bool },
    /// The coordinator requested the stop.
    Stopped { may_restart: bool },
}

/// Messages of the coordinator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum ToAgent {
    /// The agent can't take part. The last message.
    Refused { why: String },
    /// Other agents are missing; `there` lists the hosts that have joined.
    Waiting { there: String, nnodes: (u32, u32) },
    /// Start the ranks.
    Start(Assignment),
    /// Stop the ranks. `costs` says whether it costs a restart.
    Stop { attempt: u32, why: String, costs: bool },
    /// A rank of another agent on the same machine has exited with code 0.
    RankDone { attempt: u32, rank: usize },
    /// PMI entries of another agent's ranks.
    PmiPut { attempt: u32, entries: Vec<KeyValue> },
    /// All ranks of all agents are in the PMI barrier.
    PmiBarrierDone { attempt: u32 },
    /// The run is over. The last message.
    End(Box<RunResult>),
    /// Keep-alive.
    Ping,
}

/// The ranks of one agent in one attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Assignment {
    /// Number of earlier attempts.
    pub(crate) attempt: u32,
    /// Restarts used: attempts that followed a failure.
    pub(crate) restarts: u32,
    pub(crate) run_id: String,
    /// `GROUP_RANK` and `GROUP_WORLD_SIZE`: index and number of agents.
    pub(crate) group_rank: usize,
    pub(crate) group_world_size: usize,
    /// Rank of local rank 0.
    pub(crate) first_rank: usize,
    pub(crate) world_size: usize,
    /// Role rank of local rank 0.
    pub(crate) first_role_rank: usize,
    pub(crate) role_world_size: usize,
    pub(crate) master_addr: String,
    pub(crate) master_port: u16,
    /// Number of machines; several agents may share one.
    pub(crate) machines: usize,
    /// Runs of agents with equal numbers of ranks, in rank order: (agents, ranks of each).
    pub(crate) ranks_of_hosts: Vec<(usize, usize)>,
    /// Secret of the run's store.
    pub(crate) store_secret: Secret,
    /// Name of the PMI KVS, unique to this attempt: MPICH names shared memory after it.
    pub(crate) pmi_space: String,
}

impl Assignment {
    /// Returns the assignment of the only agent.
    pub(crate) fn single_node(run_id: &str, ranks: usize, master_port: u16) -> Self {
        Assignment {
            attempt: 0,
            restarts: 0,
            run_id: run_id.to_owned(),
            group_rank: 0,
            group_world_size: 1,
            first_rank: 0,
            world_size: ranks,
            first_role_rank: 0,
            role_world_size: ranks,
            master_addr: "127.0.0.1".into(),
            master_port,
            machines: 1,
            ranks_of_hosts: vec![(1, ranks)],
            store_secret: Secret::default(),
            pmi_space: "kvs".into(),
        }
    }
}

/// Result of the whole run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RunResult {
    /// The failure that ended the run, if any.
    pub(crate) failure: Option<Failure>,
    /// Earlier failed attempts.
    pub(crate) failed_attempts: Vec<FailedAttempt>,
    /// Restarts used.
    pub(crate) restarts: u32,
}

/// Keep-alive settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeepAlive {
    /// Time between two messages.
    pub(crate) interval: Duration,
    /// Number of intervals until a silent peer is lost.
    pub(crate) attempts: u32,
}

impl fmt::Display for KeepAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.interval.as_secs_f64();
        write!(f, "keep_alive_interval={seconds},keep_alive_max_attempt={}", self.attempts)
    }
}

impl KeepAlive {
    /// Returns the settings of `spec`, limited to values that neither flood the network nor overflow the clock.
    pub(crate) fn of(spec: &RendezvousSpec) -> Self {
        let interval = spec.keep_alive_interval.clamp(Duration::from_millis(10), Duration::from_secs(86400));
        KeepAlive { interval, attempts: spec.keep_alive_attempts }
    }

    /// Maximum silence.
    pub(crate) fn limit(self) -> Duration {
        self.interval.saturating_mul(self.attempts)
    }
}

/// Secret of the run's store. The coordinator creates it; launchers pass it to their ranks in the environment only.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Secret(String);

impl Secret {
    /// Creates a secret.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Secret(hex(&random_secret()?)))
    }

    /// Returns the text for ranks; `None` without a secret.
    pub(crate) fn text(&self) -> Option<&str> {
        Some(self.0.as_str()).filter(|text| !text.is_empty())
    }
}

/// Returns a unique id.
pub(crate) fn new_id() -> io::Result<String> {
    Ok(hex(&random_secret()?[..8]))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Does not print the secret.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Returns an id that is equal for agents whose ranks can share memory: same boot of the same kernel, same network
/// namespace.
pub(crate) fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {}", boot.trim(), network.display())
}

/// Returns a port that is likely to be free.
pub(crate) fn free_port() -> io::Result<u16> {
    TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), 0))?.local_addr().map(|address| address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_new_and_not_printed() {
        let secret = Secret::new().unwrap();
        assert_eq!(secret.text().unwrap().len(), 64);
        assert_ne!(secret, Secret::new().unwrap());
        assert!(new_id().unwrap().len() == 16 && new_id().unwrap() != new_id().unwrap());
        assert_eq!((format!("{secret:?}"), Secret::default().text()), ("Secret".to_owned(), None));
    }
}
