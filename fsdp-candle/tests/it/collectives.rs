//! Differentiable collectives compared with one process: results and gradients.

use candle_core::{D, DType, Result, Tensor, Var};
use fsdp_candle::collectives::{
    Consumers, all_gather, all_reduce, all_to_all, all_to_all_v, copy, exchange_counts, prepare_module_input,
    prepare_module_output, reduce_scatter, split,
};
use fsdp_candle::{Placement, ReduceOp, no_grad};
use fsdp_core::ProcessGroup;

use crate::common::{all_refused, elements, exact, on_cuda, ranks, refused};

const DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::F64];

fn assert_close(what: &str, found: &Tensor, wanted: &Tensor) {
    assert_eq!((found.dims(), found.dtype()), (wanted.dims(), wanted.dtype()), "{what}");
    let tolerance = match found.dtype() {
        DType::BF16 => 1e-2,
        DType::F16 => 1e-3,
        _ => 1e-6,
    };
    for (found, wanted) in elements::<f64>(found).into_iter().zip(elements::<f64>(wanted)) {
        assert!((found - wanted).abs() <= tolerance * wanted.abs().max(1.), "{what}: {found} instead of {wanted}");
    }
}

/// A collective's definition on the tensors of all ranks.
struct Plainly {
    /// Whether all ranks have the same input.
    one_input: bool,
    /// From the ranks' inputs to their outputs.
    outputs: fn(&[Tensor], [usize; 2]) -> Result<Vec<Tensor>>,
    /// Whether all ranks have the same output, and so one loss.
    one_output: bool,
}

fn sum(inputs: &[Tensor]) -> Result<Tensor> {
    let zeros = inputs[0].zeros_like()?.to_dtype(DType::F64)?;
    let sum = inputs.iter().try_fold(zeros, |sum, input| sum + input.to_dtype(DType::F64)?)?;
    sum.to_dtype(inputs[0].dtype())
}

fn same(tensor: Tensor, ranks: usize) -> Result<Vec<Tensor>> {
    Ok(vec![tensor; ranks])
}

/// Compares a collective with its definition along one dimension, for every dtype, contiguous and not.
fn check(
    name: &str,
    plainly: &Plainly,
    collective: impl Fn(&Tensor, [usize; 2], &ProcessGroup) -> Result<Tensor> + Sync,
) {
    for size in 1..=4 {
        ranks(size, |world| {
            let (rank, group) = (world.rank(), world.group());
            for dtype in DTYPES {
                for (shape, dims, turned) in [
                    (&[12, 2][..], [0, 0], false),
                    (&[12, 24], [0, 1], true),
                    (&[2, 12, 12], [1, 2], false),
                    (&[3, 12, 12], [1, 2], true),
                    (&[12, 3, 24], [2, 0], false),
                    (&[1, 12, 12], [1, 2], false),
                ] {
                    let what = format!("{name} on {size} ranks, {dtype:?} {shape:?} {dims:?} {turned}");
                    let seed = |rank| if plainly.one_input { 0 } else { rank };
                    let start = |rank| {
                        let shape: Vec<usize> =
                            if turned { shape.iter().rev().copied().collect() } else { shape.to_vec() };
                        Var::from_tensor(&exact(seed(rank), &shape, dtype)).unwrap()
                    };
                    let view = |var: &Var| {
                        let mut x = var.as_tensor().clone();
                        if turned {
                            x = x.transpose(0, shape.len() - 1).unwrap();
                        }
                        x
                    };
                    // Each element of each rank's output has a different weight.
                    let weigh = |y: &Tensor, rank: usize| {
                        let seed = if plainly.one_output { 7 } else { 7 + rank };
                        (y * exact(seed, y.dims(), dtype)).unwrap().to_dtype(DType::F64).unwrap().sum_all().unwrap()
                    };
                    let vars: Vec<Var> = (0..size).map(start).collect();
                    let inputs: Vec<Tensor> =
                        (0..size).map(|rank| view(&vars[if plainly.one_input { 0 } else { rank }])).collect();
                    let outputs = (plainly.outputs)(&inputs, dims).unwrap();
                    let losses = outputs.iter().enumerate().map(|(rank, y)| weigh(y, rank));
                    let losses: Vec<_> = losses.take(if plainly.one_output { 1 } else { size }).collect();
                    let wanted = Tensor::stack(&losses, 0).unwrap().sum_all().unwrap().backward().unwrap();
                    let wanted = wanted.get(&vars[if plainly.one_input { 0 } else { rank }]).unwrap();

                    let var = start(rank);
                    let y = collective(&view(&var), dims, group).unwrap();
                    assert_close(&what, &y, &outputs[rank]);
                    let found = weigh(&y, rank).backward().unwrap();
                    assert_close(&format!("the gradient of {what}"), found.get(&var).unwrap(), wanted);

                    let y = no_grad(|| collective(&view(&var), dims, group)).unwrap();
                    assert!(!y.track_op(), "{what}");
                    assert_close(&what, &y, &outputs[rank]);
                }
            }
        });
    }
}

