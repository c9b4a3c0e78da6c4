//! Memory that processes share: an anonymous file of a fixed length, and its mapping.

use std::{io, os::fd::OwnedFd};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};

/// Seals of a file whose length cannot change.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Creates an anonymous file of `len` zeros, which no process can resize.
pub(crate) fn create(name: &str, len: usize) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, len as u64)?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

/// Maps a file of [`create`], possibly of another process. Fails if it is not sealed or has another length.
pub(crate) fn map(file: &OwnedFd, len: usize) -> io::Result<MmapRaw> {
    // Without the seals, another process could truncate the file, and an access would kill this process.
    let is_sealed = rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SEALS));
    if !is_sealed || rustix::fs::fstat(file)?.st_size as u64 != len as u64 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("it is not a sealed file of {len} bytes")));
    }
    MmapOptions::new().len(len).map_raw(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_sealed_file_of_the_right_length_is_mapped() {
        let file = create("test", 4096).unwrap();
        assert!(rustix::fs::ftruncate(&file, 0).is_err() && map(&file, 4096).is_ok() && map(&file, 8192).is_err());
        let unsealed = rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&unsealed, 4096).unwrap();
        assert!(map(&unsealed, 4096).is_err());
    }
}
