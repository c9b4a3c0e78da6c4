//! Failed saves: every rank returns the same message, and no files are left.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;

use crate::world::{Broken, Global, fresh, line, list, save_all, save_fails, state, world, zoo};
use fsdp_ckpt::{Checkpoint, Error, TensorSource, open_for, save};
use fsdp_core::layout::Region;
use fsdp_core::process_group::{Options, local};
use fsdp_core::{Buffer, DType, Placement, ProcessGroup};

#[test]
fn failed_rank_is_named_on_every_rank() {
    let (root, dir) = fresh();
    let message = save_fails(&dir, 3, |rank| {
        let mut state = state(&zoo(), &line(3), rank);
        if rank == 1 {
            state.tensors[0].data = Arc::new(Broken(state.tensors[0].data.len()));
        }
        state
    });
    assert_eq!(
        message,
        "rank 1 failed to write its shards: can't access tensor \"model.even.weight\": its storage has been resharded"
    );
    assert!(list(root.path()).is_empty());

    let kinds = world(2, |group| {
        let mut state = state(&zoo(), &line(2), group.rank());
        if group.rank() == 1 {
            state.tensors[0].data = Arc::new(Broken(state.tensors[0].data.len()));
        }
        match save(&dir, group, &state) {
            Err(Error::Rank { rank: 1, error, .. }) => error.map(|error| matches!(*error, Error::ShardMemory { .. })),
            other => panic!("{other:?}"),
        }
    });
    assert_eq!(kinds, [None, Some(true)]);
}

#[test]
fn keeps_an_existing_target() {
    let (root, dir) = fresh();
    save_all(&dir, &zoo(), &line(2));
    let message = save_fails(&dir, 2, |rank| state(&zoo(), &line(2), rank));
    assert!(message.contains("rank 0 failed") && message.contains("exists already; choose another name"), "{message}");
    Checkpoint::open(&dir).unwrap().verify().unwrap();
    assert_eq!(list(root.path()), ["step-00000010"]);

    let empty = root.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    assert!(save_fails(&empty, 1, |rank| state(&zoo(), &line(1), rank)).contains("exists already"));
}

#[test]
fn save_removes_only_stale_directories() {
    let (root, dir) = fresh();
    let leftovers =
        [".step-00000010.tmp-host-1-1", ".step-00000011.tmp-another-host-3-3f", ".step-00000009.deleting-host-4-1"];
    let live = ".step-00000010.tmp-host-2-2";
    let others = [".cache.tmp", ".step-00000010.tmp-1", ".venv-1-1"];
    for left in leftovers.iter().chain([&live]).chain(&others) {
        std::fs::create_dir(root.path().join(left)).unwrap();
        std::fs::write(root.path().join(left).join("shard"), "x").unwrap();
    }
    let held = std::fs::File::open(root.path().join(live)).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    save_all(&dir, &zoo(), &line(2));
    assert_eq!(list(root.path()), [".cache.tmp", ".step-00000010.tmp-1", live, ".venv-1-1", "step-00000010"]);
}

