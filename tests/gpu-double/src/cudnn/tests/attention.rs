//! Attention and its gradients beside plain sums in f64.

use half::bf16;

use super::graphs::{Band, Builder, Case};
use super::*;
use crate::streams::Access;

const CASES: [Case; 6] = [
    case([2, 3, 3], [5, 7], Band::All),
    case([1, 4, 2], [6, 6], Band::Causal(0)),
    case([2, 4, 1], [4, 9], Band::Causal(5)),
    // The first two rows see no key.
    case([1, 2, 2], [5, 5], Band::Causal(-2)),
    case([1, 6, 2], [9, 9], Band::Window(0, 3.0)),
    case([2, 2, 1], [3, 8], Band::Window(5, -2.0)),
];

const fn case([batch, heads, key_heads]: [usize; 3], [rows, keys]: [usize; 2], band: Band) -> Case {
    Case { batch, heads, key_heads, rows, keys, width: 16, band, scale: 0.3 }
}

/// Attention's arrays: `[batch, row, head, width]`, and the stats as `[batch, head, row]`.
struct Plain {
    o: Vec<f64>,
    stats: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

fn is_kept(band: Band, row: usize, key: usize) -> bool {
    let (row, key) = (row as i32, key as i32);
    match band {
        Band::All => true,
        Band::Causal(shift) => row + shift >= key,
        Band::Window(shift, left) => row + shift >= key && key as f32 + left > row as f32,
    }
}

/// Computes attention head by head. `o` gives the values that the gradients read, if any.
fn plain(case: Case, [q, k, v, d_o]: [&[bf16]; 4], o: Option<&[bf16]>) -> Plain {
    let Case { batch, heads, key_heads, rows, keys, width, .. } = case;
    let (wide, narrow) = (batch * rows * heads * width, batch * keys * key_heads * width);
    let mut to = Plain {
        o: vec![0.0; wide],
        stats: vec![f64::NEG_INFINITY; batch * heads * rows],
        dq: vec![0.0; wide],
        dk: vec![0.0; narrow],
        dv: vec![0.0; narrow],
    };
    for (b, head, row) in
        (0..batch).flat_map(|b| (0..heads).flat_map(move |head| (0..rows).map(move |row| (b, head, row))))
    {
        let of_q = ((b * rows + row) * heads + head) * width;
        let of_k = |key| ((b * keys + key) * key_heads + head / (heads / key_heads)) * width;
        let dot = |x: &[bf16], i: usize, y: &[bf16], j: usize| -> f64 {
            (0..width).map(|w| x[i + w].to_f64() * y[j + w].to_f64()).sum()
        };
        let seen: Vec<usize> = (0..keys).filter(|key| is_kept(case.band, row, *key)).collect();
        let scale = f64::from(case.scale);
        let exps: Vec<f64> = seen.iter().map(|key| (scale * dot(q, of_q, k, of_k(*key))).exp()).collect();
        let sum: f64 = exps.iter().sum();
        if !seen.is_empty() {
            to.stats[(b * heads + head) * rows + row] = sum.ln();
        }
        let total = o.map_or(0.0, |o| dot(o, of_q, d_o, of_q));
        for (key, exp) in seen.iter().zip(exps) {
            let (p, of_k) = (exp / sum, of_k(*key));
            let ds = scale * p * (dot(d_o, of_q, v, of_k) - total);
            for w in 0..width {
                to.o[of_q + w] += p * v[of_k + w].to_f64();
                to.dv[of_k + w] += p * d_o[of_q + w].to_f64();
                to.dq[of_q + w] += ds * k[of_k + w].to_f64();
                to.dk[of_k + w] += ds * q[of_q + w].to_f64();
            }
        }
    }
    to
}

/// Memory whose contents no graph may read.
fn garbage<T: Copy>(len: usize, value: T) -> Vec<T> {
    vec![value; len]
}

fn assert_close(what: &str, case: Case, found: &[bf16], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let difference = (found.to_f64() - expected).abs();
        assert!(difference <= expected.abs() / 250.0 + 1e-5, "{case:?} {what} {i}: {found} beside {expected}");
    }
}

/// Returns queries, keys, values and gradients of the output.
fn inputs(case: Case) -> [Vec<bf16>; 4] {
    let Case { batch, heads, key_heads, rows, keys, width, .. } = case;
    let [wide, narrow] = [batch * rows * heads * width, batch * keys * key_heads * width];
    [random(wide, 1), random(narrow, 2), random(narrow, 3), random(wide, 4)]
}

