//! Cost of saves and loads as the number of ranks grows, counted on simulated ranks.
//!
//! Run it with `--nocapture` for the table in docs/planning.md.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::{Arc, Mutex};

use fsdp_ckpt::{LoadOptions, LoadTensor, SaveState, TensorShard, load, open, save};
use fsdp_core::layout::{Region, local_region};
use fsdp_core::{Buffer, DType, MeshLayout, Placement, ProcessGroup};
use fsdp_test_support::simulated::{self, Counter, Traffic};
use tracing::{Dispatch, Metadata, span};

use crate::world::line;

/// Heap memory of a thread: bytes that it has allocated and not freed, and the most so far.
#[derive(Clone, Copy, Default)]
struct Heap {
    live: isize,
    peak: isize,
}

thread_local! {
    static HEAP: Cell<Heap> = const { Cell::new(Heap { live: 0, peak: 0 }) };
    /// Files that this thread has opened or created, and files that it has only looked up.
    static FILES: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// Counts the heap memory of each thread.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

impl Counting {
    fn add(bytes: isize) {
        // A thread that ends has no counter any more.
        let _ = HEAP.try_with(|heap| {
            let Heap { live, peak } = heap.get();
            heap.set(Heap { live: live + bytes, peak: peak.max(live + bytes) });
        });
    }
}

// SAFETY: passes every call to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::add(layout.size() as isize);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        Self::add(-(layout.size() as isize));
        // SAFETY: the caller's.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Counts the files of each thread by the crate's traces.
struct FileCounter;

impl tracing::Subscriber for FileCounter {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        ["fsdp_ckpt::opened", "fsdp_ckpt::looked_up"].contains(&metadata.target())
    }
    fn event(&self, event: &tracing::Event<'_>) {
        let is_opened = event.metadata().target() == "fsdp_ckpt::opened";
        FILES.with(|files| {
            let (opened, looked_up) = files.get();
            files.set((opened + usize::from(is_opened), looked_up + usize::from(!is_opened)));
        });
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// What a rank does in a save or in a load.
#[derive(Clone, Copy, Debug)]
struct Cost {
    traffic: Traffic,
    opened: usize,
    looked_up: usize,
    /// Most bytes of heap memory.
    heap: usize,
}

/// Runs `f` and returns its cost on this thread.
fn cost_of<T>(counter: &Counter, f: impl FnOnce() -> T) -> (T, Cost) {
    counter.take();
    FILES.set((0, 0));
    let before = HEAP.get().live;
    HEAP.set(Heap { live: before, peak: before });
    let result = f();
    let (opened, looked_up) = FILES.get();
    let heap = (HEAP.get().peak - before).max(0) as usize;
    (result, Cost { traffic: counter.take(), opened, looked_up, heap })
}

const LAYERS: usize = 25;
const SHAPE: [usize; 2] = [4096, 2];

/// Returns name and region of each tensor of a rank: 25 weights, with the state of Adam.
fn tensors(mesh: &MeshLayout, rank: usize) -> Vec<(String, Vec<usize>, Region)> {
    let own = local_region(&SHAPE, mesh, &mesh.coordinate_of(rank).unwrap(), &[Placement::Shard(0)]).unwrap();
    let of_layer = |layer: usize| {
        let weight = format!("layers.{layer}.mlp.weight");
        let state = |what: &str| format!("optim.state.{weight}.{what}");
        let sharded = [format!("model.{weight}"), state("exp_avg"), state("exp_avg_sq")];
        let sharded = sharded.map(|name| (name, SHAPE.to_vec(), own.clone()));
        sharded.into_iter().chain([(state("step"), vec![], Region::whole(&[]))]).collect::<Vec<_>>()
    };
    (0..LAYERS).flat_map(of_layer).collect()
}

fn save_from(dir: &Path, group: &ProcessGroup) {
    let mesh = line(group.size());
    let shard = |(fqn, shape, region): (String, Vec<usize>, Region)| {
        let data = Arc::new(Buffer::F32(vec![layer_value(&fqn); region.elements()]));
        TensorShard { fqn, shape, region, data }
    };
    let tensors = tensors(&mesh, group.rank()).into_iter().map(shard).collect();
    save(dir, group, &SaveState { mesh, tensors, values: Default::default() }).unwrap();
}

fn layer_value(fqn: &str) -> f32 {
    fqn.bytes().map(f32::from).sum()
}

fn load_on(dir: &Path, group: &ProcessGroup) {
    let memory = |(fqn, shape, region): (String, Vec<usize>, Region)| {
        let data = Arc::new(Mutex::new(Buffer::zeros(DType::F32, region.elements())));
        (LoadTensor { fqn, shape, region, data: data.clone() }, data)
    };
    let (tensors, memories): (Vec<_>, Vec<_>) =
        tensors(&line(group.size()), group.rank()).into_iter().map(memory).unzip();
    load(&*open(dir).unwrap(), &tensors, &LoadOptions::default()).unwrap();
    for (tensor, memory) in tensors.iter().zip(memories) {
        let expected = Buffer::F32(vec![layer_value(&tensor.fqn); tensor.region.elements()]);
        assert_eq!(*memory.lock().unwrap(), expected, "{}", tensor.fqn);
    }
}

/// Returns the costs of a save and of a load, by rank.
fn costs(ranks: usize) -> (Vec<Cost>, Vec<Cost>) {
    let root = tempfile::tempdir_in("/dev/shm").unwrap();
    let dir = root.path().join("step-1");
    let files = Dispatch::new(FileCounter);
    let both = simulated::run(ranks, |group, counter| {
        tracing::dispatcher::with_default(&files, || {
            let ((), saved) = cost_of(&counter, || save_from(&dir, &group));
            group.barrier().wait().unwrap();
            let ((), loaded) = cost_of(&counter, || load_on(&dir, &group));
            (saved, loaded)
        })
    });
    both.into_iter().unzip()
}

fn print(ranks: usize, what: &str, costs: &[Cost]) {
    let line = |who: &str, cost: Cost| {
        let Cost { traffic: Traffic { collectives, messages, bytes }, opened, looked_up, heap } = cost;
        println!(
            "{ranks:>5} {what:<5} {who:<7} {collectives:>4} {messages:>5} {bytes:>11} {opened:>4} {looked_up:>5} {heap:>11}"
        );
    };
    let last = costs[costs.len() - 1];
    line("last", last);
    let most = |of: fn(&Cost) -> usize| costs.iter().map(of).max().unwrap_or(0);
    let traffic = Traffic {
        collectives: most(|cost| cost.traffic.collectives),
        messages: most(|cost| cost.traffic.messages),
        bytes: most(|cost| cost.traffic.bytes),
    };
    let (opened, looked_up) = (most(|cost| cost.opened), most(|cost| cost.looked_up));
    line("worst", Cost { traffic, opened, looked_up, heap: most(|cost| cost.heap) });
}

#[test]
fn saves_and_loads_cost_a_rank_little_more_on_more_ranks() {
    println!("ranks what  rank    coll  msgs       bytes open looks   heap bytes");
    let sizes = std::env::var("SIZES").unwrap_or("8,64,512,4096".into());
    for ranks in sizes.split(',').map(|size| size.parse().unwrap()) {
        let started = std::time::Instant::now();
        let (saved, loaded) = costs(ranks);
        print(ranks, "save", &saved);
        print(ranks, "load", &loaded);
        println!("{:?}", started.elapsed());
    }
}
