//! State of a running launch for other processes: a temporary directory with `job.json`, which `fsdp-launch status`
//! reads. The launcher rewrites the file when an attempt starts, or when it waits for other hosts.

pub(crate) mod cleanup;
pub(crate) mod status;

use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use crate::{
    LaunchSpec,
    job::cleanup::PREFIX,
    rank::{
        environment::Job,
        worker::{Worker, pid_of},
    },
    report::process::ProcessInfo,
};

const FILE_NAME: &str = "job.json";
/// Maximum size of a file that is read; enough for all ranks of a host.
const MAX_FILE: u64 = 16 << 20;

/// Contents of `job.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct JobFile {
    pub(crate) launcher: ProcessId,
    #[serde(flatten)]
    pub(crate) run: RunInfo,
    /// Start of the attempt, or of the wait, in seconds since 1970.
    pub(crate) since: u64,
    /// Ranks of this host.
    pub(crate) ranks: Vec<RankFile>,
}

/// A run, as its launcher describes it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RunInfo {
    /// `TORCHELASTIC_RUN_ID`.
    pub run_id: String,
    /// Program of the ranks.
    pub program: String,
    /// Arguments of the program.
    pub args: Vec<String>,
    /// Reason why the launcher waits before it starts ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting: Option<String>,
    /// Number of earlier starts: `FSDP_ATTEMPT`.
    pub attempt: u32,
    /// Restarts used so far.
    pub restarts: u32,
    /// Restarts allowed.
    pub max_restarts: u32,
    /// Number of ranks on all hosts; 0 during a wait.
    pub world_size: usize,
    /// Number of launchers that take part; 0 during a wait.
    pub hosts: usize,
}

/// A process that is identified even if its pid is reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessId {
    pub(crate) pid: u32,
    /// As [`ProcessInfo::started`].
    pub(crate) started: u64,
}

impl ProcessId {
    fn of(pid: u32) -> Self {
        ProcessId { pid, started: ProcessInfo::of(pid).map_or(0, |process| process.started) }
    }

    /// Returns the process, unless it has ended.
    pub(crate) fn find(self) -> Option<ProcessInfo> {
        ProcessInfo::started_at(self.pid, self.started)
    }
}

/// Process and status page of a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RankFile {
    pub(crate) rank: usize,
    pub(crate) process: ProcessId,
    pub(crate) status_page: Option<String>,
}

impl JobFile {
    /// Describes an attempt that has just started.
    pub(crate) fn of(job: &Job<'_>, workers: &[Worker]) -> Self {
        let (spec, assignment) = (job.spec, job.assignment);
        let rank = |worker: &Worker| RankFile {
            rank: worker.rank,
            process: ProcessId::of(pid_of(worker.pid)),
            status_page: worker.status_page.as_ref().map(fsdp_core::heartbeat::StatusPage::path),
        };
        let mut file = Self::new(spec, &assignment.run_id, assignment.attempt, assignment.restarts, SystemTime::now());
        file.run.world_size = assignment.world_size;
        file.run.hosts = assignment.group_world_size;
        file.ranks = workers.iter().map(rank).collect();
        file
    }

    /// Describes a launch without ranks.
    pub(crate) fn new(spec: &LaunchSpec, run_id: &str, attempt: u32, restarts: u32, since: SystemTime) -> Self {
        JobFile {
            launcher: ProcessId::of(std::process::id()),
            run: RunInfo {
                run_id: run_id.to_owned(),
                program: spec.program.to_string_lossy().into_owned(),
                args: spec.args.iter().map(|arg| arg.to_string_lossy().into_owned()).collect(),
                attempt,
                restarts,
                max_restarts: spec.max_restarts,
                ..RunInfo::default()
            },
            since: since.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
            ranks: Vec::new(),
        }
    }

    /// Writes the file to `dir`. On an error, the run continues, but `status` does not show it.
    pub(crate) fn publish(&self, dir: &Path) {
        if let Err(error) = self.write(dir) {
            tracing::warn!("`fsdp-launch status` won't find this run: {error}");
        }
    }

    /// Replaces the file atomically.
    fn write(&self, dir: &Path) -> io::Result<()> {
        let new = dir.join("job.json.new");
        fs::write(&new, serde_json::to_vec(self)?)?;
        fs::rename(new, dir.join(FILE_NAME))
    }

    /// Returns this user's running launches with directories in `temp`, oldest first. Skips other files, and
    /// directories of dead launchers.
    pub(crate) fn running(temp: &Path) -> io::Result<Vec<Self>> {
        let mut found: Vec<JobFile> = fs::read_dir(temp)?
            .filter_map(Result::ok)
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX))
            .filter_map(|entry| read(&entry.path()))
            .filter(|job| job.launcher.find().is_some())
            .collect();
        found.sort_by_key(|job| (job.launcher.started, job.launcher.pid));
        Ok(found)
    }
}

/// Reads the file in a launcher's directory. Checks owner and file type: other users can create such names.
fn read(dir: &Path) -> Option<JobFile> {
    let is_ours = |path: &Path| fs::symlink_metadata(path).ok().filter(|meta| meta.uid() == geteuid().as_raw());
    is_ours(dir).filter(fs::Metadata::is_dir)?;
    let path = dir.join(FILE_NAME);
    is_ours(&path).filter(fs::Metadata::is_file)?;
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MAX_FILE).read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(launcher: ProcessId, run_id: &str) -> JobFile {
        let run = RunInfo { run_id: run_id.into(), ..RunInfo::default() };
        JobFile { launcher, run, since: 0, ranks: Vec::new() }
    }

    #[test]
    fn skips_stale_and_invalid_files() {
        let temp = tempfile::tempdir().unwrap();
        let dir = |name: &str| {
            let dir = temp.path().join(name);
            fs::create_dir(&dir).unwrap();
            dir
        };
        let us = ProcessId::of(std::process::id());
        job(us, "running").write(&dir("fsdp-launch-a")).unwrap();
        job(us, "elsewhere").write(&dir("other")).unwrap();
        job(ProcessId { started: us.started + 1, ..us }, "its pid is ours now").write(&dir("fsdp-launch-b")).unwrap();
        fs::write(dir("fsdp-launch-c").join(FILE_NAME), "{\"launcher\": 3}").unwrap();
        fs::create_dir(dir("fsdp-launch-d").join(FILE_NAME)).unwrap();
        dir("fsdp-launch-logs-e");
        fs::write(temp.path().join("fsdp-launch-f"), "").unwrap();
        std::os::unix::fs::symlink(temp.path().join("fsdp-launch-a"), temp.path().join("fsdp-launch-g")).unwrap();
        let found = JobFile::running(temp.path()).unwrap();
        assert_eq!(found.iter().map(|job| job.run.run_id.as_str()).collect::<Vec<_>>(), ["running"]);
        assert!(JobFile::running(Path::new("/no/such/directory")).is_err());
    }
}
