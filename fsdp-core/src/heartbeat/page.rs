//! The layout of a status page, and its reader.

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

/// Environment variable with the path of a rank's status page.
pub const VARIABLE: &str = "FSDP_HEARTBEAT";

/// First word of a page with this layout.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"fsdphb\0\x01");

/// Word with the id of the process that writes the page.
pub(super) const PID: usize = 1;
/// Word with the start time of that process, in clock ticks.
pub(super) const START_TIME: usize = 2;
/// Word with the time of the last heartbeat; 0 before the first.
pub(super) const HEARTBEAT: usize = 3;

/// First word that the rank writes.
pub(super) const STEP: usize = 4;
const SPAN: usize = 8;
const GROUPS: usize = 24;
/// First word that the launcher writes: an id of the world, then one bit for each rank that has exited.
pub(super) const WORLD: usize = WORDS - 5;
/// Maximum number of process groups on a page.
pub(super) const MAX_GROUPS: usize = 16;

/// Number and time of a step.
pub(super) type StepLock<'a> = Seqlock<'a, 2>;
/// Start time, length of the text, text.
pub(super) type SpanLock<'a> = Seqlock<'a, { 2 + SPAN_TEXT }>;
/// As `CollectiveRecorder` writes it.
pub(super) type GroupLock<'a> = Seqlock<'a, GROUP_WORDS>;

/// Words of a span's text.
pub(super) const SPAN_TEXT: usize = 13;
/// Words of a group's name, of a collective's name, and of the set of missing ranks.
pub(super) const GROUP_TEXT: usize = 8;
pub(super) const NAME_TEXT: usize = 4;
pub(super) const MISSING: usize = 4;
/// Words of a group's lock before its texts.
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

/// Returns nanoseconds of the monotonic clock, which all processes of a host share and which stops during suspend.
pub(super) fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Progress of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Progress {
    /// The rank has entered the collective.
    Running = 1,
    /// The collective has succeeded.
    Done,
    /// The collective ended because ranks did not arrive in time.
    TimedOut,
    /// The collective failed for another reason.
    Failed,
}

impl Progress {
    pub(super) fn word(self) -> u64 {
        self as u64
    }

    fn from_word(word: u64) -> Option<Self> {
        [Progress::Running, Progress::Done, Progress::TimedOut, Progress::Failed]
            .into_iter()
            .find(|it| it.word() == word)
    }
}

/// The last collective that a rank began in one of its process groups.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Collective {
    /// Name of the group, the same on all its ranks.
    pub group: String,
    /// Rank of this process in the group.
    pub rank: usize,
    /// Number of ranks in the group.
    pub size: usize,
    /// Name of the collective, such as `all_gather`.
    pub name: String,
    /// Sequence number in the group, from 0.
    pub sequence: u64,
    /// Progress of the collective.
    pub progress: Progress,
    /// Time since the progress changed.
    pub age: Age,
    /// Ranks of the group that did not arrive, if the collective timed out. Ranks above 255 are left out.
    pub missing: Vec<usize>,
    /// Whether the rank was stopped or killed during the write: some fields may belong to the previous collective.
    pub torn: bool,
}

/// Activity of a rank's main thread.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Activity {
    /// Description, such as `forward layers.3`.
    pub what: String,
    /// Time since it began.
    pub age: Age,
    /// Whether the rank was stopped or killed during the write: the text may mix two descriptions.
    pub torn: bool,
}

/// A completed training step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StepDone {
    /// Step number.
    pub number: u64,
    /// Time since the step was done.
    pub age: Age,
    /// Whether the rank was stopped or killed during the write.
    pub torn: bool,
}

/// Contents of a status page at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// Id of the process that writes the page; `None` before a process has claimed it.
    pub pid: Option<u32>,
    /// Start time of that process, as field 22 of `/proc/PID/stat`. It detects a reused pid.
    pub pid_started: Option<u64>,
    /// Time since the last heartbeat; the interval is half a second. `None` before the first.
    pub beat: Option<Age>,
    /// Last completed training step.
    pub step: Option<StepDone>,
    /// Activity of the main thread.
    pub doing: Option<Activity>,
    /// Last collective of each process group with several ranks.
    pub collectives: Vec<Collective>,
}

