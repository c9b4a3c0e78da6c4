//! Asynchronous saves.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use fsdp_ckpt::{AsyncSaver, Checkpoint, Error, SaveState, TensorShard, TensorSource, WhenBusy};
use fsdp_core::layout::Region;
use fsdp_core::process_group::{Options, local};
use fsdp_core::{Buffer, DType, Placement, ProcessGroup, Readable};

use crate::gated::{self, Gate};
use crate::processes::start;
use crate::world::{Broken, Global, fresh, line, list, state, zoo};

/// Memory that changes, like a parameter's.
struct Changing(Mutex<Vec<f32>>);

impl Readable for Changing {
    fn dtype(&self) -> DType {
        DType::F32
    }
    fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }
    fn read(&self, f: &mut dyn FnMut(&[u8])) -> Result<(), String> {
        Buffer::F32(self.0.lock().unwrap().clone()).read(f)
    }
}

fn of(group: &ProcessGroup, tensors: Vec<TensorShard>) -> SaveState {
    SaveState { mesh: line(group.size()), tensors, values: Default::default() }
}

fn values(dir: &Path) -> Vec<f32> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    checkpoint.verify().unwrap();
    let mut bytes = vec![0; 4 * 1000];
    checkpoint.read("weight", &Region::whole(&[1000]), &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn saves_the_state_of_the_call() {
    let (root, _) = fresh();
    let dir = |step: usize| root.path().join(format!("step-{step}"));
    local::run(2, |group| {
        let weight = Arc::new(Changing(Mutex::new(vec![0.0; 1000])));
        let shard = TensorShard::whole("weight", &[1000], weight.clone());
        let mut saver =
            AsyncSaver::new(group.clone(), WhenBusy::Wait).unwrap().keep_newest(NonZeroUsize::new(2).unwrap());
        saver.reserve(std::slice::from_ref(&shard));
        assert!(saver.wait().unwrap().is_none());
        for step in 1..=6 {
            weight.0.lock().unwrap().fill(step as f32);
            saver.save(dir(step), &of(&group, vec![shard.clone()])).unwrap();
            weight.0.lock().unwrap().fill(-1.0);
            // Training uses its own group meanwhile.
            for _ in 0..20 {
                group.barrier().wait().unwrap();
            }
        }
        assert_eq!(saver.finish().unwrap().unwrap().path, dir(6));
    });
    assert_eq!(list(root.path()), ["step-5", "step-6"]);
    assert_eq!((values(&dir(5)), values(&dir(6))), (vec![5.0; 1000], vec![6.0; 1000]));
}

#[test]
fn next_call_returns_the_failure_on_every_rank() {
    let (root, dir) = fresh();
    std::fs::create_dir(&dir).unwrap();
    let messages = local::run(3, |group| {
        let mut saver = AsyncSaver::new(group.clone(), WhenBusy::Wait).unwrap();
        let state = state(&zoo(), &line(3), group.rank());
        saver.save(&dir, &state).unwrap();
        let next = root.path().join("step-00000020");
        let error = saver.save(&next, &state).unwrap_err();
        assert!(matches!(error, Error::AsyncSave { .. }), "{error}");
        saver.save(&next, &state).unwrap();
        assert!(saver.wait().unwrap().is_some() && saver.wait().unwrap().is_none());
        std::error::Error::source(&error).unwrap().to_string()
    });
    assert!(messages.iter().all(|message| message.contains("rank 0") && message.contains("exists already")));
    assert_eq!(list(root.path()), ["step-00000010", "step-00000020"]);
}

#[test]
fn staging_failure_of_one_rank_fails_all() {
    let (root, dir) = fresh();
    local::run(2, |group| {
        let mut saver = AsyncSaver::new(group.clone(), WhenBusy::Wait).unwrap();
        let good: Arc<dyn Readable> = Arc::new(Buffer::F32(vec![1.0; 3]));
        let data = if group.rank() == 1 { Arc::new(Broken(3)) } else { good.clone() };
        let error = saver.save(&dir, &of(&group, vec![TensorShard::whole("w", &[3], data)])).unwrap_err();
        assert!(
            error.to_string().starts_with("rank 1 failed to stage its tensors: can't access tensor \"w\""),
            "{error}"
        );
        assert!(saver.wait().unwrap().is_none());
        saver.save(&dir, &of(&group, vec![TensorShard::whole("w", &[3], good)])).unwrap();
        saver.finish().unwrap();
    });
    assert_eq!(list(root.path()), ["step-00000010"]);
}

#[test]
fn refuses_a_second_save_while_any_rank_writes() {
    let (root, dir) = fresh();
    // Rank 1 may start its first background collective only after rank 0 was refused.
    let gate: Gate = Arc::new((Mutex::new(false), Condvar::new()));
    let world = gated::world(&gate);
    local::run(2, |beside| {
        let group = world[beside.rank()].clone();
        let mut saver = AsyncSaver::new(group.clone(), WhenBusy::Refuse).unwrap();
        let state = state(&zoo(), &line(2), group.rank());
        saver.save(&dir, &state).unwrap();
        let error = saver.save(root.path().join("step-00000020"), &state).unwrap_err();
        assert!(matches!(&error, Error::Busy { path, .. } if *path == dir), "{error}");
        *gate.0.lock().unwrap() = true;
        gate.1.notify_all();
        assert_eq!(saver.wait().unwrap().unwrap().path, dir);
        saver.save(root.path().join("step-00000020"), &state).unwrap();
        saver.finish().unwrap();
    });
    assert_eq!(list(root.path()), ["step-00000010", "step-00000020"]);
}

/// Ranks wait for the save before they load. Without waiting, they get an error and never half of a checkpoint.
#[test]
fn a_checkpoint_is_refused_until_its_save_ends() {
    let (root, dir) = fresh();
    let gate: Gate = Arc::new((Mutex::new(false), Condvar::new()));
    let world = gated::world(&gate);
    local::run(2, |beside| {
        let group = world[beside.rank()].clone();
        let mut saver = AsyncSaver::new(group.clone(), WhenBusy::Wait).unwrap();
        saver.save(&dir, &state(&zoo(), &line(2), group.rank())).unwrap();
        let error = fsdp_ckpt::open(&dir).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("step-00000010"), "{error}");
        assert_eq!(fsdp_ckpt::latest(root.path()).unwrap(), None);
        beside.barrier().wait().unwrap();
        *gate.0.lock().unwrap() = true;
        gate.1.notify_all();
        saver.wait().unwrap();
        assert_eq!(fsdp_ckpt::latest(root.path()).unwrap(), Some(dir.clone()));
        let checkpoint = Checkpoint::open(&dir).unwrap();
        checkpoint.verify().unwrap();
        saver.finish().unwrap();
    });
}

