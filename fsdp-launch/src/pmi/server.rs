//! The launcher's ends of the ranks' PMI connections: a socket and a thread for each rank, for one attempt.

use std::{
    io::{self, BufReader},
    net::Shutdown,
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    process::Command,
    sync::Arc,
    thread::{self, JoinHandle},
};

use parking_lot::Mutex;
use rustix::{
    io::{FdFlags, fcntl_setfd},
    net::{SendFlags, send},
};

use super::{
    kvs::{Action, Kvs, PmiEvent, PmiFailure},
    protocol::{Parser, Response, read_line},
};
use crate::rendezvous::{Assignment, KeyValue};

const STACK_BYTES: usize = 256 << 10;

/// Serves the ranks of this host. Dropping it closes the connections.
pub(crate) struct Server {
    shared: Arc<Shared>,
    /// The ranks' ends of the sockets, until the ranks start.
    rank_ends: Vec<Option<OwnedFd>>,
    threads: Vec<JoinHandle<()>>,
    first_rank: usize,
    world_size: usize,
}

struct Shared {
    kvs: Mutex<Kvs>,
    launcher_ends: Vec<UnixStream>,
    report: Box<dyn Fn(PmiEvent) + Send + Sync>,
}

impl Server {
    /// Serves the `ranks` ranks of this host. Events for the launcher go to `report`.
    pub(crate) fn start(
        assignment: &Assignment,
        ranks: usize,
        report: impl Fn(PmiEvent) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let pairs: Vec<_> = (0..ranks).map(|_| UnixStream::pair()).collect::<Result<_, _>>()?;
        let (launcher_ends, rank_ends): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let shared =
            Arc::new(Shared { kvs: Mutex::new(Kvs::new(assignment, ranks)), launcher_ends, report: Box::new(report) });
        let mut server = Server {
            shared,
            rank_ends: rank_ends.into_iter().map(|end| Some(OwnedFd::from(end))).collect(),
            threads: Vec::with_capacity(ranks),
            first_rank: assignment.first_rank,
            world_size: assignment.world_size,
        };
        for local_rank in 0..ranks {
            let shared = server.shared.clone();
            let thread = thread::Builder::new().name(format!("pmi of rank {local_rank}")).stack_size(STACK_BYTES);
            server.threads.push(thread.spawn(move || shared.listen(local_rank))?);
        }
        Ok(server)
    }

    /// Passes a rank's end to `command`. Keep the returned descriptor open until the rank has started.
    pub(crate) fn apply(&mut self, local_rank: usize, command: &mut Command) -> Option<OwnedFd> {
        // Variables of an outer launcher, such as `srun --mpi=pmix`, would make MPI connect to that launcher.
        for name in ["PMI_PORT", "PMI_ID", "PMI_SPAWNED", "PMI_JOBID"] {
            command.env_remove(name);
        }
        let is_of_launcher = |name: &[u8]| {
            // The user's own PMIx settings stay.
            name.starts_with(b"PMIX_") && !name.starts_with(b"PMIX_MCA_") && name != b"PMIX_INSTALL_PREFIX"
        };
        for (name, _) in std::env::vars_os().filter(|(name, _)| is_of_launcher(name.as_encoded_bytes())) {
            command.env_remove(name);
        }
        let end = self.rank_ends.get_mut(local_rank)?.take()?;
        let number = end.as_raw_fd();
        command.env("PMI_FD", number.to_string());
        command.env("PMI_RANK", (self.first_rank + local_rank).to_string());
        command.env("PMI_SIZE", self.world_size.to_string());
        // SAFETY: the hook runs between fork and exec, where only async-signal-safe calls are allowed: fcntl is one,
        // and an error from a code does not allocate. The caller keeps `end`, so the descriptor is open.
        unsafe {
            command.pre_exec(move || Ok(fcntl_setfd(BorrowedFd::borrow_raw(number), FdFlags::empty())?));
        }
        Some(end)
    }

