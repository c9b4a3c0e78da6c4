//! The command line, in `torchrun`'s names. Every option is also understood with underscores for dashes, as `torchrun` does.

use std::{
    env,
    ffi::{OsStr, OsString},
    net::IpAddr,
    num::NonZeroU16,
    path::PathBuf,
    time::Duration,
};

use clap::{ArgAction, Parser, Subcommand, builder::FalseyValueParser};
use clap_complete::Shell;

use crate::{
    Error, LaunchSpec, LinePrefix, NumaBinding, RankFilter, RendezvousSpec, Result, StreamChoice, Streams, cores,
    find_program, gpus,
    help::{AFTER_HELP, EXAMPLES},
    program::plan_program,
    python::{self, Kind},
    rendezvous::{
        Endpoint, HOW_TO_MAKE_ONE,
        options::{self, RendezvousConf},
    },
    signals::SignalList,
    status::StatusArgs,
};

/// Starts one process per rank of a training program, on one host or several, and ends them all when one fails.
#[derive(Parser, Debug)]
#[command(name = "fsdp-launch", version, after_long_help = AFTER_HELP, after_help = EXAMPLES)]
#[command(override_usage = "fsdp-launch [OPTIONS] PROGRAM [ARGS]...\n       fsdp-launch status [RUN] [--json]")]
#[command(next_help_heading = "Ranks", args_override_self = true, subcommand_help_heading = "Instead of a program")]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true, disable_help_subcommand = true)]
pub struct Args {
    /// Ranks to start on this host: a number, `gpu` for one per GPU, `cpu` for one per core, `auto` for GPUs if there are any, else cores
    #[arg(long, alias = "nproc_per_node", value_name = "N", default_value = "1", value_parser = process_count)]
    #[arg(env = "PET_NPROC_PER_NODE", hide_env = true)]
    pub nproc_per_node: usize,

    /// Hosts: a number, or the fewest and the most that a run may go on with
    #[arg(long, value_name = "N|MIN:MAX", default_value = "1", value_parser = options::nnodes)]
    #[arg(env = "PET_NNODES", hide_env = true)]
    pub nnodes: (u32, u32),

    /// This host's place among them [default: as they come]
    #[arg(long, alias = "node_rank", value_name = "N", value_parser = options::node_rank)]
    #[arg(env = "PET_NODE_RANK", hide_env = true)]
    pub node_rank: Option<u32>,

    /// ROLE_NAME of the ranks
    #[arg(long, value_name = "NAME", default_value = "default", value_parser = options::word)]
    #[arg(env = "PET_ROLE", hide_env = true)]
    pub role: String,

    /// Set LOCAL_RANK=0 for every rank, and CUDA_VISIBLE_DEVICES to the one GPU that is its own
    #[arg(long, alias = "virtual_local_rank", action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    #[arg(env = "PET_VIRTUAL_LOCAL_RANK", hide_env = true)]
    pub virtual_local_rank: bool,

    /// Give every rank its own share of the cores to run on
    #[arg(long, alias = "pin_cores")]
    pub pin_cores: bool,

    /// Run every rank near to the GPU of its local rank, or where there is none on one NUMA node after the other
    #[arg(long, alias = "numa_binding", value_name = "WHERE", value_enum, conflicts_with = "pin_cores")]
    #[arg(env = "PET_NUMA_BINDING", hide_env = true)]
    pub numa_binding: Option<NumaBinding>,

    /// Run PROGRAM as a Python module (`python3 -u -m PROGRAM`)
    #[arg(short, long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new(), help_heading = "Program")]
    #[arg(env = "PET_MODULE", hide_env = true, conflicts_with_all = ["no_python", "run_path"])]
    pub module: bool,

    /// Execute PROGRAM itself, also if its name ends in .py
    #[arg(long, alias = "no_python", action = ArgAction::SetTrue, value_parser = FalseyValueParser::new(), help_heading = "Program")]
    #[arg(env = "PET_NO_PYTHON", hide_env = true)]
    pub no_python: bool,

