//! The command line, with `torchrun`'s names. Every option also accepts underscores for dashes, as `torchrun` does.

use std::{ffi::OsString, num::NonZeroU16, path::PathBuf, str::FromStr, time::Duration};

use clap::{ArgAction, Parser, Subcommand, builder::FalseyValueParser};
use clap_complete::Shell;

use crate::{
    Endpoint, LinePrefix, NumaBinding, RankFilter, SignalList, StreamChoice,
    cli::help::{AFTER_HELP, EXAMPLES},
    job::status::StatusArgs,
    rank::{affinity, gpus},
    spec::values::{nnodes, node_rank, word},
};

/// Starts one process per rank of a training program, on one host or several, and ends all ranks when one fails.
#[derive(Parser, Debug)]
#[command(name = "fsdp-launch", version, after_long_help = AFTER_HELP, after_help = EXAMPLES)]
#[command(override_usage = "fsdp-launch [OPTIONS] PROGRAM [ARGS]...\n       fsdp-launch status [RUN] [--json]")]
#[command(next_help_heading = "Ranks", args_override_self = true, subcommand_help_heading = "Subcommands")]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true, disable_help_subcommand = true)]
pub struct Args {
    /// Ranks to start on this host: a number, `gpu` for one per GPU, `cpu` for one per core, `auto` for GPUs if there
    /// are any, else cores
    #[arg(long, alias = "nproc_per_node", allow_negative_numbers = true, value_name = "N", default_value = "1")]
    #[arg(value_parser = process_count)]
    #[arg(env = "PET_NPROC_PER_NODE", hide_env = true)]
    pub nproc_per_node: usize,

    /// Number of hosts, or the minimum and maximum for an elastic run
    #[arg(long, value_name = "N|MIN:MAX", allow_negative_numbers = true, default_value = "1")]
    #[arg(value_parser = nnodes)]
    #[arg(env = "PET_NNODES", hide_env = true)]
    pub nnodes: (u32, u32),

    /// Index of this host, which orders the ranks [default: the order in which hosts join]
    #[arg(long, alias = "node_rank", allow_negative_numbers = true, value_name = "N", value_parser = node_rank)]
    #[arg(env = "PET_NODE_RANK", hide_env = true)]
    pub node_rank: Option<u32>,

    /// ROLE_NAME of the ranks
    #[arg(long, value_name = "NAME", default_value = "default", value_parser = word)]
    #[arg(env = "PET_ROLE", hide_env = true)]
    pub role: String,

    /// Set LOCAL_RANK=0 for every rank, and CUDA_VISIBLE_DEVICES to the rank's own GPU
    #[arg(long, alias = "virtual_local_rank", action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    #[arg(env = "PET_VIRTUAL_LOCAL_RANK", hide_env = true)]
    pub virtual_local_rank: bool,

    /// Pin every rank to its own share of the cores
    #[arg(long, alias = "pin_cores")]
    pub pin_cores: bool,

    /// Bind every rank to cores near the GPU of its local rank. Without GPUs, ranks are spread over the NUMA nodes
    #[arg(long, alias = "numa_binding", value_name = "WHERE", value_enum, conflicts_with = "pin_cores")]
    #[arg(env = "PET_NUMA_BINDING", hide_env = true)]
    pub numa_binding: Option<NumaBinding>,

    /// Run PROGRAM as a Python module (`python3 -u -m PROGRAM`)
    #[arg(short, long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new(), help_heading = "Program")]
    #[arg(env = "PET_MODULE", hide_env = true, conflicts_with_all = ["no_python", "run_path"])]
    pub module: bool,

    /// Execute PROGRAM directly, even if its name ends in .py
    #[arg(long, alias = "no_python", action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    #[arg(help_heading = "Program")]
    #[arg(env = "PET_NO_PYTHON", hide_env = true)]
    pub no_python: bool,

    /// Run PROGRAM, an absolute path, with Python's runpy.run_path
    #[arg(long, alias = "run_path", action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    #[arg(help_heading = "Program")]
    #[arg(env = "PET_RUN_PATH", hide_env = true)]
    pub run_path: bool,

    /// Print the environment and the command of each rank, and start nothing
    #[arg(long, alias = "dry_run", help_heading = "Program")]
    pub dry_run: bool,