fn forward(case: Case, [q, k, v, _]: [&[bf16]; 4]) -> (Vec<bf16>, Vec<f32>) {
    let mut builder = Builder::new();
    let (graph, uids) = builder.forward(case);
    let plan = heuristic_plan(&graph).expect("it is supported");
    drop(graph);
    assert_eq!(plan.number(&at::EXECUTION_PLAN_WORKSPACE_SIZE), 256);
    let (mut o, mut stats) = (garbage(q.len(), bf16::NAN), garbage(case.batch * case.heads * case.rows, f32::NAN));
    let mut workspace = vec![0u64; 32];
    let mut places = builder.places();
    for (name, at) in [("q", q.as_ptr()), ("k", k.as_ptr()), ("v", v.as_ptr()), ("o", o.as_mut_ptr().cast_const())] {
        places.push((uids[name], at as u64));
    }
    places.push((uids["stats"], stats.as_mut_ptr() as u64));
    let operation = execution(&plan, &pack(&places, workspace.as_mut_ptr() as u64)).unwrap();
    let written =
        |at: u64| operation.touches.iter().filter(|one| one.at == at).map(|one| one.access).collect::<Vec<_>>();
    for at in [o.as_ptr() as u64, stats.as_ptr() as u64, workspace.as_ptr() as u64] {
        assert_eq!(written(at), [Access::Write]);
    }
    for at in [q, k, v].map(|one| one.as_ptr() as u64) {
        assert_eq!(written(at), [Access::Read]);
    }
    assert_eq!(operation.touches.len(), 6, "numbers by value are not the device's");
    run(operation);
    assert!(workspace.iter().all(|word| *word == u64::MAX), "the workspace is written");
    (o, stats)
}

#[test]
fn attention_matches_plain_sums() {
    for case in CASES {
        let inputs = inputs(case);
        let inputs = inputs.each_ref().map(|one| one.as_slice());
        let (o, stats) = forward(case, inputs);
        let expected = plain(case, inputs, None);
        assert_close("o", case, &o, &expected.o);
        for (found, expected) in stats.iter().zip(&expected.stats) {
            assert!(f64::from(*found) == *expected || (f64::from(*found) - expected).abs() < 1e-6, "{case:?}");
        }
    }
}

/// Returns a plan of the engine for gradients, with or without the knob for a fixed order.
fn explicit_plan(graph: &Made, ordered: bool) -> Made {
    let engine = Made::new(Kind::Engine).of(&at::ENGINE_OPERATION_GRAPH, &[graph]);
    let engine = engine.with(&at::ENGINE_GLOBAL_INDEX, &[6]).done();
    assert_eq!(engine.number(&at::ENGINE_NUMERICAL_NOTE), 0);
    let chosen = [(40, 2), (41, 1), (24, 2), (38, 0), (27, 0), (14, 4)];
    let chosen = &chosen[..if ordered { 6 } else { 5 }];
    let knob = |(kind, value): &(i64, i64)| {
        let knob = Made::new(Kind::Knob).with(&at::KNOB_CHOICE_KNOB_TYPE, &[*kind]);
        knob.with(&at::KNOB_CHOICE_KNOB_VALUE, &[*value]).done()
    };
    let knobs: Vec<Made> = chosen.iter().map(knob).collect();
    let config = Made::new(Kind::EngineConfig).of(&at::ENGINECFG_ENGINE, &[&engine]);
    let config = config.of(&at::ENGINECFG_KNOB_CHOICES, &knobs.iter().collect::<Vec<_>>()).done();
    Made::new(Kind::Plan).of(&at::EXECUTION_PLAN_ENGINE_CONFIG, &[&config]).done()
}

#[test]
fn gradients_match_plain_sums() {
    for (case, ordered) in CASES.into_iter().flat_map(|case| [(case, false), (case, true)]) {
        let inputs = inputs(case);
        let inputs = inputs.each_ref().map(|one| one.as_slice());
        let (o, stats) = forward(case, inputs);
        let [q, k, v, d_o] = inputs;
        let mut builder = Builder::new();
        let (graph, uids) = builder.backward(case);
        let plan = if ordered { explicit_plan(&graph, true) } else { heuristic_plan(&graph).unwrap() };
        drop(graph);
        let [mut dq, mut dk, mut dv] = [q, k, v].map(|one| garbage(one.len(), bf16::NAN));
        let (mut sums, mut accumulated) = (garbage(stats.len(), f32::NAN), garbage(q.len(), f32::NAN));
        let len = plan.number(&at::EXECUTION_PLAN_WORKSPACE_SIZE) as usize;
        let mut workspace = garbage(len.div_ceil(8), 0u64);
        let mut places = builder.places();
        let halves = [("q", q), ("k", k), ("v", v), ("o", &o), ("do", d_o)].map(|(name, of)| (name, of.as_ptr()));
        places.extend(halves.map(|(name, at)| (uids[name], at as u64)));
        let grads = [("dq", &mut dq), ("dk", &mut dk), ("dv", &mut dv)].map(|(name, of)| (name, of.as_mut_ptr()));
        places.extend(grads.map(|(name, at)| (uids[name], at as u64)));
        places.push((uids["stats"], stats.as_ptr() as u64));
        let floats = [("sums", &mut sums), ("accumulated", &mut accumulated)];
        places.extend(floats.map(|(name, of)| (uids[name], of.as_mut_ptr() as u64)));
        let operation = execution(&plan, &pack(&places, workspace.as_mut_ptr() as u64)).unwrap();
        assert_eq!(operation.touches.iter().filter(|one| one.access == Access::Write).count(), 6);
        assert_eq!(operation.touches.len(), 12);
        run(operation);
        let expected = plain(case, inputs, Some(&o));
        assert_close("dv", case, &dv, &expected.dv);
        assert_close("dq", case, &dq, &expected.dq);
        assert_close("dk", case, &dk, &expected.dk);
        assert!(sums.iter().chain(&accumulated).all(|value| value.is_finite()), "the results between are written");
    }
}