    /// Run PROGRAM, an absolute path, with Python's runpy.run_path
    #[arg(long, alias = "run_path", action = ArgAction::SetTrue, value_parser = FalseyValueParser::new(), help_heading = "Program")]
    #[arg(env = "PET_RUN_PATH", hide_env = true)]
    pub run_path: bool,

    /// Print the environment and the command of each rank, and start nothing
    #[arg(long, alias = "dry_run", help_heading = "Program")]
    pub dry_run: bool,

    /// Where the ranks reach rank 0 [default: 127.0.0.1, of several hosts that of rank 0]
    #[arg(long, alias = "master_addr", value_name = "ADDRESS", value_parser = options::word, help_heading = "Meeting")]
    #[arg(env = "PET_MASTER_ADDR", hide_env = true)]
    pub master_addr: Option<String>,

    /// The port there [default: one that is free]
    #[arg(long, alias = "master_port", value_name = "PORT", help_heading = "Meeting")]
    #[arg(env = "PET_MASTER_PORT", hide_env = true)]
    pub master_port: Option<NonZeroU16>,

    /// This host's address for the others
    #[arg(long, alias = "local_addr", value_name = "ADDRESS", value_parser = options::word, help_heading = "Meeting")]
    #[arg(env = "PET_LOCAL_ADDR", hide_env = true)]
    pub local_addr: Option<String>,

    /// One host, a free port and a run id of its own: ignores the --rdzv options
    #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new(), help_heading = "Meeting")]
    #[arg(env = "PET_STANDALONE", hide_env = true)]
    pub standalone: bool,

    /// The run's id, TORCHELASTIC_RUN_ID [default: one that no other run has]
    #[arg(long, alias = "rdzv_id", value_name = "ID", help_heading = "Meeting")]
    #[arg(env = "PET_RDZV_ID", hide_env = true)]
    pub rdzv_id: Option<String>,

    /// Of one host: static: --rdzv-endpoint is MASTER_ADDR and MASTER_PORT; c10d: it must be this host. Of several: static: hosts need --node-rank, and host 0 holds the rendezvous
    #[arg(long, alias = "rdzv_backend", value_name = "NAME", default_value = "static", value_parser = ["static", "c10d"])]
    #[arg(env = "PET_RDZV_BACKEND", hide_env = true, help_heading = "Meeting")]
    pub rdzv_backend: String,

    /// Where hosts meet: the same on all of them, an address of one [port: 29400; static: --master-addr and --master-port]
    #[arg(long, alias = "rdzv_endpoint", value_name = "HOST[:PORT]", help_heading = "Meeting")]
    #[arg(env = "PET_RDZV_ENDPOINT", hide_env = true)]
    pub rdzv_endpoint: Option<Endpoint>,

    /// join_timeout=600,last_call_timeout=30,keep_alive_interval=5,keep_alive_max_attempt=3 (in seconds), is_host=true|false
    #[arg(long, alias = "rdzv_conf", value_name = "KEY=VALUE,...", default_value = "", help_heading = "Meeting")]
    #[arg(env = "PET_RDZV_CONF", hide_env = true, hide_default_value = true)]
    pub rdzv_conf: RendezvousConf,

    /// The secret that all hosts share, at least 16 bytes; hosts that are this one need none
    #[arg(long, alias = "rdzv_token_file", value_name = "FILE", help_heading = "Meeting")]
    #[arg(env = "PET_RDZV_TOKEN_FILE", hide_env = true)]
    pub rdzv_token_file: Option<PathBuf>,

    /// How often all ranks start again after one has failed; never after Ctrl-C
    #[arg(long, alias = "max_restarts", value_name = "N", default_value = "0", value_parser = restarts)]
    #[arg(env = "PET_MAX_RESTARTS", hide_env = true, help_heading = "Failure")]
    pub max_restarts: u32,

