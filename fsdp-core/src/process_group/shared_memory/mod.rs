//! The backend over memory that ranks share, be they threads ([`local`]) or processes of one host ([`shm`]).
//!
//! From the bottom up: `segment` (the mapping, of a `shape`, and who may touch what), `watch` (waiting, longer awake
//! where `cores` suffice), `peer_monitor` (seeing peers without waiting), `rounds` (running one collective as rounds over
//! the segment) with `seat`, a file for each collective (`sends` is what two of them share), `meet` (how ranks come to
//! share a segment), `engine` (the backend), and the two ways to meet: `local`, and `shm` by `rendezvous`. Threads
//! therefore test what processes run.

mod collectives;
mod engine;
pub mod local;
mod peer_monitor;
mod rendezvous;
mod segment;
pub mod shm;
