//! Downloads by one rank of each host, while the other ranks wait.
//!
//! Rank 0 chooses the commits and the files. Then the first rank of each host downloads them. Both work on a thread.
//! The ranks exchange their state twice a second, so each wait is short. If a rank dies, its peers notice at once, and
//! a failed download ends all ranks with its error.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use fsdp_core::ProcessGroup;
use indicatif::BinaryBytes;
use serde::{Deserialize, Serialize};

use super::cache::Entry;
use super::client::Client;
use super::name::Name;
use super::plan::{Plan, Request};
use super::progress::{Activity, Display};
use crate::console::Console;

/// Time between two exchanges of the ranks.
const PERIOD: Duration = Duration::from_millis(500);
/// Files that a host downloads at a time.
const WORKERS: usize = 4;

/// Repository or file in this host's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// Its name.
    pub name: Name,
    /// Commit of the revision, the same on all ranks.
    pub commit: String,
    /// Directory of the files, or the file itself or the pattern in this directory if the name has one.
    pub path: PathBuf,
}

/// Downloads what is not in the cache, and returns the paths in the order of the requests. Ranks with `downloads` do it
/// for their hosts, the others wait. All ranks use the commits that rank 0 found. Collective.
///
/// # Errors
/// Fails on all ranks if a download fails, or if a rank has no byte for as long as the group's timeout.
pub fn fetch(client: Client, group: &ProcessGroup, downloads: bool, requests: Vec<Request>) -> Result<Vec<Fetched>> {
    let client = Arc::new(client);
    let activity = Arc::new(Activity::default());
    let task = {
        let (client, activity) = (client.clone(), activity.clone());
        move || requests.iter().map(|request| client.plan(request, &activity)).collect::<Result<Vec<Plan>>>()
    };
    let plans: Vec<Plan> = watch(group, group.rank() == 0, &activity, task)?.swap_remove(0).context("no plan")?;

    let task = {
        let (client, activity, plans) = (client.clone(), activity.clone(), plans.clone());
        let prints = group.rank() == 0;
        move || download(&client, &plans, &activity, prints)
    };
    watch(group, downloads || group.rank() == 0, &activity, task)?;

    let path = |plan: Plan| {
        let dir = client.snapshot(&plan.name, &plan.commit);
        if let Some(file) = plan.files.iter().map(|file| dir.join(file)).find(|file| !file.exists()) {
            bail!(
                "rank {} does not see {}, which another rank of its host downloaded: let all ranks have the same HF_HOME",
                group.rank(),
                file.display()
            );
        }
        let path = plan.name.file.iter().fold(dir, |dir, file| dir.join(file));
        Ok(Fetched { name: plan.name, commit: plan.commit, path })
    };
    plans.into_iter().map(path).collect()
}

/// Downloads the missing files of all plans.
fn download(client: &Client, plans: &[Plan], activity: &Activity, prints: bool) -> Result<()> {
    let mut missing = vec![];
    for plan in plans {
        let dir = client.snapshot(&plan.name, &plan.commit);
        missing.extend(plan.files.iter().filter(|file| !dir.join(file).exists()).map(|file| (plan, file.as_str())));
    }
    if let (Some(_), Some((plan, _))) = (client.offline, missing.first()) {
        let files = missing.iter().map(|(_, file)| *file).collect::<Vec<_>>().join(", ");
        let Plan { name, commit, .. } = plan;
        return Err(client.offline_error(format_args!("{files} of {} {name} at commit {commit}", name.kind)));
    }
    let entries: Vec<(&Plan, Entry)> = in_parallel(missing, |(plan, file)| {
        let entry = client.describe(&plan.name, &plan.commit, file, activity)?;
        ensure!(
            entry.commit == plan.commit,
            "{} has `{file}` of {} at commit {}, expected {}: start again",
            client.host(),
            plan.name,
            entry.commit,
            plan.commit
        );
        activity.plan(entry.size);
        Ok((plan, entry))
    })?;
    if let (true, Some((plan, _))) = (prints, entries.first()) {
        let bytes = BinaryBytes(entries.iter().map(|(_, entry)| entry.size).sum());
        let (count, place) = (entries.len(), client.cache.path().display());
        let files = if count == 1 { "file" } else { "files" };
        let more = if plans.len() > 1 { " and others" } else { "" };
        let host = client.host();
        Console::Stderr
            .line(format_args!("downloading {count} {files} ({bytes}) of {}{more} from {host} to {place}", plan.name));
    }
    in_parallel(entries, |(plan, entry)| client.download(&plan.name, &entry, activity))?;
    match client.offline {
        Some(_) => Ok(()),
        None => plans.iter().try_for_each(|plan| client.record_commit(&plan.name, &plan.commit)),
    }
}

/// Calls `work` with all items on a few threads. Returns the results in the order of the items, or the first error.
fn in_parallel<I: Send, T: Send>(items: Vec<I>, work: impl Fn(I) -> Result<T> + Sync) -> Result<Vec<T>> {
    let count = items.len();
    let queue: Mutex<VecDeque<(usize, I)>> = Mutex::new(items.into_iter().enumerate().collect());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let worker = || {
        let mut done = vec![];
        while let Some((index, item)) = next() {
            match work(item) {
                Ok(value) => done.push((index, value)),
                Err(error) => {
                    // The other threads finish their items and take no more.
                    queue.lock().unwrap_or_else(PoisonError::into_inner).clear();
                    return Err(error);
                }
            }
        }
        Ok(done)
    };
    let results: Vec<Result<Vec<(usize, T)>>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..WORKERS.min(count)).map(|_| scope.spawn(worker)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked")))).collect()
    });
    let mut all = vec![];
    for done in results {
        all.extend(done?);
    }
    all.sort_by_key(|(index, _)| *index);
    Ok(all.into_iter().map(|(_, value)| value).collect())
}