    /// Accepted; the launcher is told at once when a rank ends
    #[arg(long, alias = "monitor_interval", value_name = "SECONDS", default_value = "0.1", value_parser = seconds)]
    #[arg(env = "PET_MONITOR_INTERVAL", hide_env = true, help_heading = "Failure")]
    pub monitor_interval: Duration,

    /// How long ranks that are asked to end have until they are killed [default: $TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30]
    #[arg(long, alias = "shutdown_timeout", value_name = "SECONDS", value_parser = seconds, help_heading = "Failure")]
    #[arg(env = "PET_SHUTDOWN_TIMEOUT", hide_env = true)]
    pub shutdown_timeout: Option<Duration>,

    /// A rank that had a heartbeat (programs that use fsdp-core do) and has none for so long hangs, which is a failure; 0: never
    #[arg(long, alias = "heartbeat_timeout", value_name = "SECONDS", default_value = "15", value_parser = seconds)]
    #[arg(env = "PET_HEARTBEAT_TIMEOUT", hide_env = true, help_heading = "Failure")]
    pub heartbeat_timeout: Duration,

    /// The signals that end the launch, and reach the ranks as they are [default: SIGTERM,SIGINT,SIGHUP,SIGQUIT, less those that are ignored, as SIGHUP under nohup]
    #[arg(long, alias = "signals_to_handle", value_name = "NAMES", help_heading = "Failure")]
    #[arg(env = "PET_SIGNALS_TO_HANDLE", hide_env = true)]
    pub signals_to_handle: Option<SignalList>,

    /// Keep what the ranks print, in `DIR/<run id>/attempt_<n>/<local rank>/stdout.log` and stderr.log; without --tee and --redirects all of it
    #[arg(long, alias = "log_dir", value_name = "DIR", help_heading = "Output")]
    #[arg(env = "PET_LOG_DIR", hide_env = true)]
    pub log_dir: Option<PathBuf>,

    /// Print to log files and not here: 0 nothing, 1 stdout, 2 stderr, 3 both, or by local rank: 0:1,1:3
    #[arg(short, long, value_name = "STREAMS", help_heading = "Output")]
    #[arg(env = "PET_REDIRECTS", hide_env = true)]
    pub redirects: Option<StreamChoice>,

    /// Print to log files and here; values as for --redirects
    #[arg(short, long, value_name = "STREAMS", help_heading = "Output")]
    #[arg(env = "PET_TEE", hide_env = true)]
    pub tee: Option<StreamChoice>,

    /// Show only these local ranks here: 0,2
    #[arg(long, alias = "local_ranks_filter", value_name = "RANKS", default_value = "", help_heading = "Output")]
    #[arg(env = "PET_LOCAL_RANKS_FILTER", hide_env = true, hide_default_value = true)]
    pub local_ranks_filter: RankFilter,

    /// What stands before each line: ${role_name}, ${local_rank}, ${rank}, ${hostname} [default: "[rank ${rank}] "]
    #[arg(long, alias = "log_line_prefix_template", value_name = "TEXT", default_value = "", help_heading = "Output")]
    #[arg(env = "PET_LOG_LINE_PREFIX_TEMPLATE", hide_env = true, hide_default_value = true)]
    pub log_line_prefix_template: LinePrefix,

    /// Print the completions of a shell for this command
    #[arg(long, alias = "print_completion", value_name = "SHELL", help_heading = "Shell")]
    pub print_completion: Option<Shell>,

    /// The program, by name or by path, and its arguments
    #[arg(required_unless_present = "print_completion", trailing_var_arg = true, value_names = ["PROGRAM", "ARGS"], num_args = 1.., help_heading = "Arguments")]
    pub command: Vec<OsString>,

    /// What to do instead of launching a program.
    #[command(subcommand)]
    pub action: Option<Action>,
}

/// What the command does besides launching. Programs of these names are launched by a path: `./status`.
#[derive(Subcommand, Clone, Debug)]
pub enum Action {
    /// Show the runs of this user on this host: their ranks, and what each of them does
    Status(StatusArgs),
}

