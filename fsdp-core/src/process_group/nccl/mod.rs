//! NCCL: collectives between CUDA devices, one process a device.
//!
//! A collective is enqueued on the group's communication stream by the thread that issues it. The stream first waits
//! for what the device computes so far: inputs are ready then, and what was put back into pools is free. What is
//! computed next waits for the collective's end only when somebody waits for its [`Work`](crate::Work).
//!
//! Nothing that ranks issue is compared before it runs, for that would take a round trip through the host each time.
//! Ranks that issue different collectives hang in NCCL or mix up their data. `FSDP_NCCL_CHECK=always` compares every
//! one over the host's group, whose thread then enqueues it: for tests and programs that hang. Without it the watchdog
//! compares what the ranks hang in when the group's timeout is over. It ends what can't end by itself: when a peer is
//! gone, when NCCL says so, when there is no progress for as long as the timeout, and when the device does not come to
//! a collective that is first in line for three timeouts. Everything the host may be blocked in (a copy to the host, a
//! synchronisation) then goes on, unless the device itself is stuck; the collective's outputs have unspecified values,
//! and every later collective, and whoever waits for one that was in flight, gets the error.
//!
//! From the bottom up: `failure` (errors), `meet` (how ranks find each other), `config`, `communicator` (a communicator
//! from its beginning to its end), `transfer` (what NCCL is asked for) and `plan` (in which ways for which collective),
//! `flight` (collectives on their way), `diagnosis` (what became of one that does not end), `watchdog`, `engine`.

mod communicator;
mod engine;
mod watchdog;

pub use engine::Nccl;
