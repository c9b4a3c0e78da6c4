//! Offloaded inputs on disks that fail or are slow.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use rustix::io::Errno;

use super::super::checkpoint::run;
use super::ActivationOffload;
use crate::disk::Disk;
use crate::nn::Linear;
use crate::{Error, no_grad};

const LAYERS: usize = 6;

/// A disk whose operation of a number fails, or panics, or that is slow. Counts bytes that are written and read.
struct Bad {
    file: File,
    fails: Option<(usize, Errno)>,
    panics: bool,
    takes: Duration,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    done: AtomicUsize,
    written: AtomicUsize,
    read: AtomicUsize,
}

impl Bad {
    fn act(&self) -> io::Result<()> {
        std::thread::sleep(self.takes);
        let number = self.counts.done.fetch_add(1, Ordering::SeqCst);
        assert!(!self.panics, "a disk that panics");
        match self.fails {
            Some((at, errno)) if number == at => Err(errno.into()),
            _ => Ok(()),
        }
    }
}

impl Disk for Bad {
    fn read(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.counts.read.fetch_add(into.len(), Ordering::SeqCst);
        self.act().and_then(|()| self.file.read(into, at))
    }

    fn write(&self, from: &[u8], at: u64) -> io::Result<()> {
        self.counts.written.fetch_add(from.len(), Ordering::SeqCst);
        self.act().and_then(|()| self.file.write(from, at))
    }

    fn allocate(&self, _: u64) -> io::Result<bool> {
        unreachable!("activations are written without allocation")
    }
}

fn on(fails: Option<(usize, Errno)>, panics: bool, takes: Duration) -> (ActivationOffload, Arc<Counts>) {
    let counts = Arc::new(Counts::default());
    let disk = Bad { file: tempfile::tempfile().unwrap(), fails, panics, takes, counts: counts.clone() };
    (ActivationOffload::on_disk(3, Box::new(disk), "/bad".as_ref()).unwrap(), counts)
}

fn on_good_disk() -> (ActivationOffload, Arc<Counts>) {
    on(None, false, Duration::ZERO)
}

/// Layers with a weight each, and an input.
struct Model {
    weights: Vec<Var>,
    x: Var,
}

impl Model {
    fn new(dtype: DType) -> Self {
        let values = |rows: usize, from: usize| {
            let values: Vec<f32> = (0..rows * 16).map(|i| ((i * 37 + from * 11) % 61) as f32 / 61. - 0.5).collect();
            let tensor = Tensor::from_vec(values, (rows, 16), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            Var::from_tensor(&tensor).unwrap()
        };
        Model { weights: (0..LAYERS).map(|layer| values(16, layer)).collect(), x: values(100, 7) }
    }

    fn loss(&self, offload: Option<&ActivationOffload>) -> Result<Tensor> {
        let layers = self.weights.iter().try_fold(self.x.as_tensor().clone(), |x, weight| {
            let layer = Linear::new(weight.as_tensor().clone(), None);
            run(None, offload, move |x: Tensor| layer.forward(&x)?.tanh(), x)
        });
        layers?.to_dtype(DType::F32)?.sqr()?.mean_all()
    }

    fn gradients(&self, loss: &Tensor) -> Result<Vec<Vec<f32>>> {
        let grads = loss.backward()?;
        let of = |var: &Var| grads.get(var).unwrap().to_dtype(DType::F32)?.flatten_all()?.to_vec1();
        self.weights.iter().chain([&self.x]).map(of).collect()
    }
}

/// Waits until all inputs are written, and returns the bytes.
fn written(counts: &Counts, at_least: usize) -> usize {
    let begun = Instant::now();
    while counts.written.load(Ordering::SeqCst) < at_least {
        assert!(begun.elapsed() < Duration::from_secs(60), "{at_least} bytes");
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(20));
    counts.written.load(Ordering::SeqCst)
}

/// Waits until all inputs are gone. The thread may still hold the one that it read ahead.
fn gone(offload: &ActivationOffload) {
    let begun = Instant::now();
    while offload.bytes() > 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} bytes", offload.bytes());
        std::thread::yield_now();
    }
}

#[test]
fn inputs_come_back_with_the_same_bits() {
    for (dtype, bytes) in [(DType::F32, 6400), (DType::BF16, 3200), (DType::F64, 12800)] {
        let model = Model::new(dtype);
        let want = model.gradients(&model.loss(None).unwrap()).unwrap();
        // Backward begins before, and after, all inputs are written.
        for waits in [false, true] {
            let (offload, counts) = on(None, false, Duration::from_millis(u64::from(!waits)));
            let loss = model.loss(Some(&offload)).unwrap();
            assert_eq!(offload.bytes(), (LAYERS * bytes) as u64);
            let file = LAYERS * bytes.next_multiple_of(4096);
            if waits {
                assert_eq!(written(&counts, file), file);
            }
            // The graph is usable twice.
            for _ in 0..2 {
                assert!(model.gradients(&loss).unwrap() == want, "{dtype:?}");
            }
            if waits {
                assert_eq!(counts.read.load(Ordering::SeqCst), 2 * file, "every input is read once in a backward");
            }
            drop(loss);
            gone(&offload);
        }
    }
}

