//! How this host's launcher takes part: as the only agent, or as one of several.

use std::{
    sync::mpsc::{self, Receiver, Sender},
    thread,
};

use crate::{
    Error, RendezvousSpec, Result,
    rendezvous::{
        agent::{Agent, FAREWELL, TICK, local_outbox},
        coordinator::Rules,
        hub::Hub,
        message::{FromAgent, Member},
        news::Listener,
        token,
    },
};

/// An agent's connection to the coordinator, or to the one that it holds itself.
pub(crate) enum Membership {
    /// One host.
    Alone(Box<Hub>),
    /// Several; the thread connects, or holds the coordinator.
    Several {
        to: Option<Sender<FromAgent>>,
        /// Ends when the thread has.
        done: Receiver<()>,
    },
}

impl Membership {
    /// Begins to take part as `member`. All that follows is told to
    /// `listener`; with several hosts and no `spec` of how they meet, there is only this one.
    pub(crate) fn start(
        spec: Option<&RendezvousSpec>,
        rules: Rules,
        member: Member,
        listener: Listener,
    ) -> Result<Self> {
        let Some(spec) = spec else {
            let hub = Hub::new(rules);
            hub.enter(local_outbox(&listener));
            hub.hear(0, FromAgent::Join(Box::new(member)));
            return Ok(Membership::Alone(Box::new(hub)));
        };
        let key = spec.token_file.as_deref().map(token::read).transpose()?;
        let (to, from_us) = mpsc::channel();
        let agent = Agent { spec: spec.clone(), key, rules, member, listener, from_us };
        let (until_done, done) = mpsc::channel();
        let run = move || {
            agent.run();
            drop(until_done);
        };
        let thread = thread::Builder::new().name("rendezvous".into()).spawn(run);
        thread.map_err(Error::system("start a thread for the rendezvous"))?;
        Ok(Membership::Several { to: Some(to), done })
    }

    /// Leaves when all that was said is sent, and what others have to hear of us is heard.
    pub(crate) fn part(&mut self) {
        if let Membership::Several { to, done } = self {
            drop(to.take());
            // A thread that looks a name up, or waits for a connection to be made, is left to itself.
            done.recv_timeout(FAREWELL + TICK).ok();
        }
    }

    pub(crate) fn say(&self, message: FromAgent) {
        match self {
            Membership::Alone(hub) => hub.hear(0, message),
            Membership::Several { to, .. } => {
                if let Some(to) = to {
                    // Where the thread has ended it has told why.
                    to.send(message).ok();
                }
            }
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.part();
    }
}