impl Args {
    /// Finds or builds the program and puts the launch together.
    ///
    /// # Errors
    /// As [`find_program`]; [`Error::Usage`] where options contradict each other.
    pub fn into_spec(self) -> Result<LaunchSpec> {
        self.spec_with(find_program)
    }

    /// As [`into_spec`](Self::into_spec), but builds nothing: a program that would be built comes with the command that builds it.
    ///
    /// # Errors
    /// As [`into_spec`](Self::into_spec).
    pub fn plan(self) -> Result<(LaunchSpec, Option<String>)> {
        let mut build = None;
        let spec = self.spec_with(|program| {
            let (path, command) = plan_program(program)?;
            build = command;
            Ok(path)
        })?;
        Ok((spec, build))
    }

    fn spec_with(self, find: impl FnOnce(&OsStr) -> Result<PathBuf>) -> Result<LaunchSpec> {
        let meeting = self.meeting()?;
        let (host, port) = match (&meeting, &self.rdzv_endpoint) {
            (None, Some(endpoint)) if !self.standalone => {
                check_is_here(endpoint)?;
                let is_master = self.rdzv_backend == "static";
                if is_master { (Some(endpoint.host.clone()), endpoint.port) } else { (None, None) }
            }
            _ => (None, None),
        };

        let mut command = self.command.into_iter();
        let name = command.next().unwrap_or_default();
        let kind = match (self.module, self.run_path) {
            (true, _) => Some(Kind::Module),
            (_, true) => Some(Kind::RunPath),
            _ => (!self.no_python && python::is_script(&name)).then_some(Kind::Script),
        };
        let (program, mut args) = match kind {
            Some(kind) => python::command(kind, name)?,
            None => (find(&name)?, Vec::new()),
        };
        args.extend(command);
        let mut spec = LaunchSpec::new(program, self.nproc_per_node);
        spec.args = args;
        if let Some(meeting) = meeting {
            // Where the endpoint is made of them, the launchers meet there, and the ranks elsewhere.
            let is_endpoint = self.rdzv_endpoint.is_none();
            spec.master_addr = self.master_addr;
            spec.master_port = self.master_port.map(NonZeroU16::get).filter(|_| !is_endpoint);
            spec.rendezvous = Some(meeting);
        } else {
            spec.master_addr = self.master_addr.or(host).or(self.local_addr);
            spec.master_port = self.master_port.map(NonZeroU16::get).or(port);
        }
        spec.run_id = self.rdzv_id.filter(|_| !self.standalone);
        let timeout = || variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", seconds);
        spec.shutdown_timeout =
            self.shutdown_timeout.map_or_else(timeout, |it| Ok(Some(it)))?.unwrap_or(spec.shutdown_timeout);
        spec.max_restarts = self.max_restarts;
        spec.heartbeat_timeout = self.heartbeat_timeout;
        spec.role = self.role;
        if let Some(SignalList(signals)) = self.signals_to_handle {
            spec.signals = signals;
        }
        spec.virtual_local_rank = self.virtual_local_rank;
        spec.pin_cores = self.pin_cores;
        spec.numa_binding = self.numa_binding;
        // Who names a directory for logs wants some.
        let all = self.log_dir.is_some() && self.redirects.is_none() && self.tee.is_none();
        spec.logs.dir = self.log_dir;
        spec.logs.redirects = self.redirects.unwrap_or_default();
        spec.logs.tee = self
            .tee
            .unwrap_or_else(|| if all { StreamChoice::EveryRank(Streams::BOTH) } else { StreamChoice::default() });
        spec.logs.local_ranks_filter = self.local_ranks_filter;
        spec.logs.line_prefix = self.log_line_prefix_template;
        check_ranks(&spec)?;
        Ok(spec)
    }
}

