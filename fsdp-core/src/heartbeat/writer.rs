//! The writing side of a status page.

use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use super::{
    memory::{Page, pack},
    page::{
        GROUP_HEAD, GROUP_TEXT, GROUP_WORDS, HEARTBEAT, MAX_GROUPS, MISSING, NAME_TEXT, PID, Progress, SPAN_TEXT,
        START_TIME, STEP, WORLD, group_lock, now, open_page, span_lock, step_lock,
    },
};
use crate::{Error, Result};

/// Interval between heartbeats.
const INTERVAL: Duration = Duration::from_millis(500);

/// Words of a span.
pub(super) type SpanWords = [u64; 2 + SPAN_TEXT];

/// The status page that this process has claimed.
pub(super) struct Writer {
    page: Page,
    /// Whether each group lock is in use.
    used: [AtomicBool; MAX_GROUPS],
}

impl Writer {
    /// Opens a page and claims it for `pid`.
    pub(super) fn claim(path: &Path, pid: u32) -> io::Result<Self> {
        let page = open_page(path)?;
        let (pid, started) = (u64::from(pid), process_start_time().unwrap_or(0));
        if let Err(other) = page[PID].compare_exchange(0, pid, Ordering::AcqRel, Ordering::Relaxed) {
            // A child process inherits the variable, but must not write. A program that replaces the rank by `exec` may
            // continue.
            if (other, page[START_TIME].load(Ordering::Acquire)) != (pid, started) {
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("process {other} already writes it")));
            }
            page[STEP..WORLD].iter().for_each(|word| word.store(0, Ordering::Release));
        }
        page[START_TIME].store(started, Ordering::Release);
        Ok(Writer { page, used: Default::default() })
    }

    /// Starts the thread that writes a heartbeat for as long as the process runs.
    pub(super) fn start_beating(self: &Arc<Self>) -> io::Result<()> {
        let writer = self.clone();
        let beat = move || {
            loop {
                std::thread::sleep(INTERVAL);
                writer.beat();
            }
        };
        std::thread::Builder::new().name("fsdp heartbeat".into()).stack_size(64 << 10).spawn(beat)?;
        // The first heartbeat is written only once the thread exists: a rank without the thread must not be taken for
        // hung.
        self.beat();
        Ok(())
    }

    pub(super) fn beat(&self) {
        self.page[HEARTBEAT].store(now(), Ordering::Release);
    }

    pub(super) fn step(&self, number: u64) {
        step_lock(&*self.page).write(&[number, now()]);
    }

    /// Writes what the rank does. Returns the previous span.
    pub(super) fn enter_span(&self, what: &str, unit: &str) -> SpanWords {
        let gap = if unit.is_empty() { "" } else { " " };
        let (text, len) = pack::<SPAN_TEXT>(&[what, gap, unit]);
        let mut words = [0; 2 + SPAN_TEXT];
        words[0] = now();
        words[1] = len;
        words[2..].copy_from_slice(&text);
        let previous = span_lock(&*self.page).latest();
        self.write_span(&words);
        previous
    }

    pub(super) fn write_span(&self, words: &SpanWords) {
        span_lock(&*self.page).write(words);
    }

    /// Reserves a lock for a group. Returns `None` for a group of one rank, or without free locks.
    pub(super) fn group(self: &Arc<Self>, group: &str, rank: usize, size: usize) -> Option<CollectiveRecorder> {
        let take = |used: &AtomicBool| !used.swap(true, Ordering::AcqRel);
        let index = self.used.iter().take(if size > 1 { MAX_GROUPS } else { 0 }).position(take)?;
        let mut words = [0; GROUP_WORDS];
        words[3] = rank as u64;
        words[4] = size as u64;
        let (text, len) = pack::<GROUP_TEXT>(&[group]);
        words[5] = len;
        words[GROUP_HEAD..GROUP_HEAD + GROUP_TEXT].copy_from_slice(&text);
        Some(CollectiveRecorder { writer: self.clone(), index, words })
    }
}

/// Writes the collectives of one group. The thread that runs the group's collectives owns it.
pub(crate) struct CollectiveRecorder {
    writer: Arc<Writer>,
    index: usize,
    words: [u64; GROUP_WORDS],
}

impl CollectiveRecorder {
    /// Records that this rank has entered a collective.
    pub(crate) fn begin(&mut self, name: &str, sequence: u64) {
        let (text, len) = pack::<NAME_TEXT>(&[name]);
        self.words[1] = sequence;
        self.words[6] = len;
        self.words[GROUP_HEAD + GROUP_TEXT..].copy_from_slice(&text);
        self.set(Progress::Running);
    }

    /// Records the outcome of the collective that began last.
    pub(crate) fn end<T>(&mut self, outcome: &Result<T>) {
        let progress = match outcome {
            Ok(_) => Progress::Done,
            Err(Error::Timeout { missing, .. }) => {
                for rank in missing.iter().filter(|&&rank| rank < 64 * MISSING) {
                    self.words[7 + rank / 64] |= 1 << (rank % 64);
                }
                Progress::TimedOut
            }
            Err(_) => Progress::Failed,
        };
        self.set(progress);
    }