#[test]
fn one_of_two_writers_succeeds() {
    let (root, dir) = fresh();
    for _ in 0..20 {
        let outcomes: Vec<Vec<_>> = std::thread::scope(|scope| {
            let writer = || world(2, |group| save(&dir, group, &state(&zoo(), &line(2), group.rank())));
            let threads = [scope.spawn(writer), scope.spawn(writer)];
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let succeeded = outcomes.iter().filter(|ranks| ranks.iter().all(Result::is_ok)).count();
        let failed = outcomes.iter().filter(|ranks| ranks.iter().all(Result::is_err)).count();
        assert_eq!((succeeded, failed), (1, 1), "{outcomes:?}");
        let message = outcomes.iter().flatten().find_map(|rank| rank.as_ref().err()).unwrap().to_string();
        assert!(message.contains("exists already"), "{message}");
        Checkpoint::open(&dir).unwrap().verify().unwrap();
        assert_eq!(list(root.path()), ["step-00000010"]);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

#[test]
fn names_an_unwritable_directory() {
    let (root, _) = fresh();
    let file = root.path().join("file");
    std::fs::write(&file, "").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o444)).unwrap();
    let message = save_fails(&file.join("step-1"), 2, |rank| state(&zoo(), &line(2), rank));
    assert!(message.starts_with("rank 0 failed to create the checkpoint's directory: can't create"), "{message}");
    let message = save_fails("/".as_ref(), 2, |rank| state(&zoo(), &line(2), rank));
    assert!(message.contains("does not end in a name"), "{message}");
}

#[test]
fn rejects_inconsistent_shards() {
    let (root, dir) = fresh();
    let fails = |change: &(dyn Fn(usize, &mut fsdp_ckpt::SaveState) + Sync)| {
        save_fails(&dir, 2, |rank| {
            let mut state = state(&zoo(), &line(2), rank);
            change(rank, &mut state);
            state
        })
    };
    for (part, change) in [
        (
            "rank 0 holds [0..6, 0..5] and rank 1 holds [5..11, 0..5] of shape [12, 5]: they overlap in part",
            &(|rank: usize, state: &mut fsdp_ckpt::SaveState| state.tensors[0].region.offsets[0] -= rank)
                as &(dyn Fn(usize, &mut fsdp_ckpt::SaveState) + Sync),
        ),
        ("\"model.even.weight\": no rank holds 30 of the elements", &|rank, state| {
            if rank == 1 {
                state.tensors.remove(0);
            }
        }),
        (
            "rank 1 failed to list its shards: tensor \"model.even.weight\": [6..12, 0..5] has 30 elements",
            &|rank, state| {
                if rank == 1 {
                    state.tensors[0].data = Arc::new(Buffer::F32(vec![0.0; 3]));
                }
            },
        ),
        ("[11..17, 0..5] is not within its shape", &|rank, state| {
            if rank == 1 {
                state.tensors[0].region.offsets[0] = 11;
            }
        }),
        ("this rank has it twice", &|_, state| state.tensors.push(state.tensors[0].clone())),
        ("can't be used in a safetensors file", &|_, state| state.tensors[0].fqn = "__metadata__".into()),
        ("rank 0 has it as F32 [12, 5], rank 1 as F64 [12, 5]", &|rank, state| {
            if rank == 1 {
                state.tensors[0].data = Arc::new(Buffer::F64(vec![0.0; 30]));
            }
        }),
        ("too large to count", &|_, state| {
            state.tensors[0].shape = vec![usize::MAX, usize::MAX, 0];
            state.tensors[0].region = Region::whole(&[0, 0, 0]);
            state.tensors[0].data = Arc::new(Buffer::F32(vec![]));
        }),
        ("has 3 ranks, but the group", &|_, state| state.mesh = line(3)),
        ("the ranks save different things", &|rank, state| {
            if rank == 1 {
                state.mesh = fsdp_core::MeshLayout::new(&[("other", 2)]).unwrap();
            }
        }),
    ] {
        let message = fails(change);
        assert!(message.contains(part), "{message}");
    }
    assert!(list(root.path()).is_empty());
}

#[test]
fn saves_a_tensor_that_only_some_ranks_hold() {
    let (_root, dir) = fresh();
    let global = Global::new("w", DType::F32, &[4], &[Placement::Replicate]);
    world(3, |group| {
        let mut state = state(std::slice::from_ref(&global), &line(3), group.rank());
        if group.rank() != 1 {
            state.tensors.clear();
        }
        save(&dir, group, &state).unwrap();
    });
    let checkpoint = Checkpoint::open(&dir).unwrap();
    assert_eq!(crate::world::read(&checkpoint, &global, &Region::whole(&[4])).unwrap(), global.bytes);
}

#[test]
fn missing_rank_fails_the_others() {
    let (root, dir) = fresh();
    let outcomes = world(3, |group| {
        if group.rank() == 2 {
            return None;
        }
        Some(save(&dir, group, &state(&zoo(), &line(3), group.rank())).unwrap_err())
    });
    for error in outcomes.into_iter().flatten() {
        assert!(matches!(&error, Error::Save { path, .. } if *path == dir), "{error}");
    }
    assert!(list(root.path()).is_empty());
}

/// Rank 2 is alive, and does not take part.
fn without_rank_2<T: Send>(part: impl Fn(&ProcessGroup) -> fsdp_ckpt::Result<T> + Sync) -> Vec<String> {
    let options = Options::default().with_timeout(Duration::from_secs(2));
    let end = std::sync::Barrier::new(3);
    let messages = local::run_with(3, options, |group| {
        let message = (group.rank() != 2).then(|| part(&group).err().unwrap().to_string());
        end.wait();
        message
    });
    messages.into_iter().flatten().collect()
}

#[test]
fn saves_and_opens_that_ranks_wait_for_name_rank_and_file() {
    let (root, dir) = fresh();
    let own = |group: &ProcessGroup| state(&zoo(), &line(3), group.rank());
    let of_save = without_rank_2(|group| save(&dir, group, &own(group)));
    assert!(list(root.path()).is_empty());
    save_all(&dir, &zoo(), &line(3));
    let of_open = without_rank_2(|group| open_for(&dir, group, &own(group).tensors));
    for message in of_save.into_iter().chain(of_open) {
        assert!(message.contains("rank(s) [2]") && message.contains(&dir.display().to_string()), "{message}");
    }
}
