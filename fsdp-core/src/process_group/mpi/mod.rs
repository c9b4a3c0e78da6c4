//! The backend over MPI, for ranks on several hosts.
//!
//! Every build has it: the library is opened at run time, whatever its binary interface. From the bottom up: `abi` (how
//! libraries spell constants), `functions` and `session` (calls of one library), `find` (which one), `held` (memory
//! that messages use), `line` (what a group and the thread that calls MPI share), `thread` and `driver` (that thread
//! and its handle), `wire` (sending and receiving with deadlines), `meet` (making groups), `phase` and `exchange` (what
//! ranks send each other in a collective, and running it), `hosts` and `sums` (what ranks that share a host do for each
//! other: they hand on what comes, and add up what goes), `engine` (the backend), `host_id` and `connect` (the world).
//!
//! All of it is messages between two ranks. MPI's own collectives can't be ended when a rank does not come, nor can
//! `MPI_Comm_split`, and don't say who is missing; and they add up in an order and a precision of their own. A group is
//! therefore no communicator but a tag, which each rank chooses for what is sent to it, and its ranks.

mod abi;
mod connect;
mod driver;
mod engine;
mod exchange;
mod find;
mod functions;
mod held;
mod host_id;
mod hosts;
mod line;
mod meet;
mod phase;
mod session;
mod sums;
mod thread;
mod wire;

pub use connect::connect;
