//! The directories that a run reads from and writes to. Rank 0 looks and decides before the first step: all ranks then
//! use the same, and what would be in the way hours later shows at once.
//! Who looks at checkpoints: rank 0 for all, or, with --checkpoint-local, each host in its own directory.
//! Checkpoints that `--resume auto` can't use because they are damaged. They are set aside, never deleted, and the run
//! goes on from an older one.
//! Whether what a run is going to write can be written, found out before its first step by writing.

use std::io::ErrorKind;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use fsdp_candle::{ReduceOp, World};
use fsdp_ckpt::{Checkpoint, Error, Format, HostDirs, Result, Survey, TensorSource};
use fsdp_examples::writable::{try_directory, try_file, try_file_and_directory};
use serde::{Deserialize, Serialize};

use crate::agreement::{RankResult, broadcast_result, worst_result};
use crate::args::Args;
use crate::checkpoint::{Position, step_of};
use crate::export::may_replace;
use crate::flag_types::{Resume, is_url, on_this_host};
use crate::trace::rank_file;

/// Where runs without --checkpoint-dir keep their checkpoints.
pub(crate) const ROOT: &str = "checkpoints";

/// Where a run keeps its checkpoints, and the one that it goes on from.
pub(crate) struct RunDirs {
    pub(crate) checkpoints: PathBuf,
    pub(crate) hosts: Hosts,
    pub(crate) resume_from: Option<PathBuf>,
    /// Whether what --export-hf holds is an earlier export of this run.
    pub(crate) replaces_export: bool,
    _claim: Option<NewRunDir>,
}

/// What rank 0 tells the others; what is not here is on everybody's command line.
#[derive(Serialize, Deserialize)]
struct Decision {
    /// The name of the checkpoint in --checkpoint-dir that `--resume auto` goes on from.
    newest: Option<String>,
    /// The number of this run's own directory, where there is no --checkpoint-dir.
    run: Option<u32>,
    replaces_export: bool,
}

/// What rank 0 has found.
struct Found {
    newest: Option<String>,
    replaces_export: bool,
}

impl RunDirs {
    /// Fails on every rank, with rank 0's words, where something is in the way. Collective.
    pub(crate) fn new(args: &Args, hosts: Hosts, world: &World) -> anyhow::Result<Self> {
        let mut claim = None;
        let decision = hosts.ask(world, || {
            let Found { newest, replaces_export } = inspect(args, &hosts, world)?;
            let run = match args.checkpoint_dir {
                Some(_) => None,
                None => Some(claim.insert(NewRunDir::new(Path::new(ROOT))?).number),
            };
            Ok(Decision { newest, run, replaces_export })
        })?;
        let checkpoints = match (&args.checkpoint_dir, decision.run) {
            (Some(dir), _) => dir.clone(),
            (None, Some(number)) => Path::new(ROOT).join(run_name(number)),
            // The ranks have compared their arguments: rank 0 has no --checkpoint-dir either.
            (None, None) => bail!("rank 0 chose no directory for this run: please report this"),
        };
        let resume_from = match &args.resume {
            Resume::None => None,
            Resume::Auto => decision.newest.map(|name| checkpoints.join(name)),
            Resume::Path(path) => Some(path.clone()),
        };
        Ok(RunDirs { checkpoints, hosts, resume_from, replaces_export: decision.replaces_export, _claim: claim })
    }

    /// Sets the checkpoint aside that `--resume auto` chose and that turned out to be damaged, for which `why` has the
    /// words; chooses the next older one. Collective.
    pub(crate) fn fall_back(&mut self, args: &Args, world: &World, why: &str) -> anyhow::Result<()> {
        let Some(damaged) = &self.resume_from else { bail!("there is no checkpoint to set aside") };
        let newest = self.hosts.ask(world, || {
            quarantine(&self.hosts, damaged, why)?;
            Ok(inspect(args, &self.hosts, world)?.newest)
        })?;
        self.resume_from = newest.map(|name| self.checkpoints.join(name));
        Ok(())
    }
}

