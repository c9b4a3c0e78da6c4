//! Cross-entropy over a vocabulary that is sharded among the ranks.

use candle_core::{DType, Module, Result, Tensor, Var};
use candle_nn::VarBuilder;
use fsdp_candle::nn::{
    self, CrossEntropyOptions, Embedding, IGNORED, Linear, Reduction, cross_entropy_with, linear_cross_entropy_with,
    vocab_parallel_cross_entropy,
};
use fsdp_candle::{
    ActivationLayout, ColwiseParallel, FsdpModule, ParallelPlan, Placement, RowwiseParallel, ShardedVarMap,
    VocabParallel,
};

use super::layers::drawn;
use super::{
    Case, DTYPES, assert_near, assert_same_gradients, assert_within, build, check, ids, numbers, parallel_vars, part,
    values,
};
use crate::common::{counted, elements, one_of, ranks, refused, unsharded};

/// Every combination of options, some with targets to ignore.
fn all_options() -> Vec<CrossEntropyOptions> {
    let mut all = vec![];
    for reduction in [Reduction::Mean, Reduction::Sum] {
        for (label_smoothing, softcap) in [(0., None), (0.1, None), (1., None), (0.1, Some(5.))] {
            all.push(CrossEntropyOptions { label_smoothing, softcap, reduction, ..Default::default() });
        }
    }
    all
}

/// Targets below `classes`, with every third row ignored, or every row.
fn targets(shape: &[usize], classes: u32, all_ignored: bool) -> Tensor {
    let found: Vec<u32> = elements(&ids(3, shape, classes));
    let gap = |row: usize| all_ignored || row % 3 == 1;
    let found = found.into_iter().enumerate().map(|(row, id)| if gap(row) { IGNORED } else { id });
    Tensor::from_vec(found.collect::<Vec<_>>(), shape, &crate::common::device()).unwrap()
}

fn scalar(tensor: &Tensor) -> f64 {
    numbers(tensor)[0]
}

/// Whether two losses agree within 1e-6, or both are NaN.
fn assert_same_loss(what: &str, found: &Tensor, wanted: &Tensor) {
    assert_eq!(found.dtype(), wanted.dtype());
    let (found, wanted) = (scalar(found), scalar(wanted));
    let same = (found - wanted).abs() <= 1e-6 * wanted.abs() || found.is_nan() && wanted.is_nan();
    assert!(same, "{what}: {found} instead of {wanted}");
}

#[test]
fn matches_the_unsharded_loss() {
    for size in 1..=4 {
        ranks(size, |world| {
            for dtype in DTYPES {
                for (shape, all_ignored) in [(vec![1], false), (vec![7], false), (vec![3, 4], false), (vec![5], true)] {
                    let classes = 24;
                    // Large logits too: the maximum of all shards must be subtracted.
                    let logits = (values(4, &[&shape[..], &[classes]].concat(), dtype) * 20.).unwrap();
                    let targets = targets(&shape, classes as u32, all_ignored);
                    for options in all_options() {
                        let what = format!("rank {} of {size}: {dtype:?} {shape:?} {options:?}", world.rank());
                        let whole = Var::from_tensor(&logits).unwrap();
                        let wanted = cross_entropy_with(&whole, &targets, &options).unwrap();
                        let wanted_grad = (&wanted * 3.).unwrap().backward().unwrap().remove(&whole).unwrap();

                        let layout = Placement::Shard(shape.len());
                        let own = Var::from_tensor(&part(&logits, layout, &world)).unwrap();
                        let loss = vocab_parallel_cross_entropy(&own, &targets, world.group(), &options).unwrap();
                        assert_same_loss(&what, &loss, &wanted);
                        let grad = (&loss * 3.).unwrap().backward().unwrap().remove(&own).unwrap();
                        assert_near(&what, &grad, &part(&wanted_grad, layout, &world));
                        let bits = world.group().gather_values(vec![scalar(&loss).to_bits() as i64]).unwrap();
                        assert!(bits.iter().all(|other| *other == bits[0]), "{what}: {bits:?}");
                    }
                }
            }
        });
    }
}

#[test]
fn accepts_masked_shards() {
    ranks(2, |world| {
        let options = CrossEntropyOptions::default();
        let targets = Tensor::new(&[1u32, 0], world.device()).unwrap();
        for dtype in [DType::F32, DType::F64] {
            let value = if world.rank() == 0 { 1. } else { f64::NEG_INFINITY };
            let logits = Tensor::full(value, (2, 2), world.device()).unwrap().to_dtype(dtype).unwrap();
            let loss = vocab_parallel_cross_entropy(&logits, &targets, world.group(), &options).unwrap();
            assert!((scalar(&loss) - 2f64.ln()).abs() < 1e-6, "{dtype:?}: {loss}");
        }
    });
}

