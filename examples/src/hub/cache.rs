//! Files in the cache of the Hugging Face libraries.
//!
//! A repository's folder holds `blobs/ETAG`, `snapshots/COMMIT/FILE` (a link to the blob) and `refs/REVISION` (a
//! commit). A download grows in `blobs/ETAG.incomplete` under a lock. It gets its name once its size and its hash are
//! right, so a file in a snapshot is complete. `huggingface_hub` uses the same names and locks. `file-lists` is ours.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use fsdp_core::file_limit;
use hf_hub::{Repo, RepoType};
use sha2::{Digest, Sha256};
use ureq::http::StatusCode;

use super::client::{Client, Failure, Item, header};
use super::name::{Kind, Name, is_commit};
use super::progress::Activity;

/// Bytes that are read at a time.
const BLOCK: usize = 256 << 10;
/// Pause between two attempts to lock a file.
const LOCK_PAUSE: Duration = Duration::from_millis(200);

/// The hub's description of a file.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) file: String,
    pub(super) commit: String,
    pub(super) size: u64,
    etag: String,
    /// Hash of a file in the hub's large storage, which all weights are. Small files have none.
    sha256: Option<String>,
}

impl Client {
    /// Returns the directory of a repository in the cache.
    fn folder(&self, name: &Name) -> PathBuf {
        self.cache.path().join(repo(name).folder_name())
    }

    /// Returns the directory of a commit's files.
    pub(super) fn snapshot(&self, name: &Name, commit: &str) -> PathBuf {
        self.cache.repo(repo(name)).pointer_path(commit)
    }