pub(crate) fn same_file(a: &Path, b: &Path) -> bool {
    match (on_this_host(a), on_this_host(b)) {
        (Some(a), Some(b)) => matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b),
        _ => a == b,
    }
}

/// Checks what the run is to read and to write; finds the checkpoint that `--resume auto` goes on from, if any. All
/// ranks together where each host has its own directory: what one of them finds alone is agreed upon.
fn inspect(args: &Args, hosts: &Hosts, world: &World) -> anyhow::Result<Found> {
    let Survey { newest, skipped, .. } = match (&args.resume, &args.checkpoint_dir) {
        (Resume::Auto, None) => bail!("--resume auto looks into --checkpoint-dir: pass it"),
        (Resume::Path(_), _) | (Resume::None, None) => Survey::default(),
        (Resume::None, Some(dir)) => hosts.survey(dir)?,
        (Resume::Auto, Some(dir)) => {
            let found = hosts.survey(dir)?;
            if world.rank() == 0 {
                found.warn_of_links();
            }
            check_something_is_left(dir, &found)?;
            check_no_newer_is_whole(&found)?;
            found
        }
    };
    let resume_from = match (&args.resume, &newest) {
        (Resume::Path(path), _) => Some(path),
        (Resume::None, Some(old)) => bail!(
            "{} is a checkpoint of an earlier run: pass --resume auto to go on from it, or another --checkpoint-dir",
            old.display()
        ),
        (_, newest) => newest.as_ref(),
    };
    let start = match resume_from {
        Some(path) => {
            let done = hosts
                .open(path, world)
                .map_err(anyhow::Error::from)
                .and_then(|source| hosts.agreed(world, Position::read(&*source, args.sequences_per_step(world)?)));
            match done {
                Err(error) if args.resume == Resume::Auto && is_damage(&error) => {
                    quarantine(hosts, path, &format!("{error:#}"))?;
                    return inspect(args, hosts, world);
                }
                done => done.with_context(|| format!("can't resume from {}", path.display()))?,
            }
        }
        None => Position::default(),
    };
    let own = args.checkpoint_dir.as_deref().filter(|_| args.resume == Resume::Auto && newest.is_some());
    let replaces_export = match &args.export_hf {
        Some(dir) => hosts.once(world, || may_replace(dir, own, args.steps.max(start.step)))?,
        None => false,
    };
    if let Some(dir) = &args.checkpoint_dir {
        let from = resume_from.map(PathBuf::as_path);
        check_save_targets(dir, start.step, args, skipped, from, hosts, world)?;
    }
    // `survey` reads steps off names, so they are text.
    let newest = newest.as_ref().and_then(|path| Some(path.file_name()?.to_str()?.to_owned()));
    Ok(Found { newest, replaces_export })
}

