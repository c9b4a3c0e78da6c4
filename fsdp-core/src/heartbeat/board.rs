//! What lies where on a board, and reading it.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::{
    age::Age,
    entry::{Entry, unpack},
    memory::{Page, WORDS},
};

/// The environment variable that names the board of a rank.
pub const VARIABLE: &str = "FSDP_HEARTBEAT";

/// What the first word of a board of this layout holds.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"fsdphb\0\x01");

/// The process that writes the board.
pub(super) const PID: usize = 1;
/// When that process was started, in the kernel's ticks.
pub(super) const BORN: usize = 2;
/// The time of the last beat, 0 before the first.
pub(super) const BEAT: usize = 3;

/// Where what is told begins.
pub(super) const STEP: usize = 4;
const SPAN: usize = 8;
const GROUPS: usize = 24;
/// What the launcher tells: a number for the world, and in the words up to the end a bit for each rank that has ended.
pub(super) const WORLD: usize = WORDS - 5;
/// Process groups that a board has room for.
pub(super) const MOST_GROUPS: usize = 16;

/// A step's number and time.
pub(super) type StepEntry<'a> = Entry<'a, 2>;
/// Since when, length of the text, the text.
pub(super) type SpanEntry<'a> = Entry<'a, { 2 + SPAN_TEXT }>;
/// As [`group_words`] puts them.
pub(super) type GroupEntry<'a> = Entry<'a, GROUP_WORDS>;

/// Words of a span's text.
pub(super) const SPAN_TEXT: usize = 13;
/// Words of a group's name, of a collective's, and of the ranks that are missing.
pub(super) const GROUP_TEXT: usize = 8;
pub(super) const NAME_TEXT: usize = 4;
pub(super) const MISSING: usize = 4;
/// Words of a group's entry before its texts.
pub(super) const GROUP_HEAD: usize = 7 + MISSING;
pub(super) const GROUP_WORDS: usize = GROUP_HEAD + GROUP_TEXT + NAME_TEXT;

const _: () = assert!(STEP + StepEntry::LEN <= SPAN && SPAN + SpanEntry::LEN <= GROUPS);
const _: () = assert!(GROUPS + MOST_GROUPS * GroupEntry::LEN <= WORLD);

pub(super) fn step_entry(page: &[AtomicU64]) -> StepEntry<'_> {
    Entry::at(page, STEP)
}

pub(super) fn span_entry(page: &[AtomicU64]) -> SpanEntry<'_> {
    Entry::at(page, SPAN)
}

pub(super) fn group_entry(page: &[AtomicU64], index: usize) -> GroupEntry<'_> {
    Entry::at(page, GROUPS + index * GroupEntry::LEN)
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

    fn of(word: u64) -> Option<Self> {
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
pub struct Doing {
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

/// What a board says of its rank at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// The process that writes the board; `None` if none has begun to.
    pub pid: Option<u32>,
    /// When that process was started, as in field 22 of `/proc/PID/stat`: another process may have its pid by now.
    pub pid_started: Option<u64>,
    /// How long ago its heart beat; it does every half second. `None` if it has not begun to.
    pub beat: Option<Age>,
    /// The last training step that was done.
    pub step: Option<StepDone>,
    /// What the main thread does.
    pub doing: Option<Doing>,
    /// The last collective of each process group with several ranks.
    pub collectives: Vec<Collective>,
}

/// A board: a page of memory without a name, on which one rank says how it is and which others may read at any time,
/// whatever state the rank is in.
///
/// ```
/// use fsdp_core::heartbeat::{Board, VARIABLE};
/// let board = Board::new()?;
/// let mut rank = std::process::Command::new("true");
/// rank.env(VARIABLE, board.path());
/// rank.status()?;
/// assert_eq!(board.snapshot().pid, None); // that program knows nothing of boards
/// # Ok::<_, std::io::Error>(())
/// ```
pub struct Board {
    file: OwnedFd,
    pub(super) page: Page,
}

impl Board {
    /// A new board. It lives as long as any process has it open, and programs that this process starts do not inherit
    /// it.
    ///
    /// # Errors
    /// The system's.
    pub fn new() -> io::Result<Self> {
        let file = Page::file()?;
        let page = Page::map(&file)?;
        page[0].store(MAGIC, Ordering::Release);
        Ok(Board { file, page })
    }

    /// Where other processes of this user find the board, for as long as this one lives and has it: the value of
    /// [`VARIABLE`](super::VARIABLE).
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// What the board says.
    pub fn snapshot(&self) -> Snapshot {
        snapshot(&*self.page)
    }
}

/// Reads the board of another process, at a path from [`Board::path`].
///
/// # Errors
/// When the path names no board, or not one that this process may read.
pub fn read(path: impl AsRef<Path>) -> io::Result<Snapshot> {
    Ok(snapshot(&*open(path.as_ref())?))
}

/// The page of a board.
pub(super) fn open(path: &Path) -> io::Result<Page> {
    let page = Page::open(path)?;
    match page[0].load(Ordering::Acquire) {
        MAGIC => Ok(page),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "it is no board of this version")),
    }
}

