//! The side of every rank but the holder.

use std::{
    io,
    sync::{Mutex, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use super::{
    asked::Asked,
    message::{Answer, Request},
    secret::Secret,
};
use crate::{
    Error, Result,
    channel::{Channel, dial},
};

/// How long the holder waits for a value before it says that there is none yet.
pub(super) const SLICE: Duration = Duration::from_secs(1);
/// So little time is as good as none.
const MOMENT: Duration = Duration::from_millis(10);
/// The longest pause between two tries to reach the holder.
const PAUSE: Duration = Duration::from_millis(50);
/// How long something else may answer at the holder's port, such as a job that is just ending.
const PATIENCE: Duration = Duration::from_secs(10);

/// A way to the holder.
pub(super) struct Client {
    host: String,
    port: u16,
    secret: Secret,
    rank: usize,
    /// In messages.
    holder: String,
    /// Connections that nobody uses: each of two threads that ask at a time has one.
    idle: Mutex<Vec<Channel>>,
    /// Why there is nobody to be asked any more.
    gone: OnceLock<String>,
}

/// When a wait is over.
#[derive(Clone, Copy)]
struct Deadline {
    began: Instant,
    timeout: Duration,
}

impl Deadline {
    fn left(self) -> Duration {
        self.timeout.saturating_sub(self.began.elapsed())
    }
}

impl Client {
    /// Reaches the holder, which may not be there yet.
    pub(super) fn connect(host: &str, port: u16, secret: Secret, rank: usize, timeout: Duration) -> Result<Self> {
        let client = Client {
            host: host.to_owned(),
            port,
            secret,
            rank,
            holder: format!("rank 0 at {host}:{port}"),
            idle: Mutex::default(),
            gone: OnceLock::new(),
        };
        let asked = Asked::of(&Request::Hello, Some(rank), &client.holder);
        let deadline = Deadline { began: asked.began, timeout };
        let mut strange_since: Option<Instant> = None;
        let mut pause = Duration::from_millis(1);
        let channel = loop {
            let error = match client.greeted(deadline) {
                Ok(channel) => break channel,
                Err(error) => error,
            };
            let is_stranger = error.kind() == io::ErrorKind::PermissionDenied;
            let since = if is_stranger { *strange_since.get_or_insert_with(Instant::now) } else { Instant::now() };
            if deadline.left() < pause || (is_stranger && since.elapsed() >= PATIENCE) {
                return Err(asked.failed(client.unreached(&error)));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE);
        };
        client.put_back(channel);
        Ok(client)
    }

    /// What is there before, or now.
    pub(super) fn ask(&self, request: &Request<'_>, timeout: Duration) -> Result<Option<Vec<u8>>> {
        let asked = Asked::of(request, Some(self.rank), &self.holder);
        if let Some(why) = request.refusal() {
            return Err(asked.failed(why));
        }
        let answer = self.exchange(request, Deadline { began: asked.began, timeout }, &asked, None)?;
        asked.before(answer)
    }

    /// The value, once it is there.
    pub(super) fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let whole = Request::Get { key, wait: timeout };
        let asked = Asked::of(&whole, Some(self.rank), &self.holder);
        if let Some(why) = whole.refusal() {
            return Err(asked.failed(why));
        }
        let deadline = Deadline { began: asked.began, timeout };
        let mut answered: Option<Instant> = None;
        loop {
            let left = deadline.left();
            // The answer takes time as well.
            let wait = (left / 4 * 3).min(SLICE);
            let answer = self.exchange(&Request::Get { key, wait }, deadline, &asked, answered)?;
            answered = Some(Instant::now());
            match asked.before(answer)? {
                Some(value) => return Ok(value),
                None if deadline.left() <= MOMENT => return Err(asked.not_set()),
                None => {}
            }
        }
    }

    /// An answer. Where the holder gave one at `answered`, it lives, and may only be a little late.
    fn exchange(
        &self,
        request: &Request<'_>,
        deadline: Deadline,
        asked: &Asked<'_>,
        answered: Option<Instant>,
    ) -> Result<Answer> {
        if let Some(why) = self.gone.get() {
            return Err(asked.failed(why));
        }
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut channel = match idle {
            Some(channel) => channel,
            None => self.greeted(deadline).map_err(|error| asked.failed(self.unreached(&error)))?,
        };
        let answer = said(&mut channel, request, deadline).map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut if answered.is_some_and(|at| at.elapsed() < 2 * SLICE) => asked.not_set(),
            _ => self.lost(&error, asked),
        })?;
        self.put_back(channel);
        Ok(answer)
    }

    /// A connection of which the holder has seen that it has the secret.
    fn greeted(&self, deadline: Deadline) -> io::Result<Channel> {
        let stream = dial(&self.host, self.port, deadline.left().max(MOMENT))?;
        let stranger = |error: io::Error| io::Error::new(io::ErrorKind::PermissionDenied, error.to_string());
        let mut channel = Channel::connect(stream, self.secret.key()).map_err(stranger)?;
        match said(&mut channel, &Request::Hello, deadline)? {
            Answer::Nothing => Ok(channel),
            answer => Err(io::Error::other(format!("it answered {answer:?} to a greeting"))),
        }
    }

    fn put_back(&self, channel: Channel) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(channel);
    }

    fn unreached(&self, error: &io::Error) -> String {
        if error.kind() == io::ErrorKind::PermissionDenied {
            let way_out = if self.secret.is_given {
                "give all ranks the same FSDP_STORE_SECRET, and start them as one job"
            } else {
                "start all ranks as one job, or give all of them the same FSDP_STORE_SECRET"
            };
            return format!("{error}: {way_out}, or choose another MASTER_PORT");
        }
        format!(
            "it can't be reached ({error}): is rank 0 running, and are MASTER_ADDR and MASTER_PORT its host and a port \
             that the others reach there?"
        )
    }

    fn lost(&self, error: &io::Error, asked: &Asked<'_>) -> Error {
        if error.kind() == io::ErrorKind::TimedOut {
            return asked.failed("it does not answer: its process is stopped, or its host or the network is down");
        }
        let why = format!("rank 0 has ended, and the store with it ({error}). The output of rank 0 says more");
        asked.failed(self.gone.get_or_init(|| why))
    }
}

/// The answer to a request.
fn said(channel: &mut Channel, request: &Request<'_>, deadline: Deadline) -> io::Result<Answer> {
    channel.writer.send(&request.to_bytes())?;
    let answer = channel.reader.receive(deadline.left().max(MOMENT))?;
    Answer::parse(answer).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "its answer can't be understood"))
}
