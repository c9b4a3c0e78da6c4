//! Refused descriptors, graphs and executions.

use half::bf16;

use super::graphs::{Band, Builder, Case, contiguous};
use super::refusal::{BAD_PARAM, BAD_TYPE, NOT_FINALIZED, NOT_SUPPORTED};
use super::*;

const CASE: Case =
    Case { batch: 1, heads: 2, key_heads: 1, rows: 3, keys: 4, width: 8, band: Band::Causal(1), scale: 0.5 };

#[test]
fn unknown_descriptors_and_attributes_are_refused_by_name() {
    let mut made = std::ptr::null_mut();
    // SAFETY: `made` is a pointer.
    assert_eq!(unsafe { cudnnBackendCreateDescriptor(1, &mut made) }, BAD_PARAM);
    assert_eq!(last_error(), "cudnnBackendDescriptorType_t 1 is not emulated");
    assert_eq!(last_error(), "", "a message is read once");
    let tensor = Made::new(Kind::Tensor);
    // SAFETY: the values are an array of this type.
    let set = |number, of: Type, count| unsafe {
        cudnnBackendSetAttribute(tensor.0, number, of as c_int, count, [1i64; 8].as_ptr().cast())
    };
    assert_eq!(set(904, Type::Int64, 1), BAD_PARAM);
    assert_eq!(last_error(), "attribute 904 of a Tensor is not emulated");
    assert_eq!(set(750, Type::Int64, 1), BAD_PARAM);
    assert_eq!(set(902, Type::Data, 4), BAD_TYPE);
    assert_eq!(last_error(), "CUDNN_ATTR_TENSOR_DIMENSIONS is of type 3, not 1");
    assert_eq!(set(902, Type::Int64, 5), BAD_PARAM);
    assert_eq!(set(902, Type::Int64, 0), BAD_PARAM);
    assert_eq!(set(902, Type::Int64, 4), SUCCESS);
    assert_eq!(tensor.finalize(), BAD_PARAM);
    assert_eq!(last_error(), "CUDNN_ATTR_TENSOR_UNIQUE_ID is not set");
    let plan = Made::new(Kind::Plan);
    assert_eq!(plan.set(&at::EXECUTION_PLAN_WORKSPACE_SIZE, &[1]), BAD_PARAM);
    assert_eq!(plan.get(&at::EXECUTION_PLAN_WORKSPACE_SIZE, &mut [0]).0, NOT_INITIALIZED);
    assert_eq!(plan.set(&at::EXECUTION_PLAN_HANDLE, &[77]), BAD_PARAM);
    assert_eq!(cudnnBackendFinalize(std::ptr::null_mut()), NULL_POINTER);
    assert_eq!(cudnnBackendFinalize(&raw mut made as *mut c_void), BAD_PARAM);
}

#[test]
fn references_need_finalized_descriptors_of_their_kind() {
    let tensor = Builder::new().tensor(F32, contiguous([1, 1, 2, 2]), None);
    assert_eq!(tensor.made.set(&at::TENSOR_UNIQUE_ID, &[2]), BAD_PARAM, "it is finalized");
    assert_eq!(tensor.made.finalize(), BAD_PARAM);
    let (open, reshape) = (Made::new(Kind::Tensor), Made::new(Kind::Reshape));
    assert_eq!(reshape.set(&at::OPERATION_RESHAPE_XDESC, &[open.0 as i64]), NOT_FINALIZED);
    assert_eq!(Made::new(Kind::Graph).set(&at::OPERATIONGRAPH_OPS, &[tensor.made.0 as i64]), BAD_PARAM);
    assert_eq!(reshape.set(&at::OPERATION_RESHAPE_XDESC, &[12345]), BAD_PARAM);
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let mut builder = Builder::new();
    let mut tensor = |dims| builder.tensor(F32, contiguous(dims), Some(&at::TENSOR_IS_VIRTUAL));
    let (a, b, c) = (tensor([1, 3, 4, 5]), tensor([1, 2, 5, 6]), tensor([1, 3, 4, 6]));
    let product = |a: &graphs::Named, b: &graphs::Named, c: &graphs::Named| {
        let described = Made::new(Kind::Matmul).with(&at::MATMUL_COMP_TYPE, &[F32]).done();
        let made = Made::new(Kind::MatmulOperation).of(&at::OPERATION_MATMUL_DESC, &[&described]);
        let made = made.of(&at::OPERATION_MATMUL_ADESC, &[&a.made]).of(&at::OPERATION_MATMUL_BDESC, &[&b.made]);
        made.of(&at::OPERATION_MATMUL_CDESC, &[&c.made]).finalize()
    };
    assert_eq!(product(&a, &b, &c), BAD_PARAM, "3 heads are not a multiple of 2");
    let b = tensor([1, 1, 5, 6]);
    assert_eq!(product(&a, &b, &c), SUCCESS);
    assert_eq!(product(&b, &a, &c), BAD_PARAM);
    let (x, y) = (tensor([1, 6, 2, 2]), tensor([1, 4, 2, 1]));
    let described = Made::new(Kind::Reduction).with(&at::REDUCTION_OPERATOR, &[0]);
    let described = described.with(&at::REDUCTION_COMP_TYPE, &[F32]).done();
    let made = Made::new(Kind::ReductionOperation).of(&at::OPERATION_REDUCTION_DESC, &[&described]);
    let made = made.of(&at::OPERATION_REDUCTION_XDESC, &[&x.made]).of(&at::OPERATION_REDUCTION_YDESC, &[&y.made]);
    assert_eq!(made.finalize(), BAD_PARAM, "4 is not a divisor of 6");
    let described = Made::new(Kind::Pointwise).with(&at::POINTWISE_MODE, &[0]);
    assert_eq!(described.with(&at::POINTWISE_MATH_PREC, &[F32]).finalize(), BAD_PARAM);
    assert_eq!(last_error(), "cudnnPointwiseMode_t 0 is not emulated");
    // A virtual tensor that no operation makes.
    let open = Builder::graph(&[Builder::matmul(&a, &b, &c)]).done();
    let heuristics = Made::new(Kind::Heuristics).of(&at::ENGINEHEUR_OPERATION_GRAPH, &[&open]);
    assert_eq!(heuristics.with(&at::ENGINEHEUR_MODE, &[3]).finalize(), BAD_PARAM);
}

