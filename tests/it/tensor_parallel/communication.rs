//! Collectives of a step along each mesh dimension, in calls and bytes, follow the documented formula.

use std::collections::{BTreeMap, BTreeSet};

use fsdp_test_support::trace::{Event, Trace};

use super::{DP2_TP2, Mesh, REPLICATE2_TP2, SEQUENCE, SEQUENCES, TP4, train};

// The sizes of `llama_tp_tiny`.
const TOKENS: u64 = 32;
const WIDTH: u64 = 32;
const INNER: u64 = 88;
const IDS: u64 = 132;
const BLOCKS: u64 = 2;
const F32: u64 = 4;
const RANKS: u64 = 4;

/// Ranks and kind of collectives, with the sorted bytes of each call over all ranks.
type Calls = BTreeMap<(Vec<u64>, String), Vec<u64>>;

/// A rank's place in the mesh.
struct Place {
    replicate: u64,
    shard: u64,
    tensor: u64,
    sequence: bool,
    /// Whether blocks are recomputed in backward.
    again: bool,
    rank: u64,
}

impl Place {
    /// Returns the ranks along a mesh dimension of `size` ranks that are `step` apart.
    fn along(&self, step: u64, size: u64) -> Vec<u64> {
        let first = self.rank - self.rank / step % size * step;
        (0..size).map(|i| first + i * step).collect()
    }

    fn formula(&self) -> Calls {
        let &Place { replicate, shard, tensor, sequence, again, .. } = self;
        let mut calls = Calls::new();
        let mut add = |ranks: Vec<u64>, op: &str, count: u64, bytes: u64| {
            // A group of one rank does not communicate.
            if ranks.len() > 1 {
                calls.entry((ranks, op.into())).or_default().extend((0..count).map(|_| bytes));
            }
        };
        let shards = || self.along(tensor, shard);
        let copies = || self.along(tensor * shard, replicate);
        let layers = || self.along(1, tensor);
        let world = || (0..RANKS).collect::<Vec<_>>();

        // FSDP's units hold this rank's part of the layers. Backward does not gather the embedding and the head.
        let embedding = F32 * IDS * WIDTH / tensor;
        let head = embedding + F32 * WIDTH;
        let block = F32 * ((4 * WIDTH * WIDTH + 3 * WIDTH * INNER) / tensor + 2 * WIDTH);
        add(shards(), "all_gather", 2 * BLOCKS, block);
        add(shards(), "reduce_scatter", BLOCKS, block);
        add(copies(), "all_reduce", BLOCKS, block / shard);
        for unit in [embedding, head] {
            add(shards(), "all_gather", 1, unit);
            add(shards(), "reduce_scatter", 1, unit);
            add(copies(), "all_reduce", 1, unit / shard);
        }

        // Layers: forward has the embedding and two for each block, backward the head and two for each block.
        // Recomputation repeats those of the blocks' forward.
        let of_layers = 2 * (2 * BLOCKS + 1) + if again { 2 * BLOCKS } else { 0 };
        let rows = SEQUENCES as u64 / (replicate * shard) * TOKENS;
        let activations = F32 * rows * WIDTH;
        if sequence {
            // Backward gathers what forward scatters, and vice versa.
            for op in ["all_gather", "reduce_scatter"] {
                add(layers(), op, of_layers, activations);
            }
            // Gradients of norms are partial sums.
            add(layers(), "all_reduce", 1, F32 * WIDTH / shard);
            add(layers(), "all_reduce", BLOCKS, F32 * 2 * WIDTH / shard);
        } else {
            add(layers(), "all_reduce", of_layers, activations);
        }
        // The loss: the largest logit of each row; then the sum of exponentials and the target's logit.
        add(layers(), "all_reduce", 1, F32 * rows);
        add(layers(), "all_reduce", 1, 2 * F32 * rows);

        // Squares of the gradient norm: of parallel parameters, and of replicated ones, which are also compared.
        add(shards(), "all_reduce", 1, 16);
        add(layers(), "all_reduce", 1, 24);
        // Loss and norm for the metrics, and peak memory.
        add(world(), "all_reduce", 1, 16);
        add(world(), "all_reduce", 1, 8);
        calls.values_mut().for_each(|bytes| bytes.sort_unstable());
        calls
    }
}

/// Returns the collectives of a rank in step 3. `members` are the ranks of each group.
fn measured(events: &[Event], members: &BTreeMap<String, BTreeSet<u64>>, rank: u64) -> Calls {
    let mut calls = Calls::new();
    for event in Trace::step(events, rank, 3) {
        let Some((group, bytes)) = event.moved.as_ref().filter(|_| event.phase == "B") else { continue };
        let ranks: Vec<u64> = members[group].iter().copied().collect();
        if ranks.len() > 1 {
            calls.entry((ranks, event.name.clone())).or_default().push(*bytes);
        }
    }
    calls.values_mut().for_each(|bytes| bytes.sort_unstable());
    calls
}

fn as_the_formula_says(mesh: &Mesh, [replicate, shard, tensor]: [u64; 3], again: bool) {
    for sequence in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let flag = if sequence { SEQUENCE } else { "" };
        let keep = if again { "--activation-checkpoint full --checkpoint-keep linear" } else { "" };
        let flags = format!("--steps 3 --trace trace.json {flag} {keep}");
        train("llama_tp_tiny", mesh, &flags, dir.path());
        let events = Trace::read(&dir.path().join("trace.json")).events();
        let mut members: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
        for event in &events {
            if let Some((group, _)) = &event.moved {
                members.entry(group.clone()).or_default().insert(event.rank);
            }
        }
        for rank in 0..RANKS {
            let want = Place { replicate, shard, tensor, sequence, again, rank }.formula();
            assert_eq!(measured(&events, &members, rank), want, "{}, {flags}, rank {rank}", mesh.record);
        }
    }
}

#[test]
fn calls_and_bytes_follow_the_formula() {
    as_the_formula_says(&DP2_TP2, [1, 2, 2], false);
    as_the_formula_says(&TP4, [1, 1, 4], false);
    as_the_formula_says(&REPLICATE2_TP2, [2, 1, 2], false);
}

/// Kept products are not recomputed, but their sums are communicated again.
#[test]
fn recomputed_blocks_communicate_again() {
    as_the_formula_says(&DP2_TP2, [1, 2, 2], true);
}