#[test]
fn copy_sums_gradients() {
    let plainly = Plainly { one_input: true, outputs: |x, _| Ok(x.to_vec()), one_output: false };
    check("copy", &plainly, |x, _, group| copy(x, group));
    let replicate = Placement::Replicate;
    check("prepared", &plainly, |x, _, group| prepare_module_input(x, replicate, replicate, group));
}

#[test]
fn all_reduce_passes_gradients_on() {
    let plainly = Plainly { one_input: false, outputs: |x, _| same(sum(x)?, x.len()), one_output: true };
    check("all_reduce", &plainly, |x, _, group| all_reduce(x, group));
    let (from, to) = (Placement::Partial(ReduceOp::Sum), Placement::Replicate);
    check("prepared", &plainly, |x, _, group| prepare_module_output(x, from, to, group));
}

#[test]
fn all_gather_scatters_gradients() {
    let outputs = |x: &[Tensor], [dim, _]: [usize; 2]| same(Tensor::cat(x, dim)?, x.len());
    let plainly = Plainly { one_input: false, outputs, one_output: false };
    check("all_gather", &plainly, |x, [dim, _], group| all_gather(x, dim, group, Consumers::Differ));
    check("prepared", &plainly, |x, [dim, _], group| {
        prepare_module_input(x, Placement::Shard(dim), Placement::Replicate, group)
    });
    let plainly = Plainly { one_output: true, ..plainly };
    check("all_gather", &plainly, |x, [dim, _], group| all_gather(x, dim, group, Consumers::Same));
    check("prepared", &plainly, |x, [dim, _], group| {
        prepare_module_output(x, Placement::Shard(dim), Placement::Replicate, group)
    });
}

#[test]
fn reduce_scatter_gathers_gradients() {
    let outputs = |x: &[Tensor], [dim, _]: [usize; 2]| sum(x)?.chunk(x.len(), dim);
    let plainly = Plainly { one_input: false, outputs, one_output: false };
    check("reduce_scatter", &plainly, |x, [dim, _], group| reduce_scatter(x, dim, group));
    check("prepared", &plainly, |x, [dim, _], group| {
        prepare_module_output(x, Placement::Partial(ReduceOp::Sum), Placement::Shard(dim), group)
    });
}

#[test]
fn split_gathers_gradients() {
    let outputs = |x: &[Tensor], [dim, _]: [usize; 2]| x[0].chunk(x.len(), dim);
    let plainly = Plainly { one_input: true, outputs, one_output: false };
    check("split", &plainly, |x, [dim, _], group| split(x, dim, group));
    for prepare in [prepare_module_input, prepare_module_output] {
        check("prepared", &plainly, |x, [dim, _], group| {
            prepare(x, Placement::Replicate, Placement::Shard(dim), group)
        });
    }
}

