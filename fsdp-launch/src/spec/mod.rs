//! What to launch.

pub(crate) mod output;
pub(crate) mod values;

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::ValueEnum;

use crate::{Endpoint, LinePrefix, RankFilter, StreamChoice, spec::values::default_signals};

/// What this host has to do for a launch: the program, how often, how its ranks find each other, and whether other
/// hosts take part.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LaunchSpec {
    /// The executable; [`find_program`](crate::find_program) finds or builds it.
    pub program: PathBuf,
    /// Its arguments, the same for every rank.
    pub args: Vec<OsString>,
    /// The number of ranks, at least 1.
    pub nproc_per_node: usize,
    /// `MASTER_ADDR`: where the other ranks reach rank 0. `None`: 127.0.0.1 for one host, else the address of the host
    /// of rank 0.
    pub master_addr: Option<String>,
    /// `MASTER_PORT`; `None` chooses one that is free.
    pub master_port: Option<u16>,
    /// `TORCHELASTIC_RUN_ID`; `None` makes one that no other launch has.
    pub run_id: Option<String>,
    /// How long ranks that are asked to end (SIGTERM) have until they are killed (SIGKILL).
    pub shutdown_timeout: Duration,
    /// How often all ranks are started again after one has failed.
    pub max_restarts: u32,
    /// A rank whose heartbeat had begun and has stopped for longer has failed; zero: it is waited for. Ranks that use
    /// `fsdp-core` have one.
    pub heartbeat_timeout: Duration,
    /// `ROLE_NAME`.
    pub role: String,
    /// The numbers of the signals upon which the launcher ends the ranks; they are passed on as they are. By default
    /// SIGTERM, SIGINT, SIGHUP and SIGQUIT, less those that this process ignores (SIGHUP under `nohup`).
    pub signals: Vec<i32>,
    /// Every rank finds `LOCAL_RANK=0` and sees one GPU, its own, in `CUDA_VISIBLE_DEVICES`.
    pub virtual_local_rank: bool,
    /// Every rank runs on its own share of the cores.
    pub pin_cores: bool,
    /// Every rank runs near to its GPU, or on a NUMA node; counts more than `pin_cores`.
    pub numa_binding: Option<NumaBinding>,
    /// Where the ranks' output goes.
    pub logs: LogSpec,
    /// How this launcher meets those of other hosts; `None` for one host.
    pub rendezvous: Option<RendezvousSpec>,
}

/// Where the ranks' output goes; by default to the launcher's own stdout and stderr, by lines behind `[rank N] `.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct LogSpec {
    /// Files are `DIR/<run id>/attempt_<restarts>/<local rank>/stdout.log`, stderr.log and error.json. `None`: a new
    /// temporary directory, if a stream goes to a file.
    pub dir: Option<PathBuf>,
    /// The streams that go to their file and not to the console.
    pub redirects: StreamChoice,
    /// The streams that go to both, also if they are among the `redirects`.
    pub tee: StreamChoice,
    /// The ranks that the console shows; files are written of all.
    pub local_ranks_filter: RankFilter,
    /// What stands before each line on the console.
    pub line_prefix: LinePrefix,
}

impl LaunchSpec {
    /// `nproc_per_node` ranks of `program` without arguments, a free port on 127.0.0.1, a run id of its own, and 30
    /// seconds to end in.
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
    /// Where; the launcher of that host holds the rendezvous. Port 29400 if there is none.
    pub endpoint: Endpoint,
    /// The fewest and the most hosts.
    pub nnodes: (u32, u32),
    /// The order of this host among them; `None` as they come.
    pub node_rank: Option<u32>,
    /// Whether this launcher is the one that holds the rendezvous; `None`: if the endpoint is an address of this host,
    /// and nobody listens there.
    pub is_host: Option<bool>,
    /// This host's address for the others; `None`: as the connection shows it.
    pub local_addr: Option<String>,
    /// The file with the secret that all launchers share, at least 16 bytes; `None`, for launchers of one user on one
    /// host, makes one.
    pub token_file: Option<PathBuf>,
    /// How long to wait for the fewest hosts.
    pub join_timeout: Duration,
    /// How long to wait for more than the fewest.
    pub last_call_timeout: Duration,
    /// The time between two signs of life of a launcher.
    pub keep_alive_interval: Duration,
    /// How many may be missed until its host is given up.
    pub keep_alive_attempts: u32,
}

impl RendezvousSpec {
    /// From `nnodes.0` to `nnodes.1` hosts that meet at `endpoint`, with `torchrun`'s times: 600 s for the fewest, 30 s
    /// for more, 3 signs of life 5 s apart.
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

/// Where a rank runs, in `torchrun`'s words: near to the GPU of its local rank, or where there is none on one of the
/// NUMA nodes, over which the ranks are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NumaBinding {
    /// On all cores of the NUMA node
    Node,
    /// On all cores of the node's socket
    Socket,
    /// On its own share of the node's cores; none is shared
    Exclusive,
    /// On cores of the node that share a last-level cache
    CoreComplex,
}