/// Returns the reason for which the heuristics have no engine for a graph, if any.
fn why_unsupported(graph: &Made) -> Option<String> {
    let plan = heuristic_plan(graph);
    let why = last_error();
    plan.is_none().then_some(why)
}

#[test]
fn graphs_that_no_engine_computes_are_refused() {
    for (width, of, is_supported) in
        [(8, BF16, true), (256, 2, true), (12, BF16, false), (264, BF16, false), (16, F32, false)]
    {
        let case = Case { width, ..CASE };
        let builder = || Builder::of(of);
        for (graph, engine) in [(builder().forward(case).0, 9), (builder().backward(case).0, 6)] {
            let why = why_unsupported(&graph);
            assert_eq!(why.is_none(), is_supported, "{width} {of}: {why:?}");
            let other = Made::new(Kind::Engine).of(&at::ENGINE_OPERATION_GRAPH, &[&graph]);
            assert_eq!(other.with(&at::ENGINE_GLOBAL_INDEX, &[15 - engine]).finalize(), NOT_SUPPORTED);
            let made = Made::new(Kind::Engine).of(&at::ENGINE_OPERATION_GRAPH, &[&graph]);
            let made = made.with(&at::ENGINE_GLOBAL_INDEX, &[engine]).done();
            let knob = Made::new(Kind::Knob).with(&at::KNOB_CHOICE_KNOB_TYPE, &[24]);
            let knob = knob.with(&at::KNOB_CHOICE_KNOB_VALUE, &[2]).done();
            let config = Made::new(Kind::EngineConfig).of(&at::ENGINECFG_ENGINE, &[&made]);
            let config = config.of(&at::ENGINECFG_KNOB_CHOICES, &[&knob]);
            assert_eq!(config.finalize(), if is_supported { SUCCESS } else { NOT_SUPPORTED });
        }
    }
}