#[test]
fn refuses_bad_targets() {
    ranks(2, |world| {
        let options = CrossEntropyOptions::default();
        let logits = values(1, &[2, 4], DType::F32);
        let targets = Tensor::new(&[7u32, 8], world.device()).unwrap();
        let error = vocab_parallel_cross_entropy(&logits, &targets, world.group(), &options).unwrap_err().to_string();
        assert!(error.contains("target 8") && error.contains("the number of classes is 8"), "{error}");
    });
    // Ranks that were given different batches.
    let errors = ranks(2, |world| {
        let logits = values(1, &[2, 4], DType::F32);
        let targets = Tensor::new(&[1u32, world.rank() as u32], world.device()).unwrap();
        let loss = vocab_parallel_cross_entropy(&logits, &targets, world.group(), &CrossEntropyOptions::default());
        loss.unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("cross_entropy over 4 columns") && error.contains("the same batch"), "{error}");
    }
}

const WIDTH: usize = 6;
const VOCABULARY: usize = 24;

/// A head with its own weight or that of an embedding.
struct Model {
    embedding: Option<Embedding>,
    head: Linear,
}

impl Model {
    fn new(tied: bool, vb: VarBuilder<'static>) -> Result<Self> {
        if tied {
            let embedding = nn::embedding(VOCABULARY, WIDTH, vb.pp("embed"))?;
            let head = Linear::new(embedding.embeddings().clone(), None);
            return Ok(Model { embedding: Some(embedding), head });
        }
        Ok(Model { embedding: None, head: nn::linear_no_bias(WIDTH, VOCABULARY, vb.pp("head"))? })
    }
}

fn plan(tied: bool, input_layout: ActivationLayout) -> ParallelPlan {
    let head = ColwiseParallel { input_layout, ..Default::default() };
    match tied {
        true => {
            let embed = VocabParallel { output_layout: input_layout, tied_head: head, ..Default::default() };
            ParallelPlan::new().module("embed", embed)
        }
        false => ParallelPlan::new().module("head", head),
    }
}

/// The loss of hidden states; the ids are for the embedding of a tied model.
fn loss(
    model: &FsdpModule<Model>,
    x: &Tensor,
    ids: &Tensor,
    logits_first: bool,
    targets: &Tensor,
    options: &CrossEntropyOptions,
    group: Option<&fsdp_core::ProcessGroup>,
) -> Tensor {
    model
        .call(|model| {
            let hidden = match &model.embedding {
                Some(embedding) => (x + embedding.forward(ids)?)?,
                None => x.clone(),
            };
            if !logits_first {
                return linear_cross_entropy_with(&hidden, model.head.weight(), targets, options);
            }
            let logits = model.head.forward(&hidden)?;
            match group {
                Some(group) => vocab_parallel_cross_entropy(&logits, targets, group, options),
                None => cross_entropy_with(&logits, targets, options),
            }
        })
        .unwrap()
}

