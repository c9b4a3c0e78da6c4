//! The backend over shared memory, for threads of a process ([`local`]) and processes of a host ([`shm`]).
//!
//! `segment` maps the memory and decides which rank may access what. `collectives` moves data through it in steps.
//! `peer_monitor` waits for peers and detects their failure. `engine` is the backend. `local` and `shm` create segments,
//! `shm` by a `rendezvous` of processes. Threads run the same code as processes, so that they test it.

mod collectives;
mod engine;
pub mod local;
mod peer_monitor;
mod rendezvous;
mod segment;
pub mod shm;
