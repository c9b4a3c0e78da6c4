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