    fn set(&mut self, progress: Progress) {
        self.words[0] = now();
        self.words[2] = progress.word();
        group_lock(&*self.writer.page, self.index).write(&self.words);
    }
}

impl Drop for CollectiveRecorder {
    /// Clears the lock when the group is dropped. After a failure, the collective stays on the page for its readers.
    fn drop(&mut self) {
        let failed = [Progress::TimedOut, Progress::Failed].iter().any(|it| it.word() == self.words[2]);
        if !failed {
            group_lock(&*self.writer.page, self.index).write(&[0; GROUP_WORDS]);
            self.writer.used[self.index].store(false, Ordering::Release);
        }
    }
}

/// Returns the start time of this process, in clock ticks.
fn process_start_time() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is the name in parentheses, which may contain any character.
    stat.rsplit(')').next()?.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heartbeat::StatusPage;

    fn claimed() -> (StatusPage, Arc<Writer>) {
        let page = StatusPage::new().unwrap();
        let writer = Writer::claim(Path::new(&page.path()), 7).unwrap();
        (page, Arc::new(writer))
    }

    #[test]
    fn a_page_is_claimed_once() {
        let (page, writer) = claimed();
        let again = Writer::claim(Path::new(&page.path()), 8).map(drop).unwrap_err();
        assert!(again.to_string().contains("process 7"), "{again}");
        drop(writer);
        assert!(Writer::claim(Path::new(&page.path()), 8).is_err());
        let snapshot = page.snapshot();
        assert_eq!((snapshot.pid, snapshot.beat), (Some(7), None));
        assert_eq!(snapshot.pid_started, process_start_time());
        // The same process, after an `exec`.
        let writer = Arc::new(Writer::claim(Path::new(&page.path()), 7).unwrap());
        writer.step(3);
        writer.group("world", 0, 2).unwrap().begin("barrier", 0);
        Writer::claim(Path::new(&page.path()), 7).unwrap();
        let snapshot = page.snapshot();
        assert!(snapshot.step.is_none() && snapshot.collectives.is_empty(), "{snapshot:?}");
        assert!(process_start_time().is_some());
    }

    #[test]
    fn a_snapshot_shows_what_was_written() {
        let (page, writer) = claimed();
        writer.beat();
        writer.step(41);
        writer.step(42);
        let before = writer.enter_span("forward", "layers.3");
        let inner = writer.enter_span("wait for all-gather", "");
        let doing = || page.snapshot().doing.map(|doing| doing.what);
        assert_eq!(doing().as_deref(), Some("wait for all-gather"));
        writer.write_span(&inner);
        assert_eq!(doing().as_deref(), Some("forward layers.3"));
        let snapshot = page.snapshot();
        assert!(snapshot.beat.is_some_and(|age| age.0 < Duration::from_secs(60)));
        assert!(
            snapshot.step.is_some_and(|step| step.number == 42 && step.age.0 < Duration::from_secs(60) && !step.torn)
        );
        writer.write_span(&before);
        assert_eq!(doing(), None);
    }

    #[test]
    fn records_collectives_of_several_groups() {
        let (page, writer) = claimed();
        assert!(writer.group("alone", 0, 1).is_none());
        let mut world = writer.group("world", 3, 300).unwrap();
        let mut half = writer.group("world/0.1", 1, 2).unwrap();
        assert_eq!(page.snapshot().collectives, []);
        world.begin("all_reduce", 0);
        half.begin("all_gather", 8);
        world.end(&Ok(()));
        world.begin("reduce_scatter", 1);
        let told = || -> Vec<String> {
            let told = page.snapshot().collectives.into_iter().map(|it| {
                let (progress, missing) = (it.progress, it.missing);
                format!("{} {}/{}: {} {} {progress:?} {missing:?}", it.group, it.rank, it.size, it.name, it.sequence)
            });
            told.collect()
        };
        assert_eq!(told(), ["world 3/300: reduce_scatter 1 Running []", "world/0.1 1/2: all_gather 8 Running []"]);
        let late = Error::Timeout {
            rank: 3,
            group: "world".into(),
            what: "reduce_scatter".into(),
            missing: vec![0, 64, 255, 299],
            hosts: crate::HostNames::default(),
            seconds: 1.,
        };
        world.end(&Err::<(), _>(late));
        half.end(&Ok(()));
        drop((world, half));
        assert_eq!(told(), ["world 3/300: reduce_scatter 1 TimedOut [0, 64, 255]"]);
        // The lock of a dropped group is reused. A group beyond the maximum is not recorded.
        let groups: Vec<_> = (0..MAX_GROUPS).map(|_| writer.group("g", 0, 2)).collect();
        assert!(groups.iter().filter(|group| group.is_some()).count() == MAX_GROUPS - 1 && groups[15].is_none());
    }
}
