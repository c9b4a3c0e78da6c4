//! Builds the [`LaunchSpec`] from the command line, and checks the options together.

use std::{env, ffi::OsStr, net::IpAddr, num::NonZeroU16, path::PathBuf};

use crate::{
    Args, Endpoint, Error, LaunchSpec, LinePrefix, RendezvousSpec, Result, SignalList, StreamChoice, Streams,
    cli::args::{CONF_KEYS, TORCHRUN_CONF_KEYS, parse_seconds},
    find_program,
    program::{PythonKind, is_python_script, nearest, plan_program, python_command},
    rendezvous::TOKEN_HELP,
    spec::values::nnodes_text,
};

impl Args {
    /// Finds or builds the program, and returns the launch that the options describe.
    ///
    /// # Errors
    /// As [`find_program`], and [`Error::Usage`] for options that contradict each other.
    pub fn into_spec(self) -> Result<LaunchSpec> {
        self.spec_with(|program| find_program(program))
    }

    /// Like [`into_spec`](Self::into_spec), but does not build the program: returns the command that would build it.
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
        let rendezvous = self.rendezvous_spec()?;
        if !self.standalone {
            self.rdzv_conf.unknown.iter().for_each(|key| warn_of_key(key));
        }
        let (host, port) = match (&rendezvous, &self.rdzv_endpoint) {
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
            (true, _) => Some(PythonKind::Module),
            (_, true) => Some(PythonKind::RunPath),
            _ => (!self.no_python && is_python_script(&name)).then_some(PythonKind::Script),
        };
        let (program, mut args) = match kind {
            Some(kind) => python_command(kind, name)?,
            None => (find(&name)?, Vec::new()),
        };
        args.extend(command);
        let mut spec = LaunchSpec::new(program, self.nproc_per_node);
        spec.args = args;
        if let Some(rendezvous) = rendezvous {
            // If --master-addr and --master-port are the endpoint, the launchers use the port, so ranks need another.
            let is_endpoint = self.rdzv_endpoint.is_none();
            spec.master_addr = self.master_addr;
            spec.master_port = self.master_port.map(NonZeroU16::get).filter(|_| !is_endpoint);
            spec.rendezvous = Some(rendezvous);
        } else {
            spec.master_addr = self.master_addr.or(host).or(self.local_addr);
            spec.master_port = self.master_port.map(NonZeroU16::get).or(port);
        }
        spec.run_id = self.rdzv_id.filter(|_| !self.standalone);
        spec.shutdown_timeout = or_variable(self.shutdown_timeout, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", parse_seconds)?
            .unwrap_or(spec.shutdown_timeout);
        spec.max_restarts = self.max_restarts;
        spec.heartbeat_timeout = self.heartbeat_timeout;
        spec.role = self.role;
        if let Some(SignalList(signals)) = self.signals_to_handle {
            spec.signals = signals;
        }
        spec.virtual_local_rank = self.virtual_local_rank;
        spec.pin_cores = self.pin_cores;
        spec.numa_binding = self.numa_binding;
        // --log-dir alone logs everything.
        let all = self.log_dir.is_some() && self.redirects.is_none() && self.tee.is_none();
        spec.logs.dir = self.log_dir;
        spec.logs.redirects = self.redirects.unwrap_or_default();
        spec.logs.tee = self
            .tee
            .unwrap_or_else(|| if all { StreamChoice::EveryRank(Streams::BOTH) } else { StreamChoice::default() });
        spec.logs.local_ranks_filter = self.local_ranks_filter;
        // An empty template means the default.
        let template = self.log_line_prefix_template.filter(|it| *it != LinePrefix::default());
        spec.logs.line_prefix =
            or_variable(template, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", str::parse)?.unwrap_or_default();
        check_ranks(&spec)?;
        Ok(spec)
    }

    /// Returns how this host meets other hosts; `None` for a launch on one host.
    fn rendezvous_spec(&self) -> Result<Option<RendezvousSpec>> {
        let (min, max) = self.nnodes;
        let usage =
            |flag, value: &dyn ToString, expected: String| Error::Usage { flag, value: value.to_string(), expected };
        let nnodes = nnodes_text(self.nnodes);
        if self.standalone && min > 1 {
            return Err(Error::Options(format!("--standalone means one host, but --nnodes is {nnodes}")));
        }
        if let Some(rank) = self.node_rank.filter(|&rank| rank >= max) {
            return Err(usage(
                "--node-rank",
                &rank,
                if max == 1 {
                    "expected 0, because --nnodes is 1".into()
                } else {
                    format!("expected 0 to {}, because --nnodes is {max}", max - 1)
                },
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
        let Some(endpoint) = self.rdzv_endpoint.clone().or_else(of_master) else {
            return Err(Error::Options(format!(
                "--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT, the same on all hosts: HOST is one \
                 of them, at an address that the others reach"
            )));
        };
        if endpoint.host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified()) {
            let expected = "expected an address that the other hosts can reach";
            return Err(usage("--rdzv-endpoint", &endpoint, expected.into()));
        }
        if self.rdzv_token_file.is_none() && !endpoint.is_loopback() {
            return Err(Error::Options(format!(
                "--nnodes {nnodes} needs --rdzv-token-file FILE, which keeps other users out. {TOKEN_HELP}"
            )));
        }
        let conf = &self.rdzv_conf;
        let mut rendezvous = RendezvousSpec::new(endpoint, (min, max));
        rendezvous.node_rank = self.node_rank;
        let is_first = self.node_rank.filter(|_| is_static).map(|rank| rank == 0);
        rendezvous.is_host = conf.is_host.or(is_first);
        rendezvous.local_addr.clone_from(&self.local_addr);
        rendezvous.token_file.clone_from(&self.rdzv_token_file);
        rendezvous.join_timeout = conf.join_timeout.unwrap_or(rendezvous.join_timeout);
        rendezvous.last_call_timeout = conf.last_call_timeout.unwrap_or(rendezvous.last_call_timeout);
        rendezvous.keep_alive_interval = conf.keep_alive_interval.unwrap_or(rendezvous.keep_alive_interval);
        rendezvous.keep_alive_attempts = conf.keep_alive_max_attempt.unwrap_or(rendezvous.keep_alive_attempts);
        Ok(Some(rendezvous))
    }
}

/// Warns of an unknown key, which may be a misspelt one.
fn warn_of_key(key: &str) {
    match nearest(key, CONF_KEYS.into_iter().chain(TORCHRUN_CONF_KEYS)) {
        Some(meant) => tracing::warn!("--rdzv-conf knows no key {key:?}; did you mean {meant}?"),
        None => tracing::warn!("--rdzv-conf knows no key {key:?}, only {}", CONF_KEYS.join(", ")),
    }
}

/// Checks that the endpoint of a launch on one host is this host.
fn check_is_here(endpoint: &Endpoint) -> Result<()> {
    if endpoint.is_here() {
        return Ok(());
    }
    Err(Error::Usage {
        flag: "--rdzv-endpoint",
        value: endpoint.host.clone(),
        expected: "expected an address of this host, because --nnodes is 1: use localhost, or omit the option".into(),
    })
}

/// Checks that options do not name local ranks beyond `--nproc-per-node`.
fn check_ranks(spec: &LaunchSpec) -> Result<()> {
    let logs = &spec.logs;
    for (flag, highest) in [
        ("--redirects", logs.redirects.highest()),
        ("--tee", logs.tee.highest()),
        ("--local-ranks-filter", logs.local_ranks_filter.0.iter().max().copied()),
    ] {
        if let Some(rank) = highest.filter(|&rank| rank >= spec.nproc_per_node) {
            let expected = format!("expected local ranks from 0 to {}", spec.nproc_per_node - 1);
            return Err(Error::Usage { flag, value: rank.to_string(), expected });
        }
    }
    Ok(())
}

/// Returns an option's value, or the value of the variable that is `torchrun`'s default for it. An empty variable
/// counts as unset.
fn or_variable<T>(
    option: Option<T>,
    name: &'static str,
    parse: impl FnOnce(&str) -> std::result::Result<T, String>,
) -> Result<Option<T>> {
    let Some(value) = env::var_os(name).filter(|value| option.is_none() && !value.is_empty()) else {
        return Ok(option);
    };
    let value = value.to_string_lossy();
    parse(&value).map(Some).map_err(|expected| Error::Usage { flag: name, value: value.into_owned(), expected })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser;

    use super::*;

    fn parse(line: &str) -> std::result::Result<Args, clap::Error> {
        Args::try_parse_from(line.split(' '))
    }

    #[test]
    fn static_uses_the_endpoint_as_master() {
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
    fn hosts_meet_at_the_endpoint_or_master() {
        let spec = |line: &str| parse(line).unwrap().into_spec();
        let met = |line: &str| spec(line).unwrap().rendezvous.unwrap();
        assert!(spec("l --nnodes 1:1 /bin/true").unwrap().rendezvous.is_none());
        assert!(spec("l --nnodes 1:4 --standalone /bin/true").unwrap().rendezvous.is_none());
        let c10d = met("l --nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint a:5 --rdzv-token-file t --rdzv-conf \
                last_call_timeout=2 /bin/true");
        assert_eq!((c10d.nnodes, c10d.port(), c10d.is_host, c10d.node_rank), ((1, 4), 5, None, None));
        assert_eq!((c10d.last_call_timeout, c10d.join_timeout), (Duration::from_secs(2), Duration::from_secs(600)));
        let line = "l --nnodes 2 --node-rank 1 --master-addr a --master-port 7 --rdzv-token-file t /bin/true";
        assert_eq!((met(line).port(), met(line).is_host, met(line).node_rank), (7, Some(false), Some(1)));
        // The launchers listen on the endpoint's port, so ranks cannot.
        assert_eq!((spec(line).unwrap().master_addr.as_deref(), spec(line).unwrap().master_port), (Some("a"), None));
        assert_eq!(met("l --nnodes 2 --rdzv-endpoint localhost /bin/true").port(), 29400);

        for (line, part) in [
            ("l --nnodes 2 /bin/true", "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
            ("l --nnodes 2 --rdzv-endpoint a:5 /bin/true", "--nnodes 2 needs --rdzv-token-file FILE"),
            (
                "l --nnodes 2 --rdzv-endpoint 0.0.0.0:5 --rdzv-token-file t /bin/true",
                "\"0.0.0.0:5\" for --rdzv-endpoint",
            ),
            (
                "l --nnodes 2 --node-rank 2 --rdzv-endpoint localhost /bin/true",
                "expected 0 to 1, because --nnodes is 2",
            ),
            ("l --node-rank 1 /bin/true", "expected 0, because --nnodes is 1"),
            ("l --nnodes 2 --standalone /bin/true", "--standalone means one host, but --nnodes is 2"),
        ] {
            let error = spec(line).unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().contains(part), "{line}: {error}");
        }
    }
}