#[test]
fn executions_with_wrong_memory_are_refused() {
    let mut builder = Builder::new();
    let (graph, uids) = builder.forward(CASE);
    let plan = heuristic_plan(&graph).unwrap();
    let memory: Vec<[bf16; 128]> = vec![[bf16::ZERO; 128]; 6];
    let at = |i: usize| memory[i].as_ptr() as u64;
    let names = ["q", "k", "v", "o", "stats"];
    let mut places = builder.places();
    let numbers = places.len();
    places.extend(names.iter().enumerate().map(|(i, name)| (uids[name], at(i))));
    let refused = |places: &[(i64, u64)], workspace| {
        execution(&plan, &pack(places, workspace)).err().map(|one| (one.status, one.why))
    };
    assert_eq!(refused(&places, at(5)), None);
    assert_eq!(refused(&places, 0).unwrap().0, NOT_SUPPORTED);
    let (status, why) = refused(&places[1..], at(5)).unwrap();
    assert_eq!((status, why), (NOT_SUPPORTED, format!("the variant pack has no address of tensor {}", places[0].0)));
    let mut moved = places.clone();
    moved[numbers].1 += 8;
    let (status, why) = refused(&moved, at(5)).unwrap();
    assert!(status == NOT_SUPPORTED && why.ends_with("is not aligned to 16 bytes"), "{why}");
    let mut foreign = places.clone();
    foreign.push((99, at(5)));
    assert_eq!(
        refused(&foreign, at(5)).unwrap(),
        (BAD_PARAM, "the graph has no tensor 99 in memory or by value".into())
    );
    // The output over the queries, and the workspace over the output's end.
    let mut overlapping = places.clone();
    overlapping[numbers + 3].1 = at(0);
    assert!(refused(&overlapping, at(5)).unwrap().1.contains("overlap"));
    assert!(refused(&places, at(3) + 64).unwrap().1.contains("overlap"));
    // Keys and values in one allocation, which are only read.
    let mut shared = places.clone();
    shared[numbers + 2].1 = at(1);
    assert_eq!(refused(&shared, at(5)), None);
}

#[test]
fn explicit_engines_and_knobs_are_checked() {
    let (graph, _) = Builder::new().backward(CASE);
    let engine = Made::new(Kind::Engine).of(&at::ENGINE_OPERATION_GRAPH, &[&graph]);
    let engine = engine.with(&at::ENGINE_GLOBAL_INDEX, &[6]).done();
    let status = |chosen: &[(i64, i64)]| {
        let knob = |(kind, value): &(i64, i64)| {
            let knob = Made::new(Kind::Knob).with(&at::KNOB_CHOICE_KNOB_TYPE, &[*kind]);
            knob.with(&at::KNOB_CHOICE_KNOB_VALUE, &[*value]).done()
        };
        let knobs: Vec<Made> = chosen.iter().map(knob).collect();
        let config = Made::new(Kind::EngineConfig).of(&at::ENGINECFG_ENGINE, &[&engine]);
        config.of(&at::ENGINECFG_KNOB_CHOICES, &knobs.iter().collect::<Vec<_>>()).finalize()
    };
    assert_eq!(status(&[(24, 2), (14, 4)]), SUCCESS);
    assert_eq!(status(&[(14, 4)]), NOT_SUPPORTED, "the kernel's configuration is missing");
    assert_eq!(status(&[(24, 2), (14, 7)]), NOT_SUPPORTED);
    assert_eq!(status(&[(24, 2), (0, 1)]), NOT_SUPPORTED);
    assert_eq!(status(&[(24, 2), (24, 2)]), BAD_PARAM);
}

/// The rule of `evaluate`: a reshape whose strides are not the operand's, swapped, is not a transposition.
#[test]
fn reshapes_follow_the_places_in_memory() {
    for (strides, is_transposed) in [([24, 24, 1, 8], true), ([24, 24, 3, 1], false)] {
        let mut builder = Builder::new();
        let x = builder.tensor(BF16, ([1, 1, 3, 8], [24, 24, 8, 1]), None);
        let turned = builder.tensor(F32, ([1, 1, 8, 3], strides), Some(&at::TENSOR_IS_VIRTUAL));
        // Each row of 3, times a matrix of ones: sums over the operand's columns if it is transposed.
        let ones = builder.tensor(BF16, ([1, 1, 3, 8], [24, 24, 8, 1]), None);
        let sums = builder.tensor(BF16, ([1, 1, 8, 8], [64, 64, 8, 1]), None);
        let graph = Builder::graph(&[Builder::matmul(&turned, &ones, &sums), Builder::reshape(&x, &turned)]).done();
        let plan = heuristic_plan(&graph).unwrap();
        let value = |i: usize| bf16::from_f64(i as f64);
        let (from, by): (Vec<bf16>, Vec<bf16>) = ((0..24).map(value).collect(), vec![bf16::ONE; 24]);
        let (mut to, mut workspace) = (vec![bf16::NAN; 64], vec![0u64; 32]);
        let places =
            [(x.uid, from.as_ptr() as u64), (ones.uid, by.as_ptr() as u64), (sums.uid, to.as_mut_ptr() as u64)];
        run(execution(&plan, &pack(&places, workspace.as_mut_ptr() as u64)).unwrap());
        for (i, sums) in to.chunks(8).enumerate() {
            let expected = if is_transposed { i + (i + 8) + (i + 16) } else { 9 * i + 3 };
            assert!(sums.iter().all(|sum| sum.to_f64() == expected as f64), "{strides:?} {i}: {sums:?}");
        }
    }
}
