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
    pub(crate) run_id: String,
    pub(crate) program: String,
    pub(crate) args: Vec<String>,
    /// Reason for waiting before an attempt. There are no ranks then, and `world_size` and `hosts` are 0.
    pub(crate) waiting: Option<String>,
    pub(crate) world_size: usize,
    pub(crate) hosts: usize,
    pub(crate) attempt: u32,
    pub(crate) restarts: u32,
    pub(crate) max_restarts: u32,
    /// Start of the attempt, or of the wait, in seconds since 1970.
    pub(crate) since: u64,
    /// Ranks of this host.
    pub(crate) ranks: Vec<RankFile>,
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
        JobFile {
            world_size: assignment.world_size,
            hosts: assignment.group_world_size,
            ranks: workers.iter().map(rank).collect(),
            ..Self::new(spec, &assignment.run_id, assignment.attempt, assignment.restarts, SystemTime::now())
        }
    }

    /// Describes a launch without ranks.
    pub(crate) fn new(spec: &LaunchSpec, run_id: &str, attempt: u32, restarts: u32, since: SystemTime) -> Self {
        JobFile {
            launcher: ProcessId::of(std::process::id()),
            run_id: run_id.to_owned(),
            program: spec.program.to_string_lossy().into_owned(),
            args: spec.args.iter().map(|arg| arg.to_string_lossy().into_owned()).collect(),
            waiting: None,
            world_size: 0,
            hosts: 0,
            attempt,
            restarts,
            max_restarts: spec.max_restarts,
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

    /// Returns this user's running launches with directories in `temp`, oldest first.
    ///
    /// # Errors
    /// When `temp` can't be read. Other files, and directories of dead launchers, are skipped.
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
        JobFile {
            launcher,
            run_id: run_id.into(),
            program: "p".into(),
            args: Vec::new(),
            waiting: None,
            world_size: 1,
            hosts: 1,
            attempt: 0,
            restarts: 0,
            max_restarts: 0,
            since: 0,
            ranks: Vec::new(),
        }
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
        assert_eq!(found.iter().map(|job| job.run_id.as_str()).collect::<Vec<_>>(), ["running"]);
        assert!(JobFile::running(Path::new("/no/such/directory")).is_err());
    }
}