/// Nothing may have the name of a checkpoint that the run is going to save; the one that it goes on from is not saved
/// again. What `--resume auto` has `skipped` because it is damaged is set aside if it has. What another program saved
/// is not ours to move.
fn check_save_targets(
    dir: &Path,
    start: usize,
    args: &Args,
    skipped: Vec<(PathBuf, fsdp_ckpt::Error)>,
    resume_from: Option<&Path>,
    hosts: &Hosts,
    world: &World,
) -> anyhow::Result<()> {
    let last = args.steps.max(start);
    let saves = |step: usize| {
        step == last || (args.save_every > 0 && start < step && step < last && step.is_multiple_of(args.save_every))
    };
    let saves_as = |path: &Path| step_of(path.file_name()?.to_str()?).filter(|&step| saves(step));
    let (mut aside, mut left) = (Vec::new(), Vec::new());
    for (path, error) in skipped {
        let is_in_the_way = args.resume == Resume::Auto && saves_as(&path).is_some() && error.is_damage();
        let is_ours = !hosts.any(world, is_of_another_program(&path))?;
        if is_in_the_way && is_ours { &mut aside } else { &mut left }.push((path, error));
    }
    let look = || {
        let in_the_way = entries(dir)?
            .into_iter()
            .filter_map(|path| Some((saves_as(&path)?, path)))
            .filter(|(_, path)| !resume_from.is_some_and(|from| same_file(from, path)))
            .filter(|(_, path)| !aside.iter().any(|(aside, _)| same_file(aside, path)))
            .min();
        let Some((step, path)) = in_the_way else { return Ok(()) };
        let what = match Checkpoint::open(&path) {
            Ok(_) => "a checkpoint of an earlier run".to_owned(),
            Err(error) => format!("not a whole checkpoint ({})", error.with_causes()),
        };
        bail!(
            "{} is in the way of the checkpoint that this run saves at step {step}, and it is {what}: remove it, or \
                pass another --checkpoint-dir",
            path.display()
        );
    };
    hosts.agreed(world, look())?;
    for (path, error) in left.iter().filter(|_| world.rank() == 0) {
        tracing::warn!("skipping {}: {}", path.display(), error.with_causes());
    }
    for (path, error) in aside {
        quarantine(hosts, &path, &error.with_causes())?;
    }
    Ok(())
}

/// What is in a directory of checkpoints, but for saves to an object store that did not finish: they are in nobody's
/// way.
fn entries(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let Some(dir) = on_this_host(dir) else {
        let is_finished = |path: &PathBuf| !matches!(Checkpoint::open(path), Err(fsdp_ckpt::Error::Incomplete { .. }));
        return Ok(fsdp_ckpt::survey(dir)?.steps.into_iter().filter(is_finished).collect());
    };
    match std::fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        entries => {
            let entries = entries.with_context(|| format!("can't list {}", dir.display()))?;
            Ok(entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
        }
    }
}

/// A new directory that no other run uses. Dropped while it is still empty, it is removed again.
struct NewRunDir {
    number: u32,
    /// The directories that were made for it, the inner one first.
    made: Vec<PathBuf>,
}

impl NewRunDir {
    /// Makes the one with the number after the highest in `root`.
    fn new(root: &Path) -> anyhow::Result<Self> {
        let made_root = !root.exists();
        let numbers = std::fs::read_dir(root).into_iter().flatten();
        let number_of = |name: &str| name.strip_prefix("run-")?.parse::<u32>().ok();
        let highest = numbers.filter_map(|entry| number_of(entry.ok()?.file_name().to_str()?)).max();
        let mut number = highest.unwrap_or(0);
        loop {
            std::fs::create_dir_all(root).with_context(|| format!("can't create {}", root.display()))?;
            number = number.checked_add(1).with_context(|| {
                format!("{} is the last of its kind: pass --checkpoint-dir", root.join(run_name(number)).display())
            })?;
            let path = root.join(run_name(number));
            match std::fs::create_dir(&path) {
                Ok(()) => {
                    let made = std::iter::once(path).chain(made_root.then(|| root.to_owned())).collect();
                    return Ok(NewRunDir { number, made });
                }
                // Another run took it, or removed the root that was empty again.
                Err(error) if [ErrorKind::AlreadyExists, ErrorKind::NotFound].contains(&error.kind()) => {}
                Err(error) => return Err(error).with_context(|| format!("can't create {}", path.display())),
            }
        }
    }
}

impl Drop for NewRunDir {
    fn drop(&mut self) {
        for dir in &self.made {
            // Only what is empty can be removed like this.
            let _ = std::fs::remove_dir(dir);
        }
    }
}

fn run_name(number: u32) -> String {
    format!("run-{number:03}")
}

/// Where each host has its directory, the calls are collective, and their outcome is the same on every rank. Else they
/// are for the rank that makes them.
pub(crate) struct Hosts {
    name: Option<String>,
    dirs: Option<HostDirs>,
}

