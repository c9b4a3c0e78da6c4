//! The messages between agents and the coordinator.

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, TcpListener},
    time::Duration,
};

use fsdp_core::channel::random_secret;
use serde::{Deserialize, Serialize};

use crate::{FailedAttempt, Failure, RankReport, RendezvousSpec};

/// Tells agents apart, in the order in which they came.
pub(crate) type AgentId = u64;

/// What a rank has put over PMI: a key and a value.
pub(crate) type KeyValue = (String, String);

/// What an agent brings with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NodeInfo {
    /// The host's name, for messages.
    pub(crate) host: String,
    /// Equal for agents between which shared memory can be handed over.
    pub(crate) machine: String,
    /// `--node-rank`.
    pub(crate) node_rank: Option<u32>,
    /// How many ranks it starts.
    pub(crate) ranks: usize,
    /// `--role` of its ranks.
    pub(crate) role: String,
    /// Where other hosts reach it, if it was told.
    pub(crate) address: Option<String>,
    /// `MASTER_ADDR`, if it was told, for when rank 0 is here.
    pub(crate) master_addr: Option<String>,
    /// `MASTER_PORT` for when rank 0 is here: given, or one that was free a moment ago.
    pub(crate) master_port: u16,
    /// `--rdzv-id`.
    pub(crate) run_id: Option<String>,
    /// `--nnodes`.
    pub(crate) nnodes: (u32, u32),
    /// The signs of life that it gives and expects; nothing where it is the only one.
    pub(crate) keep_alive: Option<KeepAlive>,
    /// `--max-restarts`.
    pub(crate) max_restarts: u32,
    /// `--shutdown-timeout`: how long its ranks have to end when they are asked to.
    pub(crate) grace: Duration,
    /// How often its ranks were started before, under a coordinator that is gone.
    pub(crate) attempts: u32,
    /// How many restarts were used then.
    pub(crate) restarts: u32,
}

/// What an agent says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum FromAgent {
    /// It wants to take part, and has no ranks running. The first message.
    Join(Box<NodeInfo>),
    /// A rank has ended with exit code 0, while others may still run.
    RankDone { attempt: u32, rank: usize },
    /// Its ranks have put this over PMI.
    PmiPut { attempt: u32, entries: Vec<KeyValue> },
    /// All of its ranks wait in a barrier of PMI.
    PmiBarrier { attempt: u32 },
    /// The first rank has failed; the others are being ended.
    Failed { attempt: u32, report: Box<RankReport> },
    /// Not all of its ranks could be started, and nothing is left of those that were. The last message.
    NotStarted { attempt: u32, why: String },
    /// Nothing is left of an attempt, or what is left can't be ended.
    AttemptEnded { attempt: u32, result: AttemptResult, master_port: u16 },
    /// It was asked to end, and is ending its ranks.
    Leaving { attempt: u32, why: String },
    /// It goes; nothing is left of its ranks, or what is left can't be ended.
    Leave { why: String },
    /// It is alive.
    Ping,
}

/// How an attempt ended on one host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum AttemptResult {
    /// Every rank with exit code 0.
    Succeeded,
    /// By this rank's failure.
    Failed { report: Box<RankReport>, may_restart: bool },
    /// Because the coordinator wanted it.
    Stopped { may_restart: bool },
}

/// What the coordinator says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum ToAgent {
    /// It can't take part. The last message.
    Refused { why: String },
    /// Others are waited for; these are there.
    Waiting { there: String, nnodes: (u32, u32) },
    /// Start your ranks.
    Start(Assignment),
    /// End your ranks; `costs` a restart, if the coordinator lives to count it.
    Stop { attempt: u32, why: String, costs: bool },
    /// A rank of another agent of the machine has ended with exit code 0.
    RankDone { attempt: u32, rank: usize },
    /// Ranks of another agent have put this over PMI.
    PmiPut { attempt: u32, entries: Vec<KeyValue> },
    /// All ranks wait in a barrier of PMI: they wait no more.
    PmiBarrierDone { attempt: u32 },
    /// All is over. The last message.
    End(Box<RunResult>),
    /// It is alive.
    Ping,
}

