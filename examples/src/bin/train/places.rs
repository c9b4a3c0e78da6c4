//! The directories that a run reads from and writes to. Rank 0 looks and decides before the first step: all ranks then
//! use the same, and what would be in the way hours later shows at once.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use fsdp_candle::World;
use fsdp_ckpt::{Checkpoint, Survey};
use serde::{Deserialize, Serialize};

use crate::args::{Args, Resume};
use crate::damage;
use crate::done::Done;
use crate::exported;
use crate::hosts::Hosts;
use crate::steps::step_of;
use crate::values::on_this_host;

/// Where runs without --checkpoint-dir keep their checkpoints.
pub(crate) const ROOT: &str = "checkpoints";

/// Where a run keeps its checkpoints, and the one that it goes on from.
pub(crate) struct Places {
    pub(crate) checkpoints: PathBuf,
    pub(crate) hosts: Hosts,
    pub(crate) resume_from: Option<PathBuf>,
    /// Whether what --export-hf holds is an earlier export of this run.
    pub(crate) replaces_export: bool,
    _claim: Option<Claim>,
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

impl Places {
    /// Fails on every rank, with rank 0's words, where something is in the way. Collective.
    pub(crate) fn new(args: &Args, hosts: Hosts, world: &World) -> anyhow::Result<Self> {
        let mut claim = None;
        let decision = hosts.ask(world, || {
            let Found { newest, replaces_export } = check(args, &hosts, world)?;
            let run = match args.checkpoint_dir {
                Some(_) => None,
                None => Some(claim.insert(Claim::new(Path::new(ROOT))?).number),
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
        Ok(Places { checkpoints, hosts, resume_from, replaces_export: decision.replaces_export, _claim: claim })
    }

    /// Sets the checkpoint aside that `--resume auto` chose and that turned out to be damaged, for which `why` has the
    /// words; chooses the next older one. Collective.
    pub(crate) fn fall_back(&mut self, args: &Args, world: &World, why: &str) -> anyhow::Result<()> {
        let Some(damaged) = &self.resume_from else { bail!("there is no checkpoint to set aside") };
        let newest = self.hosts.ask(world, || {
            damage::set_aside(&self.hosts, damaged, why)?;
            Ok(check(args, &self.hosts, world)?.newest)
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
fn check(args: &Args, hosts: &Hosts, world: &World) -> anyhow::Result<Found> {
    let Survey { newest, skipped, .. } = match (&args.resume, &args.checkpoint_dir) {
        (Resume::Auto, None) => bail!("--resume auto looks into --checkpoint-dir: pass it"),
        (Resume::Path(_), _) | (Resume::None, None) => Survey::default(),
        (Resume::None, Some(dir)) => hosts.survey(dir)?,
        (Resume::Auto, Some(dir)) => {
            let found = hosts.survey(dir)?;
            if world.rank() == 0 {
                found.warn_about_links();
            }
            damage::check_something_is_left(dir, &found)?;
            damage::check_no_newer_is_whole(&found)?;
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
                .and_then(|source| hosts.agreed(world, Done::of(&*source, args.sequences_per_step(world)?)));
            match done {
                Err(error) if args.resume == Resume::Auto && damage::is_damage(&error) => {
                    damage::set_aside(hosts, path, &format!("{error:#}"))?;
                    return check(args, hosts, world);
                }
                done => done.with_context(|| format!("can't resume from {}", path.display()))?,
            }
        }
        None => Done::default(),
    };
    let own = args.checkpoint_dir.as_deref().filter(|_| args.resume == Resume::Auto && newest.is_some());
    let replaces_export = match &args.export_hf {
        Some(dir) => hosts.once(world, || exported::may_replace(dir, own, args.steps.max(start.step)))?,
        None => false,
    };
    if let Some(dir) = &args.checkpoint_dir {
        let from = resume_from.map(PathBuf::as_path);
        clear_targets(dir, start.step, args, skipped, from, hosts, world)?;
    }
    // `survey` reads steps off names, so they are text.
    let newest = newest.as_ref().and_then(|path| Some(path.file_name()?.to_str()?.to_owned()));
    Ok(Found { newest, replaces_export })
}

/// Nothing may have the name of a checkpoint that the run is going to save; the one that it goes on from is not saved
/// again. What `--resume auto` has `skipped` because it is damaged is set aside if it has. What another program saved
/// is not ours to move.
fn clear_targets(
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
        let is_ours = !hosts.any(world, damage::is_of_another_program(&path))?;
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
        damage::set_aside(hosts, &path, &error.with_causes())?;
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
struct Claim {
    number: u32,
    /// The directories that were made for it, the inner one first.
    made: Vec<PathBuf>,
}

impl Claim {
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
                    return Ok(Claim { number, made });
                }
                // Another run took it, or removed the root that was empty again.
                Err(error) if [ErrorKind::AlreadyExists, ErrorKind::NotFound].contains(&error.kind()) => {}
                Err(error) => return Err(error).with_context(|| format!("can't create {}", path.display())),
            }
        }
    }
}

impl Drop for Claim {
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
        let claims: Vec<Claim> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| Claim::new(&root).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut numbers: Vec<u32> = claims.iter().map(|claim| claim.number).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (1..=8).collect::<Vec<_>>());
        std::fs::create_dir(root.join("run-003/step-00000001")).unwrap();
        drop(claims);
        let left: Vec<_> = std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["run-003"]);
        assert_eq!(Claim::new(&root).unwrap().number, 4);
    }
}
