//! How the processes of one host meet.
//!
//! Rank 0 listens on a Unix socket in the abstract namespace, which leaves no file behind, under a name that only ranks
//! of the same user, port, job and group derive. The others connect, say who they are, and hand over a pidfd of
//! themselves. When all are there rank 0 sends each the shared file and the pidfds of all. Both sides check that the
//! other belongs to the same user.

mod guest;
mod host;
mod meeting;
mod message;

use std::os::fd::OwnedFd;

use rustix::process::PidfdFlags;

use guest::join;
use host::host;
pub(super) use meeting::{Meeting, Met};
use message::MESSAGE;
pub(super) use message::MOST_RANKS;

use crate::Result;

/// Meets the other ranks. `number` and `file` are what rank 0 gives to all.
pub(super) fn meet(meeting: &Meeting<'_>, number: u64, file: impl FnOnce() -> Result<OwnedFd>) -> Result<Met> {
    if meeting.run.len() + meeting.group.name.len() > MESSAGE / 2 {
        return meeting.fail(
            "the job's run id and the group's name take more than 2000 bytes: choose a shorter \
                             TORCHELASTIC_RUN_ID, or split groups less deep",
        );
    }
    let own = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
        .map_err(|errno| meeting.os("opening a pidfd of this process", errno))?;
    if meeting.group.rank == 0 { host(meeting, number, file()?, own) } else { join(meeting, own) }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{
        super::super::{membership::Membership, patience::Patience},
        guest::connect,
        host::STRANGERS,
        message::{MAGIC, send},
        *,
    };
    use crate::Error;

    /// Ends waits that should have ended long ago.
    fn all_well() -> Result<()> {
        static STARTED: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
        if STARTED.elapsed() > Duration::from_secs(60) { Err(Error::Env("hung".into())) } else { Ok(()) }
    }

    fn group(name: &str, rank: usize, timeout: Duration) -> Membership {
        Membership { name: name.into(), rank, size: 2, ..Membership::world(rank, 2, timeout) }
    }

    fn meeting(group: &Membership) -> Meeting<'_> {
        let run = format!("unit test {}", std::process::id());
        Meeting { addr: "127.0.0.1", port: 1, run, group, all_well: &all_well, has_ended: &|_| false }
    }

    /// Rank 0 and rank 1 meet, with `before` done between.
    fn two_meet(name: &str, timeout: Duration, before: impl FnOnce(&Meeting<'_>)) -> [Result<Met>; 2] {
        std::thread::scope(|scope| {
            let file = || Ok(rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
            let host = scope.spawn(move || meet(&meeting(&group(name, 0, timeout)), 7, file));
            let guest = group(name, 1, timeout);
            let guest = meeting(&guest);
            before(&guest);
            let guest = meet(&guest, 0, || unreachable!("rank 0 makes the file"));
            [host.join().unwrap(), guest]
        })
    }

    #[test]
    fn the_longest_timeout_is_no_overflow() {
        for met in two_meet("longest", Duration::MAX, |_| ()) {
            let met = met.unwrap();
            assert_eq!((met.number, met.processes.len()), (7, 2));
        }
    }

    #[test]
    fn strangers_who_say_nothing_or_nonsense_keep_nobody_out() {
        let mut strangers = Vec::new();
        let met = two_meet("strangers", Duration::from_secs(30), |guest| {
            for index in 0..3 * STRANGERS {
                let stranger = connect(guest, &mut Patience::default()).unwrap();
                let nonsense: [&[u8]; 4] = [&[], MAGIC, &[0xff; MESSAGE], &guest.hello()[..20]];
                // Every second one is silent. Rank 0 may have hung up already.
                if index % 2 == 0 {
                    let _ = send(&stranger, nonsense[index / 2 % 4], &[]);
                }
                strangers.push(stranger);
            }
        });
        for met in met {
            assert_eq!(met.unwrap().number, 7);
        }
    }

    #[test]
    fn hellos_of_strangers_are_told_from_those_of_ranks_that_disagree() {
        let host = group("hellos", 0, Duration::ZERO);
        let host = meeting(&host);
        let hello = |change: fn(&mut Membership)| {
            let mut guest = group("hellos", 1, Duration::ZERO);
            change(&mut guest);
            host.guest(&meeting(&guest).hello())
        };
        assert_eq!(hello(|_| ()), Some(Ok(1)));
        assert_eq!(hello(|guest| guest.name = "another".into()), None);
        for (said, part) in [
            (hello(|guest| guest.size = 3), "WORLD_SIZE"),
            (hello(|guest| guest.rank = 0), "RANK of its own"),
            (hello(|guest| guest.rank = usize::MAX), "RANK of its own"),
        ] {
            assert!(said.unwrap().unwrap_err().contains(part));
        }
        let whole = meeting(&group("hellos", 1, Duration::ZERO)).hello();
        assert!((0..whole.len()).all(|len| host.guest(&whole[..len]).is_none()));
    }
}