/// An agent's place in one attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Assignment {
    /// How often ranks were started before.
    pub(crate) attempt: u32,
    /// How many of the restarts that are allowed are used: those because of a failure.
    pub(crate) restarts: u32,
    pub(crate) run_id: String,
    /// `GROUP_RANK` and `GROUP_WORLD_SIZE`: agents.
    pub(crate) group_rank: usize,
    pub(crate) group_world_size: usize,
    /// The rank of local rank 0.
    pub(crate) first_rank: usize,
    pub(crate) world_size: usize,
    /// The role rank of local rank 0.
    pub(crate) first_role_rank: usize,
    pub(crate) role_world_size: usize,
    pub(crate) master_addr: String,
    pub(crate) master_port: u16,
    /// The number of machines, which may be fewer than agents.
    pub(crate) machines: usize,
    /// In the order of ranks: so many agents have so many ranks each.
    pub(crate) ranks_of_hosts: Vec<(usize, usize)>,
    /// What lets ranks into the store of this run.
    pub(crate) store_secret: Secret,
    /// The name of the PMI space, which no other attempt of any run has: MPICH names shared memory after it.
    pub(crate) pmi_space: String,
}

impl Assignment {
    /// The place of the only agent.
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

/// How the whole launch ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RunResult {
    /// What ended it, if it was no success.
    pub(crate) failure: Option<Failure>,
    /// What went wrong before that, as far back as it is kept.
    pub(crate) failed_attempts: Vec<FailedAttempt>,
    /// How many restarts were used.
    pub(crate) restarts: u32,
}

/// How agents notice that one is gone without a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeepAlive {
    /// The time between signs of life.
    pub(crate) interval: Duration,
    /// How many may be missed.
    pub(crate) attempts: u32,
}

impl fmt::Display for KeepAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.interval.as_secs_f64();
        write!(f, "keep_alive_interval={seconds},keep_alive_max_attempt={}", self.attempts)
    }
}

impl KeepAlive {
    /// What `spec` asks for, within reason: neither a flood of messages, nor more time than a clock can count.
    pub(crate) fn of(spec: &RendezvousSpec) -> Self {
        let interval = spec.keep_alive_interval.clamp(Duration::from_millis(10), Duration::from_secs(86400));
        KeepAlive { interval, attempts: spec.keep_alive_attempts }
    }

    /// The longest silence.
    pub(crate) fn limit(self) -> Duration {
        self.interval.saturating_mul(self.attempts)
    }
}

/// A secret that the coordinator makes up, which launchers pass to their ranks in the environment and nowhere else.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Secret(String);

impl Secret {
    /// A new one.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Secret(hex(&random_secret()?)))
    }

    /// The text for ranks; none where there is nothing to be kept.
    pub(crate) fn text(&self) -> Option<&str> {
        Some(self.0.as_str()).filter(|text| !text.is_empty())
    }
}

/// An id that no other run has.
pub(crate) fn new_id() -> io::Result<String> {
    Ok(hex(&random_secret()?[..8]))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Says nothing of it.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Text that is equal for agents between whose ranks shared memory can be handed over: of one boot of one kernel, in
/// one network namespace.
pub(crate) fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {}", boot.trim(), network.display())
}

/// A port that was free a moment ago.
pub(crate) fn free_port() -> io::Result<u16> {
    TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), 0))?.local_addr().map(|address| address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_long_new_and_not_printed() {
        let secret = Secret::new().unwrap();
        assert_eq!(secret.text().unwrap().len(), 64);
        assert_ne!(secret, Secret::new().unwrap());
        assert!(new_id().unwrap().len() == 16 && new_id().unwrap() != new_id().unwrap());
        assert_eq!((format!("{secret:?}"), Secret::default().text()), ("Secret".to_owned(), None));
    }
}