impl Args {
    /// How this host meets others, if there may be others.
    fn meeting(&self) -> Result<Option<RendezvousSpec>> {
        let (min, max) = self.nnodes;
        let usage =
            |flag, value: &dyn ToString, expected: String| Error::Usage { flag, value: value.to_string(), expected };
        if self.standalone && min > 1 {
            return Err(usage("--standalone", &true, format!("it means one host, and --nnodes wants at least {min}")));
        }
        if let Some(rank) = self.node_rank.filter(|&rank| rank >= max) {
            return Err(usage(
                "--node-rank",
                &rank,
                format!("of {max} hosts (--nnodes), the ranks are 0 to {}", max - 1),
            ));
        }
        if max == 1 || self.standalone {
            return Ok(None);
        }
        let is_static = self.rdzv_backend == "static";
        let of_master = || {
            let host = self.master_addr.clone().filter(|_| is_static)?;
            Some(Endpoint { host, port: self.master_port.map(NonZeroU16::get) })
        };
        let nnodes = options::nnodes_text(self.nnodes);
        let Some(endpoint) = self.rdzv_endpoint.clone().or_else(of_master) else {
            let expected = "several hosts need --rdzv-endpoint HOST:PORT, the same on all of them: HOST is one of them, whose launcher the others can reach there";
            return Err(usage("--nnodes", &nnodes, expected.into()));
        };
        if endpoint.host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified()) {
            let expected =
                "the other hosts can't reach that: give the name or address of the host that they reach it by";
            return Err(usage("--rdzv-endpoint", &endpoint, expected.into()));
        }
        if self.rdzv_token_file.is_none() && !endpoint.is_loopback() {
            let expected =
                format!("several hosts need --rdzv-token-file FILE, so that no stranger takes part. {HOW_TO_MAKE_ONE}");
            return Err(usage("--nnodes", &nnodes, expected));
        }
        let conf = &self.rdzv_conf;
        let mut meeting = RendezvousSpec::new(endpoint, (min, max));
        meeting.node_rank = self.node_rank;
        let is_first = self.node_rank.filter(|_| is_static).map(|rank| rank == 0);
        meeting.is_host = conf.is_host.or(is_first);
        meeting.local_addr.clone_from(&self.local_addr);
        meeting.token_file.clone_from(&self.rdzv_token_file);
        meeting.join_timeout = conf.join_timeout.unwrap_or(meeting.join_timeout);
        meeting.last_call_timeout = conf.last_call_timeout.unwrap_or(meeting.last_call_timeout);
        meeting.keep_alive_interval = conf.keep_alive_interval.unwrap_or(meeting.keep_alive_interval);
        meeting.keep_alive_attempts = conf.keep_alive_max_attempt.unwrap_or(meeting.keep_alive_attempts);
        Ok(Some(meeting))
    }
}

/// One host can't meet anybody elsewhere.
fn check_is_here(endpoint: &Endpoint) -> Result<()> {
    if endpoint.is_here() {
        return Ok(());
    }
    Err(Error::Usage {
        flag: "--rdzv-endpoint",
        value: endpoint.host.clone(),
        expected: "one host is launched (--nnodes 1), and this is no address of it: use localhost, or leave it out"
            .into(),
    })
}

/// Options that name local ranks must name ranks that there are.
fn check_ranks(spec: &LaunchSpec) -> Result<()> {
    let logs = &spec.logs;
    for (flag, highest) in [
        ("--redirects", logs.redirects.highest()),
        ("--tee", logs.tee.highest()),
        ("--local-ranks-filter", logs.local_ranks_filter.0.iter().max().copied()),
    ] {
        if let Some(rank) = highest.filter(|&rank| rank >= spec.nproc_per_node) {
            let expected = format!("there is no local rank {rank}: they count from 0 to {}", spec.nproc_per_node - 1);
            return Err(Error::Usage { flag, value: rank.to_string(), expected });
        }
    }
    Ok(())
}