#[test]
fn missing_rank_does_not_hang_the_others() {
    let (root, dir) = fresh();
    let options = Options::default().with_timeout(Duration::from_secs(5));
    local::run_with(3, options, |group| {
        let mut saver = AsyncSaver::new(group.clone(), WhenBusy::Wait).unwrap();
        let state = state(&zoo(), &line(3), group.rank());
        saver.save(&dir, &state).unwrap();
        if group.rank() == 2 {
            // Dropping waits for the write.
            return;
        }
        let error = saver.save(root.path().join("step-00000020"), &state).unwrap_err();
        assert!(matches!(error, Error::Group(_)), "{error}");
    });
    assert_eq!(list(root.path()), ["step-00000010"]);
    Checkpoint::open(&dir).unwrap().verify().unwrap();
}

pub(crate) fn dies_while_saving(group: ProcessGroup, root: &Path) {
    let large = Global::new("large", DType::F32, &[4_000_000], &[Placement::Shard(0)]);
    let state = state(&[large], &line(2), group.rank());
    let mut saver = AsyncSaver::new(group.clone(), WhenBusy::Wait).unwrap();
    saver.save(root.join("step-00000010"), &state).unwrap();
    saver.wait().unwrap();
    saver.save(root.join("step-00000020"), &state).unwrap();
    if group.rank() == 1 {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    }
    let error = saver.wait().unwrap_err();
    let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    println!("says: {error}: {source}");
}

#[test]
fn killed_rank_fails_the_others_and_keeps_the_previous_checkpoint() {
    let (root, dir) = fresh();
    let outcomes = start("dies_while_saving", root.path()).outcomes();
    assert!(outcomes[0].contains("rank 1") && outcomes[1].contains("signal"), "{outcomes:?}");
    Checkpoint::open(&dir).unwrap().verify().unwrap();
    let left = list(root.path());
    assert!(left.iter().all(|name| name.starts_with("step-")), "{left:?}");
    for name in left {
        Checkpoint::open(root.path().join(name)).unwrap().verify().unwrap();
    }
}
