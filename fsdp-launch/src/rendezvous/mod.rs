mod agent;
mod coordinator;
mod message;
mod server;
mod token;

pub(crate) use agent::{Listener, Membership, News};
pub(crate) use coordinator::Rules;
pub(crate) use message::{Ended, Entry, FromAgent, KeepAlive, Member, Place, ToAgent, Verdict, free_port, machine};
pub(crate) use token::HOW_TO_MAKE_ONE;