    /// Returns the commit that the cache has for a revision.
    pub(super) fn cached_commit(&self, name: &Name) -> Option<String> {
        if name.is_commit() {
            return Some(name.revision.clone());
        }
        let commit = fs::read_to_string(self.folder(name).join("refs").join(&name.revision)).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// Records the commit of a branch or tag, for later runs without a network.
    pub(super) fn record_commit(&self, name: &Name, commit: &str) -> Result<()> {
        if name.is_commit() {
            return Ok(());
        }
        let recorded = self.cache.repo(repo(name)).create_ref(commit);
        recorded.with_context(|| format!("can't write refs/{} in {}", name.revision, self.folder(name).display()))
    }

    /// Returns the list of a commit's files, if the cache has it.
    pub(super) fn cached_list(&self, name: &Name, commit: &str) -> Option<BTreeSet<String>> {
        serde_json::from_slice(&fs::read(self.list_path(name, commit)).ok()?).ok()
    }

    /// Records the list of a commit's files. Without it, a run without a network can't know whether the cache has all
    /// files of a pattern.
    pub(super) fn record_list(&self, name: &Name, commit: &str, files: &BTreeSet<String>) -> Result<()> {
        let path = self.list_path(name, commit);
        let write = || -> Result<()> {
            let dir = path.parent().unwrap_or(&path);
            fs::create_dir_all(dir)?;
            let mut file = tempfile::Builder::new().permissions(Permissions::from_mode(0o666)).tempfile_in(dir)?;
            file.write_all(&serde_json::to_vec(files)?)?;
            file.persist(&path)?;
            Ok(())
        };
        write().with_context(|| {
            format!("can't write {}: set HF_HOME to a directory that you can write to", path.display())
        })
    }

    /// Returns the path of the list of a commit's files. Other libraries do not read it.
    fn list_path(&self, name: &Name, commit: &str) -> PathBuf {
        self.folder(name).join("file-lists").join(format!("{commit}.json"))
    }

    /// Asks for the size, the hash and the commit of a file.
    pub(super) fn describe(&self, name: &Name, revision: &str, file: &str, activity: &Activity) -> Result<Entry> {
        let item = Item { name, file: Some(file) };
        let url = self.file_url(name, revision, file);
        let answer = self.retrying(activity, |_| self.head(&url, &item))?;
        activity.tick();
        let first = |names: &[&str]| names.iter().find_map(|name| header(answer.headers(), name));
        let missing = |what: &str| anyhow!("{} does not tell the {what} of {item}: is it a hub?", self.host());
        let commit = first(&["x-repo-commit"]).filter(|commit| is_commit(commit));
        let commit = commit.ok_or_else(|| missing("commit (X-Repo-Commit)"))?;
        let etag = first(&["x-linked-etag", "etag"]).map(|etag| etag.trim_start_matches("W/").trim_matches('"'));
        let is_name = |etag: &&str| {
            (1..=128).contains(&etag.len()) && etag.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        };
        let etag = etag.filter(is_name).ok_or_else(|| missing("hash (ETag)"))?;
        let size = first(&["x-linked-size", "content-length"]).and_then(|size| size.parse().ok());
        let size = size.ok_or_else(|| missing("size (Content-Length)"))?;
        let is_sha256 = etag.len() == 64 && is_commit(etag);
        Ok(Entry {
            file: file.into(),
            commit: commit.into(),
            size,
            etag: etag.into(),
            sha256: is_sha256.then(|| etag.into()),
        })
    }

    /// Downloads a file into the cache, from where an interrupted download stopped.
    pub(super) fn download(&self, name: &Name, entry: &Entry, activity: &Activity) -> Result<()> {
        let folder = self.folder(name);
        let blob = folder.join("blobs").join(&entry.etag);
        let partial = folder.join("blobs").join(format!("{}.incomplete", entry.etag));
        let locks = self.cache.path().join(".locks").join(repo(name).folder_name());
        for dir in [&folder.join("blobs"), &locks] {
            fs::create_dir_all(dir).with_context(|| {
                format!("can't create {}: set HF_HOME to a directory that you can write to", dir.display())
            })?;
        }
        let _lock = lock(&locks.join(format!("{}.lock", entry.etag)), &partial, activity)?;
        if fs::metadata(&blob).is_ok_and(|status| status.len() == entry.size) {
            activity.add(entry.size);
            activity.tick();
        } else {
            self.transfer(name, entry, &partial, activity)?;
            fs::rename(&partial, &blob).with_context(|| format!("can't rename {}", partial.display()))?;
        }
        let pointer = self.snapshot(name, &entry.commit).join(&entry.file);
        link(&pointer, &blob, &entry.file).with_context(|| format!("can't create {}", pointer.display()))
    }

    /// Completes `partial`, and checks its size and its hash.
    fn transfer(&self, name: &Name, entry: &Entry, partial: &Path, activity: &Activity) -> Result<()> {
        let item = Item { name, file: Some(&entry.file) };
        let cant_write = || format!("can't write {}: make room there, or set HF_HOME", partial.display());
        let url = self.file_url(name, &entry.commit, &entry.file);
        let mut download = Partial::open(partial, entry.size, activity).with_context(cant_write)?;
        loop {
            let was_resumed = download.length > 0;
            self.retrying(activity, |has_received| {
                if download.length == entry.size {
                    return Ok(());
                }
                let answer = self.get(&url, download.length, &item)?;
                if answer.status() != StatusCode::PARTIAL_CONTENT {
                    // The server sends the whole file, whatever was asked for.
                    download.restart().with_context(cant_write)?;
                } else if range_start(header(answer.headers(), "content-range")) != Some(download.length) {
                    return Err(anyhow!("{} sends another part of {item} than it was asked for", self.host()).into());
                }
                let mut body = answer.into_body().into_reader();
                let mut block = vec![0; BLOCK];
                loop {
                    let cut = |error: String, at: u64| {
                        let host = self.host();
                        let words = format!("{host} cut the connection after {at} of {} bytes of {item}", entry.size);
                        Failure::Transient(anyhow!("{words}{error}"), None)
                    };
                    let count = body.read(&mut block).map_err(|error| cut(format!(": {error}"), download.length))?;
                    if count == 0 && download.length < entry.size {
                        return Err(cut(String::new(), download.length));
                    }
                    if count == 0 {
                        return Ok(());
                    }
                    if download.length + count as u64 > entry.size {
                        let host = self.host();
                        let _ = download.restart();
                        return Err(anyhow!("{host} sends more than the {} bytes of {item}", entry.size).into());
                    }
                    *has_received |= download.append(&block[..count]).with_context(cant_write)?;
                }
            })?;
            let found = download.sha256();
            let Some(wanted) = entry.sha256.as_ref().filter(|wanted| **wanted != found) else { break };
            download.restart().with_context(cant_write)?;
            download.furthest = 0;
            if !was_resumed {
                bail!(
                    "{} sent {item} with SHA-256 {found}, expected {wanted}: the file was removed. Start again; if it \
                     happens again, check the proxy and HF_ENDPOINT",
                    self.host()
                );
            }
        }
        download.file.sync_all().with_context(cant_write)
    }
}

fn repo(name: &Name) -> Repo {
    let kind = match name.kind {
        Kind::Model => RepoType::Model,
        Kind::Dataset => RepoType::Dataset,
    };
    Repo::with_revision(name.repo.clone(), kind, name.revision.clone())
}

/// Incomplete file and the hash of its bytes.
struct Partial<'a> {
    file: File,
    length: u64,
    /// Largest length so far. A server that sends the same bytes again makes no progress.
    furthest: u64,
    digest: Sha256,
    activity: &'a Activity,
}

