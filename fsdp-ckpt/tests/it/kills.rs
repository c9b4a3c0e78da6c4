//! Ranks that are killed during saves, asynchronous saves and removals.

use std::io::BufReader;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fsdp_ckpt::{AsyncSaver, Checkpoint, SaveState, TensorShard, TensorSource, WhenBusy, keep_newest, latest, save};
use fsdp_core::layout::Region;
use fsdp_core::{Buffer, ProcessGroup};

use crate::processes::{next_number, start};
use crate::world::{fresh, line, list};

const KEEP: NonZeroUsize = NonZeroUsize::new(2).unwrap();
const TENSORS: usize = 3;
const ELEMENTS: usize = 30_000;

/// Creates the state of a step: every element is the step.
fn of(step: usize, rank: usize) -> SaveState {
    let part = ELEMENTS / 2;
    let shard = |i: usize| TensorShard {
        fqn: format!("w{i}"),
        shape: vec![ELEMENTS],
        region: Region { offsets: vec![rank * part], sizes: vec![part] },
        data: Arc::new(Buffer::I64(vec![step as i64; part])),
    };
    let values = [("step".to_string(), step.into())].into_iter().collect();
    SaveState { mesh: line(2), tensors: (0..TENSORS).map(shard).collect(), values }
}

/// Checks that a checkpoint is whole and all of one step. Returns the step.
fn check(dir: &Path) -> usize {
    let checkpoint = Checkpoint::open(dir).unwrap();
    checkpoint.verify().unwrap();
    let step = checkpoint.values()["step"].as_u64().unwrap() as usize;
    assert_eq!(dir.file_name().unwrap().to_str().unwrap(), format!("step-{step}"));
    assert_eq!(checkpoint.tensors().len(), TENSORS);
    for fqn in checkpoint.tensors().keys() {
        let mut bytes = vec![0; 8 * ELEMENTS];
        checkpoint.read(fqn, &Region::whole(&[ELEMENTS]), &mut bytes).unwrap();
        assert!(bytes.as_chunks::<8>().0.iter().all(|bytes| i64::from_le_bytes(*bytes) == step as i64));
    }
    step
}

/// Saves step after step, every other one asynchronously, and prints each saved step.
pub(crate) fn saves_repeatedly(group: ProcessGroup, root: &Path) {
    let mut saver = AsyncSaver::new(group.clone(), WhenBusy::Wait).unwrap().keep_newest(KEEP);
    let first = latest(root).unwrap().map_or(1, |dir| check(&dir) + 1);
    group.barrier().wait().unwrap();
    for step in first.. {
        let (dir, state) = (root.join(format!("step-{step}")), of(step, group.rank()));
        if step % 2 == 0 {
            saver.save(&dir, &state).unwrap();
            saver.wait().unwrap();
        } else {
            save(&dir, &group, &state).unwrap();
            if group.rank() == 0 {
                keep_newest(root, KEEP, &[]).unwrap();
            }
        }
        if group.rank() == 0 {
            println!("saved {step}");
        }
    }
}

/// Returns the next number of a pseudo-random sequence.
pub(crate) fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[test]
fn survives_two_hundred_kills() {
    const KILLS: usize = 200;
    let mut random = 0x5AFE;
    let (root, _) = fresh();
    let (mut safe, mut unfinished) = (0, 0);
    for kill in 0..KILLS {
        let mut job = start("saves_repeatedly", root.path());
        let mut lines = BufReader::new(job.0[0].stdout.take().unwrap());
        // The job has started, and has removed stale entries.
        let started =
            next_number(&mut lines, "saved ").unwrap_or_else(|| panic!("kill {kill}: {:?}", list(root.path())));
        std::thread::sleep(Duration::from_micros(splitmix(&mut random) % 40_000));
        job.kill();
        let mut told = started;
        while let Some(step) = next_number(&mut lines, "saved ") {
            told = step;
        }
        assert!(started > safe, "{started} came after {safe}");
        // Lost would be what was told to be safe; half-read, what is there and not whole.
        let names = list(root.path());
        let steps: Vec<usize> =
            names.iter().filter(|name| !name.starts_with('.')).map(|name| check(&root.path().join(name))).collect();
        safe = steps.iter().copied().max().unwrap();
        assert!(safe >= told, "{names:?}, {told} was saved");
        assert_eq!(latest(root.path()).unwrap(), Some(root.path().join(format!("step-{safe}"))));
        assert!((1..=KEEP.get() + 1).contains(&steps.len()), "{names:?}");
        let hidden = names.len() - steps.len();
        unfinished += usize::from(hidden > 0);
        assert!(hidden <= 1, "{names:?}: earlier ones should be swept");
    }
    assert!(unfinished > KILLS / 20, "{unfinished} of {KILLS} kills hit a save or a removal");
    // The next save leaves nothing of any of them.
    let next = root.path().join(format!("step-{}", safe + 1));
    crate::world::world(2, |group| save(&next, group, &of(safe + 1, group.rank())).unwrap());
    keep_newest(root.path(), KEEP, &[]).unwrap();
    let left: Vec<String> = list(root.path());
    assert!(left.len() == KEEP.get() && left.iter().all(|name| name.starts_with("step-")), "{left:?}");
}
