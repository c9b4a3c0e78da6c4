//! What an agent learns, and who is told of it.

use std::sync::Arc;

use crate::rendezvous::message::ToAgent;

/// What an agent learns.
pub(crate) enum News {
    /// From the coordinator.
    Said(ToAgent),
    /// The coordinator is gone.
    Gone(String),
    /// The coordinator was not reached yet; why the last try failed.
    NotYet(String),
    /// The coordinator was not reached.
    Unreachable(String),
}

/// Is told what an agent learns; says whether anybody listens still.
pub(crate) type Listener = Arc<dyn Fn(News) -> bool + Send + Sync>;