#[test]
fn all_to_all_reverses_gradients() {
    let outputs = |x: &[Tensor], [from, to]: [usize; 2]| {
        if from == to { Ok(x.to_vec()) } else { Tensor::cat(x, from)?.chunk(x.len(), to) }
    };
    let plainly = Plainly { one_input: false, outputs, one_output: false };
    check("all_to_all", &plainly, |x, [from, to], group| all_to_all(x, from, to, group));
    for prepare in [prepare_module_input, prepare_module_output] {
        check("prepared", &plainly, |x, [from, to], group| {
            prepare(x, Placement::Shard(from), Placement::Shard(to), group)
        });
    }
}

/// Returns how many rows rank `from` sends to rank `to`: uneven numbers, of which some are 0.
fn sent_rows(from: usize, to: usize, skew: usize) -> usize {
    match skew {
        // Nothing but to the last rank.
        0 => [0, 5][usize::from(to == 1)],
        // One rank sends nothing, and one gets nothing.
        1 if from == 0 || to == 2 => 0,
        _ => (3 * from + 2 * to + skew) % 4,
    }
}

#[test]
fn all_to_all_v_exchanges_rows_and_their_gradients() {
    for size in 1..=4 {
        ranks(size, |world| {
            let (rank, group) = (world.rank(), world.group());
            let rows = |from: usize, skew| (0..size).map(|to| sent_rows(from, to, skew)).sum::<usize>();
            let received = |to: usize, skew| (0..size).map(|from| sent_rows(from, to, skew)).sum::<usize>();
            // Candle can't cast or copy tensors without elements on devices.
            let is_empty = |skew| (0..size).any(|rank| rows(rank, skew) * received(rank, skew) == 0);
            let skews = (0..4).filter(|&skew| !(on_cuda() && is_empty(skew)));
            for (skew, dtype) in skews.flat_map(|skew| DTYPES.map(|dtype| (skew, dtype))) {
                for row in [&[3][..], &[], &[2, 4]] {
                    let shape = |rows: usize| [&[rows], row].concat();
                    let inputs = |rank: usize| exact(rank, &shape(rows(rank, skew)), dtype);
                    let send: Vec<usize> = (0..size).map(|to| sent_rows(rank, to, skew)).collect();
                    let recv = exchange_counts(&send, group).unwrap();
                    assert_eq!(recv, (0..size).map(|from| sent_rows(from, rank, skew)).collect::<Vec<_>>());
                    // Rows that are not contiguous are sent as well.
                    let x = Var::from_tensor(&inputs(rank)).unwrap();
                    let turned = x.t().ok().filter(|_| row.len() == 1).map(|x| x.contiguous().unwrap().t().unwrap());
                    let y = all_to_all_v(turned.as_ref().unwrap_or(&x), &send, &recv, group).unwrap();

                    let rows_of = |from: usize| {
                        let before = (0..rank).map(|to| sent_rows(from, to, skew)).sum();
                        inputs(from).narrow(0, before, sent_rows(from, rank, skew)).unwrap()
                    };
                    let wanted = Tensor::cat(&(0..size).map(rows_of).collect::<Vec<_>>(), 0).unwrap();
                    assert_eq!((y.dims(), y.dtype()), (wanted.dims(), dtype));
                    assert_eq!(elements::<f64>(&y), elements::<f64>(&wanted));

                    // Each rank multiplies its rows by a number of its own.
                    let loss = (y * (1 + rank) as f64).unwrap().sum_all().unwrap();
                    let gradient = loss.backward().unwrap().remove(&x).unwrap();
                    let len: usize = row.iter().product();
                    let of_rank = |to: usize| vec![(1 + to) as f64; sent_rows(rank, to, skew) * len];
                    assert_eq!(elements::<f64>(&gradient), (0..size).flat_map(of_rank).collect::<Vec<_>>());
                }
            }
        });
    }
}

