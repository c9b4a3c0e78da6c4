//! The directories and files of a run: checked, and chosen, before the first step.
//!
//! Rank 0 looks at them for all ranks, so that all use the same. With --checkpoint-local each host looks at its own
//! directory ([`Hosts`]). Errors that would otherwise show after hours of training show at once: a directory that can't
//! be written, or a file in the place of a later checkpoint. Damaged checkpoints are renamed, never deleted.

use std::io::ErrorKind;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use fsdp_candle::{ReduceOp, World};
use fsdp_ckpt::{Checkpoint, Error, Format, HostDirs, RemoveIfEmpty, Result, Survey, TensorShard, TensorSource};
use fsdp_train::writable::{try_directory, try_file, try_file_and_directory};
use serde::{Deserialize, Serialize};

use crate::agreement::{RankResult, broadcast_result, worst_result};
use crate::args::Args;
use crate::checkpoint::{Position, step_of};
use crate::export::may_replace;
use crate::flag_types::{Resume, is_url, on_this_host};
use crate::trace::rank_file;

/// Directory for the checkpoints of runs without --checkpoint-dir.
pub(crate) const ROOT: &str = "checkpoints";

/// Directories of a run, and the checkpoint that it resumes from.
pub(crate) struct RunDirs {
    pub(crate) checkpoints: PathBuf,
    pub(crate) hosts: Hosts,
    pub(crate) resume_from: Option<PathBuf>,
    /// Whether --export-hf holds an earlier export of this run.
    pub(crate) replaces_export: bool,
    _new_dir: Option<NewRunDir>,
}

/// Rank 0's findings. Everything else is on the command line, which is the same on all ranks.
#[derive(Serialize, Deserialize)]
struct Decision {
    /// Name of the checkpoint in --checkpoint-dir that `--resume auto` continues.
    newest: Option<String>,
    /// Number of the run's new directory, without --checkpoint-dir.
    run: Option<u32>,
    replaces_export: bool,
}

impl RunDirs {
    /// Fails on every rank, with rank 0's error, if a path can't be used. Collective.
    pub(crate) fn new(args: &Args, hosts: Hosts, world: &World) -> anyhow::Result<Self> {
        let mut new_dir = None;
        let decision = hosts.ask(world, || {
            let mut decision = inspect(args, &hosts, world)?;
            if args.checkpoint_dir.is_none() {
                decision.run = Some(new_dir.insert(NewRunDir::new(Path::new(ROOT))?).number);
            }
            Ok(decision)
        })?;
        let checkpoints = match (&args.checkpoint_dir, decision.run) {
            (Some(dir), _) => dir.clone(),
            (None, Some(number)) => Path::new(ROOT).join(run_name(number)),
            // All ranks have the same arguments, so rank 0 has no --checkpoint-dir either.
            (None, None) => bail!("rank 0 chose no directory for this run: please report this"),
        };
        let resume_from = match &args.resume {
            Resume::None => None,
            Resume::Auto => decision.newest.map(|name| checkpoints.join(name)),
            Resume::Path(path) => Some(path.clone()),
        };
        Ok(RunDirs { checkpoints, hosts, resume_from, replaces_export: decision.replaces_export, _new_dir: new_dir })
    }