    /// Address at which ranks reach rank 0 [default: 127.0.0.1 on one host, else the address of rank 0's host]
    #[arg(long, alias = "master_addr", value_name = "ADDRESS", value_parser = word, help_heading = "Rendezvous")]
    #[arg(env = "PET_MASTER_ADDR", hide_env = true)]
    pub master_addr: Option<String>,

    /// Port at that address [default: a free port]
    #[arg(long, alias = "master_port", allow_negative_numbers = true, value_name = "PORT", value_parser = port)]
    #[arg(env = "PET_MASTER_PORT", hide_env = true, help_heading = "Rendezvous")]
    pub master_port: Option<NonZeroU16>,

    /// Address of this host for the other hosts
    #[arg(long, alias = "local_addr", value_name = "ADDRESS", value_parser = word, help_heading = "Rendezvous")]
    #[arg(env = "PET_LOCAL_ADDR", hide_env = true)]
    pub local_addr: Option<String>,

    /// Run on one host, with a free port and a new run id; ignores the --rdzv options
    #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new(), help_heading = "Rendezvous")]
    #[arg(env = "PET_STANDALONE", hide_env = true)]
    pub standalone: bool,

    /// Run id, TORCHELASTIC_RUN_ID [default: a unique id]
    #[arg(long, alias = "rdzv_id", value_name = "ID", help_heading = "Rendezvous")]
    #[arg(env = "PET_RDZV_ID", hide_env = true)]
    pub rdzv_id: Option<String>,

    /// How hosts meet. On one host, `static` uses --rdzv-endpoint as MASTER_ADDR and MASTER_PORT; with `c10d` the
    /// endpoint must be this host. On several hosts, `static` needs --node-rank, and host 0 serves the rendezvous
    #[arg(long, alias = "rdzv_backend", value_name = "NAME", default_value = "static")]
    #[arg(value_parser = ["static", "c10d"])]
    #[arg(env = "PET_RDZV_BACKEND", hide_env = true, help_heading = "Rendezvous")]
    pub rdzv_backend: String,

    /// Where hosts meet: an address of one host, the same on all hosts [port: 29400; static: --master-addr and
    /// --master-port]
    #[arg(long, alias = "rdzv_endpoint", value_name = "HOST[:PORT]", help_heading = "Rendezvous")]
    #[arg(env = "PET_RDZV_ENDPOINT", hide_env = true)]
    pub rdzv_endpoint: Option<Endpoint>,

    /// join_timeout=600,last_call_timeout=30,keep_alive_interval=5,keep_alive_max_attempt=3 (in seconds),
    /// is_host=true|false
    #[arg(long, alias = "rdzv_conf", value_name = "KEY=VALUE,...", default_value = "", help_heading = "Rendezvous")]
    #[arg(env = "PET_RDZV_CONF", hide_env = true, hide_default_value = true)]
    pub rdzv_conf: RendezvousConf,

    /// File with the secret that all hosts share, at least 16 bytes. Launchers on one host need none
    #[arg(long, alias = "rdzv_token_file", value_name = "FILE", help_heading = "Rendezvous")]
    #[arg(env = "PET_RDZV_TOKEN_FILE", hide_env = true)]
    pub rdzv_token_file: Option<PathBuf>,

    /// Restarts of all ranks after a failure; none after Ctrl-C
    #[arg(long, alias = "max_restarts", allow_negative_numbers = true, value_name = "N", default_value = "0")]
    #[arg(value_parser = restarts)]
    #[arg(env = "PET_MAX_RESTARTS", hide_env = true, help_heading = "Failure")]
    pub max_restarts: u32,

    /// Time between the request to end and SIGKILL [default: $TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30]
    #[arg(long, alias = "shutdown_timeout", allow_negative_numbers = true, value_name = "SECONDS")]
    #[arg(value_parser = parse_seconds, help_heading = "Failure")]
    #[arg(env = "PET_SHUTDOWN_TIMEOUT", hide_env = true)]
    pub shutdown_timeout: Option<Duration>,

    /// Time without heartbeat after which a rank counts as hung and failed (0: never). Programs that use fsdp-core have
    /// a heartbeat
    #[arg(long, alias = "heartbeat_timeout", allow_negative_numbers = true, value_name = "SECONDS")]
    #[arg(default_value = "15", value_parser = parse_seconds)]
    #[arg(env = "PET_HEARTBEAT_TIMEOUT", hide_env = true, help_heading = "Failure")]
    pub heartbeat_timeout: Duration,

