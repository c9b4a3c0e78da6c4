//! Optimizers over shards, with their state in the open.

mod adamw;

pub use adamw::{AdamW, AdamWConfig, AdamWState};
