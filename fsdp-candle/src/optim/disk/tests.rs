//! The file of a rank's state on disks that fail, fill up or are slow.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use candle_core::DType;
use fsdp_core::process_group::local;
use rustix::io::Errno;

use super::*;
use crate::disk::{Disk, LEAST_BLOCK};
use crate::optim::elementwise::ElementwiseOptimizer;
use crate::optim::{AdamW, AdamWConfig, ShardedOptimizer};
use crate::{Error, FsdpModule, FullyShard, ShardedVarMap, World, fully_shard, nn};

/// A disk whose operation of a number fails, or that is slow.
struct Bad {
    file: File,
    /// Number of reads and writes until now.
    done: Arc<AtomicUsize>,
    fails: Option<(usize, Errno)>,
    takes: Duration,
}

impl Bad {
    fn act(&self) -> io::Result<()> {
        let number = self.done.fetch_add(1, Ordering::SeqCst);
        // Later operations may end first.
        std::thread::sleep(self.takes * (number as u32 * 3 % 4));
        match self.fails {
            Some((from, errno)) if number >= from => Err(errno.into()),
            _ => Ok(()),
        }
    }
}

impl Disk for Bad {
    fn read(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.act().and_then(|()| self.file.read(into, at))
    }

    fn write(&self, from: &[u8], at: u64) -> io::Result<()> {
        self.act().and_then(|()| self.file.write(from, at))
    }

    fn allocate(&self, end: u64) -> io::Result<bool> {
        self.file.allocate(end)
    }
}

type Model = FsdpModule<nn::Linear>;

fn model(world: &World) -> (ShardedVarMap, Model) {
    let vars = ShardedVarMap::of_world(world).unwrap();
    let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear(100, 400, vb)).unwrap();
    (vars, model)
}

fn step(optim: &mut AdamW, model: &Model) -> Result<()> {
    let x = candle_core::Tensor::arange(0f32, 300., &candle_core::Device::Cpu)?.reshape((3, 100))?;
    let y = candle_nn::Module::forward(model, &x)?;
    optim.step(&model.backward(&y.sqr()?.mean_all()?)?)
}

/// An optimizer on a disk on which the operation of a number and all later ones fail.
fn on_bad_disk(vars: &ShardedVarMap, fails: Option<(usize, Errno)>, takes: Duration) -> AdamW {
    let disk = Bad { file: tempfile::tempfile().unwrap(), done: Arc::new(AtomicUsize::new(0)), fails, takes };
    let file = |rank, bytes, block| {
        disk.file.set_len(bytes).unwrap();
        StateFile::new(Box::new(disk), "/bad".as_ref(), rank, bytes, block)
    };
    let groups = vec![(vars.trainable(), AdamWConfig::default())];
    ElementwiseOptimizer::in_file(groups, |params| DiskState::new(params, LEAST_BLOCK, file)).unwrap()
}

/// Shards on a disk on which reads and writes fail from a number on. The moments are in memory or on a good disk.
/// Returns also how many reads and writes the model and all steps did.
fn steps_with_shards_on(world: &World, fails: Option<(usize, Errno)>, moments_on_disk: bool) -> (Result<()>, usize) {
    let bad =
        Bad { file: tempfile::tempfile().unwrap(), done: Arc::new(AtomicUsize::new(0)), fails, takes: Duration::ZERO };
    let done = bad.done.clone();
    bad.file.set_len(4 * LEAST_BLOCK as u64).unwrap();
    let file = StateFile::new(Box::new(bad), "/shards".as_ref(), world.rank(), 4 * LEAST_BLOCK as u64, LEAST_BLOCK);
    let vars = ShardedVarMap::of_world(world).unwrap();
    vars.store_in(Arc::new(file.unwrap()));
    let run = || {
        let build = |vb| nn::linear(100, 400, vb);
        let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), build)?;
        let mut optim = match moments_on_disk {
            true => on_bad_disk(&vars, None, Duration::ZERO),
            false => AdamW::new(vars.trainable(), AdamWConfig::default())?,
        };
        (0..2).try_for_each(|_| step(&mut optim, &model))
    };
    (run(), done.load(Ordering::SeqCst))
}

#[test]
fn any_failed_read_or_write_of_a_shard_ends_the_step_with_an_error() {
    for (ranks, moments_on_disk) in [(1, false), (2, false), (1, true), (2, true)] {
        let operations = local::run(ranks, |group| {
            let (outcome, operations) = steps_with_shards_on(&World::of(group), None, moments_on_disk);
            outcome.unwrap();
            operations
        });
        for at in 0..operations[0] {
            let errno = if at % 2 == 0 { Errno::IO } else { Errno::NOSPC };
            // Only rank 0's disk fails. Rank 1 ends as well, with an error unless it has taken the last step.
            local::run(ranks, |group| {
                let world = World::of(group);
                let fails = (world.rank() == 0).then_some((at, errno));
                let outcome = steps_with_shards_on(&world, fails, moments_on_disk).0;
                if world.rank() == 0 {
                    let error = outcome.unwrap_err().to_string();
                    assert!(error.contains("rank 0, state on disk in /shards: can't "), "{at}: {error}");
                    assert!(error.contains(&io::Error::from(errno).to_string()), "{at}: {error}");
                }
            });
        }
    }
}

/// The values of all moments.
fn moments(optim: &AdamW) -> Result<Vec<Vec<f32>>> {
    let names = optim.states().iter().flat_map(|state| state.names().map(move |name| state.tensor(name)));
    names.map(|tensor| Ok(tensor?.flatten_all()?.to_vec1()?)).collect()
}