#[test]
fn parallel_heads_match() {
    let (batch, steps) = (2, 12);
    for size in 1..=4 {
        ranks(size, |world| {
            for (tied, logits_first, layout, dtype) in [false, true]
                .into_iter()
                .flat_map(|tied| [false, true].map(|logits_first| (tied, logits_first)))
                .flat_map(|(tied, first)| [Placement::Replicate, Placement::Shard(1)].map(|at| (tied, first, at)))
                .flat_map(|(tied, first, at)| DTYPES.map(|dtype| (tied, first, at, dtype)))
                .step_by(one_of(3))
            {
                let input_layout = match layout {
                    Placement::Shard(_) => ActivationLayout::Shard(1),
                    _ => ActivationLayout::Replicate,
                };
                let x = values(1, &[batch, steps, WIDTH], dtype);
                let ids = ids(2, &[batch, steps], VOCABULARY as u32);
                for (all_ignored, options) in all_options()
                    .into_iter()
                    .map(|options| (false, options))
                    .take(4)
                    .chain([(true, CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() })])
                {
                    let what = format!(
                        "rank {} of {size}: {dtype:?} {layout} tied {tied} logits {logits_first} {options:?}",
                        world.rank()
                    );
                    let targets = targets(&[batch, steps], VOCABULARY as u32, all_ignored);
                    let whole_vars = unsharded(&world);
                    let whole = build(&whole_vars, dtype, |vb| Model::new(tied, vb));
                    let whole_x = Var::from_tensor(&x).unwrap();
                    let wanted = loss(&whole, &whole_x, &ids, logits_first, &targets, &options, None);
                    let whole_grads = whole.backward(&wanted).unwrap();

                    let vars = parallel_vars(&world, &plan(tied, input_layout));
                    let model = build(&vars, dtype, |vb| Model::new(tied, vb));
                    let own_x = Var::from_tensor(&part(&x, layout, &world)).unwrap();
                    let group = Some(world.group());
                    let found = loss(&model, &own_x, &ids, logits_first, &targets, &options, group);
                    let tolerance = match dtype {
                        DType::F32 | DType::F64 => 1e-6,
                        DType::F16 => 1e-3,
                        _ => 1e-2,
                    };
                    assert_within(&what, &found, &wanted, tolerance);
                    let grads = model.backward(&found).unwrap();
                    let of_x = part(whole_grads.get(&whole_x).unwrap(), layout, &world);
                    assert_near(&what, grads.get(&own_x).unwrap(), &of_x);
                    assert_same_gradients(&what, (&vars, &grads), (&whole_vars, &whole_grads));
                }
            }
        });
    }
}

/// A head that returns its loss.
struct HeadLoss(Linear, Tensor);

impl Module for HeadLoss {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.cross_entropy(x, &self.1, &CrossEntropyOptions::default())?.to_dtype(x.dtype())
    }
}

#[test]
fn parallel_heads_with_bias_and_adapter_match() {
    for is_adapted in [false, true] {
        let prepare = |vars: &ShardedVarMap| {
            if is_adapted {
                vars.adapt(nn::LoraConfig { rank: 3, alpha: 6. }, |_| true).unwrap();
            }
            drawn(vars);
        };
        let plan = ParallelPlan::new().module("head", ColwiseParallel::default());
        let case = Case { plan, input: Placement::Replicate, output: Placement::Replicate };
        let new = |vb: VarBuilder<'static>| {
            Ok(HeadLoss(nn::linear(WIDTH, VOCABULARY, vb.pp("head"))?, targets(&[2, 12], VOCABULARY as u32, false)))
        };
        check(&format!("adapted {is_adapted}"), &case, &[2, 12, WIDTH], prepare, new);
    }
}

#[test]
fn does_not_communicate_logits() {
    let (rows, vocabulary) = (12, 96);
    counted(4, |world, counts| {
        for (label_smoothing, numbers) in [(0., 2), (0.1, 3)] {
            let plan = ParallelPlan::new().module("head", ColwiseParallel::default());
            let vars = parallel_vars(&world, &plan);
            let new = |vb: VarBuilder<'static>| nn::linear_no_bias(WIDTH, vocabulary, vb.pp("head"));
            let model = build(&vars, DType::F32, new);
            let x = Var::from_tensor(&values(1, &[rows, WIDTH], DType::F32)).unwrap();
            let targets = ids(2, &[rows], vocabulary as u32);
            let options = CrossEntropyOptions { label_smoothing, ..Default::default() };
            counts.take();
            let loss = model.call(|head| linear_cross_entropy_with(&x, head.weight(), &targets, &options)).unwrap();
            // The largest logit of each row, then sums, of four bytes each.
            assert_eq!(counts.take(), [("all_reduce", 4 * rows), ("all_reduce", 4 * rows * numbers)]);
            model.backward(&loss).unwrap();
            // The gradient of the hidden states. Each rank has its parameters' gradients in full.
            assert_eq!(counts.take(), [("all_reduce", 4 * rows * WIDTH)]);
        }
    });
}

#[test]
fn refuses_row_parallel_heads() {
    ranks(2, |world| {
        let vars = parallel_vars(&world, &ParallelPlan::new().module("head", RowwiseParallel::default()));
        let model = build(&vars, DType::F32, |vb| nn::linear_no_bias(WIDTH, VOCABULARY, vb.pp("head")));
        let (x, targets) = (values(1, &[2, WIDTH], DType::F32), ids(2, &[2], VOCABULARY as u32));
        refused(
            model.call(|head| nn::linear_cross_entropy(&x, head.weight(), &targets)),
            &["along its inputs", "VocabParallel"],
        );
    });
}
