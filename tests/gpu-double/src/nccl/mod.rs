//! NCCL, with processes that meet through shared memory.
//!
//! Collectives of a communicator run in the order of its streams, all calls of a group as one operation. The bytes go
//! through process groups of fsdp-core's: one for collectives, and one for each direction between two ranks that send.
//! What differs from the kind library that a program may hope for:
//! - A communicator that does not block says `ncclInProgress` for a while, also after a group's end: its calls are on
//!   their streams only when it says `ncclSuccess`.
//! - Sums are made in the buffer's dtype, around a ring that begins anywhere: the seed and what is called say where, so
//!   that the same calls have the same bits.
//! - Ranks that call different things wait for each other until somebody aborts, and a line on stderr says what
//!   differs.
//! - What is aborted ends without having written.
//! - A communicator that is used after its end is a fault.
//!
//! From the bottom up: `status`, `element` (what is in buffers), `transfer` (one call), `exchange` (a group of calls as
//! bytes that ranks exchange), `ranks` (how they meet), `communicator`, `group` (calls between start and end), and
//! `interface`, the functions themselves.

mod communicator;
mod element;
mod exchange;
mod group;
mod interface;
mod ranks;
mod status;
mod transfer;

#[cfg(test)]
mod tests;
