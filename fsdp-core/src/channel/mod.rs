//! Connections between processes of several hosts that share a secret: the launchers of one run, and the ranks of a job
//! that meet in a [store](crate::store).
//!
//! Every connection begins with a handshake of the Noise protocol (<https://noiseprotocol.org>) that only who has the
//! secret can make. What follows is encrypted, in messages of bounded size.
//!
//! From the bottom up: `key` (what is made of a secret), `address` (which addresses a name means), `stream` (reads that
//! end at a moment), `session` (handshake and messages), `listener` (who is let in).

mod address;
mod key;
mod listener;
mod session;
mod stream;

pub use address::{bind, dial, is_here, is_loopback};
pub use key::{Key, LEAST_SECRET, random};
pub use listener::{Guest, Host, Listener};
pub use session::{Channel, MOST_BYTES, Reader, Writer};
