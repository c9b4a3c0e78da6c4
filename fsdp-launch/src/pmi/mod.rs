//! A server for PMI-1, the protocol between MPICH's `mpiexec` and its ranks: lines of text over a descriptor that each
//! rank inherits (`PMI_FD`). By PMI, ranks exchange their addresses in `MPI_Init`. Ranks without MPI are not affected.
//!
//! `protocol` parses and formats the lines. `kvs` is the state machine of this host's ranks. `server` has the sockets
//! and threads. The launchers exchange entries and barriers between hosts over their own connections
//! ([`rendezvous`](crate::rendezvous)).

mod kvs;
mod protocol;
mod server;

pub(crate) use kvs::{PmiEvent, PmiFailure, PmiFailureKind};
pub(crate) use server::Server;
