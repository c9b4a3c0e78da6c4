//! The file in which a launcher tells `fsdp-launch status` of its run: `job.json` in its temporary directory, replaced
//! whenever an attempt starts, or other hosts are waited for.

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
    job::temp_dir::PREFIX,
    rank::{
        environment::Job,
        worker::{Worker, pid_of},
    },
    report::process::ProcessInfo,
};

const NAME: &str = "job.json";
/// No more of a file is read: enough for all ranks that a host can have.
const MOST: u64 = 16 << 20;

/// A run as its launcher knows it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct JobFile {
    pub(crate) launcher: ProcessId,
    pub(crate) run_id: String,
    pub(crate) program: String,
    pub(crate) args: Vec<String>,
    /// What the launcher waits for before it starts an attempt: the two that follow are 0 and there are no ranks then.
    pub(crate) waiting: Option<String>,
    pub(crate) world_size: usize,
    pub(crate) hosts: usize,
    /// How often ranks were started before.
    pub(crate) attempt: u32,
    pub(crate) restarts: u32,
    pub(crate) max_restarts: u32,
    /// When the attempt, or the waiting, began: in seconds since 1970.
    pub(crate) since: u64,
    /// Those of this host.
    pub(crate) ranks: Vec<RankFile>,
}

/// A process, whoever has its pid later.
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

    /// The process, unless it has ended.
    pub(crate) fn find(self) -> Option<ProcessInfo> {
        ProcessInfo::started_at(self.pid, self.started)
    }
}

/// A rank's process and where to read how it is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RankFile {
    pub(crate) rank: usize,
    pub(crate) process: ProcessId,
    pub(crate) board: Option<String>,
}

impl JobFile {
    /// Of an attempt that has just started.
    pub(crate) fn of(job: &Job<'_>, workers: &[Worker]) -> Self {
        let (spec, place) = (job.spec, job.place);
        let rank = |worker: &Worker| RankFile {
            rank: worker.rank,
            process: ProcessId::of(pid_of(worker.pid)),
            board: worker.board.as_ref().map(fsdp_core::heartbeat::StatusPage::path),
        };
        JobFile {
            world_size: place.world_size,
            hosts: place.group_world_size,
            ranks: workers.iter().map(rank).collect(),
            ..Self::new(spec, &place.run_id, place.attempt, place.restarts, SystemTime::now())
        }
    }

    /// Without any ranks.
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

    /// Writes it into `dir`. A run that can't be shown goes on all the same.
    pub(crate) fn offer(&self, dir: &Path) {
        if let Err(error) = self.write(dir) {
            tracing::warn!("`fsdp-launch status` won't find this run: {error}");
        }
    }

    /// A reader sees the old file or the new one.
    fn write(&self, dir: &Path) -> io::Result<()> {
        let new = dir.join("job.json.new");
        fs::write(&new, serde_json::to_vec(self)?)?;
        fs::rename(new, dir.join(NAME))
    }

    /// The runs of this user whose launchers have their temporary directories in `temp` and are running, the oldest
    /// first.
    ///
    /// # Errors
    /// When `temp` can't be read. What else stands there, or was left by a launcher that is gone, is passed over.
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

/// The file in a launcher's directory, if that is what it is. Others may make directories of such names too.
fn read(dir: &Path) -> Option<JobFile> {
    let is_ours = |path: &Path| fs::symlink_metadata(path).ok().filter(|meta| meta.uid() == geteuid().as_raw());
    is_ours(dir).filter(fs::Metadata::is_dir)?;
    let path = dir.join(NAME);
    is_ours(&path).filter(fs::Metadata::is_file)?;
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MOST).read_to_end(&mut bytes).ok()?;
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
    fn what_is_stale_or_nonsense_is_passed_over() {
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
        fs::write(dir("fsdp-launch-c").join(NAME), "{\"launcher\": 3}").unwrap();
        fs::create_dir(dir("fsdp-launch-d").join(NAME)).unwrap();
        dir("fsdp-launch-logs-e");
        fs::write(temp.path().join("fsdp-launch-f"), "").unwrap();
        std::os::unix::fs::symlink(temp.path().join("fsdp-launch-a"), temp.path().join("fsdp-launch-g")).unwrap();
        let found = JobFile::running(temp.path()).unwrap();
        assert_eq!(found.iter().map(|job| job.run_id.as_str()).collect::<Vec<_>>(), ["running"]);
        assert!(JobFile::running(Path::new("/no/such/directory")).is_err());
    }
}
