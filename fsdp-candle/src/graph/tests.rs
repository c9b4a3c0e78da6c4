use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Storage, Tensor, Var};

use super::record::records;
use super::token::Token;
use super::*;

/// `factor * x`, as an operation of this library that keeps `x`.
fn scaled(x: &Tensor, factor: f64) -> Tensor {
    let values: Vec<f32> = (x.detach() * factor).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    let memory = Storage::Cpu(CpuStorage::F32(values));
    graph_op("scaled", &[x], memory, x.shape(), Reads::Sources, move |_, _, dy| Ok([Some((dy * factor)?)])).unwrap()
}

fn variable() -> Var {
    Var::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu).unwrap()
}

fn of(gradients: &GradStore, x: &Var) -> Vec<f32> {
    gradients.get(x).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn gradient(loss: &Tensor, x: &Var) -> Vec<f32> {
    of(&loss.backward().unwrap(), x)
}

#[test]
fn every_user_of_an_output_adds_its_gradient() {
    let x = variable();
    let y = scaled(&x, 2.);
    // Three operations of this library and two of Candle, which all use `y`.
    let mut users: Vec<Tensor> = [3., 5., 7.].map(|factor| scaled(&y, factor)).into();
    users.extend([(&y * 11.).unwrap(), y.t().unwrap()]);
    let loss = users.iter().map(|user| user.sum_all().unwrap()).reduce(|a, b| (a + b).unwrap()).unwrap();
    for _ in 0..2 {
        assert_eq!(gradient(&loss, &x), [2. * (3. + 5. + 7. + 11. + 1.); 4]);
    }
    // Another loss over the same graph.
    assert_eq!(gradient(&users[1].sum_all().unwrap(), &x), [10.; 4]);
}

#[test]
fn a_shared_gradient_is_not_changed_by_its_sum() {
    let x = variable();
    let (a, b) = (scaled(&x, 2.), scaled(&x, 3.));
    let memory = Storage::Cpu(CpuStorage::F32(vec![0.; 4]));
    // Both sources get the same tensor, and `a` gets more.
    let both = graph_op("both", &[&a, &b], memory, a.shape(), Reads::Nothing, |_, _, dy| {
        Ok([Some(dy.clone()), Some(dy.clone())])
    });
    let more = [scaled(&a, 10.), scaled(&a, 100.)].map(|more| more.sum_all().unwrap());
    let loss = ((both.unwrap().sum_all().unwrap() + &more[0]).unwrap() + &more[1]).unwrap();
    assert_eq!(gradient(&loss, &x), [2. * 111. + 3.; 4]);
}

#[test]
fn tokens_end_with_their_outputs() {
    let x = variable();
    let y = scaled(&x, 2.);
    let next = scaled(&y, 3.);
    let id = y.id();
    assert!(Token::of(&y).is_some() && Token::of(&y.detach()).is_none());
    assert_eq!(y.detach().flatten_all().unwrap().to_vec1::<f32>().unwrap(), [2., 4., 6., 8.]);
    drop(y);
    assert!(is_output(id), "the next operation reads the output in backward");
    drop(next);
    assert!(!is_output(id));
    let constant = scaled(&x.as_detached_tensor(), 2.);
    assert!(!constant.track_op() && Token::of(&constant).is_none());
}

#[test]
fn values_that_backward_does_not_read_are_freed() {
    let x = variable();
    for (reads, is_kept) in [(Reads::Nothing, false), (Reads::Sources, true), (Reads::Output, false)] {
        let y = scaled(&x, 2.);
        let id = y.id();
        let memory = y.storage_and_layout().0.try_clone(y.layout()).unwrap();
        let next = graph_op("next", &[&y], memory, y.shape(), reads, |_, _, dy| Ok([Some(dy.clone())])).unwrap();
        drop(y);
        assert_eq!(is_output(id), is_kept, "{reads:?}");
        assert_eq!(gradient(&next.sum_all().unwrap(), &x), [2.; 4]);
    }
}

/// The square of `x`, which is computed again in backward, and how often it was computed.
fn square(x: &Tensor) -> (Tensor, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let compute = move |x: &[&Tensor]| {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(Storage::Cpu(CpuStorage::F32(x[0].detach().sqr()?.flatten_all()?.to_vec1()?)))
    };
    let backward = |x: &[&Tensor], dy: &Tensor| Ok([Some((x[0].detach() * dy)?.affine(2., 0.)?)]);
    (recomputed_op("square", &[x], compute, backward).unwrap(), count)
}

/// An operation whose gradient is the values of its source.
fn reader(x: &Tensor) -> Tensor {
    let memory = x.storage_and_layout().0.try_clone(x.layout()).unwrap();
    graph_op("reader", &[x], memory, x.shape(), Reads::Sources, |x, _, _| {
        assert!(x[0].track_op());
        Ok([Some(x[0].detach())])
    })
    .unwrap()
}

#[test]
fn an_activation_is_freed_and_computed_once_for_all_that_read_it() {
    let x = variable();
    let (y, count) = square(&scaled(&x, 1.));
    let (z, count_z) = square(&y);
    let ids = [y.id(), z.id()];
    // The gradient of z is 2 z = 2 x^4, and that of x is then 4 x^3 2 x^4. A reader of y adds 2 x x^2.
    let users = [reader(&z), reader(&z), reader(&y)].map(|user| user.sum_all().unwrap());
    let loss = ((&users[0] + &users[1]).unwrap() + &users[2]).unwrap();
    drop((y, z));
    assert!(ids.into_iter().all(|id| !is_output(id)), "the graph keeps an activation");
    let expected = [1f32, 2., 3., 4.].map(|x| 8. * x.powi(7) + 2. * x.powi(3));
    for run in 2..4 {
        assert_eq!(gradient(&loss, &x), expected);
        let counts = [&count, &count_z].map(|count| count.load(Ordering::Relaxed));
        assert_eq!(counts, [run; 2]);
    }
    assert_eq!(of(&backward(&loss, true).unwrap(), &x), expected);
    let error = backward(&loss, true).unwrap_err().to_string();
    assert!(error.contains("backward_retain_graph"), "{error}");
}

#[test]
fn an_activation_is_kept_for_operations_after_a_backward_that_frees() {
    let x = variable();
    let (y, count) = square(&x);
    backward(&y.sum_all().unwrap(), true).unwrap();
    let loss = reader(&y).sum_all().unwrap();
    let error = loss.backward().unwrap_err().to_string();
    assert!(error.contains("square: the graph has been through backward"), "{error}");
    assert_eq!(count.load(Ordering::Relaxed), 1);
}

#[test]
fn backward_gets_the_output_that_it_reads() {
    let x = variable();
    let memory = Storage::Cpu(CpuStorage::F32(vec![5., 6., 7., 8.]));
    let y = graph_op("y", &[x.as_tensor()], memory, x.shape(), Reads::Output, |_, y, _| Ok([Some(y.clone())])).unwrap();
    let loss = y.sum_all().unwrap();
    drop(y);
    assert_eq!(gradient(&loss, &x), [5., 6., 7., 8.]);
}

#[test]
fn the_newest_record_has_the_outputs() {
    let x = variable();
    let outer = RecordedOutputs::begin();
    let y = scaled(&x, 2.);
    let inner = RecordedOutputs::begin();
    let z = scaled(&y, 3.);
    let of_record = |record: RecordedOutputs| {
        record.end().into_iter().map(|(token, output)| (token, output.id())).collect::<Vec<_>>()
    };
    assert_eq!(of_record(inner), [(followed(&z), z.id())]);
    assert_eq!(of_record(outer), [(followed(&y), y.id())]);
    assert_eq!(gradient(&z.sum_all().unwrap(), &x), [6.; 4]);
    assert_eq!(records(), 0);
}

#[test]
fn half_floats_are_summed_like_candle_does() {
    for dtype in [DType::BF16, DType::F16] {
        let x = Var::from_tensor(&variable().to_dtype(dtype).unwrap()).unwrap();
        let like = |x: &Tensor| {
            let memory = x.storage_and_layout().0.try_clone(x.layout()).unwrap();
            graph_op("same", &[x], memory, x.shape(), Reads::Nothing, |_, _, dy| Ok([Some(dy.clone())])).unwrap()
        };
        let y = like(&x);
        let users = [like(&y), like(&y), like(&y)].map(|user| user.sum_all().unwrap());
        let loss = ((&users[0] + &users[1]).unwrap() + &users[2]).unwrap();
        let gradient = loss.backward().unwrap().get(&x).unwrap().to_dtype(DType::F32).unwrap();
        assert_eq!(gradient.flatten_all().unwrap().to_vec1::<f32>().unwrap(), [3.; 4]);
    }
}

/// An operation without a backward.
struct NoBackward;

impl CustomOp1 for NoBackward {
    fn name(&self) -> &'static str {
        "no-backward"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }
}