fn process_count(text: &str) -> std::result::Result<usize, String> {
    match text {
        "cpu" => Ok(cores::count()),
        "auto" => Ok(Some(gpus::count()).filter(|&count| count > 0).unwrap_or_else(cores::count)),
        "gpu" => match gpus::count() {
            0 => Err("there is no GPU here, or CUDA_VISIBLE_DEVICES hides it; expected a number, or `cpu`".into()),
            count => Ok(count),
        },
        number => number
            .parse::<NonZeroU16>()
            .map(|count| usize::from(count.get()))
            .map_err(|_| format!("expected a number from 1 to {}, `auto`, `cpu` or `gpu`", u16::MAX)),
    }
}

fn restarts(text: &str) -> std::result::Result<u32, String> {
    text.parse().map_err(|_| format!("expected a number of restarts from 0 to {}", u32::MAX))
}

/// What a variable of the environment says that is `torchrun`'s default for an option; an empty one says nothing.
fn variable<T>(name: &'static str, parse: impl FnOnce(&str) -> std::result::Result<T, String>) -> Result<Option<T>> {
    let Some(value) = env::var_os(name).filter(|value| !value.is_empty()) else { return Ok(None) };
    let value = value.to_string_lossy();
    parse(&value).map(Some).map_err(|expected| Error::Usage { flag: name, value: value.into_owned(), expected })
}

fn seconds(text: &str) -> std::result::Result<Duration, String> {
    let seconds: Option<f64> = text.parse().ok();
    let duration = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    duration.ok_or_else(|| "expected a number of seconds, 0 or more".to_owned())
}

