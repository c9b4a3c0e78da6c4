//! A few bytes by name that all ranks see: where something listens, who is on which host, who was first. Ranks exchange
//! them before any engine stands.
//!
//! A [`Store`] is [`MemoryStore`] for threads of a process, [`TcpStore`] for processes of any hosts, which rank 0 holds
//! at `MASTER_ADDR:MASTER_PORT`, and [`GroupStore`](crate::process_group::GroupStore) for the ranks of a group that
//! stands, whatever its backend.
//!
//! From the bottom up: `limits`, `interface` (the trait), `message` (what clients and the holder say), `asked` (a
//! request and its errors), `memory`, `secret` (what lets ranks in), `client` and `server` (the two sides of a
//! connection), `tcp`.

mod asked;
mod client;
mod interface;
mod limits;
mod memory;
mod message;
mod secret;
mod server;
mod tcp;

pub(crate) use asked::Asked;
pub use interface::Store;
pub use limits::{MOST_KEY, MOST_TOTAL, MOST_VALUE};
pub use memory::MemoryStore;
pub(crate) use message::{Answer, Request};
pub use secret::Secret;
pub use tcp::TcpStore;