#[test]
fn a_failed_backward_leaves_nothing() {
    let x = variable();
    let (y, count) = square(&scaled(&x, 1.));
    let z = scaled(&y, 2.);
    let fails = z.apply_op1(NoBackward).unwrap().sum_all().unwrap();
    let read = reader(&y).sum_all().unwrap();
    // Whichever comes first in the graph, and whichever operations it shares with the next backward.
    let users = [scaled(&z, 100.), scaled(&y, 1000.)].map(|user| user.sum_all().unwrap());
    let loss = z.sum_all().unwrap();
    let expected = [1f32, 2., 3., 4.].map(|x| 4. * x);
    let with_read = (&loss + &read).unwrap();
    for user in &users {
        for failing in [(user + &fails).unwrap(), (&fails + user).unwrap(), (&with_read + &fails).unwrap()] {
            assert!(failing.backward().is_err());
            assert_eq!(gradient(&loss, &x), expected);
            assert!(backward(&failing, false).is_err());
            assert_eq!(of(&backward(&loss, false).unwrap(), &x), expected);
            assert!(failing.backward().is_err());
            // By a user that the failed backward did not reach.
            assert_eq!(gradient(&scaled(&z, 3.).sum_all().unwrap(), &x), expected.map(|dx| 3. * dx));
        }
    }
    // An activation that a failed backward computed is computed again.
    let before = count.load(Ordering::Relaxed);
    assert!((&read + &fails).unwrap().backward().is_err());
    assert_eq!(gradient(&read, &x), [1f32, 2., 3., 4.].map(|x| 2. * x.powi(3)));
    assert!(count.load(Ordering::Relaxed) > before);
}