    /// Signals that end the launch and are passed to the ranks [default: SIGTERM,SIGINT,SIGHUP,SIGQUIT, except ignored
    /// signals, such as SIGHUP under nohup]
    #[arg(long, alias = "signals_to_handle", value_name = "NAMES", help_heading = "Failure")]
    #[arg(env = "PET_SIGNALS_TO_HANDLE", hide_env = true)]
    pub signals_to_handle: Option<SignalList>,

    /// Write the ranks' output to `DIR/<run id>/attempt_<n>/<local rank>/stdout.log` and stderr.log: all of it, unless
    /// --tee or --redirects selects streams
    #[arg(long, alias = "log_dir", value_name = "DIR", help_heading = "Output")]
    #[arg(env = "PET_LOG_DIR", hide_env = true)]
    pub log_dir: Option<PathBuf>,

    /// Write these streams only to log files: 0 none, 1 stdout, 2 stderr, 3 both, or by local rank: 0:1,1:3
    #[arg(short, long, value_name = "STREAMS", allow_negative_numbers = true, help_heading = "Output")]
    #[arg(env = "PET_REDIRECTS", hide_env = true)]
    pub redirects: Option<StreamChoice>,

    /// Write these streams to log files and to the console; values as for --redirects
    #[arg(short, long, value_name = "STREAMS", allow_negative_numbers = true, help_heading = "Output")]
    #[arg(env = "PET_TEE", hide_env = true)]
    pub tee: Option<StreamChoice>,

    /// Show only these local ranks on the console: 0,2
    #[arg(
        long,
        alias = "local_ranks_filter",
        allow_negative_numbers = true,
        value_name = "RANKS",
        default_value = "",
        help_heading = "Output"
    )]
    #[arg(env = "PET_LOCAL_RANKS_FILTER", hide_env = true, hide_default_value = true)]
    pub local_ranks_filter: RankFilter,

    /// Prefix of each line, with ${role_name}, ${local_rank}, ${rank}, ${hostname} [default:
    /// $TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else "[rank ${rank}] "]
    #[arg(long, alias = "log_line_prefix_template", value_name = "TEXT", help_heading = "Output")]
    #[arg(env = "PET_LOG_LINE_PREFIX_TEMPLATE", hide_env = true)]
    pub log_line_prefix_template: Option<LinePrefix>,

    #[command(flatten, next_help_heading = "Accepted, without effect")]
    pub(crate) torchrun_only: TorchrunOnly,

    /// Print shell completions for this command
    #[arg(long, alias = "print_completion", value_name = "SHELL", help_heading = "Shell")]
    pub print_completion: Option<Shell>,

    /// Program, by name or by path, and its arguments
    #[arg(required_unless_present = "print_completion", trailing_var_arg = true, value_names = ["PROGRAM", "ARGS"])]
    #[arg(num_args = 1.., help_heading = "Arguments")]
    pub command: Vec<OsString>,

    /// Subcommand, instead of launching a program.
    #[command(subcommand)]
    pub action: Option<Action>,
}

/// Subcommands. To launch a program of such a name, give its path: `./status`.
#[derive(Subcommand, Clone, Debug)]
pub enum Action {
    /// Show this user's runs on this host, and what each rank does
    Status(StatusArgs),
}

/// Options of `torchrun` without effect here. They are accepted, so that its command lines work, or refused with the
/// option to use instead.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Accepted, without effect")]
pub(crate) struct TorchrunOnly {
    /// The launcher is notified at once when a rank ends
    #[arg(long, alias = "monitor_interval", value_name = "SECONDS", value_parser = parse_seconds)]
    #[arg(allow_negative_numbers = true)]
    #[arg(env = "PET_MONITOR_INTERVAL", hide_env = true)]
    monitor_interval: Option<Duration>,

    /// Every rank is a new process
    #[arg(long, alias = "start_method", value_name = "METHOD", value_parser = ["spawn", "fork", "forkserver"])]
    #[arg(env = "PET_START_METHOD", hide_env = true)]
    start_method: Option<String>,

    /// Events are logged to stderr only
    #[arg(long, alias = "event_log_handler", value_name = "NAME")]
    #[arg(env = "PET_EVENT_LOG_HANDLER", hide_env = true)]
    event_log_handler: Option<String>,

