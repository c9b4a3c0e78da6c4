//! Encrypted connections between processes that share a secret: the launchers of one run, and the ranks of a job that
//! use a [store](crate::store).
//!
//! Every connection begins with a handshake of the Noise protocol (<https://noiseprotocol.org>), which needs the
//! secret. The messages that follow are encrypted and have a maximum length.

mod address;
mod listener;
mod session;

pub use address::{bind, connect, is_local, is_loopback};
pub use listener::{Accepted, Handler, Listener};
pub use session::{Channel, Key, MAX_MESSAGE_LEN, MIN_SECRET_LEN, Reader, Writer, random_secret};