/// A status page: anonymous shared memory that one rank writes, and that other processes can read at any time.
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
    /// Creates an empty page. The page lives as long as a process has it open. Child processes do not inherit the
    /// descriptor.
    ///
    /// # Errors
    /// The system's.
    pub fn new() -> io::Result<Self> {
        let file = Page::file()?;
        let words = Page::map(&file)?;
        words[0].store(MAGIC, Ordering::Release);
        Ok(StatusPage { file, words })
    }

    /// Returns the path by which processes of this user open the page while this value lives: the value of
    /// [`VARIABLE`](super::VARIABLE).
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// Reads the page.
    pub fn snapshot(&self) -> Snapshot {
        snapshot(&*self.words)
    }
}

/// Reads the page of another process, at a path from [`StatusPage::path`].
///
/// # Errors
/// When the path is not a status page, or this process may not open it.
pub fn read(path: impl AsRef<Path>) -> io::Result<Snapshot> {
    Ok(snapshot(&*open_page(path.as_ref())?))
}

/// Maps a status page.
pub(super) fn open_page(path: &Path) -> io::Result<Page> {
    let page = Page::open(path)?;
    match page[0].load(Ordering::Acquire) {
        MAGIC => Ok(page),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a status page of this version")),
    }
}

/// Parses a page. Any words yield a snapshot.
fn snapshot(page: &[AtomicU64]) -> Snapshot {
    let load = |index: usize| Some(page[index].load(Ordering::Acquire)).filter(|&word| word != 0);
    let beat = load(HEARTBEAT);
    // The clock is read after the locks, so that no age is negative.
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

/// Maximum number of ranks whose exit is recorded.
const MAX_RANKS: usize = 64 * (WORDS - WORLD - 1);

/// Returns an id of the world of `env`. A rank may start a launcher of its own, whose ranks belong to another world.
fn world_id(env: &RankEnv) -> u64 {
    let mut hash = Hash::default();
    hash.bytes(env.run_id.as_bytes());
    hash.number(u64::from(env.attempt));
    hash.number(env.world_size as u64);
    hash.value()
}

/// Returns the word and the bit of a rank.
fn exit_bit(rank: usize) -> (usize, u64) {
    (WORLD + 1 + rank / 64, 1 << (rank % 64))
}

impl StatusPage {
    /// Records for this rank that another rank of its world has exited with code 0. A rank that waits for the exited
    /// rank to join then gives up. Only `rank`, `world_size`, `run_id` and `attempt` of `exited` are used. Ranks from
    /// 256 on are ignored.
    pub fn record_exit(&self, exited: &RankEnv) {
        if exited.rank < MAX_RANKS {
            let (word, bit) = exit_bit(exited.rank);
            self.words[WORLD].store(world_id(exited), Ordering::Release);
            self.words[word].fetch_or(bit, Ordering::AcqRel);
        }
    }
}

/// The exits of other ranks that the launcher has recorded for this rank.
pub(crate) struct PeerExits {
    /// The rank's status page; `None` under another launcher.
    page: Option<Page>,
    world: u64,
}

impl PeerExits {
    /// Opens the status page of this process, the rank that `env` describes.
    pub(crate) fn open(env: &RankEnv) -> Self {
        let page = std::env::var_os(VARIABLE).and_then(|path| open_page(Path::new(&path)).ok());
        PeerExits { page, world: world_id(env) }
    }

    /// Returns whether a rank has exited with code 0.
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
        // A process that claims its own page again clears only the words that the rank writes.
        for _ in 0..2 {
            crate::heartbeat::writer::Writer::claim(Path::new(&page.path()), 7).unwrap();
        }
        assert_eq!(exited(&env("r", 7)), [0, 64, 255]);
        assert_eq!(page.snapshot().collectives, []);
    }
}
