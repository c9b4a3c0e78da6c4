//! The wait for the coordinator: before the first attempt, and between attempts.

use std::{
    collections::VecDeque,
    fmt,
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use crate::{
    Endpoint, Failure, LaunchSpec,
    rendezvous::{Assignment, RendezvousEvent, RunResult, ToAgent},
    watch::Event,
};

/// Time until the first warning. The interval then doubles.
const FIRST_WARNING: Duration = Duration::from_secs(10);

/// The next step of a launch.
pub(crate) enum Next {
    Start(Assignment),
    End(RunResult),
    Failed(Failure),
    Gone(String),
    Interrupted(i32),
}

/// Why an attempt stopped.
pub(crate) struct Reason {
    /// Text for the user.
    pub(crate) text: String,
    /// Whether it costs a restart.
    pub(crate) costs: bool,
}

/// Waits for the coordinator's next message, after the `pending` ones. Stores the reason of a stop in `why`, unless it
/// is known. Passes the state of the wait to `show` for `fsdp-launch status`, and logs it if the wait is long.
pub(crate) fn next(
    spec: &LaunchSpec,
    pending: &mut VecDeque<RendezvousEvent>,
    why: &mut Option<Reason>,
    events: &Receiver<Event>,
    show: impl Fn(&str),
) -> Next {
    let mut interval = FIRST_WARNING;
    let mut warn_at = Instant::now() + interval;
    let endpoint = spec.rendezvous.as_ref().map(|rendezvous| &rendezvous.endpoint);
    let mut waiting = endpoint.map(|at| Waiting { at, target: Target::Coordinator(None) });
    let change = |waiting: &mut Option<Waiting<'_>>, target| {
        if let Some(waiting) = waiting {
            waiting.target = target;
            show(&waiting.to_string());
        }
    };
    loop {
        let event = match pending.pop_front() {
            Some(event) => Ok(Event::Rendezvous(event)),
            None => events.recv_timeout(warn_at.saturating_duration_since(Instant::now())),
        };
        let event = match event {
            Ok(Event::Rendezvous(event)) => event,
            Ok(Event::Interrupted(signal)) => return Next::Interrupted(signal),
            Ok(Event::ChildEnded | Event::OutputEnded | Event::Pmi { .. }) => continue,
            Err(RecvTimeoutError::Timeout) => {
                if let Some(waiting) = &waiting {
                    tracing::warn!("{waiting}");
                }
                interval = interval.saturating_mul(2);
                warn_at += interval;
                continue;
            }
            // This process holds a sender itself.
            Err(RecvTimeoutError::Disconnected) => {
                return Next::Failed(Failure::Rendezvous { why: "the launcher's events ended".into() });
            }
        };
        let message = match event {
            RendezvousEvent::Message(message) => message,
            RendezvousEvent::Failed(why) => return Next::Failed(Failure::Rendezvous { why }),
            RendezvousEvent::Lost(how) => return Next::Gone(how),
            RendezvousEvent::Retrying(error) => {
                change(&mut waiting, Target::Coordinator(Some(error)));
                continue;
            }
        };
        match message {
            ToAgent::Start(assignment) => return Next::Start(assignment),
            ToAgent::End(run_result) => return Next::End(*run_result),
            ToAgent::Refused { why } => {
                let at = endpoint.map(ToString::to_string).unwrap_or_default();
                let why = format!("the launcher at {at} refused this one: {why}");
                return Next::Failed(Failure::Rendezvous { why });
            }
            ToAgent::Waiting { there, nnodes } => change(&mut waiting, Target::Nodes(there, nnodes)),
            // The coordinator stops a host whose ranks had succeeded.
            ToAgent::Stop { why: text, costs, .. } => {
                why.get_or_insert(Reason { text, costs });
            }
            ToAgent::Ping | ToAgent::RankDone { .. } | ToAgent::PmiPut { .. } | ToAgent::PmiBarrierDone { .. } => {}
        }
    }
}

/// Endpoint and target of the wait.
struct Waiting<'a> {
    at: &'a Endpoint,
    target: Target,
}

enum Target {
    /// The coordinator, and the error of the last attempt to connect.
    Coordinator(Option<String>),
    /// Other hosts: those that have joined, and the required number.
    Nodes(String, (u32, u32)),
}

impl fmt::Display for Waiting<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = self.at;
        match &self.target {
            Target::Coordinator(error) => {
                write!(f, "waiting for the launcher at {at}, which serves the rendezvous")?;
                error.as_ref().map_or(Ok(()), |error| write!(f, ": {error}"))
            }
            Target::Nodes(hosts, (min, max)) => {
                let wanted = if min == max { min.to_string() } else { format!("{min} to {max}") };
                let only = if at.is_loopback() { " (an address that only launchers of this host reach)" } else { "" };
                write!(f, "waiting for other hosts at {at}{only}: need {wanted}, joined: {hosts}")
            }
        }
    }
}