    /// `default`
    #[arg(long, alias = "logs_specs", value_name = "NAME", value_parser = logs_specs, hide = true)]
    logs_specs: Option<()>,

    /// None
    #[arg(long, alias = "duplicate_stdout_filters", value_name = "FILTERS", value_parser = filters, hide = true)]
    #[arg(env = "PET_DUPLICATE_STDOUT_FILTERS", hide_env = true)]
    duplicate_stdout_filters: Option<()>,

    /// None
    #[arg(long, alias = "duplicate_stderr_filters", value_name = "FILTERS", value_parser = filters, hide = true)]
    #[arg(env = "PET_DUPLICATE_STDERR_FILTERS", hide_env = true)]
    duplicate_stderr_filters: Option<()>,
}

fn logs_specs(text: &str) -> Result<(), String> {
    if text == "default" {
        return Ok(());
    }
    Err("expected `default`: Python classes are not supported; use --log-dir, --redirects and --tee".into())
}

fn filters(text: &str) -> Result<(), String> {
    if text.is_empty() {
        return Ok(());
    }
    Err("expected no filters: use --local-ranks-filter, or search the files of --log-dir with `grep`".into())
}

/// Keys of `--rdzv-conf` that the launcher uses.
pub(crate) const CONF_KEYS: [&str; 6] =
    ["join_timeout", "timeout", "last_call_timeout", "keep_alive_interval", "keep_alive_max_attempt", "is_host"];

/// Keys of `torchrun`'s backends that have no effect here.
pub(crate) const TORCHRUN_CONF_KEYS: [&str; 14] = [
    "close_timeout",
    "heartbeat_timeout",
    "cas_backoff_max_seconds",
    "read_timeout",
    "store_type",
    "rank",
    "protocol",
    "cert",
    "key",
    "cacert",
    "ssl_cert",
    "ssl_cert_key",
    "ca_cert",
    "etcd_prefix",
];

/// `--rdzv-conf KEY=VALUE,...`, with `torchrun`'s keys. Keys of its backends are accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RendezvousConf {
    /// `join_timeout` or `timeout`: time to wait for the minimum number of hosts.
    pub join_timeout: Option<Duration>,
    /// `last_call_timeout`: time to wait for more than the minimum.
    pub last_call_timeout: Option<Duration>,
    /// `keep_alive_interval`: time between two keep-alive messages.
    pub keep_alive_interval: Option<Duration>,
    /// `keep_alive_max_attempt`: missed keep-alive messages until a host is lost.
    pub keep_alive_max_attempt: Option<u32>,
    /// `is_host`: whether this launcher serves the rendezvous.
    pub is_host: Option<bool>,
    /// Keys that neither the launcher nor `torchrun` knows.
    pub unknown: Vec<String>,
}

impl FromStr for RendezvousConf {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut conf = RendezvousConf::default();
        for pair in text.split(',').map(str::trim).filter(|_| !text.trim().is_empty()) {
            let wrong = || format!("expected KEY=VALUE,KEY=VALUE, found {pair:?}");
            let (key, value) = pair.split_once('=').ok_or_else(wrong)?;
            let (key, value) = (key.trim(), value.trim());
            if key.is_empty() || value.is_empty() {
                return Err(wrong());
            }
            let seconds = || {
                let duration = parse_seconds(value).ok().filter(|duration| !duration.is_zero());
                let expected =
                    || format!("expected a positive number of seconds, at most {MAX_SECONDS:e}, in {pair:?}");
                duration.map(Some).ok_or_else(expected)
            };
            match key {
                "join_timeout" | "timeout" => conf.join_timeout = seconds()?,
                "last_call_timeout" => conf.last_call_timeout = seconds()?,
                "keep_alive_interval" => conf.keep_alive_interval = seconds()?,
                "keep_alive_max_attempt" => {
                    let count = value.parse().ok().filter(|&count: &u32| count > 1);
                    conf.keep_alive_max_attempt = Some(count.ok_or_else(|| {
                        format!(
                            "expected 2 or more, at most {}, in {pair:?}: a host sends one message in a \
                             keep_alive_interval, so that 1 would lose a live host",
                            u32::MAX
                        )
                    })?);
                }
                "is_host" => {
                    conf.is_host = Some(match value.to_ascii_lowercase().as_str() {
                        "1" | "true" | "t" | "yes" | "y" => true,
                        "0" | "false" | "f" | "no" | "n" => false,
                        _ => return Err(format!("expected true or false in {pair:?}")),
                    });
                }
                _ if TORCHRUN_CONF_KEYS.contains(&key) => {}
                _ => conf.unknown.push(key.to_owned()),
            }
        }
        Ok(conf)
    }
}