impl Hosts {
    /// Collective.
    pub(crate) fn of(args: &Args, world: &World) -> Result<Self> {
        if !args.checkpoint_local {
            return Ok(Hosts { name: None, dirs: None });
        }
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let dirs = HostDirs::new(world.group(), &name)?;
        Ok(Hosts { name: Some(name), dirs: Some(dirs) })
    }

    /// This host's name for [`fsdp_ckpt::SaveOptions`].
    pub(crate) fn name(&self) -> Option<String> {
        self.name.clone()
    }

    /// The answer that all ranks go by. Rank 0 looks for it, and tells the others; where each host has its directory,
    /// every rank calls `ask`, which is collective then and has the same outcome everywhere. Collective.
    pub(crate) fn ask<T>(&self, world: &World, ask: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T>
    where
        T: Serialize + for<'de> Deserialize<'de>,
    {
        match self.dirs {
            Some(_) => ask(),
            None => broadcast_result(world, 0, ask),
        }
    }

    /// What rank 0 answers. Where each host has its directory: collective.
    pub(crate) fn once<T>(&self, world: &World, ask: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T>
    where
        T: Serialize + for<'de> Deserialize<'de>,
    {
        match self.dirs {
            Some(_) => broadcast_result(world, 0, ask),
            None => ask(),
        }
    }

    /// The outcome of what this rank did by itself. Where each host has its directory: collective, and an error on
    /// every rank when one of them has any.
    pub(crate) fn agreed<T>(&self, world: &World, own: anyhow::Result<T>) -> anyhow::Result<T> {
        if self.dirs.is_none() {
            return own;
        }
        let finding = match &own {
            Ok(_) => RankResult::Passed,
            Err(error) => RankResult::Failed(format!("rank {}: {error:#}", world.rank())),
        };
        match worst_result(world, finding)? {
            RankResult::Passed => own,
            RankResult::Failed(why) | RankResult::Damaged(why) => Err(anyhow!(why)),
        }
    }

    /// Whether it is so here. Where each host has its directory: collective, and whether it is so on any rank.
    pub(crate) fn any(&self, world: &World, own: bool) -> anyhow::Result<bool> {
        match self.dirs {
            Some(_) => Ok(world.all_reduce(&[f64::from(u8::from(own))], ReduceOp::Max)?[0] > 0.),
            None => Ok(own),
        }
    }

    /// This rank's number among those that read the same files, and how many they are.
    pub(crate) fn readers(&self, world: &World) -> (usize, usize) {
        self.dirs.as_ref().map_or((world.rank(), world.size()), HostDirs::place)
    }

    pub(crate) fn check_writable(&self, dir: &Path, world: &World) -> Result<()> {
        match &self.dirs {
            Some(dirs) => dirs.check_writable(dir),
            None => fsdp_ckpt::check_writable(dir, world.group()),
        }
    }

    pub(crate) fn survey(&self, dir: &Path) -> Result<Survey> {
        self.dirs.as_ref().map_or_else(|| fsdp_ckpt::survey(dir), |dirs| dirs.survey(dir))
    }

    /// A checkpoint or model. One that is whole on every host need not be ours.
    pub(crate) fn open(&self, path: &Path, world: &World) -> Result<Box<dyn TensorSource>> {
        let Some(dirs) = &self.dirs else { return fsdp_ckpt::open(path) };
        let other = fsdp_ckpt::open(path).ok().filter(|source| source.format() != Format::Fsdp);
        let all_have = world.group().all_reduce_scalar(u32::from(other.is_some()), ReduceOp::Min);
        match other.filter(|_| all_have.as_ref().is_ok_and(|all| *all == 1)) {
            Some(source) => Ok(source),
            None => Ok(Box::new(all_have.map_err(Error::from).and_then(|_| dirs.open(path))?)),
        }
    }

    pub(crate) fn set_aside(&self, path: &Path) -> Result<Option<PathBuf>> {
        self.dirs.as_ref().map_or_else(|| fsdp_ckpt::set_aside(path), |dirs| dirs.set_aside(path))
    }

    /// Leaves `newest` and `keep - 1` others in `dir`, everywhere. Collective.
    pub(crate) fn keep_newest(
        &self,
        dir: &Path,
        keep: NonZeroUsize,
        newest: &Path,
        world: &World,
    ) -> Result<Vec<PathBuf>> {
        match &self.dirs {
            Some(dirs) => dirs.keep_newest(dir, keep, &[newest]),
            None if world.rank() == 0 => fsdp_ckpt::keep_newest(dir, keep, &[newest]),
            None => Ok(Vec::new()),
        }
    }
}

/// Whether an error says that what is on disk is not what was written.
pub(crate) fn is_damage(error: &anyhow::Error) -> bool {
    error.chain().filter_map(|cause| cause.downcast_ref()).any(fsdp_ckpt::Error::is_damage)
}

/// Whether there is something whole that `train` has not saved, as a model of Hugging Face's. Without its manifest a
/// checkpoint of ours reads like one of PyTorch's, so the names of its files decide too.
pub(crate) fn is_of_another_program(path: &Path) -> bool {
    let is_shard = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with("shard-");
    let has_shards = std::fs::read_dir(path).is_ok_and(|entries| entries.flatten().any(is_shard));
    !has_shards && fsdp_ckpt::open(path).is_ok()
}

/// Renames a damaged checkpoint. `why` says what is wrong with it. One rank calls it, while the others wait for what
/// comes of it; all of them, where each host has its own directory.
pub(crate) fn quarantine(hosts: &Hosts, path: &Path, why: &str) -> anyhow::Result<()> {
    let moved =
        hosts.set_aside(path).with_context(|| format!("can't set {} aside, which is damaged", path.display()))?;
    if let Some(moved) = moved {
        tracing::warn!("{} can't be gone on from and was set aside as {}: {why}", path.display(), moved.display());
    }
    Ok(())
}

/// Fails when there have been checkpoints under `dir` and none of them can be gone on from: a run that begins anew then
/// is not what was asked for.
pub(crate) fn check_something_is_left(dir: &Path, found: &Survey) -> anyhow::Result<()> {
    let was_step = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        step_of(fsdp_ckpt::name_before_aside(name).unwrap_or(name)).is_some()
    };
    let unusable =
        found.skipped.iter().map(|(path, error)| (path, format!("{}: {}", path.display(), error.with_causes())));
    let aside = found.set_aside.iter().map(|path| (path, format!("{}: set aside", path.display())));
    let links = found.links.iter().map(|(path, target)| {
        let why = if target.exists() { "which has a name of its own" } else { "which is not there" };
        (path, format!("{}: a link to {}, {why}", path.display(), target.display()))
    });
    let all = unusable.chain(aside).chain(links);
    let lost: Vec<String> = all.filter(|(path, _): &(&PathBuf, _)| was_step(path)).map(|(_, about)| about).collect();
    if found.newest.is_some() || lost.is_empty() {
        return Ok(());
    }
    bail!(
        "--resume auto: no checkpoint in {} can be used ({}); put a good one there, or move these away, or pass \
            another --checkpoint-dir, to begin anew",
        dir.display(),
        lost.join("; ")
    );
}

/// Fails when a checkpoint newer than the one to go on from can't be read for another reason than damage: it may be
/// whole, and what was trained since would be lost.
pub(crate) fn check_no_newer_is_whole(found: &Survey) -> anyhow::Result<()> {
    let Some((path, error)) = found.skipped.iter().find(|(_, error)| !error.is_damage()) else { return Ok(()) };
    bail!(
        "--resume auto: {} can't be read, which does not mean that it is damaged: {}; mend that, move it away, or \
            pass the path of the one to go on from to --resume",
        path.display(),
        error.with_causes()
    );
}

/// Each rank tries what it is going to write; where one can't, all of them fail with its words. Collective.
pub(crate) fn check_writable(args: &Args, hosts: &Hosts, world: &World) -> anyhow::Result<()> {
    // The ranks have compared their arguments: these are the same everywhere.
    let cannot = |flag: &str, dir: &Path, error: fsdp_ckpt::Error, way_out: &str| {
        anyhow!("can't write to {flag} {} ({}); {way_out}", dir.display(), error.with_causes())
    };
    let shared = "pass a directory that every rank can write to, on a file system that all hosts share";
    let dir = args.checkpoint_dir.as_deref().unwrap_or(Path::new(ROOT));
    hosts.check_writable(dir, world).map_err(|error| {
        let local = format!("{shared}, or --checkpoint-local where each host has one of its own");
        let way_out = match (args.checkpoint_local, is_url(dir)) {
            (true, _) => {
                "pass a directory of which each host has its own; leave --checkpoint-local out where they share it"
            }
            (false, true) if cfg!(feature = "object-store") => "pass a place that every rank can write to",
            (false, true) => "train saves to object stores where it was built with `--features object-store`",
            (false, false) => &local,
        };
        cannot("--checkpoint-dir", dir, error, way_out)
    })?;
    if let Some(dir) = &args.export_hf {
        let written = fsdp_ckpt::check_writable(dir, world.group());
        written.map_err(|error| cannot("--export-hf", dir, error, shared))?;
    }
    let own = match check_own_files(args, world.rank()) {
        Ok(()) => RankResult::Passed,
        Err(error) => RankResult::Failed(format!("rank {}: {error:#}", world.rank())),
    };
    match worst_result(world, own)? {
        RankResult::Passed => Ok(()),
        RankResult::Failed(why) | RankResult::Damaged(why) => {
            Err(anyhow!("{why}; pass another path, or make room there"))
        }
    }
}

/// What a rank writes by itself.
fn check_own_files(args: &Args, rank: usize) -> anyhow::Result<()> {
    let cannot = |flag: &str, path: &Path| format!("can't write {flag} {}", path.display());
    if let Some(file) = &args.trace {
        // The ranks' own files are made beside it: nothing belongs beside a device.
        if std::fs::metadata(file).is_ok_and(|there| !there.is_file()) {
            return Err(anyhow!("it is there and no file")).with_context(|| cannot("--trace", file));
        }
        let part = rank_file(file, rank);
        for file in [file, &part].iter().skip(usize::from(rank > 0)) {
            try_file(file).with_context(|| cannot("--trace", file))?;
        }
    }
    if rank > 0 {
        return Ok(());
    }
    if let Some(file) = &args.metrics {
        try_file_and_directory(file).with_context(|| cannot("--metrics", file))?;
    }
    if let Some(dir) = &args.tensorboard {
        try_directory(dir).with_context(|| cannot("--tensorboard", dir))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_of_this_host_is_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let unfinished = dir.path().join("step-00000005");
        std::fs::create_dir(&unfinished).unwrap();
        let url = PathBuf::from(format!("file://{}", dir.path().display()));
        assert_eq!(entries(&url).unwrap(), [unfinished.as_path()]);
        assert!(same_file(&url.join("step-00000005"), &unfinished) && !same_file(&url, &unfinished));
    }

    #[test]
    fn claims_at_the_same_time_are_different_and_empty_ones_go_away() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("checkpoints");
        let claims: Vec<NewRunDir> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| NewRunDir::new(&root).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut numbers: Vec<u32> = claims.iter().map(|claim| claim.number).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (1..=8).collect::<Vec<_>>());
        std::fs::create_dir(root.join("run-003/step-00000001")).unwrap();
        drop(claims);
        let left: Vec<_> = std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["run-003"]);
        assert_eq!(NewRunDir::new(&root).unwrap().number, 4);
    }
}