/// State of a rank that works.
#[derive(Serialize, Deserialize)]
enum State<T> {
    Working { done: u64, total: u64 },
    Done(T),
    Failed { host: String, why: String },
}

/// Runs `task` on the ranks with `works` while all ranks watch. Returns the result of each rank, or `None` for a
/// rank that only watched. Collective.
///
/// # Errors
/// Fails on all ranks if a task fails, or makes no progress for as long as the group's timeout. A task that
/// outlives its deadline stays behind on its thread, and the end of the process ends it.
fn watch<T>(
    group: &ProcessGroup,
    works: bool,
    activity: &Arc<Activity>,
    task: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<Vec<Option<T>>>
where
    T: Serialize + for<'de> Deserialize<'de> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel();
    if works {
        let thread = thread::Builder::new().name("hub".into());
        // Nobody receives the result after a deadline.
        let run = move || _ = sender.send(task().map_err(|error| format!("{error:#}")));
        thread.spawn(run).context("can't start a thread for downloads")?;
    }
    let failed = |why: String| {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        State::Failed { host, why }
    };
    let mut display = (group.rank() == 0).then(Display::new);
    let mut most = 0;
    let (mut ticks, mut since) = (activity.ticks(), Instant::now());
    let mut own: Option<State<T>> = None;
    loop {
        if works && !matches!(own, Some(State::Done(_))) {
            let (done, total) = activity.bytes();
            own = Some(match receiver.recv_timeout(PERIOD) {
                Ok(Ok(value)) => State::Done(value),
                Ok(Err(why)) => failed(why),
                Err(RecvTimeoutError::Disconnected) => failed("the thread for downloads panicked".into()),
                Err(RecvTimeoutError::Timeout) => State::Working { done, total },
            });
            if activity.ticks() != ticks {
                (ticks, since) = (activity.ticks(), Instant::now());
            } else if since.elapsed() >= group.timeout() && matches!(own, Some(State::Working { .. })) {
                let (seconds, note) = (group.timeout().as_secs_f64(), activity.last_note());
                let note = if note.is_empty() { note } else { format!("; before, {note}") };
                own = Some(failed(format!("no byte came for {seconds:.0} s (FSDP_TIMEOUT_S){note}")));
            }
        } else {
            // The others call at least this often.
            thread::sleep(if works { PERIOD } else { Duration::ZERO });
        }
        let text = own.as_ref().map_or(Ok(vec![]), serde_json::to_vec)?;
        let texts = group.gather_bytes(text).context("a rank left while the ranks waited for downloads")?;
        let mut states = Vec::with_capacity(texts.len());
        for text in texts {
            states.push(if text.is_empty() { None } else { Some(serde_json::from_slice::<State<T>>(&text)?) });
        }
        for (rank, state) in states.iter().enumerate() {
            if let Some(State::Failed { host, why }) = state {
                match group.size() {
                    1 => bail!("{why}"),
                    _ => bail!("rank {rank} on host {host} can't download for its host: {why}"),
                }
            }
        }
        let working = states.iter().filter_map(|state| match state {
            Some(State::Working { done, total }) => Some((*done, *total)),
            _ => None,
        });
        let (done, total) = working.clone().fold((0, 0), |sum, next| (sum.0 + next.0, sum.1 + next.1));
        let has_ended = working.count() == 0;
        most = most.max(total);
        if let Some(display) = &mut display {
            display.show(if has_ended { most } else { done }, most);
        }
        if has_ended {
            let value = |state| match state {
                Some(State::Done(value)) => Some(value),
                _ => None,
            };
            return Ok(states.into_iter().map(value).collect());
        }
    }
}

#[cfg(test)]
mod tests {
    use fsdp_core::process_group::local;

    use super::*;

    #[test]
    fn every_rank_gets_the_results_or_the_error() {
        let outcomes = local::run(3, |group| {
            let rank = group.rank();
            watch(&group, rank != 1, &Arc::default(), move || Ok(rank * 10)).map_err(|error| error.to_string())
        });
        assert!(outcomes.iter().all(|outcome| *outcome == Ok(vec![Some(0), None, Some(20)])), "{outcomes:?}");
        let outcomes = local::run(3, |group| {
            let rank = group.rank();
            let task = move || {
                ensure!(rank != 2, "no disk");
                thread::sleep(2 * PERIOD);
                Ok(())
            };
            watch(&group, rank != 1, &Arc::default(), task).map_err(|error| error.to_string())
        });
        for outcome in outcomes {
            let error = outcome.unwrap_err();
            assert!(error.starts_with("rank 2 on host ") && error.ends_with("no disk"), "{error}");
        }
    }

    #[test]
    fn a_panic_is_an_error() {
        let outcomes = local::run(2, |group| {
            let task = || -> Result<()> { panic!("on purpose") };
            watch(&group, group.rank() == 0, &Arc::default(), task).map_err(|error| error.to_string())
        });
        assert!(outcomes.iter().all(|outcome| outcome.as_ref().unwrap_err().contains("panicked")));
    }

    #[test]
    fn work_in_parallel_keeps_the_order() {
        assert_eq!(in_parallel((0..20).collect(), |i| Ok(i * i)).unwrap(), (0..20).map(|i| i * i).collect::<Vec<_>>());
        assert_eq!(in_parallel(Vec::<u8>::new(), Ok).unwrap(), [0_u8; 0]);
        let error = in_parallel((0..20).collect(), |i| if i == 7 { bail!("seven") } else { Ok(i) }).unwrap_err();
        assert_eq!(error.to_string(), "seven");
    }
}
