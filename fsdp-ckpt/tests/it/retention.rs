//! Which checkpoints stay.

use std::num::NonZeroUsize;
use std::path::Path;

use fsdp_ckpt::{Checkpoint, TensorSource, keep_newest, latest};

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
