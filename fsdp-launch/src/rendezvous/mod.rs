//! How the launchers of several hosts ("agents", of which each starts the ranks of its host) work as one.
//!
//! One of them holds the [`coordinator`], which makes all decisions; the others connect to it at `--rdzv-endpoint`
//! ([`server`], [`channel`], [`token`]). A launch on one host has a coordinator in the same process and no port. To the
//! launcher all of it is a [`membership`].

mod agent;
mod channel;
mod coordinator;
mod host;
mod hub;
mod keep_alive;
mod membership;
mod message;
mod news;
mod secret;
mod sender;
mod server;
mod token;

pub(crate) use coordinator::Rules;
pub(crate) use host::{free_port, machine};
pub(crate) use keep_alive::KeepAlive;
pub(crate) use membership::Membership;
pub(crate) use message::{Ended, Entry, FromAgent, Member, Place, ToAgent, Verdict};
pub(crate) use news::{Listener, News};
pub(crate) use token::HOW_TO_MAKE_ONE;
