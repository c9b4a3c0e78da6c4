//! Cost of saves and loads as the number of ranks grows, counted on simulated ranks.
//!
//! Run it with `--nocapture` for the table in docs/planning.md.

use std::cell::Cell;
use std::path::Path;
use std::sync::{Arc, Mutex};

use fsdp_ckpt::{LoadOptions, LoadTensor, SaveState, TensorShard, load, open_for, save};
use fsdp_core::layout::{Region, local_region};
use fsdp_core::{Buffer, DType, MeshLayout, Placement, ProcessGroup};
use fsdp_test_support::heap;
use fsdp_test_support::simulated::{self, Counter, Traffic};
use tracing::{Dispatch, Metadata, span};

use crate::world::line;

#[global_allocator]
static ALLOCATOR: heap::Counting = heap::Counting;

thread_local! {
    /// Files that this thread has opened or created, and files that it has only looked up.
    static FILES: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
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

/// Cost of a save or a load for one rank.
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
    let (result, heap) = heap::peak(f);
    let (opened, looked_up) = FILES.get();
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

fn state(group: &ProcessGroup) -> SaveState {
    let mesh = line(group.size());
    let shard = |(fqn, shape, region): (String, Vec<usize>, Region)| {
        let data = Arc::new(Buffer::F32(vec![layer_value(&fqn); region.elements()]));
        TensorShard { fqn, shape, region, data }
    };
    let tensors = tensors(&mesh, group.rank()).into_iter().map(shard).collect();
    SaveState { mesh, tensors, values: Default::default() }
}

fn layer_value(fqn: &str) -> f32 {
    fqn.bytes().map(f32::from).sum()
}

fn load_on(dir: &Path, group: &ProcessGroup) {
    let memory = |TensorShard { fqn, shape, region, .. }: &TensorShard| {
        let data = Arc::new(Mutex::new(Buffer::zeros(DType::F32, region.elements())));
        let tensor = LoadTensor { fqn: fqn.clone(), shape: shape.clone(), region: region.clone(), data: data.clone() };
        (tensor, data)
    };
    let state = state(group);
    let source = open_for(dir, group, &state.tensors).unwrap();
    source.verify_share(group.rank(), group.size()).unwrap();
    let (tensors, memories): (Vec<_>, Vec<_>) = state.tensors.iter().map(memory).unzip();
    load(&*source, &tensors, &LoadOptions::default()).unwrap();
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
            let (_, saved) = cost_of(&counter, || save(&dir, &group, &state(&group)).unwrap());
            group.barrier().wait().unwrap();
            let ((), loaded) = cost_of(&counter, || load_on(&dir, &group));
            (saved, loaded)
        })
    });
    both.into_iter().unzip()
}

/// Returns the largest of each count.
fn worst(costs: &[Cost]) -> Cost {
    let most = |of: fn(&Cost) -> usize| costs.iter().map(of).max().unwrap_or(0);
    let traffic = Traffic {
        collectives: most(|cost| cost.traffic.collectives),
        messages: most(|cost| cost.traffic.messages),
        bytes: most(|cost| cost.traffic.bytes),
    };
    let (opened, looked_up) = (most(|cost| cost.opened), most(|cost| cost.looked_up));
    Cost { traffic, opened, looked_up, heap: most(|cost| cost.heap) }
}

#[test]
fn costs_of_saves_and_loads_do_not_grow_with_the_ranks() {
    println!("ranks  what  rank        messages      bytes  opened  looked up  heap bytes");
    for ranks in [8, 64, 512, 4096] {
        let (saved, loaded) = costs(ranks);
        for (what, costs) in [("save", saved), ("load", loaded)] {
            let (first, others) = (costs[0], worst(&costs[1..]));
            for (who, cost) in [("0", first), ("any other", others)] {
                let Cost { traffic: Traffic { messages, bytes, .. }, opened, looked_up, heap } = cost;
                println!(
                    "{ranks:>5}  {what}  {who:<9} {messages:>9} {bytes:>10} {opened:>7} {looked_up:>10} {heap:>11}"
                );
            }
            let hops = ranks.ilog2() as usize;
            let Cost { traffic, opened, looked_up, heap } = others;
            assert!(traffic.messages <= 35 * hops && traffic.bytes < 24 << 10, "{ranks} ranks, {what}: {others:?}");
            // Its own file, a neighbour's to verify, and the one with what all ranks have.
            assert!(opened <= 4 && looked_up == 0, "{ranks} ranks, {what}: {others:?}");
            // The last rank of a simulated collective makes a table with an entry for each rank.
            assert!(heap < (1 << 20) + ranks * (1 << 10), "{ranks} ranks, {what}: {others:?}");
            // Rank 0 hears of each tensor of each rank, and tells each rank of its tensors.
            let Cost { traffic, opened, looked_up, heap } = first;
            assert!(traffic.messages <= 7 * ranks + 35 * hops, "{ranks} ranks, {what}: {first:?}");
            assert!(traffic.bytes < ranks * (24 << 10), "{ranks} ranks, {what}: {first:?}");
            assert!(opened <= 5 && looked_up <= ranks && heap < (2 << 20) + ranks * (96 << 10), "{what}: {first:?}");
        }
    }
}
