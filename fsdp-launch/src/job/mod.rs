//! What a launch leaves for others as long as it runs: a directory with the file that `fsdp-launch status` reads, and a
//! guard that cleans up should the launcher be killed.

pub(crate) mod file;
pub(crate) mod guard;
pub(crate) mod status;
pub(crate) mod temp_dir;
