//! The backend over shared memory, for threads of a process ([`local`]) and processes of a host ([`shm`]).
//!
//! `segment` maps the memory and decides which rank may access what. `steps` moves data through it.
//! `peer_monitor` waits for peers and detects their failure. `shm_backend` is the backend. `local` and `shm` create
//! segments, `shm` by a `rendezvous` of processes. Threads run the same code as processes, so that they test it.
//!
//! Data moves through a few small slots for each rank. A mapping of whole buffers would take more memory, and its bytes
//! would leave the cache between the writing and the reading rank.

pub mod local;
mod peer_monitor;
mod rendezvous;
mod segment;
pub mod shm;
mod shm_backend;
mod steps;
