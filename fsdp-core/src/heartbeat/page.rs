//! The layout of a status page, and reading it.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::{
    Age,
    memory::{Page, Seqlock, WORDS, unpack},
};
use crate::{RankEnv, hash::Hash};

/// The environment variable that names the page of a rank.
pub const VARIABLE: &str = "FSDP_HEARTBEAT";

/// What the first word of a page of this layout holds.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"fsdphb\0\x01");

/// The process that writes the page.
pub(super) const PID: usize = 1;
/// When that process was started, in the kernel's ticks.
pub(super) const START_TIME: usize = 2;
/// The time of the last beat, 0 before the first.
pub(super) const HEARTBEAT: usize = 3;

/// Where what is told begins.
pub(super) const STEP: usize = 4;
const SPAN: usize = 8;
const GROUPS: usize = 24;
/// What the launcher tells: a number for the world, and in the words up to the end a bit for each rank that has ended.
pub(super) const WORLD: usize = WORDS - 5;
/// Process groups that a page has room for.
pub(super) const MAX_GROUPS: usize = 16;

/// A step's number and time.
pub(super) type StepLock<'a> = Seqlock<'a, 2>;
/// Since when, length of the text, the text.
pub(super) type SpanLock<'a> = Seqlock<'a, { 2 + SPAN_TEXT }>;
/// As [`group_words`] puts them.
pub(super) type GroupLock<'a> = Seqlock<'a, GROUP_WORDS>;

/// Words of a span's text.
pub(super) const SPAN_TEXT: usize = 13;
/// Words of a group's name, of a collective's, and of the ranks that are missing.
pub(super) const GROUP_TEXT: usize = 8;
pub(super) const NAME_TEXT: usize = 4;
pub(super) const MISSING: usize = 4;
/// Words of a group's entry before its texts.
pub(super) const GROUP_HEAD: usize = 7 + MISSING;
pub(super) const GROUP_WORDS: usize = GROUP_HEAD + GROUP_TEXT + NAME_TEXT;

const _: () = assert!(STEP + StepLock::LEN <= SPAN && SPAN + SpanLock::LEN <= GROUPS);
const _: () = assert!(GROUPS + MAX_GROUPS * GroupLock::LEN <= WORLD);

pub(super) fn step_lock(page: &[AtomicU64]) -> StepLock<'_> {
    Seqlock::at(page, STEP)
}

pub(super) fn span_lock(page: &[AtomicU64]) -> SpanLock<'_> {
    Seqlock::at(page, SPAN)
}

pub(super) fn group_lock(page: &[AtomicU64], index: usize) -> GroupLock<'_> {
    Seqlock::at(page, GROUPS + index * GroupLock::LEN)
}

/// Nanoseconds of a clock that all processes of a host share and that does not run while the host sleeps.
pub(super) fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// What became of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Progress {
    /// The rank has arrived and is not done.
    Running,
    /// It has succeeded.
    Done,
    /// It ended because ranks did not arrive in time.
    TimedOut,
    /// It failed in another way.
    Failed,
}

impl Progress {
    pub(super) fn word(self) -> u64 {
        match self {
            Progress::Running => 1,
            Progress::Done => 2,
            Progress::TimedOut => 3,
            Progress::Failed => 4,
        }
    }

    fn from_word(word: u64) -> Option<Self> {
        [Progress::Running, Progress::Done, Progress::TimedOut, Progress::Failed]
            .into_iter()
            .find(|it| it.word() == word)
    }
}

/// The last collective that a rank has begun in one of its process groups.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Collective {
    /// The group's name, the same on all its ranks.
    pub group: String,
    /// This rank's rank in the group.
    pub rank: usize,
    /// The number of its ranks.
    pub size: usize,
    /// The collective's name, such as `all_gather`.
    pub name: String,
    /// Its position in the group's order, from 0.
    pub sequence: u64,
    /// What became of it.
    pub progress: Progress,
    /// How long that is so.
    pub age: Age,
    /// Ranks of the group that did not arrive, of one that timed out; those above 255 are not told.
    pub missing: Vec<usize>,
    /// The rank was stopped or killed while it wrote this: parts may be of the collective before.
    pub torn: bool,
}

/// What a rank's main thread does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Activity {
    /// What, such as `forward layers.3`.
    pub what: String,
    /// For how long.
    pub age: Age,
    /// The rank was stopped or killed while it wrote this: the text may be a mixture.
    pub torn: bool,
}