#[test]
fn workspaces_are_as_measured() {
    // Bytes beyond the sums and the accumulation of gradients, as cuDNN 9.26 asks for them.
    for ([batch, heads, key_heads], [rows, keys, width], regular, ordered) in [
        ([1, 32, 8], [8192, 8192, 128], 134_217_984, 134_250_752),
        ([1, 32, 32], [8192, 8192, 128], 256, 33_024),
        ([1, 32, 32], [1000, 1000, 64], 256, 4_352),
        ([2, 4, 2], [1000, 500, 96], 1_536_256, 1_537_280),
        ([1, 4, 4], [64, 6400, 128], 256, 384),
    ] {
        let case = Case { width, ..case([batch, heads, key_heads], [rows, keys], Band::Causal(0)) };
        let (graph, _) = Builder::new().backward(case);
        let plan = heuristic_plan(&graph).unwrap();
        assert_eq!(plan.number(&at::EXECUTION_PLAN_WORKSPACE_SIZE), regular, "{case:?}");
        assert_eq!(explicit_plan(&graph, false).number(&at::EXECUTION_PLAN_WORKSPACE_SIZE), regular, "{case:?}");
        assert_eq!(explicit_plan(&graph, true).number(&at::EXECUTION_PLAN_WORKSPACE_SIZE), ordered, "{case:?}");
    }
}

#[test]
fn runs_on_the_stream_of_the_handle() {
    use crate::machine::{machine, set_current};
    set_current(Some(1));
    let stream = machine().create_stream(true).unwrap();
    let case = CASES[1];
    let inputs = inputs(case);
    let inputs = inputs.each_ref().map(|one| one.as_slice());
    let mut builder = Builder::new();
    let (graph, uids) = builder.forward(case);
    let plan = heuristic_plan(&graph).unwrap();
    let allocate = |len| machine().allocate(len, Some(stream), "cuMemAllocAsync").unwrap();
    let len = inputs[0].len() * 2;
    let device = ["q", "k", "v", "o"].map(|name| (uids[name], allocate(len)));
    let stats = (uids["stats"], allocate(4 * case.batch * case.heads * case.rows));
    let (workspace, small) = (allocate(256), allocate(128));
    machine().synchronize(stream, "cuStreamSynchronize").unwrap();
    for ((_, at), from) in device.iter().zip(inputs) {
        // SAFETY: the memory has this size, and no operation uses it.
        unsafe { (*at as *mut bf16).copy_from(from.as_ptr(), from.len()) };
    }
    let mut places = builder.places();
    places.extend(device.into_iter().chain([stats]));
    let mut handle = std::ptr::null_mut();
    // SAFETY: the handle is a pointer, and the pack has addresses of these sizes.
    let executed = unsafe {
        assert_eq!(cudnnCreate(&mut handle), SUCCESS);
        assert_eq!(cudnnSetStream(handle, stream as *mut c_void), SUCCESS);
        let too_small = pack(&places, small);
        assert_eq!(cudnnBackendExecute(handle, plan.0, too_small.0), refusal::NOT_SUPPORTED);
        assert_eq!(last_error(), "the workspace needs 256 bytes, and its memory has 128");
        let pack = pack(&places, workspace);
        cudnnBackendExecute(handle, plan.0, pack.0)
    };
    assert_eq!(executed, SUCCESS);
    machine().synchronize(stream, "cuStreamSynchronize").unwrap();
    // SAFETY: the operation has ended.
    let o = unsafe { std::slice::from_raw_parts(device[3].1 as *const bf16, inputs[0].len()) };
    assert_close("o", case, o, &plain(case, inputs, None).o);
    assert_eq!(cudnnDestroy(handle), SUCCESS);
    assert_eq!(cudnnDestroy(handle), NOT_INITIALIZED);
}
