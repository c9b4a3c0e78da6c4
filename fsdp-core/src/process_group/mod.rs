//! Process groups: how ranks exchange buffers.
//!
//! A [`ProcessGroup`] checks, counts, fingerprints and queues collectives, keeps the first error and tells the launcher
//! where it is. A [`Backend`] moves the bytes. One works over memory that the ranks share, with two ways to meet:
//! [`local`] for threads of one process and [`shm`] for processes of one host. [`mpi`] is for ranks of several hosts. A
//! group may also move a device's memory, by a [`DeviceEngine`] beside its backend.
//!
//! From the bottom up: `membership`, `options` (what can be chosen), `parts` and `signature` (what collectives are of,
//! move and are about), `host` (what backends over host memory share), `call` and `mismatch` (what ranks compare),
//! `collective` and `failure` (what a backend gets to know and tells), `landing` (what it returns), `peer_monitor` (what it
//! sees beside collectives), `backend`, `fence` and `device_memory` (outputs that a device is still writing, and where
//! they are), `alone` (groups of one), `check` (arguments), `work` and `queue` (running), `group`, `typed` (small
//! values), `group_store`, `patience` and `roll` (waiting to meet). `on_device` moves a device's memory, over `nccl` or
//! through the host; `shared_memory` and `mpi` are the backends; `init` chooses one; `conformance` is what each of them
//! passes.

mod backend;
mod call;
mod collective;
#[cfg(feature = "cuda")]
mod device_memory;
mod group;
mod group_store;
mod host;
mod mismatch;
pub mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
mod on_device;
mod op;
mod options;
mod queue;
mod shared_memory;
mod signature;
mod single_rank;
mod waiting_ranks;
mod work;

pub use backend::{Backend, CollectiveOutput, Fence, Guarantees, PeerMonitor, PeerState};
pub use collective::{Collective, Failure, Traffic};
pub use group::ProcessGroup;
pub use group_store::GroupStore;
#[cfg(feature = "nccl")]
pub use nccl::Nccl;
pub use on_device::{DeviceEngine, device_backend};
#[cfg(feature = "cuda")]
pub use on_device::{HostStaging, ranks_sharing_devices};
pub use op::{ExchangePart, GatherPart, Op, ScatterPart};
pub use options::{Membership, Options, init};
pub use shared_memory::{local, shm};
pub use signature::{Signature, Subject};
pub use work::{Completion, Work};
