//! DTensors compared with plain tensors: all placements on 1-D and 2-D meshes of 1 to 4 ranks, with uneven, empty and
//! strided shards, and with all elements on one rank.

mod asynchronous;
mod create;
mod elementwise;
mod moves;
mod params;
mod products;
mod reductions;

use candle_core::{DType, Device, Tensor};
use fsdp_candle::Placement::{self, Partial, Replicate, Shard};
use fsdp_candle::{DTensor, DTensorSpec, DeviceMesh, ReduceOp, World};
use fsdp_core::MeshLayout;

use crate::common::{device, elements, one_of, ranks, refused, rounding};

const SUM: Placement = Partial(ReduceOp::Sum);
const AVG: Placement = Partial(ReduceOp::Avg);
const MAX: Placement = Partial(ReduceOp::Max);
const MIN: Placement = Partial(ReduceOp::Min);

const NAMES: [&str; 2] = ["a", "b"];

fn strided(dim: usize, split_factor: usize) -> Placement {
    Placement::StridedShard { dim, split_factor }
}

fn owned(dim: usize, rank: usize) -> Placement {
    Placement::OwnedBy { dim, rank }
}

/// Runs a closure on each rank of each of the meshes.
fn on_meshes(f: impl Fn(&DeviceMesh) + Sync) {
    for shape in [&[1][..], &[2], &[3], &[4], &[1, 2], &[2, 1], &[2, 2], &[1, 3]] {
        on_mesh(shape, &f);
    }
}

fn on_mesh(shape: &[usize], f: impl Fn(&DeviceMesh) + Sync) {
    let dims: Vec<_> = NAMES.into_iter().zip(shape.iter().copied()).collect();
    ranks(shape.iter().product(), |world: World| f(&world.mesh(&dims).unwrap()));
}

/// The valid placements of a tensor of this shape on a mesh, strided and owned ones included.
fn layouts(mesh: &MeshLayout, shape: &[usize], of: &[Placement]) -> Vec<Vec<Placement>> {
    let uneven = match mesh.shape() {
        [ranks] => vec![vec![strided(0, 2)], vec![owned(0, ranks - 1)]],
        [_, inner] => vec![
            vec![strided(0, *inner), Shard(0)],
            vec![strided(0, 2), Replicate],
            vec![strided(0, *inner), owned(0, inner - 1)],
            vec![Shard(0), owned(1, 0)],
        ],
        _ => vec![],
    };
    let uneven = uneven.into_iter().filter(|placements| fits(mesh, shape, placements));
    layouts_of(mesh, shape, of).into_iter().chain(uneven).collect()
}

/// The valid combinations of some placements, one for each mesh dimension.
fn layouts_of(mesh: &MeshLayout, shape: &[usize], of: &[Placement]) -> Vec<Vec<Placement>> {
    let mut all: Vec<Vec<Placement>> = vec![vec![]];
    for _ in mesh.shape() {
        all = all.into_iter().flat_map(|first| of.iter().map(move |&p| [&first[..], &[p]].concat())).collect();
    }
    all.retain(|placements| fits(mesh, shape, placements));
    all
}

fn fits(mesh: &MeshLayout, shape: &[usize], placements: &[Placement]) -> bool {
    DTensorSpec::new(mesh.clone(), placements, shape, fsdp_core::DType::F32).is_ok()
}

/// Small positive and negative integers, which every dtype represents.
fn numbers(shape: &[usize], dtype: DType) -> Tensor {
    let values: Vec<f32> = (0..shape.iter().product()).map(|at: usize| (at * 7 % 11) as f32 - 4.).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap().to_device(&device()).unwrap()
}

/// A DTensor of these values. Partial values (sum, average, maximum) differ between ranks.
fn laid_out(full: &Tensor, mesh: &DeviceMesh, placements: &[Placement]) -> DTensor {
    let whole = fsdp_candle::distribute_tensor(full, mesh, &vec![Replicate; placements.len()]).unwrap();
    let sharded = |&p: &Placement| if matches!(p, Partial(_)) { Replicate } else { p };
    let sharded = whole.redistribute(&placements.iter().map(sharded).collect::<Vec<_>>()).unwrap();
    let coordinate = mesh.coordinate();
    let mut offset = 0.;
    for ((&placement, at), &size) in placements.iter().zip(coordinate).zip(mesh.layout().shape()) {
        let (at, size) = (at as f64, size as f64);
        offset += match placement {
            Partial(ReduceOp::Avg) => 2. * at - (size - 1.),
            Partial(ReduceOp::Max) => -at,
            Partial(ReduceOp::Min) => at,
            _ => 0.,
        };
    }
    let mut local = match sharded.to_local().elem_count() {
        0 => sharded.to_local().clone(),
        _ => (sharded.to_local() + offset).unwrap(),
    };
    // The first rank has the remainder of a sum.
    for ((&placement, at), &size) in placements.iter().zip(mesh.coordinate()).zip(mesh.layout().shape()) {
        if placement == SUM && local.elem_count() > 0 {
            let threes = (local.zeros_like().unwrap() + 3.).unwrap();
            local = match at {
                0 => (local - (threes * (size as f64 - 1.)).unwrap()).unwrap(),
                _ => threes,
            };
        }
    }
    DTensor::from_local(&local, full.shape(), mesh, placements).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    elements(tensor)
}

/// The elements of a full tensor that are in a rank's regions, found element by element.
fn part(full: &Tensor, spec: &DTensorSpec, rank: usize) -> Vec<f64> {
    let regions = spec.local_regions(rank).unwrap();
    let held = |index: usize| {
        let mut rest = index;
        let mut at: Vec<usize> = spec.shape().iter().rev().map(|&n| (rest % n, rest /= n).0).collect();
        at.reverse();
        regions.iter().any(|region| {
            let within = |dim: usize| (region.offsets[dim]..region.offsets[dim] + region.sizes[dim]).contains(&at[dim]);
            (0..at.len()).all(within)
        })
    };
    values(full).into_iter().enumerate().filter(|(index, _)| held(*index)).map(|(_, value)| value).collect()
}

/// Asserts that `got`, computed without communication, equals `want` at its placements.
fn assert_is(got: &DTensor, want: &Tensor, context: &str) {
    assert_eq!((got.shape(), got.dtype()), (want.dims(), want.dtype()), "{context}");
    let rank = got.device_mesh().rank();
    assert_eq!(got.to_local().dims(), got.spec().local_shape(rank).unwrap(), "{context}");
    if !got.placements().iter().any(|p| matches!(p, Partial(_))) {
        assert_eq!(values(got.to_local()), part(want, got.spec(), rank), "{context}");
    }
    let (found, want) = (values(&got.full_tensor().unwrap()), values(want));
    if got.placements().contains(&AVG) {
        // NCCL multiplies each value, which is larger than the mean, by the dtype's value of one third.
        let largest = want.iter().fold(1., |largest: f64, value| largest.max(value.abs()));
        let allowed = f64::from(rounding(got.dtype())) * 2. * largest;
        for (found, want) in found.iter().zip(&want) {
            assert!((found - want).abs() <= allowed, "{context}: {found} instead of {want}");
        }
    } else {
        assert_eq!(found, want, "{context}");
    }
}
