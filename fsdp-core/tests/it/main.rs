//! Tests of meshes, placements and process groups, over threads and over processes.
#![allow(clippy::unwrap_used, missing_docs)]

#[cfg(feature = "tcp")]
mod channel;
mod collectives;
mod conformance;
mod dtensor;
mod failures;
mod heartbeat;
mod processes;
#[cfg(feature = "tcp")]
mod store;
#[cfg(feature = "tcp")]
mod tcp;
