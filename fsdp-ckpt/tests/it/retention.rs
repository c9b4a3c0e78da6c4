//! Which checkpoints stay.

use std::num::NonZeroUsize;
use std::path::Path;

use fsdp_ckpt::{Checkpoint, TensorSource, alias_target, keep_newest, latest, survey};

use crate::world::{fresh, line, list, save_all, zoo};

fn keep(root: &Path, count: usize, spare: &[&Path]) -> Vec<String> {
    let removed = keep_newest(root, NonZeroUsize::new(count).unwrap(), spare).unwrap();
    removed.iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_string()).collect()
}

#[test]
fn the_newest_stay_and_only_whole_checkpoints_count_and_go() {
    let (root, _) = fresh();
    let dir = |step: usize| root.path().join(format!("step-{step}"));
    for step in [5, 6, 7, 8, 9, 10, 11] {
        save_all(&dir(step), &zoo(), &line(2));
    }
    // Not whole; holds something else; is elsewhere; is no checkpoint at all.
    std::fs::remove_file(dir(11).join("checkpoint.json")).unwrap();
    std::fs::write(dir(7).join("notes.txt"), "keep me").unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    std::fs::rename(dir(6), elsewhere.path().join("moved")).unwrap();
    std::os::unix::fs::symlink(elsewhere.path().join("moved"), dir(6)).unwrap();
    std::fs::create_dir(root.path().join("data-1")).unwrap();
    std::fs::write(root.path().join("log-2"), "").unwrap();

    assert_eq!(keep(root.path(), 2, &[&dir(8), &dir(99)]), ["step-5"]);
    let left = ["data-1", "log-2", "step-10", "step-11", "step-6", "step-7", "step-8", "step-9"];
    assert_eq!(list(root.path()), left);
    assert_eq!(keep(root.path(), 2, &[]), ["step-8"]);
    assert_eq!(latest(root.path()).unwrap(), Some(dir(10)));
    for step in [6, 7, 9, 10] {
        Checkpoint::open(&dir(step)).unwrap().verify().unwrap();
    }
    assert!(keep(root.path(), 9, &[]).is_empty());
    assert!(keep(&root.path().join("not there"), 1, &[]).is_empty());
}

#[test]
fn a_link_is_no_checkpoint_of_its_own() {
    use std::os::unix::fs::symlink;
    let (root, _) = fresh();
    let elsewhere = tempfile::tempdir().unwrap();
    let dir = |step: usize| root.path().join(format!("step-{step:08}"));
    for step in [4, 8] {
        save_all(&dir(step), &zoo(), &line(2));
    }
    symlink("step-00000004", dir(12)).unwrap();
    save_all(&elsewhere.path().join("step-00000002"), &zoo(), &line(2));
    symlink(elsewhere.path().join("step-00000002"), dir(13)).unwrap();
    // What leads nowhere, or to itself, is none either.
    symlink("nowhere", dir(14)).unwrap();
    symlink(dir(15), dir(15)).unwrap();
    let found = survey(root.path()).unwrap();
    assert!(found.newest == Some(dir(8)) && found.skipped.is_empty(), "{found:?}");
    let moved = elsewhere.path().join("step-00000002").canonicalize().unwrap();
    let links = [(12, dir(4).canonicalize().unwrap()), (13, moved), (14, root.path().join("nowhere")), (15, dir(15))];
    assert_eq!(found.links, links.map(|(step, target)| (dir(step), target)));
    assert_eq!(alias_target(&dir(12)), Some(dir(4).canonicalize().unwrap()));
    assert_eq!(alias_target(&dir(4)), None);

    let out = crate::cli::succeeds(&["inspect", crate::cli::text(root.path())]);
    assert_eq!(out.matches("not used by runs").count(), 2, "{out}");
    assert!(out.lines().any(|line| line.contains("step-00000008") && line.contains("<- the newest")), "{out}");

    // MoveOutcome to another disk, with a link in its place, it is the one that it was; neither it nor the link goes.
    for (name, target) in [("step-00000020", "step-00000020"), ("step-00000021", "moved")] {
        save_all(&elsewhere.path().join(target), &zoo(), &line(2));
        symlink(elsewhere.path().join(target), root.path().join(name)).unwrap();
        assert_eq!(latest(root.path()).unwrap(), Some(root.path().join(name)));
    }
    save_all(&dir(22), &zoo(), &line(2));
    assert_eq!(keep(root.path(), 1, &[]), ["step-00000008", "step-00000004"]);
    for step in [12, 13, 20, 21] {
        assert!(dir(step).symlink_metadata().unwrap().is_symlink(), "{step}");
    }
    for name in ["step-00000002", "step-00000020", "moved"] {
        Checkpoint::open(&elsewhere.path().join(name)).unwrap().verify().unwrap();
    }
}
