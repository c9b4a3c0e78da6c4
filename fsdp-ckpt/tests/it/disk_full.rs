//! A full disk.

use std::path::Path;
use std::process::Command;

use fsdp_ckpt::{Checkpoint, TensorSource, save};
use fsdp_core::{DType, Placement, ProcessGroup};
use fsdp_test_support::ranks::Job;

use crate::processes::two_ranks;
use crate::world::{Global, fresh, line, list, save_all, state, zoo};

fn large() -> Global {
    Global::new("large", DType::F32, &[10_000_000], &[Placement::Shard(0)])
}

pub(crate) fn saves_too_much(group: &ProcessGroup, root: &Path) {
    let saved = save(root.join("step-20"), group, &state(&[large()], &line(group.size()), group.rank()));
    println!("says: {}", saved.unwrap_err());
}

/// A limit on the size of files makes the same system calls fail.
#[test]
fn full_disk_fails_every_rank_and_keeps_the_previous_checkpoint() {
    let (root, _) = fresh();
    let before = root.path().join("step-10");
    save_all(&before, &zoo(), &line(2));
    // 8 MiB, or 16 in bash: larger than the group's shared memory, smaller than a rank's file.
    let limited = two_ranks("saves_too_much", root.path()).map(|command| {
        let mut shell = Command::new("sh");
        shell.args(["-c", "trap '' XFSZ; ulimit -f 16384; exec \"$0\" \"$@\""]).arg(command.get_program());
        shell.args(command.get_args()).envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        shell
    });
    for said in Job::start(limited).outcomes() {
        assert!(said.starts_with("rank 0 failed to write its shards: can't"), "{said}");
        assert!(said.contains("shard-00001-model-00001-of-00001.safetensors: File too large"), "{said}");
    }
    assert_eq!(list(root.path()), ["step-10"]);
    Checkpoint::open(&before).unwrap().verify().unwrap();
}
