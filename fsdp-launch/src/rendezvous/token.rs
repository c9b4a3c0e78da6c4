//! The secret that agents of one launch share.

use std::{
    fs::{self, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use fsdp_core::channel::{Key, MIN_SECRET_LEN, random_secret};

use crate::{Error, Result, rendezvous::channel::key};

/// No more of a token file is read.
const LONGEST: u64 = 64 << 10;

/// Reads `--rdzv-token-file`; white space around the token does not count.
pub(crate) fn read(path: &Path) -> Result<Key> {
    let failed = |expected: String| Error::Usage {
        flag: "--rdzv-token-file",
        value: path.display().to_string(),
        expected: format!("{expected}. {HOW_TO_MAKE_ONE}"),
    };
    let mut text = Vec::new();
    let file = fs::File::open(path).and_then(|file| Ok((file.metadata()?, file)));
    let (meta, file) = file.map_err(|error| failed(format!("it can't be read: {error}")))?;
    if !meta.is_file() {
        return Err(failed("it is not a regular file".into()));
    }
    file.take(LONGEST).read_to_end(&mut text).map_err(|error| failed(format!("it can't be read: {error}")))?;
    let token = text.trim_ascii();
    if token.len() < MIN_SECRET_LEN {
        return Err(failed(format!("it holds {} bytes, a token has at least {MIN_SECRET_LEN}", token.len())));
    }
    if meta.mode() & 0o004 != 0 {
        tracing::warn!("everybody on this host can read the token in {path:?}: chmod 600 closes it");
    }
    Ok(key(token))
}

/// A new one for the agents of this user on this host that meet at `port`; it goes when the returned file does.
pub(crate) fn make_for(port: u16) -> io::Result<(Key, Shared)> {
    let bytes = random_secret()?;
    let path = shared_path(port)?;
    let dir = path.parent().unwrap_or(Path::new("/"));
    // One launcher at a time: what another is making is not stale, nor what it puts in the place of something
    // stale.
    let turn = fs::File::open(dir)?;
    turn.lock()?;
    remove_stale(dir);
    // Under another name first, so that nobody reads half a token.
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    file.write_all(&bytes)?;
    // For as long as this process lives.
    file.as_file().try_lock()?;
    let file = file.persist(&path)?;
    Ok((key(&bytes), Shared { path, _locked: file }))
}

/// What [`make_for`] made.
pub(crate) fn shared_at(port: u16) -> io::Result<Key> {
    let mut bytes = [0; 32];
    let path = shared_path(port)?;
    let mut file = OpenOptions::new().read(true).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32).open(path)?;
    file.read_exact(&mut bytes)?;
    Ok(key(&bytes))
}

/// The way out of a launch without a token.
pub(crate) const HOW_TO_MAKE_ONE: &str = "A token is a file that all hosts of the launch have and nobody else can \
read: \
    `(umask 077; head -c 32 /dev/urandom | base64 > token)` makes one, to be copied to every host";

/// The file of a token that was made.
pub(crate) struct Shared {
    path: PathBuf,
    _locked: fs::File,
}

impl Drop for Shared {
    fn drop(&mut self) {
        fs::remove_file(&self.path).ok();
    }
}

/// Removes what launchers that were killed have left.
fn remove_stale(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let is_stale = fs::File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok());
        if is_stale {
            fs::remove_file(entry.path()).ok();
        }
    }
}

/// A place that only this user can write to and read.
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
        let text = format!("{} is not a directory of this user's alone: remove it", dir.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    Ok(dir.join(format!("rendezvous-{port}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn white_space_does_not_count_and_short_tokens_are_refused() {
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
            let told = written(text).unwrap_err().to_string();
            assert!(told.contains(part) && told.contains("/dev/urandom"), "{told}");
        }
        for path in ["/", "/no/such/file", "/dev/zero"] {
            assert_eq!(read(Path::new(path)).map(|_| ()).unwrap_err().exit_code(), 2);
        }
    }

    #[test]
    fn a_token_of_this_host_is_found_by_its_port_until_it_goes() {
        let (token, file) = make_for(1).unwrap();
        assert_eq!(token, shared_at(1).unwrap());
        assert!(shared_at(2).is_err());
        // That of a launcher which was killed goes when the next one comes; that of one which lives stays.
        let stale = shared_path(3).unwrap();
        fs::write(&stale, "left").unwrap();
        let (_, other) = make_for(4).unwrap();
        assert!(!stale.exists() && shared_at(1).is_ok());
        drop((file, other));
        assert!(shared_at(1).is_err());
    }
}