/// A wrong command line in one line: the option, its value, and what it must be.
pub fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let usage = |line: &&str| line.starts_with("Usage:") || line.starts_with("For more information");
    let lines: Vec<&str> =
        text.lines().map(str::trim).take_while(|line| !usage(line)).filter(|line| !line.is_empty()).collect();
    format!("{} (--help tells more)", lines.join(" ").trim_start_matches("error: "))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> std::result::Result<Args, clap::Error> {
        Args::try_parse_from(line.split(' '))
    }

    #[test]
    fn what_follows_the_program_belongs_to_it() {
        let args = parse("fsdp-launch --nproc_per_node 2 train -x --nproc-per-node 7 -- --help").unwrap();
        assert_eq!(args.nproc_per_node, 2);
        assert_eq!(args.command, ["train", "-x", "--nproc-per-node", "7", "--", "--help"]);
        assert_eq!(parse("fsdp-launch -- -odd name").unwrap().command, ["-odd", "name"]);
    }

    #[test]
    fn both_spellings_of_every_option() {
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
    fn bad_values_are_refused_in_one_line_that_names_them() {
        for line in [
            "--nproc-per-node 0",
            "--nproc-per-node -1",
            "--nproc-per-node many",
            "--nproc-per-node 65536",
            "--nnodes 0",
            "--nnodes 2:1",
            "--node-rank -1",
            "--role ",
            "--master-port 0",
            "--master-port 65536",
            "--master-addr ",
            "--rdzv-backend etcd",
            "--rdzv-endpoint host:port",
            "--rdzv-conf timeout",
            "--rdzv-conf join_timeout=soon",
            "--shutdown-timeout -1",
            "--shutdown-timeout inf",
            "--shutdown-timeout nan",
            "--heartbeat-timeout -1",
            "--heartbeat-timeout never",
            "--signals-to-handle SIGKILL",
            "--signals-to-handle SIGTERM,,",
            "--tee 4",
            "--redirects 0:1,1:x",
            "--local-ranks-filter all",
            "--log-line-prefix-template ${pid}",
            "--max-restarts -1",
            "--max-restarts 1.5",
            "--monitor-interval soon",
            "--numa-binding core",
            "--print-completion dos",
        ] {
            let (flag, value) = line.split_once(' ').unwrap();
            let error = Args::try_parse_from(["l", &format!("{flag}={value}"), "p"]).unwrap_err();
            let told = one_line(&error);
            assert!(told.contains(flag) && told.contains(value) && told.lines().count() == 1, "{line}: {told}");
            assert_eq!(error.exit_code(), 2);
        }
        for line in [
            "l --no-such-option p",
            "l",
            "l --module --no-python p",
            "l --pin-cores --numa-binding node p",
            "l --nproc-per-node",
        ] {
            let told = one_line(&parse(line).unwrap_err());
            assert!(!told.contains("status [RUN]") && told.lines().count() == 1, "{line}: {told}");
        }
    }

    #[test]
    fn the_endpoint_is_the_master_for_the_static_backend_only() {
        let spec = |line: &str| parse(line).unwrap().into_spec().unwrap();
        let is = |line: &str| (spec(line).master_addr, spec(line).master_port);
        let here = |address: &str, port| (Some(address.to_owned()), port);
        assert_eq!(is("l --rdzv-endpoint localhost:29400 /bin/true"), here("localhost", Some(29400)));
        assert_eq!(is("l --rdzv-backend c10d --rdzv-endpoint localhost:29400 /bin/true"), (None, None));
        assert_eq!(is("l --standalone --rdzv-endpoint 192.0.2.1:1 /bin/true"), (None, None));
        assert_eq!(is("l --local-addr ::1 /bin/true"), here("::1", None));
        assert_eq!(is("l --rdzv-endpoint localhost --master-addr a --master-port 5 /bin/true"), here("a", Some(5)));
        assert_eq!(spec("l --standalone --rdzv-id x /bin/true").run_id, None);
        let elsewhere = parse("l --rdzv-endpoint 192.0.2.1:29400 /bin/true").unwrap().into_spec().unwrap_err();
        assert!(
            elsewhere.exit_code() == 2 && elsewhere.to_string().contains("\"192.0.2.1\" for --rdzv-endpoint"),
            "{elsewhere}"
        );
    }

    #[test]
    fn several_hosts_meet_at_the_endpoint_or_at_the_master() {
        let spec = |line: &str| parse(line).unwrap().into_spec();
        let met = |line: &str| spec(line).unwrap().rendezvous.unwrap();
        assert!(spec("l --nnodes 1:1 /bin/true").unwrap().rendezvous.is_none());
        assert!(spec("l --nnodes 1:4 --standalone /bin/true").unwrap().rendezvous.is_none());
        let c10d = met(
            "l --nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint a:5 --rdzv-token-file t --rdzv-conf last_call_timeout=2 /bin/true",
        );
        assert_eq!((c10d.nnodes, c10d.port(), c10d.is_host, c10d.node_rank), ((1, 4), 5, None, None));
        assert_eq!((c10d.last_call_timeout, c10d.join_timeout), (Duration::from_secs(2), Duration::from_secs(600)));
        let line = "l --nnodes 2 --node-rank 1 --master-addr a --master-port 7 --rdzv-token-file t /bin/true";
        assert_eq!((met(line).port(), met(line).is_host, met(line).node_rank), (7, Some(false), Some(1)));
        // Where the launchers meet, no rank can listen.
        assert_eq!((spec(line).unwrap().master_addr.as_deref(), spec(line).unwrap().master_port), (Some("a"), None));
        assert_eq!(met("l --nnodes 2 --rdzv-endpoint localhost /bin/true").port(), 29400);

        for (line, part) in [
            ("l --nnodes 2 /bin/true", "need --rdzv-endpoint HOST:PORT"),
            ("l --nnodes 2 --rdzv-endpoint a:5 /bin/true", "need --rdzv-token-file FILE"),
            (
                "l --nnodes 2 --rdzv-endpoint 0.0.0.0:5 --rdzv-token-file t /bin/true",
                "\"0.0.0.0:5\" for --rdzv-endpoint",
            ),
            ("l --nnodes 2 --node-rank 2 --rdzv-endpoint localhost /bin/true", "the ranks are 0 to 1"),
            ("l --node-rank 1 /bin/true", "the ranks are 0 to 0"),
            ("l --nnodes 2 --standalone /bin/true", "it means one host"),
        ] {
            let error = spec(line).unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().contains(part), "{line}: {error}");
        }
    }
}
