//! The token: the secret that all agents of a run share.

use std::{
    fs::{self, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use fsdp_core::channel::{Key, MIN_SECRET_LEN, random_secret};

use crate::{Error, Result, rendezvous::server::key};

/// Maximum size of a token file that is read.
const MAX_TOKEN_FILE: u64 = 64 << 10;

/// Reads `--rdzv-token-file`, without surrounding white space.
pub(crate) fn read(path: &Path) -> Result<Key> {
    let failed = |expected: String| Error::Usage {
        flag: "--rdzv-token-file",
        value: path.display().to_string(),
        expected: format!("{expected}. {TOKEN_HELP}"),
    };
    let mut text = Vec::new();
    let file = fs::File::open(path).and_then(|file| Ok((file.metadata()?, file)));
    let (meta, file) = file.map_err(|error| failed(format!("it can't be read: {error}")))?;
    if !meta.is_file() {
        return Err(failed("it is not a regular file".into()));
    }
    file.take(MAX_TOKEN_FILE).read_to_end(&mut text).map_err(|error| failed(format!("it can't be read: {error}")))?;
    let token = text.trim_ascii();
    if token.len() < MIN_SECRET_LEN {
        return Err(failed(format!("it holds {} bytes, but a token needs at least {MIN_SECRET_LEN}", token.len())));
    }
    if meta.mode() & 0o004 != 0 {
        tracing::warn!("every user of this host can read the token in {path:?}: run chmod 600");
    }
    Ok(key(token))
}

/// Creates a token file for agents of this user on this host that meet at `port`. Dropping the file removes it.
pub(crate) fn create_shared(port: u16) -> io::Result<(Key, SharedTokenFile)> {
    let bytes = random_secret()?;
    let path = shared_path(port)?;
    let dir = path.parent().unwrap_or(Path::new("/"));
    // Launchers take turns, so that none removes another's new file as stale.
    let turn = fs::File::open(dir)?;
    turn.lock()?;
    remove_stale(dir);
    // Create under another name, so that no launcher reads a partial token.
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    file.write_all(&bytes)?;
    // The lock marks the file as in use while this process lives.
    file.as_file().try_lock()?;
    let file = file.persist(&path)?;
    Ok((key(&bytes), SharedTokenFile { path, _locked: file }))
}

/// Reads the file of [`create_shared`].
pub(crate) fn read_shared(port: u16) -> io::Result<Key> {
    let mut bytes = [0; 32];
    let path = shared_path(port)?;
    let mut file = OpenOptions::new().read(true).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32).open(path)?;
    file.read_exact(&mut bytes)?;
    Ok(key(&bytes))
}

/// Advice for a launch without a token.
pub(crate) const TOKEN_HELP: &str = "Create a token with \
    `(umask 077; head -c 32 /dev/urandom | base64 > token)`, and copy it to every host";

/// A token file of this process.
pub(crate) struct SharedTokenFile {
    path: PathBuf,
    _locked: fs::File,
}

impl Drop for SharedTokenFile {
    fn drop(&mut self) {
        fs::remove_file(&self.path).ok();
    }
}

/// Removes the files of killed launchers.
fn remove_stale(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let is_stale = fs::File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok());
        if is_stale {
            fs::remove_file(entry.path()).ok();
        }
    }
}

/// Returns the path of the token file, in a directory that only this user can access.
fn shared_path(port: u16) -> io::Result<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|dir| dir.is_dir());
    let dir = runtime.unwrap_or_else(std::env::temp_dir).join(format!("fsdp-launch-user-{user}"));
    match fs::DirBuilder::new().mode(0o700).create(&dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let meta = dir.symlink_metadata()?;
    if !meta.is_dir() || meta.uid() != user || meta.mode() & 0o077 != 0 {
        let text = format!("{} is not a directory that only this user can access: remove it", dir.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    Ok(dir.join(format!("rendezvous-{port}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trims_tokens_and_refuses_short_ones() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let written = |text: &str| {
            fs::write(file.path(), text).unwrap();
            read(file.path())
        };
        let plain = written("0123456789abcdef").unwrap();
        assert_eq!(plain, written(" 0123456789abcdef\r\n").unwrap());
        assert_ne!(plain, written("0123456789abcdeg").unwrap());
        for (text, part) in
            [("", "holds 0 bytes"), ("short\n", "holds 5 bytes"), ("               \n", "holds 0 bytes")]
        {
            let message = written(text).unwrap_err().to_string();
            assert!(message.contains(part) && message.contains("/dev/urandom"), "{message}");
        }
        for path in ["/", "/no/such/file", "/dev/zero"] {
            assert_eq!(read(Path::new(path)).map(|_| ()).unwrap_err().exit_code(), 2);
        }
    }

    #[test]
    fn a_shared_token_lives_as_long_as_its_file() {
        let (token, file) = create_shared(1).unwrap();
        assert_eq!(token, read_shared(1).unwrap());
        assert!(read_shared(2).is_err());
        // A new launcher removes a killed launcher's file, and keeps a live launcher's file.
        let stale = shared_path(3).unwrap();
        fs::write(&stale, "left").unwrap();
        let (_, other) = create_shared(4).unwrap();
        assert!(!stale.exists() && read_shared(1).is_ok());
        drop((file, other));
        assert!(read_shared(1).is_err());
    }
}
