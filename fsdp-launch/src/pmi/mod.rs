//! A server for PMI-1, the protocol between MPICH's `mpiexec` and its ranks: lines of text over a descriptor that each
//! rank inherits (`PMI_FD`). By PMI, ranks exchange their addresses in `MPI_Init`. MPI thus works without `mpiexec`,
//! and one launcher supervises all ranks. Ranks without MPI are not affected.
//!
//! `protocol` parses and formats the lines. `kvs` is the state machine of this host's ranks. `server` has the sockets
//! and threads. The launchers exchange entries and barriers between hosts over their own connections
//! ([`rendezvous`](crate::rendezvous)). The coordinator forwards entries without keeping them, and counts the hosts in
//! a barrier. Messages of a connection stay in order. Each launcher thus has all earlier entries when its ranks leave
//! the barrier.

mod kvs;
mod protocol;
mod server;

pub(crate) use kvs::{PmiEvent, PmiFailure, PmiFailureKind};
pub(crate) use server::Server;
