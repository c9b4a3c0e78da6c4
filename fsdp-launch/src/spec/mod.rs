//! What to launch.

pub(crate) mod endpoint;
pub(crate) mod line_prefix;
pub(crate) mod nodes;
pub(crate) mod numa_binding;
pub(crate) mod rendezvous;
pub(crate) mod signals;
pub(crate) mod streams;
pub(crate) mod word;

use std::{ffi::OsString, path::PathBuf, time::Duration};

use crate::{LinePrefix, NumaBinding, RankFilter, RendezvousSpec, StreamChoice, spec::signals::default_signals};

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