/// A training step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StepDone {
    /// Its number.
    pub number: u64,
    /// How long ago it was done.
    pub age: Age,
    /// The rank was stopped or killed while it wrote this.
    pub torn: bool,
}

/// What a page says of its rank at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// The process that writes the page; `None` if none has begun to.
    pub pid: Option<u32>,
    /// When that process was started, as in field 22 of `/proc/PID/stat`: another process may have its pid by now.
    pub pid_started: Option<u64>,
    /// How long ago its heart beat; it does every half second. `None` if it has not begun to.
    pub beat: Option<Age>,
    /// The last training step that was done.
    pub step: Option<StepDone>,
    /// What the main thread does.
    pub doing: Option<Activity>,
    /// The last collective of each process group with several ranks.
    pub collectives: Vec<Collective>,
}

/// A page: a page of memory without a name, on which one rank says how it is and which others may read at any time,
/// whatever state the rank is in.
///
/// ```
/// use fsdp_core::heartbeat::{StatusPage, VARIABLE};
/// let page = StatusPage::new()?;
/// let mut rank = std::process::Command::new("true");
/// rank.env(VARIABLE, page.path());
/// rank.status()?;
/// assert_eq!(page.snapshot().pid, None); // `true` does not write a status page
/// # Ok::<_, std::io::Error>(())
/// ```
pub struct StatusPage {
    file: OwnedFd,
    words: Page,
}

impl StatusPage {
    /// A new page. It lives as long as any process has it open, and programs that this process starts do not inherit
    /// it.
    ///
    /// # Errors
    /// The system's.
    pub fn new() -> io::Result<Self> {
        let file = Page::file()?;
        let words = Page::map(&file)?;
        words[0].store(MAGIC, Ordering::Release);
        Ok(StatusPage { file, words })
    }

    /// Where other processes of this user find the page, for as long as this one lives and has it: the value of
    /// [`VARIABLE`](super::VARIABLE).
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// What the page says.
    pub fn snapshot(&self) -> Snapshot {
        snapshot(&*self.words)
    }
}

/// Reads the page of another process, at a path from [`StatusPage::path`].
///
/// # Errors
/// When the path names no page, or not one that this process may read.
pub fn read(path: impl AsRef<Path>) -> io::Result<Snapshot> {
    Ok(snapshot(&*open_page(path.as_ref())?))
}

/// The page of a page.
pub(super) fn open_page(path: &Path) -> io::Result<Page> {
    let page = Page::open(path)?;
    match page[0].load(Ordering::Acquire) {
        MAGIC => Ok(page),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a status page of this version")),
    }
}

/// Whatever the words are, the answer is something.
fn snapshot(page: &[AtomicU64]) -> Snapshot {
    let load = |index: usize| Some(page[index].load(Ordering::Acquire)).filter(|&word| word != 0);
    let beat = load(HEARTBEAT);
    // Before the clock is read, so that nothing is of the future.
    let (step, span) = (step_lock(page).read(), span_lock(page).read());
    let groups: Vec<_> = (0..MAX_GROUPS).map(|index| group_lock(page, index).read()).collect();
    let now = now();
    let age = |since: u64| Age(Duration::from_nanos(now.saturating_sub(since)));

    let [number, when] = step.words;
    let step = (when != 0).then(|| StepDone { number, age: age(when), torn: step.torn });
    let [since, len, text @ ..] = &span.words;
    let doing = (*len != 0).then(|| Activity { what: unpack(text, *len), age: age(*since), torn: span.torn });
    let collectives = groups.iter().filter_map(|entry| {
        let [since, sequence, progress, rank, size, group_len, name_len, rest @ ..] = &entry.words;
        let (missing, texts) = rest.split_at(MISSING);
        let (group, name) = texts.split_at(GROUP_TEXT);
        let is_missing = |rank: &usize| missing[rank / 64] >> (rank % 64) & 1 == 1;
        Some(Collective {
            progress: Progress::from_word(*progress)?,
            group: unpack(group, *group_len),
            rank: *rank as usize,
            size: *size as usize,
            name: unpack(name, *name_len),
            sequence: *sequence,
            age: age(*since),
            missing: (0..64 * MISSING).filter(is_missing).collect(),
            torn: entry.torn,
        })
    });
    Snapshot {
        pid: load(PID).map(|pid| pid as u32),
        pid_started: load(START_TIME),
        beat: beat.map(age),
        step,
        doing,
        collectives: collectives.collect(),
    }
}

