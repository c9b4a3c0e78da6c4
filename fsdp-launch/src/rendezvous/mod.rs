//! The rendezvous: how the launchers of several hosts ("agents") work together, and how each gets its ranks.
//!
//! One launcher serves the [`coordinator`], which makes all decisions. The others connect to it at `--rdzv-endpoint`
//! ([`server`], [`agent`], [`token`]). For a launch on one host, the coordinator is in the same process and has no
//! port. The rest of the launcher sees only [`Rendezvous`] and its events.

mod agent;
mod coordinator;
mod message;
mod server;
mod token;

pub(crate) use agent::{EventSink, Rendezvous, RendezvousEvent};
pub(crate) use coordinator::RunConfig;
pub(crate) use message::{
    Assignment, AttemptResult, FromAgent, KeepAlive, KeyValue, NodeInfo, RunResult, ToAgent, free_port, machine,
};
pub(crate) use token::TOKEN_HELP;
