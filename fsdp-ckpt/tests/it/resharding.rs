//! Any mesh loads the saves of any mesh exactly.

use fsdp_ckpt::{Checkpoint, TensorSource};
use fsdp_core::{DType, MeshLayout, Placement};
use proptest::prelude::*;

use crate::world::{Global, fresh, line, read, save_all, zoo};

/// Meshes derived from a 1-D mesh's placement.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// FSDP over the whole mesh.
    Fsdp,
    /// HSDP: replicated over the first dimension.
    Hsdp,
    /// TP x FSDP on one tensor dimension.
    TpFsdp,
    /// TP x FSDP on different tensor dimensions.
    Grid,
}

impl Way {
    fn placements(self, shape: &[usize], mesh: &MeshLayout, placement: Placement) -> Vec<Placement> {
        let strided = |dim| Placement::StridedShard { dim, split_factor: mesh.shape()[1] };
        match (self, placement) {
            (Way::Fsdp, placement) => vec![placement],
            (Way::Hsdp, placement) => vec![Placement::Replicate, placement],
            (Way::TpFsdp, Placement::Shard(dim)) => vec![strided(dim), placement],
            (Way::Grid, Placement::Shard(dim)) => vec![placement, Placement::Shard((dim + 1) % shape.len())],
            (Way::TpFsdp | Way::Grid, _) => vec![placement; 2],
        }
    }
}

/// Checks the region of every rank of a mesh.
fn loads(checkpoint: &Checkpoint, globals: &[Global], mesh: &MeshLayout) {
    for global in globals {
        for rank in 0..mesh.size() {
            let region = global.region(mesh, rank);
            let read = read(checkpoint, global, &region).unwrap();
            assert_eq!(read, global.cut(&region), "{global:?} {region:?} of rank {rank} of {mesh}");
        }
    }
}

#[test]
fn every_mesh_loads_saves_of_every_mesh() {
    let plane = |a, b| MeshLayout::new(&[("a", a), ("b", b)]).unwrap();
    let mut ways: Vec<(MeshLayout, Way)> = [1, 2, 3, 4, 6].map(|size| (line(size), Way::Fsdp)).to_vec();
    for mesh in [plane(2, 2), plane(2, 3), plane(3, 2)] {
        ways.extend([Way::Hsdp, Way::TpFsdp, Way::Grid].map(|way| (mesh.clone(), way)));
    }
    let worlds: Vec<(MeshLayout, Vec<Global>)> = ways
        .into_iter()
        .map(|(mesh, way)| {
            let mut globals = zoo();
            for global in &mut globals {
                global.placements = way.placements(&global.shape, &mesh, global.placements[0]);
            }
            (mesh, globals)
        })
        .collect();
    for (mesh, globals) in &worlds {
        let (_root, dir) = fresh();
        let summaries = save_all(&dir, globals, mesh);
        let total: u64 = globals.iter().map(|global| global.bytes.len() as u64).sum();
        assert_eq!(summaries.iter().map(|summary| summary.bytes_by_this_rank).sum::<u64>(), total);
        assert!(summaries.iter().all(|summary| summary.bytes == total && summary.tensors == globals.len()));

        let checkpoint = Checkpoint::open(&dir).unwrap();
        assert_eq!((checkpoint.mesh(), checkpoint.world_size()), (Some(mesh), mesh.size()));
        assert_eq!(checkpoint.values()["step"], 10);
        assert_eq!(checkpoint.values()["lr"].as_f64(), Some(0.1 / 3.0));
        assert_eq!(checkpoint.verify().unwrap().bytes, total);
        for global in globals {
            let entry = checkpoint.tensor(&global.fqn).unwrap();
            assert_eq!((entry.dtype, &entry.shape), (global.dtype, &global.shape));
        }
        for (other, globals) in &worlds {
            loads(&checkpoint, globals, other);
        }
    }
}

/// Generates a mesh of one or two dimensions, and placements of three tensors of these ranks.
fn held(dims: [usize; 3]) -> impl Strategy<Value = (MeshLayout, Vec<Vec<Placement>>)> {
    let placement = |dims: usize| {
        (0..=dims).prop_map(move |dim| if dim == dims { Placement::Replicate } else { Placement::Shard(dim) })
    };
    let pair = move |dims: usize| ([placement(dims), placement(dims)], any::<bool>());
    let planes = (1usize..5, 1usize..4, [pair(dims[0]), pair(dims[1]), pair(dims[2])]).prop_map(|(a, b, pairs)| {
        let placements = pairs.map(|([first, second], strided)| match (first, second) {
            (Placement::Shard(dim), Placement::Shard(other)) if strided && dim == other => {
                vec![Placement::StridedShard { dim, split_factor: b }, second]
            }
            _ => vec![first, second],
        });
        (MeshLayout::new(&[("a", a), ("b", b)]).unwrap(), placements.to_vec())
    });
    let lines = (1usize..7, dims.map(placement))
        .prop_map(|(size, placements)| (line(size), placements.map(|placement| vec![placement]).to_vec()));
    prop_oneof![lines, planes]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    #[test]
    fn round_trips_any_mesh_and_shape(
        (shapes, (saved, saved_as), (loaded, loaded_as)) in [0usize..4, 1..4, 1..4].prop_flat_map(|dims| {
            (dims.map(|dims| prop::collection::vec(0usize..8, dims)), held(dims), held(dims))
        }),
        dtypes in prop::collection::vec(prop::sample::select(DType::ALL.to_vec()), 3),
    ) {
        let (_root, dir) = fresh();
        let globals = |placements: &[Vec<Placement>]| -> Vec<Global> {
            (0..3).map(|i| Global::new(&format!("w{i}"), dtypes[i], &shapes[i], &placements[i])).collect()
        };
        save_all(&dir, &globals(&saved_as), &saved);
        let checkpoint = Checkpoint::open(&dir).unwrap();
        checkpoint.verify().unwrap();
        loads(&checkpoint, &globals(&loaded_as), &loaded);
    }
}