/// Whatever the words are, the answer is something.
fn snapshot(page: &[AtomicU64]) -> Snapshot {
    let load = |index: usize| Some(page[index].load(Ordering::Acquire)).filter(|&word| word != 0);
    let beat = load(BEAT);
    // Before the clock is read, so that nothing is of the future.
    let (step, span) = (step_entry(page).read(), span_entry(page).read());
    let groups: Vec<_> = (0..MOST_GROUPS).map(|index| group_entry(page, index).read()).collect();
    let now = now();
    let age = |since: u64| Age(Duration::from_nanos(now.saturating_sub(since)));

    let [number, when] = step.words;
    let step = (when != 0).then(|| StepDone { number, age: age(when), torn: step.torn });
    let [since, len, text @ ..] = &span.words;
    let doing = (*len != 0).then(|| Doing { what: unpack(text, *len), age: age(*since), torn: span.torn });
    let collectives = groups.iter().filter_map(|seen| {
        let [since, sequence, progress, rank, size, group_len, name_len, rest @ ..] = &seen.words;
        let (missing, texts) = rest.split_at(MISSING);
        let (group, name) = texts.split_at(GROUP_TEXT);
        let is_missing = |rank: &usize| missing[rank / 64] >> (rank % 64) & 1 == 1;
        Some(Collective {
            progress: Progress::of(*progress)?,
            group: unpack(group, *group_len),
            rank: *rank as usize,
            size: *size as usize,
            name: unpack(name, *name_len),
            sequence: *sequence,
            age: age(*since),
            missing: (0..64 * MISSING).filter(is_missing).collect(),
            torn: seen.torn,
        })
    });
    Snapshot {
        pid: load(PID).map(|pid| pid as u32),
        pid_started: load(BORN),
        beat: beat.map(age),
        step,
        doing,
        collectives: collectives.collect(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_fresh_board_says_nothing() {
        assert_eq!(Board::new().unwrap().snapshot(), Snapshot::default());
    }

    #[test]
    fn a_board_is_found_by_its_path_and_nothing_else_is_one() {
        let board = Board::new().unwrap();
        assert_eq!(read(board.path()).unwrap(), Snapshot::default());
        board.page[0].store(MAGIC + 1, Ordering::Release);
        assert!(read(board.path()).is_err() && read("/dev/zero").is_err() && read("").is_err());
    }

    proptest! {
        #[test]
        fn any_words_can_be_read(words in proptest::collection::vec(any::<u64>(), WORDS)) {
            let page: Vec<AtomicU64> = words.into_iter().map(AtomicU64::new).collect();
            let text = serde_json::to_string(&snapshot(&page)).unwrap();
            serde_json::from_str::<Snapshot>(&text).unwrap();
            prop_assert!(!text.chars().any(char::is_control));
        }
    }
}