/// Ranks that there is room for.
const MAX_RANKS: usize = 64 * (WORDS - WORLD - 1);

/// A number for the world that `env` is of: a rank may have started a launcher of its own, whose ranks are others.
fn world_id(env: &RankEnv) -> u64 {
    let mut hash = Hash::default();
    hash.bytes(env.run_id.as_bytes());
    hash.number(u64::from(env.attempt));
    hash.number(env.world_size as u64);
    hash.value()
}

/// The word and the bit of a rank.
fn exit_bit(rank: usize) -> (usize, u64) {
    (WORLD + 1 + rank / 64, 1 << (rank % 64))
}

impl StatusPage {
    /// Tells the rank that another of its world has ended with exit code 0: if it still waits to meet that one, it
    /// gives up. Of `ended`, the other's environment, `rank`, `world_size`, `run_id` and `attempt` count. Ranks from
    /// 256 on are not told of.
    pub fn record_exit(&self, exited: &RankEnv) {
        if exited.rank < MAX_RANKS {
            let (word, bit) = exit_bit(exited.rank);
            self.words[WORLD].store(world_id(exited), Ordering::Release);
            self.words[word].fetch_or(bit, Ordering::AcqRel);
        }
    }
}

/// What a rank's launcher tells it of the others.
pub(crate) struct PeerExits {
    /// The rank's page, whichever of its processes writes there; none where the launcher is another.
    page: Option<Page>,
    world: u64,
}

impl PeerExits {
    /// Those of the rank that `env` describes, this process.
    pub(crate) fn open(env: &RankEnv) -> Self {
        let page = std::env::var_os(VARIABLE).and_then(|path| open_page(Path::new(&path)).ok());
        PeerExits { page, world: world_id(env) }
    }

    /// Whether that rank has ended with exit code 0.
    pub(crate) fn has_exited(&self, rank: usize) -> bool {
        let Some(page) = self.page.as_ref().filter(|_| rank < MAX_RANKS) else { return false };
        let (word, bit) = exit_bit(rank);
        page[word].load(Ordering::Acquire) & bit != 0 && page[WORLD].load(Ordering::Acquire) == self.world
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_new_page_is_empty() {
        assert_eq!(StatusPage::new().unwrap().snapshot(), Snapshot::default());
    }

    #[test]
    fn opens_by_path_and_rejects_other_files() {
        let page = StatusPage::new().unwrap();
        assert_eq!(read(page.path()).unwrap(), Snapshot::default());
        page.words[0].store(MAGIC + 1, Ordering::Release);
        assert!(read(page.path()).is_err() && read("/dev/zero").is_err() && read("").is_err());
    }

    proptest! {
        #[test]
        fn any_words_parse(words in proptest::collection::vec(any::<u64>(), WORDS)) {
            let page: Vec<AtomicU64> = words.into_iter().map(AtomicU64::new).collect();
            let text = serde_json::to_string(&snapshot(&page)).unwrap();
            serde_json::from_str::<Snapshot>(&text).unwrap();
            prop_assert!(!text.chars().any(char::is_control));
        }
    }

    #[test]
    fn reports_exits_of_the_same_world_only() {
        let env = |run_id: &str, rank| RankEnv { rank, world_size: 300, run_id: run_id.into(), ..RankEnv::single() };
        let page = StatusPage::new().unwrap();
        let peers = |env: &RankEnv| PeerExits { page: open_page(Path::new(&page.path())).ok(), world: world_id(env) };
        assert!((0..300).all(|rank| !peers(&env("r", 0)).has_exited(rank)));
        for rank in [0, 64, 255, 299, usize::MAX] {
            page.record_exit(&env("r", rank));
        }
        let exited = |env: &RankEnv| (0..300).filter(|&rank| peers(env).has_exited(rank)).collect::<Vec<_>>();
        assert_eq!(exited(&env("r", 7)), [0, 64, 255]);
        for other in [env("other", 0), RankEnv { attempt: 1, ..env("r", 0) }, RankEnv { world_size: 2, ..env("r", 0) }]
        {
            assert!(exited(&other).is_empty(), "{other:?}");
        }
        assert!(!PeerExits { page: None, world: 0 }.has_exited(0));
        // A process that takes over its own page clears what it wrote itself.
        for _ in 0..2 {
            crate::heartbeat::writer::Writer::claim(Path::new(&page.path()), 7).unwrap();
        }
        assert_eq!(exited(&env("r", 7)), [0, 64, 255]);
        assert_eq!(page.snapshot().collectives, []);
    }
}