    /// Adds entries of another host's ranks.
    pub(crate) fn add_remote(&self, entries: Vec<KeyValue>) {
        self.shared.kvs.lock().add_remote(entries);
    }

    /// Releases the barrier: all ranks of all hosts are in it.
    pub(crate) fn release_barrier(&self) {
        self.shared.act(Kvs::release_barrier);
    }
}

impl Server {
    /// Closes the connections after reading all that the ranks sent. Returns the first failure, which may have been
    /// reported before.
    pub(crate) fn finish(&mut self) -> Option<PmiFailure> {
        for end in &self.shared.launcher_ends {
            end.shutdown(Shutdown::Both).ok();
        }
        for thread in self.threads.drain(..) {
            // Fails only after a panic, which was printed.
            thread.join().ok();
        }
        self.shared.kvs.lock().first_failure()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Shared {
    /// Reads from a rank until its connection ends.
    fn listen(&self, local_rank: usize) {
        let Some(end) = self.launcher_ends.get(local_rank) else { return };
        let (mut input, mut parser) = (BufReader::new(end), Parser::default());
        let how = loop {
            let command = match read_line(&mut input) {
                Ok(None) => break None,
                Ok(Some(line)) => {
                    tracing::trace!(local_rank, line, "pmi");
                    parser.line(&line)
                }
                Err(what) => Err(what),
            };
            match command {
                Ok(Some(command)) => self.act(|kvs| kvs.handle(local_rank, command)),
                Ok(None) => {}
                Err(what) => break Some(format!("sent over PMI {what}")),
            }
        };
        match how {
            None => self.act(|kvs| kvs.disconnect(local_rank)),
            Some(how) => self.act(|kvs| kvs.fail(local_rank, &how)),
        }
    }

    fn act(&self, step: impl FnOnce(&mut Kvs) -> Vec<Action>) {
        // Hold the lock, so that events for other hosts keep their order.
        let mut kvs = self.kvs.lock();
        for action in step(&mut kvs) {
            match action {
                Action::Report(event) => (self.report)(event),
                Action::Response(local_rank, answer) => {
                    if !self.answer(local_rank, &answer) {
                        let failed = kvs.fail(local_rank, "does not read PMI responses");
                        let event = failed.into_iter().filter_map(|action| match action {
                            Action::Report(event) => Some(event),
                            Action::Response(..) => None,
                        });
                        event.for_each(|event| (self.report)(event));
                    }
                }
            }
        }
    }

    /// Sends a response without waiting. Returns false if the rank does not read.
    fn answer(&self, local_rank: usize, answer: &Response) -> bool {
        let Some(end) = self.launcher_ends.get(local_rank) else { return true };
        let line = format!("{answer}\n");
        match send(end, line.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(count) => count == line.len(),
            Err(rustix::io::Errno::AGAIN) => false,
            // The reader sees the end of the connection.
            Err(_) => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, Write},
        sync::mpsc::{Receiver, channel},
        time::Duration,
    };

    use super::{super::kvs::PmiFailureKind, *};

    const SOON: Duration = Duration::from_secs(60);

    /// A rank that is a thread of the test.
    struct Rank(BufReader<UnixStream>);

    impl Rank {
        fn of(server: &mut Server, local_rank: usize) -> Self {
            let end = server.rank_ends[local_rank].take().unwrap();
            let end = UnixStream::from(end);
            end.set_read_timeout(Some(SOON)).unwrap();
            Rank(BufReader::new(end))
        }

        fn say(&mut self, line: &str) {
            self.0.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
        }

        fn receive(&mut self) -> String {
            let mut line = String::new();
            self.0.read_line(&mut line).unwrap();
            line.trim_end().to_owned()
        }

        fn ask(&mut self, line: &str) -> String {
            self.say(line);
            self.receive()
        }
    }

    fn server(ranks: usize) -> (Server, Vec<Rank>, Receiver<PmiEvent>) {
        let (report, events) = channel();
        let assignment = Assignment::single_node("run", ranks, 1);
        let mut server = Server::start(&assignment, ranks, move |event| drop(report.send(event))).unwrap();
        let ranks = (0..ranks).map(|local_rank| Rank::of(&mut server, local_rank)).collect();
        (server, ranks, events)
    }

    #[test]
    fn ranks_exchange_entries() {
        let (_server, ranks, _told) = server(3);
        thread::scope(|scope| {
            for (number, mut rank) in ranks.into_iter().enumerate() {
                scope.spawn(move || {
                    let init = rank.ask("cmd=init pmi_version=1 pmi_subversion=1");
                    assert_eq!(init, "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1");
                    assert_eq!(
                        rank.ask("cmd=get_maxes"),
                        "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=4096"
                    );
                    assert_eq!(rank.ask("cmd=get_my_kvsname"), "cmd=my_kvsname rc=0 kvsname=kvs");
                    assert_eq!(rank.ask("cmd=get_universe_size"), "cmd=universe_size rc=0 size=3");
                    let put = format!("cmd=put kvsname=kvs key=card{number} value=of {number}");
                    assert_eq!(rank.ask(&put), "cmd=put_result rc=0 msg=success");
                    assert_eq!(rank.ask("cmd=barrier_in"), "cmd=barrier_out rc=0");
                    let next = (number + 1) % 3;
                    let card = rank.ask(&format!("cmd=get kvsname=kvs key=card{next}"));
                    assert_eq!(card, format!("cmd=get_result rc=0 msg=success value=of {next}"));
                    assert_eq!(
                        rank.ask("mcmd=spawn\nnprocs=1\nendcmd"),
                        "cmd=spawn_result rc=-1 msg=not_served_by_fsdp-launch"
                    );
                    assert_eq!(rank.ask("cmd=finalize"), "cmd=finalize_ack rc=0");
                });
            }
        });
    }

    #[test]
    fn invalid_input_fails_only_its_rank() {
        let (_server, mut ranks, events) = server(2);
        ranks[1].0.get_mut().write_all(b"GET / HTTP/1.1\r\n").unwrap();
        let PmiEvent::Failed(failure) = events.recv_timeout(SOON).unwrap() else { panic!("nothing failed") };
        assert_eq!((failure.local_rank, failure.kind), (1, PmiFailureKind::Protocol));
        assert!(failure.text.contains("it sent over PMI a line with the byte 0x0d"), "{}", failure.text);
        assert!(ranks[0].ask("cmd=init pmi_version=2 pmi_subversion=0").contains("rc=-1"));
    }

    #[test]
    fn a_rank_that_does_not_read_fails() {
        let (_server, mut ranks, events) = server(1);
        let rank = &mut ranks[0];
        rank.say("cmd=init pmi_version=1");
        rank.0.get_mut().set_write_timeout(Some(SOON)).unwrap();
        let failure = loop {
            rank.say("cmd=get_maxes");
            if let Ok(event) = events.try_recv() {
                break event;
            }
        };
        let PmiEvent::Failed(failure) = failure else { panic!("{failure:?}") };
        assert!(failure.text.contains("does not read PMI responses"), "{}", failure.text);
    }

    #[test]
    fn a_rank_inherits_only_its_end() {
        let (report, _told) = channel();
        let mut server =
            Server::start(&Assignment::single_node("run", 2, 1), 2, move |event| drop(report.send(event))).unwrap();
        let mut command = Command::new("/bin/sh");
        let script = "echo $PMI_RANK of $PMI_SIZE; [ -S /proc/self/fd/$PMI_FD ] && echo its own; \
            ls -l /proc/self/fd | grep -c socket:";
        command.args(["-c", script]);
        command.stdin(std::process::Stdio::null());
        let end = server.apply(1, &mut command);
        let output = command.output().unwrap();
        drop(end);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "1 of 2\nits own\n1\n");
    }
}