#[test]
fn backwards_in_two_threads_share_no_sums() {
    let x = Var::ones((64, 64), DType::F32, &Device::Cpu).unwrap();
    let trunk = (0..6).fold(scaled(&x, 1.), |trunk, _| square(&trunk).0);
    let losses = [1., 3.].map(|factor| scaled(&trunk, factor).sum_all().unwrap());
    for run in 0..50 {
        let start = std::sync::Barrier::new(2);
        let found = std::thread::scope(|threads| {
            let run = |loss| {
                let (start, x) = (&start, &x);
                threads.spawn(move || {
                    start.wait();
                    gradient(loss, x)[0]
                })
            };
            let threads = [run(&losses[0]), run(&losses[1])];
            threads.map(|thread| thread.join().unwrap())
        });
        assert_eq!(found, [64., 192.], "run {run}");
    }
}

#[test]
fn long_graphs_are_freed_without_recursion() {
    let x = variable();
    let threads: [fn(&Tensor) -> Tensor; 3] = [|x| scaled(x, 1.), |x| square(x).0, |x| scaled(&(x + x).unwrap(), 0.5)];
    for operation in threads {
        let x = x.clone();
        let small = std::thread::Builder::new().stack_size(256 << 10);
        let run = move || drop((0..20_000).fold(x.as_tensor().clone(), |x, _| operation(&x)));
        small.spawn(run).unwrap().join().unwrap();
    }
}