    /// Renames the checkpoint that `--resume auto` chose, because it is damaged, and chooses the next older one. `why`
    /// describes the damage. Collective.
    pub(crate) fn fall_back(&mut self, args: &Args, world: &World, why: &str) -> anyhow::Result<()> {
        let Some(damaged) = &self.resume_from else { bail!("no checkpoint was chosen to resume from") };
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

/// Checks the inputs and outputs of the run, and finds the checkpoint for `--resume auto`, if any. Collective if each
/// host has its own directory.
fn inspect(args: &Args, hosts: &Hosts, world: &World) -> anyhow::Result<Decision> {
    let Survey { newest, skipped, .. } = match (&args.resume, &args.checkpoint_dir) {
        (Resume::Path(_), _) | (_, None) => Survey::default(),
        (Resume::None, Some(dir)) => hosts.survey(dir)?,
        (Resume::Auto, Some(dir)) => {
            let found = hosts.survey(dir)?;
            if world.rank() == 0 {
                found.warn_about_links();
            }
            check_some_usable(dir, &found)?;
            check_no_newer_unreadable(&found)?;
            found
        }
    };
    let resume_from = match (&args.resume, &newest) {
        (Resume::Path(path), _) => Some(path),
        (Resume::None, Some(old)) => bail!(
            "{} is a checkpoint of an earlier run: pass --resume auto to continue it, or another --checkpoint-dir",
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
    // `survey` reads steps from names, so they are valid text.
    let newest = newest.as_ref().and_then(|path| Some(path.file_name()?.to_str()?.to_owned()));
    Ok(Decision { newest, run: None, replaces_export })
}

/// Fails if a path exists that the run will save a checkpoint to, except the checkpoint that it resumes from. Renames
/// damaged checkpoints (`skipped`) with such a name under `--resume auto`, unless another program saved them.
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
    let (mut renamed, mut left) = (Vec::new(), Vec::new());
    for (path, error) in skipped {
        let is_target = args.resume == Resume::Auto && saves_as(&path).is_some() && error.is_damage();
        let is_ours = !hosts.any(world, is_of_another_program(&path))?;
        if is_target && is_ours { &mut renamed } else { &mut left }.push((path, error));
    }
    let check = || {
        let existing = entries(dir)?
            .into_iter()
            .filter_map(|path| Some((saves_as(&path)?, path)))
            .filter(|(_, path)| !resume_from.is_some_and(|from| same_file(from, path)))
            .filter(|(_, path)| !renamed.iter().any(|(other, _)| same_file(other, path)))
            .min();
        let Some((step, path)) = existing else { return Ok(()) };
        let what = match Checkpoint::open(&path) {
            Ok(_) => "a checkpoint of an earlier run".to_owned(),
            Err(error) => format!("not a complete checkpoint ({})", error.with_causes()),
        };
        bail!(
            "{} already exists, and this run saves a checkpoint there at step {step}; it is {what}: remove it, or pass \
             another --checkpoint-dir",
            path.display()
        );
    };
    hosts.agreed(world, check())?;
    for (path, error) in left.iter().filter(|_| world.rank() == 0) {
        tracing::warn!("skipping {}: {}", path.display(), error.with_causes());
    }
    for (path, error) in renamed {
        quarantine(hosts, &path, &error.with_causes())?;
    }
    Ok(())
}

/// Lists a directory of checkpoints. Unfinished saves in an object store are left out, because they block no name.
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

/// A new directory that no other run uses. Removed on drop if it is still empty.
struct NewRunDir {
    number: u32,
    _made: RemoveIfEmpty,
}

impl NewRunDir {
    /// Creates the directory with the number after the highest in `root`.
    fn new(root: &Path) -> anyhow::Result<Self> {
        let made_root = !root.exists();
        let numbers = std::fs::read_dir(root).into_iter().flatten();
        let number_of = |name: &str| name.strip_prefix("run-")?.parse::<u32>().ok();
        let highest = numbers.filter_map(|entry| number_of(entry.ok()?.file_name().to_str()?)).max();
        let mut number = highest.unwrap_or(0);
        loop {
            std::fs::create_dir_all(root).with_context(|| format!("can't create {}", root.display()))?;
            number = number.checked_add(1).with_context(|| {
                format!(
                    "no directory number is left after {}: pass --checkpoint-dir",
                    root.join(run_name(number)).display()
                )
            })?;
            let path = root.join(run_name(number));
            match std::fs::create_dir(&path) {
                Ok(()) => {
                    let made = std::iter::once(path).chain(made_root.then(|| root.to_owned())).collect();
                    return Ok(NewRunDir { number, _made: RemoveIfEmpty(made) });
                }
                // Another run created it, or removed the empty root.
                Err(error) if [ErrorKind::AlreadyExists, ErrorKind::NotFound].contains(&error.kind()) => {}
                Err(error) => return Err(error).with_context(|| format!("can't create {}", path.display())),
            }
        }
    }
}

fn run_name(number: u32) -> String {
    format!("run-{number:03}")
}

/// Access to checkpoints: by rank 0 for all, or by each host in its own directory (--checkpoint-local).
///
/// With a directory per host, the methods are collective and return the same on every rank. Otherwise they act for the
/// calling rank alone.
pub(crate) struct Hosts {
    name: Option<String>,
    dirs: Option<HostDirs>,
}

impl Hosts {
    /// Exchanges the hosts' names with --checkpoint-local. Collective.
    pub(crate) fn of(args: &Args, world: &World) -> Result<Self> {
        if !args.checkpoint_local {
            return Ok(Hosts { name: None, dirs: None });
        }
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let dirs = HostDirs::new(world.group(), &name)?;
        Ok(Hosts { name: Some(name), dirs: Some(dirs) })
    }

    /// Returns this host's name for [`fsdp_ckpt::SaveOptions`].
    pub(crate) fn name(&self) -> Option<String> {
        self.name.clone()
    }

    /// Returns the result of `ask` on every rank. Rank 0 runs it and broadcasts the result. With a directory per host,
    /// every rank runs it, and it must be collective. Collective.
    pub(crate) fn ask<T>(&self, world: &World, ask: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T>
    where
        T: Serialize + for<'de> Deserialize<'de>,
    {
        match self.dirs {
            Some(_) => ask(),
            None => broadcast_result(world, 0, ask),
        }
    }

    /// Returns the result of `ask` from rank 0 if each host has its own directory (collective), and from this rank
    /// otherwise.
    pub(crate) fn once<T>(&self, world: &World, ask: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T>
    where
        T: Serialize + for<'de> Deserialize<'de>,
    {
        match self.dirs {
            Some(_) => broadcast_result(world, 0, ask),
            None => ask(),
        }
    }

    /// Returns `own`. With a directory per host, fails on every rank if `own` is an error on any (collective).
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

    /// Returns `own`. With a directory per host, returns whether it is true on any rank (collective).
    pub(crate) fn any(&self, world: &World, own: bool) -> anyhow::Result<bool> {
        match self.dirs {
            Some(_) => Ok(world.all_reduce(&[f64::from(u8::from(own))], ReduceOp::Max)?[0] > 0.),
            None => Ok(own),
        }
    }

    /// Returns this rank's number among the ranks that read the same files, and their count.
    pub(crate) fn readers(&self, world: &World) -> (usize, usize) {
        self.dirs.as_ref().map_or((world.rank(), world.size()), HostDirs::local_rank_and_size)
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

    /// Opens a checkpoint or model, of which this rank reads its parts of `tensors`. Collective.
    pub(crate) fn open_for(
        &self,
        path: &Path,
        world: &World,
        tensors: &[TensorShard],
    ) -> Result<Box<dyn TensorSource>> {
        match self.dirs {
            Some(_) => self.open(path, world),
            None => fsdp_ckpt::open_for(path, world.group(), tensors),
        }
    }

    /// Opens a checkpoint or model. A model that is complete on every host need not be a checkpoint of `train`.
    pub(crate) fn open(&self, path: &Path, world: &World) -> Result<Box<dyn TensorSource>> {
        let Some(dirs) = &self.dirs else { return fsdp_ckpt::open(path) };
        let other = fsdp_ckpt::open(path).ok().filter(|source| source.format() != Format::Fsdp);
        let all_have = world.group().all_reduce_scalar(u32::from(other.is_some()), ReduceOp::Min);
        match other.filter(|_| all_have.as_ref().is_ok_and(|all| *all == 1)) {
            Some(source) => Ok(source),
            None => Ok(Box::new(all_have.map_err(Error::from).and_then(|_| dirs.open(path))?)),
        }
    }

    pub(crate) fn quarantine(&self, path: &Path) -> Result<Option<PathBuf>> {
        self.dirs.as_ref().map_or_else(|| fsdp_ckpt::quarantine(path), |dirs| dirs.quarantine(path))
    }

    /// Keeps `newest` and `keep - 1` others in `dir`, on every host. Collective.
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

/// Returns whether an error means that a file is damaged.
pub(crate) fn is_damage(error: &anyhow::Error) -> bool {
    error.chain().filter_map(|cause| cause.downcast_ref()).any(fsdp_ckpt::Error::is_damage)
}

/// Returns whether `path` holds a complete model or checkpoint of another program. A checkpoint of `train` without its
/// manifest looks like one of PyTorch's, so file names count too.
pub(crate) fn is_of_another_program(path: &Path) -> bool {
    let is_shard = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with("shard-");
    let has_shards = std::fs::read_dir(path).is_ok_and(|entries| entries.flatten().any(is_shard));
    !has_shards && fsdp_ckpt::open(path).is_ok()
}

/// Renames a damaged checkpoint. `why` describes the damage. One rank calls it while the others wait; all ranks call it
/// if each host has its own directory.
pub(crate) fn quarantine(hosts: &Hosts, path: &Path, why: &str) -> anyhow::Result<()> {
    let moved = hosts.quarantine(path).with_context(|| format!("can't rename {}, which is damaged", path.display()))?;
    if let Some(moved) = moved {
        tracing::warn!("{} can't be resumed from and was renamed to {}: {why}", path.display(), moved.display());
    }
    Ok(())
}

/// Fails if `dir` has held checkpoints and none of them is usable, because the run would silently start from step 0.
pub(crate) fn check_some_usable(dir: &Path, found: &Survey) -> anyhow::Result<()> {
    let was_step = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        step_of(fsdp_ckpt::name_before_quarantine(name).unwrap_or(name)).is_some()
    };
    let unusable =
        found.skipped.iter().map(|(path, error)| (path, format!("{}: {}", path.display(), error.with_causes())));
    let renamed = found.quarantined.iter().map(|path| (path, format!("{}: damaged", path.display())));
    let links = found.links.iter().map(|(path, target)| {
        let why = if target.exists() { "under another name" } else { "which does not exist" };
        (path, format!("{}: a link to {}, {why}", path.display(), target.display()))
    });
    let all = unusable.chain(renamed).chain(links);
    let lost: Vec<String> = all.filter(|(path, _): &(&PathBuf, _)| was_step(path)).map(|(_, about)| about).collect();
    if found.newest.is_some() || lost.is_empty() {
        return Ok(());
    }
    bail!(
        "--resume auto: no checkpoint in {} can be used ({}); add a good one, or start a new run with another \
         --checkpoint-dir",
        dir.display(),
        lost.join("; ")
    );
}

/// Fails if a newer checkpoint can't be read for a reason other than damage: it may be complete, and resuming from an
/// older one would lose its steps.
pub(crate) fn check_no_newer_unreadable(found: &Survey) -> anyhow::Result<()> {
    let Some((path, error)) = found.skipped.iter().find(|(_, error)| !error.is_damage()) else { return Ok(()) };
    bail!(
        "--resume auto: {} can't be read, but is not known to be damaged: {}; fix the error, move it away, or pass an \
         older checkpoint to --resume",
        path.display(),
        error.with_causes()
    );
}

/// Tests on every rank that it can write its outputs. Fails on all ranks if one can't. Collective.
pub(crate) fn check_writable(args: &Args, hosts: &Hosts, world: &World) -> anyhow::Result<()> {
    let cannot = |flag: &str, dir: &Path, error: fsdp_ckpt::Error, advice: &str| {
        anyhow!("can't write to {flag} {} ({}); {advice}", dir.display(), error.with_causes())
    };
    let shared = "pass a directory that every rank can write to, on a file system that all hosts share";
    let dir = args.checkpoint_dir.as_deref().unwrap_or(Path::new(ROOT));
    hosts.check_writable(dir, world).map_err(|error| {
        let local = format!("{shared}, or --checkpoint-local if each host has its own");
        let advice = match (args.checkpoint_local, is_url(dir)) {
            (true, _) => {
                "pass a directory that each host has for itself, or leave --checkpoint-local out if they share it"
            }
            (false, true) if cfg!(feature = "object-store") => "pass a URL that every rank can write to",
            (false, true) => "build train with `--features object-store` to save to object stores",
            (false, false) => &local,
        };
        cannot("--checkpoint-dir", dir, error, advice)
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

/// Tests that this rank can write its own files.
fn check_own_files(args: &Args, rank: usize) -> anyhow::Result<()> {
    let cannot = |flag: &str, path: &Path| format!("can't write {flag} {}", path.display());
    if let Some(file) = &args.trace {
        // Each rank's trace is a file beside it, which a device such as /dev/null has no place for.
        if std::fs::metadata(file).is_ok_and(|status| !status.is_file()) {
            return Err(anyhow!("it is not a regular file")).with_context(|| cannot("--trace", file));
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
    fn file_urls_are_directories() {
        let dir = tempfile::tempdir().unwrap();
        let unfinished = dir.path().join("step-00000005");
        std::fs::create_dir(&unfinished).unwrap();
        let url = PathBuf::from(format!("file://{}", dir.path().display()));
        assert_eq!(entries(&url).unwrap(), [unfinished.as_path()]);
        assert!(same_file(&url.join("step-00000005"), &unfinished) && !same_file(&url, &unfinished));
    }

    #[test]
    fn run_directories_are_distinct_and_removed_if_empty() {
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
