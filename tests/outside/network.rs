//! Hosts for tests: network namespaces, connected by a pair of virtual devices.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

const LIMIT: Duration = Duration::from_secs(100);

/// A network namespace, which ends when this is dropped or the test ends.
pub(crate) struct Host(Child);

impl Host {
    fn new() -> Result<Self, String> {
        // `cat` runs until its stdin ends.
        let mut command = Command::new("unshare");
        command.args(["--net", "cat"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(|error| format!("unshare can't be run: {error}"))?;
        let of = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        let began = Instant::now();
        let ours = of(std::process::id());
        while of(child.id()).is_none_or(|net| Some(net) == ours) {
            // Without permission, `unshare` ends at once.
            if child.try_wait().is_ok_and(|status| status.is_some()) {
                return Err("this process may not make network namespaces; root may".into());
            }
            assert!(began.elapsed() < LIMIT, "unshare makes no namespace");
            sleep(Duration::from_millis(2));
        }
        Ok(Host(child))
    }

    /// Makes a command that runs in the namespace.
    pub(crate) fn command(&self, name: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--net", "--target", &self.0.id().to_string()]).arg(name);
        command
    }

    /// Runs `ip` in the namespace and returns whether it succeeded.
    pub(crate) fn ip(&self, args: &str) -> bool {
        let mut command = self.command(Path::new("ip"));
        command.args(args.split(' ')).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Makes two hosts with the addresses 10.77.0.1 and 10.77.0.2.
pub(crate) fn two_hosts() -> Result<[Host; 2], String> {
    for (program, package) in [("ip", "iproute2"), ("nsenter", "util-linux")] {
        let found = Command::new(program).arg("-V").output();
        found.map_err(|error| format!("{program}, of the package {package}, can't be run: {error}"))?;
    }
    let hosts = [Host::new()?, Host::new()?];
    let [first, second] = &hosts;
    let joined = first.ip(&format!("link add fsdp0 type veth peer name fsdp0 netns {}", second.0.id()))
        && [first, second].iter().zip(1..).all(|(host, number)| {
            host.ip(&format!("address add 10.77.0.{number}/24 dev fsdp0"))
                && host.ip("link set fsdp0 up")
                && host.ip("link set lo up")
        });
    joined.then_some(hosts).ok_or("this process may not join network namespaces; root may".into())
}