#[test]
fn every_failed_write_or_read_ends_forward_or_backward_with_an_error() {
    let model = Model::new(DType::F32);
    let want = model.gradients(&model.loss(None).unwrap()).unwrap();
    for (at, errno) in (0..2 * LAYERS).flat_map(|at| [(at, Errno::IO), (at, Errno::NOSPC)]) {
        let (offload, counts) = on(Some((at, errno)), false, Duration::ZERO);
        let step = || {
            let loss = model.loss(Some(&offload))?;
            written(&counts, LAYERS * 8192);
            model.gradients(&loss)
        };
        let error = step().unwrap_err();
        let text = error.to_string();
        let system = io::Error::from(errno);
        let is_write = at < LAYERS;
        for part in ["rank 3, activations offloaded to /bad: ", &system.to_string(), "use another directory"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(text.contains(if is_write { "can't write them" } else { "can't read them" }), "{at}: {text}");
        assert_eq!(text.contains("Free space"), errno == Errno::NOSPC, "{text}");
        gone(&offload);
        // A failure is reported once.
        assert!(step().unwrap() == want, "{at}");
    }
}

#[test]
fn a_failed_write_ends_the_next_forward() {
    let model = Model::new(DType::F32);
    let (offload, counts) = on(Some((LAYERS - 1, Errno::NOSPC)), false, Duration::ZERO);
    let loss = model.loss(Some(&offload)).unwrap();
    written(&counts, LAYERS * 8192);
    drop(loss); // no backward
    let error = Error::from(model.loss(Some(&offload)).unwrap_err());
    let found = match &error {
        Error::Candle(error) => match error {
            candle_core::Error::Wrapped(error) => error.to_string(),
            error => error.to_string(),
        },
        error => error.to_string(),
    };
    assert!(found.contains("can't write them: No space left on device"), "{found}");
    assert!(model.loss(Some(&offload)).is_ok());
}

#[test]
fn a_panic_of_the_thread_does_not_hang_backward() {
    let model = Model::new(DType::F32);
    let (offload, _) = on(None, true, Duration::ZERO);
    let error = model.loss(Some(&offload)).and_then(|loss| model.gradients(&loss)).unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
}

#[test]
fn two_graphs_share_the_file() {
    let model = Model::new(DType::F32);
    let want = model.gradients(&model.loss(None).unwrap()).unwrap();
    let (offload, counts) = on_good_disk();
    for first in [0, 1] {
        let losses = [0, 1].map(|_| model.loss(Some(&offload)).unwrap());
        assert_eq!(offload.bytes(), (2 * LAYERS * 6400) as u64);
        written(&counts, 2 * LAYERS * 8192);
        assert!(model.gradients(&losses[first]).unwrap() == want);
        assert!(model.gradients(&losses[1 - first]).unwrap() == want);
    }
    gone(&offload);
}

#[test]
fn evaluation_writes_nothing() {
    let model = Model::new(DType::F32);
    let (offload, counts) = on_good_disk();
    no_grad(|| model.loss(Some(&offload))).unwrap();
    let frozen = |x: Tensor| x.tanh();
    run(None, Some(&offload), frozen, model.x.as_detached_tensor()).unwrap();
    assert_eq!((offload.bytes(), written(&counts, 0)), (0, 0));
}

#[test]
fn ranges_are_used_again() {
    let model = Model::new(DType::F32);
    let dir = tempfile::tempdir().unwrap();
    let file = tempfile::tempfile_in(dir.path()).unwrap();
    let counts = Arc::new(Counts::default());
    let disk = Bad {
        file: file.try_clone().unwrap(),
        fails: None,
        panics: false,
        takes: Duration::ZERO,
        counts: counts.clone(),
    };
    let offload = ActivationOffload::on_disk(0, Box::new(disk), dir.path()).unwrap();
    for step in 1..5 {
        let loss = model.loss(Some(&offload)).unwrap();
        written(&counts, step * LAYERS * 8192);
        drop(loss); // without backward
        gone(&offload);
        assert_eq!(file.metadata().unwrap().len(), (LAYERS * 8192) as u64);
    }
}

#[test]
fn errors_are_typed() {
    let world = crate::World::single().unwrap();
    let error = ActivationOffload::disk(&world, "/no/such/directory").unwrap_err();
    let Error::ActivationOffload { rank: 0, dir: Some(dir), kind: ErrorKind::NotFound, message } = &error else {
        panic!("{error}")
    };
    assert_eq!(dir.to_str(), Some("/no/such/directory"));
    assert!(message.contains("Pass a directory that this process may write to"), "{message}");
}

#[test]
fn inputs_in_host_memory_stay_there() {
    let offload = ActivationOffload::cpu(&crate::World::single().unwrap());
    let model = Model::new(DType::F32);
    model.loss(Some(&offload)).unwrap();
    let loss = model.loss(Some(&offload)).unwrap();
    assert_eq!(offload.bytes(), 0);
    model.gradients(&loss).unwrap();
}
