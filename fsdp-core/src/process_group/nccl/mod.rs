//! NCCL: collectives between CUDA devices, with one process for each device.
//!
//! The issuing thread enqueues a collective on the group's communication stream. The stream first waits for the compute
//! stream: inputs are then ready, and memory in pools is free. Later computation waits for the collective only when its
//! [`Work`](crate::Work) is waited for.
//!
//! By default ranks do not compare what they issue, which would take a round trip through the host. Ranks that issue
//! different collectives hang in NCCL or mix up data. `FSDP_NCCL_CHECK=always` compares each collective over the host
//! group before it is enqueued, for tests and for programs that hang. The host group is used because its waits end: it
//! has deadlines, watches the peers, and names the difference. The group's thread compares and enqueues then, since an
//! issuing thread could wait for a peer that issues the collectives of two groups in another order.
//!
//! The watchdog compares what ranks hang in after the group's timeout. A hung rank does not answer messages, so the
//! watchdog reads the peers' announcement pages, if the host group can read them. It aborts the communicator if a
//! peer is gone, NCCL reports an error, nothing progresses for the timeout, or the device does not reach the first
//! collective for three timeouts. Blocked calls of the host then return, unless the device
//! itself hangs: then the process ends. After an abort, outputs are unspecified, and all pending and later collectives of
//! the group return the error.
//!
//! `communicator` wraps NCCL's communicator, `communicators` aborts them, `plan` lists the NCCL calls of a collective,
//! `registered_memory` has memory of NCCL for some of them, `nccl_engine` enqueues them, and `watchdog` follows pending
//! ones.

mod communicator;
mod communicators;
mod nccl_engine;
mod plan;
mod registered_memory;
mod watchdog;

pub use nccl_engine::Nccl;