#[test]
fn any_failed_read_or_write_ends_the_step_with_an_error() {
    for ranks in [1, 2] {
        local::run(ranks, |group| {
            let world = World::of(group);
            let (vars, model) = model(&world);
            let mut good = on_bad_disk(&vars, None, Duration::ZERO);
            let operations = 2 * good.disk().blocks();
            assert!(operations >= 10);
            step(&mut good, &model).unwrap();
            for at in 0..operations {
                let errno = if at % 2 == 0 { Errno::IO } else { Errno::NOSPC };
                let mut optim = on_bad_disk(&vars, Some((at, errno)), Duration::ZERO);
                let error = step(&mut optim, &model).unwrap_err();
                let Error::StateOnDisk { rank, kind, message, .. } = &error else { panic!("{error}") };
                assert_eq!((*rank, *kind), (world.rank(), io::Error::from(errno).kind()));
                assert!(message.contains(&io::Error::from(errno).to_string()), "{message}");
                assert!(message.contains("resume from a checkpoint"), "{message}");
                // Neither a step nor a checkpoint uses the rest of the state.
                for error in [moments(&optim).unwrap_err(), step(&mut optim, &model).unwrap_err()] {
                    assert!(error.to_string().contains("it is incomplete, because an earlier write failed"), "{error}");
                }
                let saved = crate::optimizer_tensors(&optim).unwrap();
                let read = saved[0].data.read_pieces(&mut |_| panic!("no value is read"));
                assert!(read.unwrap_err().contains("it is incomplete"));
            }
        });
    }
}

#[test]
fn a_failed_read_of_a_moment_can_be_repeated() {
    local::run(1, |group| {
        let (vars, model) = model(&World::of(group));
        let mut optim = on_bad_disk(&vars, None, Duration::ZERO);
        step(&mut optim, &model).unwrap();
        let good = moments(&optim).unwrap();
        for failing in 0..4 {
            let disk = on_bad_disk(&vars, Some((failing, Errno::IO)), Duration::ZERO);
            let error = moments(&disk).unwrap_err().to_string();
            assert!(error.contains("can't read it: Input/output error") && !error.contains("incomplete"), "{error}");
        }
        assert_eq!(moments(&optim).unwrap(), good);
    });
}

#[test]
fn a_reset_makes_a_failed_state_usable() {
    local::run(1, |group| {
        let (vars, model) = model(&World::of(group));
        let dir = tempfile::tempdir().unwrap();
        let groups = || vec![(vars.trainable(), AdamWConfig::default())];
        let mut optim = AdamW::on_disk(groups(), &StateOnDisk::new(dir.path()).memory_bytes(0)).unwrap();
        step(&mut optim, &model).unwrap();
        assert!(moments(&optim).unwrap().concat().iter().any(|value| *value != 0.));
        // A closure that fails leaves the file half-written.
        let fails = |_, _: ShardUpdate<'_>| candle_core::bail!("the step fails");
        let params: Vec<&FsdpParam> = optim.states().iter().map(|state| &*state.param).collect();
        let gradient = |at: usize| Ok(Some(params[at].var().as_tensor().copy()?));
        let error = optim.disk().step(&params, &[true, true], gradient, fails).unwrap_err();
        assert!(error.to_string().contains("the step fails"), "{error}");
        assert!(moments(&optim).is_err());
        optim.reset().unwrap();
        assert!(moments(&optim).unwrap().concat().iter().all(|value| *value == 0.));
        assert!(ShardedOptimizer::states(&optim).iter().all(|state| state.step == 0));
        step(&mut optim, &model).unwrap();
    });
}

#[test]
fn a_slow_disk_gives_the_same_bits() {
    local::run(1, |group| {
        let world = World::of(group);
        let [fast, slow] = [0, 2].map(|milliseconds| {
            let (vars, model) = model(&world);
            let mut optim = on_bad_disk(&vars, None, Duration::from_millis(milliseconds));
            (0..2).for_each(|_| step(&mut optim, &model).unwrap());
            moments(&optim).unwrap()
        });
        assert!(fast == slow);
    });
}

#[test]
fn a_full_disk_fails_before_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    let found = rustix::fs::statvfs(dir.path()).unwrap();
    let bytes = (found.f_blocks * found.f_frsize).next_multiple_of(4096) + (1 << 40);
    let error = StateFile::create(dir.path(), 3, bytes, 4096).unwrap_err();
    let Error::StateOnDisk { rank: 3, kind: io::ErrorKind::StorageFull, message, .. } = &error else {
        panic!("{error}")
    };
    assert!(message.starts_with(&format!("it needs {bytes} bytes, found ")), "{message}");
    assert!(message.contains("use another directory, or use more ranks"), "{message}");
}

#[test]
fn files_have_no_name_and_keep_what_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let file = Arc::new(StateFile::create(dir.path(), 0, 3 * 8192, 8192).unwrap());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    let ranges = [0..8192, 8192..16384, 16384..24576];
    for round in 0..3_u8 {
        let filled = |at: usize, bytes: &mut [u8]| {
            assert!(
                bytes.len() == 8192
                    && bytes.iter().all(|byte| *byte == if round == 0 { 0 } else { at as u8 + round - 1 })
            );
            bytes.fill(at as u8 + round);
            Ok(())
        };
        file.stream(&ranges, Access::Update, filled).unwrap();
    }
    file.stream(&[], Access::Update, |_, _| panic!("there is no range")).unwrap();
    // A read does not write back.
    let scratched = |_: usize, bytes: &mut [u8]| {
        bytes.fill(9);
        Ok(())
    };
    file.stream(&ranges[1..], Access::Read, scratched).unwrap();
    let kept = |_: usize, bytes: &mut [u8]| {
        assert_eq!(bytes[0], 3);
        Ok(())
    };
    file.stream(&ranges[1..2], Access::Read, kept).unwrap();
}
