//! Traces written by `train --trace`.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

/// An event in one thread of one rank.
#[derive(Clone, Debug)]
pub struct Event {
    /// The rank.
    pub rank: u64,
    /// The thread's name.
    pub thread: String,
    /// `B` for a begin, `E` for an end, `i` for an instant.
    pub phase: String,
    /// The event's name.
    pub name: String,
    /// For a collective: the group, and the bytes of all ranks' parts.
    pub moved: Option<(String, u64)>,
}

impl Event {
    /// Whether this is the begin, the end or the instant (`B`, `E`, `i`) of `name`.
    pub fn is(&self, phase: &str, name: &str) -> bool {
        self.phase == phase && self.name == name
    }
}

/// A trace.
pub struct Trace(Vec<Value>);

impl Trace {
    /// Reads a trace.
    ///
    /// # Panics
    /// If the file is not a JSON array of objects.
    pub fn read(file: &Path) -> Self {
        match serde_json::from_str(&crate::read_text(file)) {
            Ok(events) => Trace(events),
            Err(error) => panic!("{}: {error}", file.display()),
        }
    }

    /// The names of processes (`process_name`, by `pid`) or threads (`thread_name`, by `tid`).
    pub fn names(&self, what: &str, id: &str) -> BTreeMap<u64, String> {
        let named = self.0.iter().filter(|event| event["name"] == what);
        named
            .map(|event| {
                (event[id].as_u64().unwrap_or(u64::MAX), event["args"]["name"].as_str().unwrap_or_default().into())
            })
            .collect()
    }

    /// The events in order of time.
    ///
    /// # Panics
    /// If an event has no time, or no named thread.
    pub fn events(&self) -> Vec<Event> {
        let threads = self.names("thread_name", "tid");
        let mut timed: Vec<_> = self.0.iter().filter(|event| event["ph"] != "M").collect();
        assert!(timed.iter().all(|event| event["ts"].is_number()), "an event without a time");
        timed.sort_by(|a, b| a["ts"].as_f64().unwrap_or(0.).total_cmp(&b["ts"].as_f64().unwrap_or(0.)));
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        timed
            .into_iter()
            .map(|event| {
                let Some(thread) = event["tid"].as_u64().and_then(|tid| threads.get(&tid)) else {
                    panic!("{event} is of no thread that has a name")
                };
                Event {
                    rank: event["pid"].as_u64().unwrap_or(u64::MAX),
                    thread: thread.clone(),
                    phase: text(&event["ph"]),
                    name: text(&event["name"]),
                    moved: event["args"]["bytes"].as_u64().map(|bytes| (text(&event["args"]["group"]), bytes)),
                }
            })
            .collect()
    }

    /// The events of one rank in one training step, in order of time.
    ///
    /// # Panics
    /// If the trace does not have the step.
    pub fn step(events: &[Event], rank: u64, step: usize) -> Vec<&Event> {
        let name = format!("step {step}");
        let of_rank = events.iter().filter(|event| event.rank == rank);
        let from = of_rank.skip_while(|event| !event.is("B", &name));
        let step: Vec<_> = from.take_while(|event| !event.is("E", &name)).collect();
        assert!(!step.is_empty(), "rank {rank} has no {name}");
        step
    }
}