#[test]
fn all_to_all_v_refuses_counts_that_do_not_fit() {
    ranks(2, |world| {
        let (group, x) = (world.group(), exact(0, &[3, 2], DType::F32));
        let scalar = Tensor::new(1f32, x.device()).unwrap();
        for (x, send, recv) in
            [(&x, &[1, 1][..], &[1, 1][..]), (&x, &[3], &[3]), (&x, &[1, 2], &[1, 1, 1]), (&scalar, &[0, 0], &[0, 0])]
        {
            let of_rank = format!("all_to_all_v on rank {}", world.rank());
            refused(all_to_all_v(x, send, recv, group), &[&of_rank, "both must have 2 numbers"]);
        }
        // This rank's own count.
        refused(all_to_all_v(&x, &[1, 2], &[2, 1], group), &["all_to_all_v on rank", "make them equal"]);
        refused(exchange_counts(&[1], group), &["exchange_counts on rank", "1 counts for the 2 ranks"]);
        refused(group.exchange_values(vec![1u32; 3]), &["3 values can't be divided evenly over the 2 ranks"]);
        // The group still works.
        assert_eq!(exchange_counts(&[1, 1], group).unwrap(), [1, 1]);
    });
    let errors = ranks(2, |world| {
        let x = exact(0, &[2, 3], DType::F32);
        // Rank 1 expects a row that rank 0 does not send.
        let recv = [[1, 1], [2, 1]][world.rank()];
        let send = [1, 1];
        all_to_all_v(&x, &send, &recv, world.group()).map(|_| ()).unwrap_err().to_string()
    });
    all_refused(errors, &["all_to_all"]);
}

#[test]
fn equal_layouts_need_no_communication() {
    ranks(2, |world| {
        let x = Var::from_tensor(&exact(world.rank(), &[2, 7, 3], DType::F32)).unwrap();
        let layout = Placement::Shard(1);
        for y in [
            all_to_all(&x, 1, 1, world.group()),
            prepare_module_input(&x, layout, layout, world.group()),
            prepare_module_output(&x, layout, layout, world.group()),
        ] {
            let y = y.unwrap();
            assert_eq!(elements::<f32>(&y), elements::<f32>(&x));
            let grads = (y * 3.).unwrap().sum_all().unwrap().backward().unwrap();
            assert_eq!(elements::<f32>(grads.get(&x).unwrap()), [3.; 2 * 7 * 3]);
        }
    });
}

#[test]
fn refuses_indivisible_dimensions_before_communication() {
    ranks(2, |world| {
        let x = exact(world.rank(), &[2, 7, 4], DType::F32);
        for error in [
            reduce_scatter(&x, 1, world.group()),
            split(&x, 1, world.group()),
            all_to_all(&x, D::Minus1, 1, world.group()),
            prepare_module_output(&x, Placement::Replicate, Placement::Shard(1), world.group()),
        ] {
            refused(
                error,
                &["dimension 1 of [2, 7, 4]", "2 does not divide", &format!("on rank {}", world.rank()), "pad it"],
            );
        }
        refused(split(&x, 3, world.group()), &["split"]);
        for (from, to) in [
            (Placement::Partial(ReduceOp::Sum), Placement::Replicate),
            (Placement::StridedShard { dim: 0, split_factor: 2 }, Placement::Replicate),
        ] {
            refused(prepare_module_input(&x, from, to, world.group()), &[&format!("from {from} to {to}")]);
        }
        let error = prepare_module_output(&x, Placement::Partial(ReduceOp::Max), Placement::Replicate, world.group());
        refused(error, &["Partial(ReduceOp::Sum)"]);
        // The group still works.
        assert_eq!(all_gather(&x, 1, world.group(), Consumers::Same).unwrap().dims(), [2, 14, 4]);
    });
}

#[test]
fn refuses_different_shapes_on_ranks() {
    let errors = ranks(2, |world| {
        let x = exact(0, &[1, 3 + world.rank()], DType::F32);
        all_gather(&x, 1, world.group(), Consumers::Differ).unwrap_err().to_string()
    });
    all_refused(errors, &["all_gather"]);
}
