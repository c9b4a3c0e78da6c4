//! The description of a launch.

pub(crate) mod output;
pub(crate) mod values;

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::ValueEnum;

use crate::{Endpoint, LinePrefix, RankFilter, StreamChoice, spec::values::default_signals};

/// The launch on this host: program, number of ranks, rendezvous, and reaction to failures.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LaunchSpec {
    /// Path of the executable; [`find_program`](crate::find_program) finds or builds it.
    pub program: PathBuf,
    /// Arguments, the same for every rank.
    pub args: Vec<OsString>,
    /// Number of ranks, at least 1.
    pub nproc_per_node: usize,
    /// `MASTER_ADDR`. `None` means 127.0.0.1 on one host, else the address of rank 0's host.
    pub master_addr: Option<String>,
    /// `MASTER_PORT`; `None` means a free port.
    pub master_port: Option<u16>,
    /// `TORCHELASTIC_RUN_ID`; `None` means a unique id.
    pub run_id: Option<String>,
    /// Time between the request to end (SIGTERM) and SIGKILL.
    pub shutdown_timeout: Duration,
    /// Restarts of all ranks after a failure.
    pub max_restarts: u32,
    /// Time without heartbeat after which a rank counts as hung; zero means never. Only ranks that use `fsdp-core` have
    /// a heartbeat.
    pub heartbeat_timeout: Duration,
    /// `ROLE_NAME`.
    pub role: String,
    /// Signals that end the launch and are passed to the ranks. The default is SIGTERM, SIGINT, SIGHUP and SIGQUIT,
    /// except those that this process ignores (SIGHUP under `nohup`).
    pub signals: Vec<i32>,
    /// Whether every rank gets `LOCAL_RANK=0` and sees only its own GPU in `CUDA_VISIBLE_DEVICES`.
    pub virtual_local_rank: bool,
    /// Whether every rank is pinned to its own share of the cores.
    pub pin_cores: bool,
    /// Binds every rank near its GPU, or to a NUMA node; takes precedence over `pin_cores`.
    pub numa_binding: Option<NumaBinding>,
    /// Destination of the ranks' output.
    pub logs: LogSpec,
    /// Rendezvous with launchers of other hosts; `None` on one host.
    pub rendezvous: Option<RendezvousSpec>,
}

/// Destination of the ranks' output. The default is the launcher's stdout and stderr, with lines prefixed by `[rank N]
/// `.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct LogSpec {
    /// Files are `DIR/<run id>/attempt_<n>/<local rank>/stdout.log`, stderr.log and error.json. `None` means a
    /// temporary directory, if a stream goes to a file.
    pub dir: Option<PathBuf>,
    /// Streams that go only to their file.
    pub redirects: StreamChoice,
    /// Streams that go to both; takes precedence over `redirects`.
    pub tee: StreamChoice,
    /// Ranks that the console shows. Files are written for all ranks.
    pub local_ranks_filter: RankFilter,
    /// Prefix of each line on the console.
    pub line_prefix: LinePrefix,
}

impl LaunchSpec {
    /// Creates a launch of `nproc_per_node` ranks without arguments, with a free port on 127.0.0.1, a unique run id,
    /// and a shutdown timeout of 30 seconds.
    pub fn new(program: impl Into<PathBuf>, nproc_per_node: usize) -> Self {
        LaunchSpec {
            program: program.into(),
            args: Vec::new(),
            nproc_per_node,
            master_addr: None,
            master_port: None,
            run_id: None,
            shutdown_timeout: Duration::from_secs(30),
            max_restarts: 0,
            heartbeat_timeout: Duration::from_secs(15),
            role: "default".into(),
            signals: default_signals(),
            virtual_local_rank: false,
            pin_cores: false,
            numa_binding: None,
            logs: LogSpec::default(),
            rendezvous: None,
        }
    }

    pub(crate) fn nnodes(&self) -> (u32, u32) {
        self.rendezvous.as_ref().map_or((1, 1), |meeting| meeting.nnodes)
    }
}

/// How the launchers of several hosts meet.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RendezvousSpec {
    /// Endpoint; the launcher of that host serves the rendezvous. The default port is 29400.
    pub endpoint: Endpoint,
    /// Minimum and maximum number of hosts.
    pub nnodes: (u32, u32),
    /// Index of this host; `None` means the order of joining.
    pub node_rank: Option<u32>,
    /// Whether this launcher serves the rendezvous. `None`: if the endpoint is an address of this host and the port is
    /// free.
    pub is_host: Option<bool>,
    /// Address of this host for the others; `None` means the address of its connection.
    pub local_addr: Option<String>,
    /// File with the secret of all launchers, at least 16 bytes. `None` is for launchers of one user on one host, which
    /// create one.
    pub token_file: Option<PathBuf>,
    /// Time to wait for the minimum number of hosts.
    pub join_timeout: Duration,
    /// Time to wait for more than the minimum.
    pub last_call_timeout: Duration,
    /// Time between two keep-alive messages of a launcher.
    pub keep_alive_interval: Duration,
    /// Missed keep-alive messages until a host is lost.
    pub keep_alive_attempts: u32,
}

impl RendezvousSpec {
    /// Creates a rendezvous of `nnodes.0` to `nnodes.1` hosts at `endpoint`, with `torchrun`'s times: 600 s for the
    /// minimum, 30 s for more, 3 keep-alive messages 5 s apart.
    pub fn new(endpoint: Endpoint, nnodes: (u32, u32)) -> Self {
        RendezvousSpec {
            endpoint,
            nnodes,
            node_rank: None,
            is_host: None,
            local_addr: None,
            token_file: None,
            join_timeout: Duration::from_secs(600),
            last_call_timeout: Duration::from_secs(30),
            keep_alive_interval: Duration::from_secs(5),
            keep_alive_attempts: 3,
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.endpoint.port.unwrap_or(29400)
    }

    pub(crate) fn may_serve(&self) -> bool {
        self.is_host.unwrap_or_else(|| self.endpoint.is_here())
    }
}

/// Cores of a rank, in `torchrun`'s terms: near the GPU of its local rank. Without GPUs, ranks are spread over the NUMA
/// nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NumaBinding {
    /// All cores of the NUMA node
    Node,
    /// All cores of the node's socket
    Socket,
    /// An exclusive share of the node's cores
    Exclusive,
    /// The cores of the node that share a last-level cache
    CoreComplex,
}
