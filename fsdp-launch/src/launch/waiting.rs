//! The wait for the coordinator's word: before the first attempt, and between attempts.

use std::{
    collections::VecDeque,
    fmt,
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use crate::{
    Endpoint, Failure, LaunchSpec,
    rendezvous::{News, Place, ToAgent, Verdict},
    watch::Event,
};

/// How long hosts are waited for before the user is told, and between one time and the next.
const PATIENCE: Duration = Duration::from_secs(10);

/// What comes after an attempt, or first.
pub(crate) enum Next {
    Start(Place),
    End(Verdict),
    Failed(Failure),
    Gone(String),
    Interrupted(i32),
}

/// What stopped an attempt.
pub(crate) struct Reason {
    /// As it is told to the user.
    pub(crate) text: String,
    /// It costs a restart.
    pub(crate) costs: bool,
}

/// Waits for the coordinator's word; `pending` was heard before. What stopped the attempt, if it was not known, is put
/// into `why`. What is waited for is shown to `fsdp-launch status` by `show`, and told to the user when it takes long.
pub(crate) fn next(
    spec: &LaunchSpec,
    pending: &mut VecDeque<News>,
    why: &mut Option<Reason>,
    events: &Receiver<Event>,
    show: impl Fn(&str),
) -> Next {
    let mut patience = PATIENCE;
    let mut tell_at = Instant::now() + patience;
    let endpoint = spec.rendezvous.as_ref().map(|meeting| &meeting.endpoint);
    let mut waiting = endpoint.map(|at| Waiting { at, what: What::Rendezvous(None) });
    let change = |waiting: &mut Option<Waiting<'_>>, what| {
        if let Some(waiting) = waiting {
            waiting.what = what;
            show(&waiting.to_string());
        }
    };
    loop {
        let event = match pending.pop_front() {
            Some(news) => Ok(Event::News(news)),
            None => events.recv_timeout(tell_at.saturating_duration_since(Instant::now())),
        };
        match event {
            Ok(Event::News(News::Said(ToAgent::Start(place)))) => return Next::Start(place),
            Ok(Event::News(News::Said(ToAgent::End(verdict)))) => return Next::End(*verdict),
            Ok(Event::News(News::Said(ToAgent::Refused { why }))) => {
                let at = endpoint.map(ToString::to_string).unwrap_or_default();
                return Next::Failed(Failure::Meeting { why: format!("the launcher at {at} refused this one: {why}") });
            }
            Ok(Event::News(News::Unreachable(why))) => return Next::Failed(Failure::Meeting { why }),
            Ok(Event::News(News::Gone(how))) => return Next::Gone(how),
            Ok(Event::News(News::Said(ToAgent::Waiting { there, nnodes }))) => {
                change(&mut waiting, What::Hosts(there, nnodes));
            }
            Ok(Event::News(News::NotYet(error))) => change(&mut waiting, What::Rendezvous(Some(error))),
            // The ranks of this host had succeeded.
            Ok(Event::News(News::Said(ToAgent::Stop { why: text, costs, .. }))) => {
                why.get_or_insert(Reason { text, costs });
            }
            Ok(Event::Interrupted(signal)) => return Next::Interrupted(signal),
            Ok(Event::News(News::Said(ToAgent::Ping | ToAgent::RankDone { .. })))
            | Ok(Event::News(News::Said(ToAgent::PmiPut { .. } | ToAgent::PmiGoOn { .. })))
            | Ok(Event::ChildEnded | Event::OutputEnded | Event::Pmi { .. }) => {}
            Err(RecvTimeoutError::Timeout) => {
                if let Some(waiting) = &waiting {
                    tracing::warn!("{waiting}");
                }
                patience = patience.saturating_mul(2);
                tell_at += patience;
            }
            // We hold a sender ourselves.
            Err(RecvTimeoutError::Disconnected) => {
                return Next::Failed(Failure::Meeting { why: "nothing more can be heard".into() });
            }
        }
    }
}

/// What is waited for, and the endpoint where.
struct Waiting<'a> {
    at: &'a Endpoint,
    what: What,
}

enum What {
    /// The coordinator; why it was not reached.
    Rendezvous(Option<String>),
    /// Other hosts; who was there, and how many are wanted.
    Hosts(String, (u32, u32)),
}

impl fmt::Display for Waiting<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = self.at;
        match &self.what {
            What::Rendezvous(error) => {
                write!(f, "waiting for the launcher at {at}, which holds the rendezvous")?;
                error.as_ref().map_or(Ok(()), |error| write!(f, ": {error}"))
            }
            What::Hosts(hosts, (min, max)) => {
                let wanted = if min == max { min.to_string() } else { format!("{min} to {max}") };
                let only = if at.is_loopback() { " (an address that only launchers of this host reach)" } else { "" };
                write!(f, "waiting for other hosts at {at}{only}: {wanted} are wanted, there were {hosts}")
            }
        }
    }
}