impl<'a> Partial<'a> {
    /// Opens or creates the file, and hashes what an earlier download left.
    fn open(path: &Path, size: u64, activity: &'a Activity) -> std::io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let mut partial = Partial { file, length: 0, furthest: 0, digest: Sha256::new(), activity };
        if partial.file.metadata()?.len() > size {
            partial.file.set_len(0)?;
        }
        let mut block = vec![0; BLOCK];
        loop {
            let count = partial.file.read(&mut block)?;
            if count == 0 {
                return Ok(partial);
            }
            partial.count(&block[..count]);
        }
    }

    /// Appends bytes. Returns whether the file is longer than ever before.
    fn append(&mut self, bytes: &[u8]) -> std::io::Result<bool> {
        self.file.write_all(bytes).map_err(file_limit::explained)?;
        Ok(self.count(bytes))
    }

    fn count(&mut self, bytes: &[u8]) -> bool {
        self.digest.update(bytes);
        self.length += bytes.len() as u64;
        self.activity.add(bytes.len() as u64);
        let is_progress = self.length > self.furthest;
        if is_progress {
            self.furthest = self.length;
            self.activity.tick();
        }
        is_progress
    }

    /// Empties the file.
    fn restart(&mut self) -> std::io::Result<()> {
        use std::io::Seek;
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.activity.subtract(self.length);
        (self.length, self.digest) = (0, Sha256::new());
        Ok(())
    }

    fn sha256(&self) -> String {
        self.digest.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Returns the first byte of `bytes FIRST-LAST/SIZE`.
fn range_start(content_range: Option<&str>) -> Option<u64> {
    content_range?.strip_prefix("bytes ")?.split_once('-')?.0.parse().ok()
}

/// Locks a file among all processes that share the cache. Another process may download the file meanwhile; its bytes
/// count as progress. The caller's deadline ends the wait.
fn lock(path: &Path, partial: &Path, activity: &Activity) -> Result<File> {
    let file = File::create(path).with_context(|| format!("can't create {}", path.display()))?;
    let mut seen = 0;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => {
                let length = fs::metadata(partial).map_or(0, |status| status.len());
                if length > seen {
                    seen = length;
                    activity.tick();
                }
                activity.note(format!("another process holds {}", path.display()));
                thread::sleep(LOCK_PAUSE);
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| {
                    format!("can't lock {}: set HF_HOME to a file system that has locks", path.display())
                });
            }
        }
    }
}

/// Makes `pointer` a relative link to the blob, in one step.
fn link(pointer: &Path, blob: &Path, file: &str) -> std::io::Result<()> {
    if pointer.exists() {
        return Ok(());
    }
    if let Some(dir) = pointer.parent() {
        fs::create_dir_all(dir)?;
    }
    // From the file's directory over `snapshots/COMMIT` to the repository's folder.
    let up = "../".repeat(2 + file.matches('/').count());
    let target = Path::new(&up).join("blobs").join(blob.file_name().unwrap_or_default());
    let mut new = pointer.as_os_str().to_owned();
    new.push(format!(".{}", std::process::id()));
    let _ = fs::remove_file(&new);
    symlink(target, &new)?;
    fs::rename(&new, pointer)
}
