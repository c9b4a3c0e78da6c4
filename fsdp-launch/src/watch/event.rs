//! What wakes the launcher: signals, the end of the ranks' output, what ranks say over PMI,
//! and what other hosts' launchers say.

use crate::{pmi::Said, rendezvous::News};

/// Something the supervisor has to look at.
pub(crate) enum Event {
    /// Some child process ended.
    ChildEnded,
    /// The launcher received one of the signals that ask it to end.
    Interrupted(i32),
    /// One of the ranks' streams has been printed to its end.
    OutputEnded,
    /// What ranks of an attempt say over PMI.
    Pmi { attempt: u32, said: Said },
    /// Something of the other hosts.
    News(News),
}
