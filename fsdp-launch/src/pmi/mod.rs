//! MPICH's simple process-management protocol, PMI-1, which `mpiexec` speaks with the ranks that it starts: lines of
//! text over a descriptor that a rank inherits (`PMI_FD`). By it ranks tell each other how they are reached, before MPI
//! stands. A rank that never speaks it does not notice.
//!
//! From the bottom up: `lines` (bytes as lines), `command` (lines as commands), `space` (the ranks of this host, as a
//! state machine), `server` (sockets and threads). What the ranks of several hosts have to know of each other goes
//! through the launchers' own connections ([`rendezvous`](crate::rendezvous)).

mod kvs;
mod protocol;
mod server;

pub(crate) use kvs::{PmiEvent, PmiFailure, PmiFailureKind};
pub(crate) use server::Server;
