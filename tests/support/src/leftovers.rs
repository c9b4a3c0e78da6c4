//! Resources of the system that a run uses, and those that remain after its end.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The environment variable that identifies the processes of a run.
pub const MARK: &str = "FSDP_TEST_RUN";

/// The time that the system and the launcher's guard may take to clean up.
const PATIENCE: Duration = Duration::from_secs(10);

/// A process of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// The process id.
    pub pid: i32,
    /// The parent's process id.
    pub parent: i32,
    /// `RANK`, if the process is a rank.
    pub rank: Option<usize>,
    /// Its command line, with spaces.
    pub command: String,
}

/// Returns the processes of the run `mark` by their environment, without zombies.
pub fn processes(mark: &str) -> Vec<Process> {
    let mark = format!("{MARK}={mark}");
    let mut found = Vec::new();
    for pid in numbered("/proc") {
        let of = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let environment = of("environ");
        let variables: Vec<_> = environment.split(|&byte| byte == 0).map(String::from_utf8_lossy).collect();
        if !variables.iter().any(|variable| *variable == mark) {
            continue;
        }
        let stat = String::from_utf8_lossy(&of("stat")).into_owned();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let [state, parent, ..] = fields[..] else { continue };
        if matches!(state, "Z" | "X") {
            continue;
        }
        let rank = variables.iter().find_map(|variable| variable.strip_prefix("RANK=")?.parse().ok());
        let command = String::from_utf8_lossy(&of("cmdline")).replace('\0', " ");
        found.push(Process { pid, parent: parent.parse().unwrap_or(0), rank, command });
    }
    found
}

/// Returns the entries of a directory that are numbers.
fn numbered(dir: &str) -> Vec<i32> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The resources that the processes of a run have held.
#[derive(Debug, Default)]
pub struct Holdings {
    /// The inodes of sockets.
    sockets: BTreeSet<u64>,
    /// The inodes of unnamed shared memory, and the names that the kernel shows.
    memory: BTreeMap<u64, String>,
    /// Files in `/dev/shm`.
    shm_files: BTreeSet<PathBuf>,
}

impl Holdings {
    /// Adds the resources that these processes hold now.
    pub fn add(&mut self, processes: &[Process]) {
        for process in processes {
            for link in links(process.pid) {
                if let Some(inode) = link.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')) {
                    self.sockets.extend(inode.parse::<u64>());
                } else if link.starts_with("/dev/shm/") {
                    self.shm_files.insert(link.into());
                }
            }
            for (inode, name) in mapped(process.pid) {
                if name.starts_with("/dev/shm/") {
                    self.shm_files.insert(name.into());
                } else if name.starts_with("/memfd:") {
                    self.memory.insert(inode, name);
                }
            }
        }
    }

    /// The numbers of sockets and of segments of shared memory so far.
    pub fn seen(&self) -> (usize, usize) {
        (self.sockets.len(), self.memory.len() + self.shm_files.len())
    }

    /// Describes those resources that still exist.
    fn left(&self) -> Vec<String> {
        let mut left = Vec::new();
        // The columns of the inode number in the kernel's tables, and of the state or name.
        for (table, column, told) in [("tcp", 9, 1), ("tcp6", 9, 1), ("udp", 9, 1), ("udp6", 9, 1), ("unix", 6, 7)] {
            let text = fs::read_to_string(format!("/proc/net/{table}")).unwrap_or_default();
            for line in text.lines().skip(1) {
                let fields: Vec<&str> = line.split_whitespace().collect();
                let inode = fields.get(column).and_then(|inode| inode.parse().ok());
                if inode.is_some_and(|inode: u64| inode != 0 && self.sockets.contains(&inode)) {
                    left.push(format!("{table} socket {}", fields.get(told).unwrap_or(&"without a name")));
                }
            }
        }
        for pid in numbered("/proc") {
            let held = mapped(pid).into_iter().filter(|(inode, name)| self.memory.get(inode) == Some(name));
            left.extend(held.map(|(_, name)| format!("{name} in process {pid}")));
        }
        left.extend(self.shm_files.iter().filter(|path| path.exists()).map(|path| path.display().to_string()));
        left
    }
}

/// Returns the targets of a process's descriptors.
fn links(pid: i32) -> Vec<String> {
    let dir = format!("/proc/{pid}/fd");
    let fds = numbered(&dir).into_iter();
    fds.filter_map(|fd| Some(fs::read_link(format!("{dir}/{fd}")).ok()?.to_string_lossy().into_owned())).collect()
}

/// Returns the files that a process has mapped: inode and path.
fn mapped(pid: i32) -> Vec<(u64, String)> {
    let text = fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let file = |line: &str| {
        let mut fields = line.split_whitespace().skip(4);
        Some((fields.next()?.parse().ok()?, fields.next()?.to_owned()))
    };
    text.lines().filter_map(file).collect()
}

/// Waits until nothing remains of the run `mark`, which held `held` and used `temp` for temporary files.
///
/// # Errors
/// The resources that remain after the time limit.
pub fn wait_until_gone(mark: &str, held: &Holdings, temp: &Path) -> Result<Duration, String> {
    let start = Instant::now();
    loop {
        let mut left: Vec<String> = processes(mark).iter().map(|process| format!("{process:?}")).collect();
        left.extend(held.left());
        let files = fs::read_dir(temp).into_iter().flatten().flatten();
        left.extend(files.map(|file| file.path().display().to_string()));
        if left.is_empty() {
            return Ok(start.elapsed());
        }
        if start.elapsed() > PATIENCE {
            return Err(format!("left behind {PATIENCE:?} after the run's end:\n  {}", left.join("\n  ")));
        }
        sleep(Duration::from_millis(10));
    }
}