/// Upper limit of all times; in effect forever.
const MAX_SECONDS: f64 = 1e19;

fn process_count(text: &str) -> Result<usize, String> {
    match text {
        "cpu" => Ok(affinity::core_count()),
        "auto" => Ok(Some(gpus::count()).filter(|&count| count > 0).unwrap_or_else(affinity::core_count)),
        "gpu" => match gpus::count() {
            0 => Err("found no GPU (see CUDA_VISIBLE_DEVICES); expected a number, or `cpu`".into()),
            count => Ok(count),
        },
        number => number
            .parse::<NonZeroU16>()
            .map(|count| usize::from(count.get()))
            .map_err(|_| format!("expected a number from 1 to {}, `auto`, `cpu` or `gpu`", u16::MAX)),
    }
}

fn restarts(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("expected a number of restarts from 0 to {}", u32::MAX))
}

fn port(text: &str) -> Result<NonZeroU16, String> {
    text.parse().map_err(|_| format!("expected a port from 1 to {}", u16::MAX))
}

pub(crate) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|&seconds: &f64| seconds <= MAX_SECONDS);
    let duration = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    duration.ok_or_else(|| format!("expected a number of seconds, 0 or more and at most {MAX_SECONDS:e}"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> std::result::Result<Args, clap::Error> {
        Args::try_parse_from(line.split(' '))
    }

    #[test]
    fn arguments_after_the_program_are_its_own() {
        let args = parse("fsdp-launch --nproc_per_node 2 train -x --nproc-per-node 7 -- --help").unwrap();
        assert_eq!(args.nproc_per_node, 2);
        assert_eq!(args.command, ["train", "-x", "--nproc-per-node", "7", "--", "--help"]);
        assert_eq!(parse("fsdp-launch -- -odd name").unwrap().command, ["-odd", "name"]);
    }

    #[test]
    fn every_option_has_both_spellings() {
        Args::command().debug_assert();
        for arg in Args::command().get_arguments() {
            if let Some(long) = arg.get_long().filter(|long| long.contains('-')) {
                assert_eq!(arg.get_all_aliases(), Some(vec![long.replace('-', "_").as_str()]), "--{long}");
            }
        }
        for line in [
            "l --nproc-per-node=3 --master-addr=a --master-port=7 --rdzv-id=r --shutdown-timeout=0.5 p",
            "l --nproc_per_node=3 --master_addr=a --master_port=7 --rdzv_id=r --shutdown_timeout=0.5 p",
        ] {
            let args = parse(line).unwrap();
            assert_eq!((args.nproc_per_node, args.master_addr.as_deref()), (3, Some("a")));
            assert_eq!(args.master_port.map(u16::from), Some(7));
            assert_eq!((args.rdzv_id.as_deref(), args.shutdown_timeout), (Some("r"), Some(Duration::from_millis(500))));
        }
    }

    #[test]
    fn parses_the_keys_of_torchrun() {
        let conf: RendezvousConf =
            "timeout=900, last_call_timeout=1.5,is_host=False,read_timeout=5,keep_alive_max_attempt=4".parse().unwrap();
        assert_eq!(
            (conf.join_timeout, conf.last_call_timeout),
            (Some(Duration::from_secs(900)), Some(Duration::from_millis(1500)))
        );
        assert_eq!((conf.is_host, conf.keep_alive_max_attempt, conf.keep_alive_interval), (Some(false), Some(4), None));
        assert!(conf.unknown.is_empty());
        assert_eq!("join_timeot=3,store_type=file".parse::<RendezvousConf>().unwrap().unknown, ["join_timeot"]);
        assert_eq!("".parse(), Ok(RendezvousConf::default()));
        for text in [
            "a",
            "a=1,",
            "=1",
            "a=",
            "join_timeout=soon",
            "join_timeout=0",
            "keep_alive_max_attempt=0",
            "keep_alive_max_attempt=1",
            "is_host=maybe",
        ] {
            assert!(text.parse::<RendezvousConf>().is_err(), "{text}");
        }
    }
}
