//! Models and data from the Hugging Face hub.
//!
//! [`Name`] parses `org/name@revision` and `org/dataset@revision:file`. With the feature `hub`, `fetch` downloads what
//! a run needs into the cache that all Hugging Face libraries share, and returns its paths. The crate `hf-hub` names
//! the cache's files. This module transfers them itself: hf-hub 0.5 resumes downloads, but has no timeouts and does not
//! check hashes, and hf-hub 1.0 does not resume downloads over plain HTTP.
//!
//! `client` sends requests and repeats them, `cache` stores one file, `plan` chooses the files, and `ranks` lets one
//! rank of each host download while the others wait.

#[cfg(feature = "hub")]
mod cache;
#[cfg(feature = "hub")]
mod client;
mod name;
#[cfg(feature = "hub")]
mod plan;
#[cfg(feature = "hub")]
mod progress;
#[cfg(feature = "hub")]
mod ranks;

#[cfg(feature = "hub")]
pub use client::Client;
pub use name::{Kind, Name};
#[cfg(feature = "hub")]
pub use plan::{Request, Wanted};
#[cfg(feature = "hub")]
pub use ranks::{Fetched, fetch};
