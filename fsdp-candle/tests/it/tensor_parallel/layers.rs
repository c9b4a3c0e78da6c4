//! Single layers, and a transformer block.

use std::sync::Arc;

use candle_core::{DType, Module, Result, Tensor, Var};
use candle_nn::{Init, VarBuilder};
use fsdp_candle::activation_checkpoint::checkpoint;
use fsdp_candle::nn::{self, Embedding, LayerNorm, Linear, LoraConfig};
use fsdp_candle::{
    ActivationLayout, ColwiseParallel, FullyShard, HiddenParallel, ParallelPlan, ParallelStyle, Placement,
    RowwiseParallel, SequenceParallel, ShardedVarMap, VocabParallel, fully_shard,
};

use super::{Case, DTYPES, build, check, ids, parallel_vars, values};
use crate::common::{Draws, counted, device, on_cuda, ranks, refused};

pub(super) const REPLICATE: (ActivationLayout, Placement) = (ActivationLayout::Replicate, Placement::Replicate);

/// A layout that shards a dimension of a 3-D tensor.
pub(super) fn shard(dim: isize) -> (ActivationLayout, Placement) {
    (ActivationLayout::Shard(dim), Placement::Shard(dim.rem_euclid(3) as usize))
}

#[test]
fn column_parallel_linear() {
    for (input_layout, input) in [REPLICATE, shard(1), shard(-1), shard(0)] {
        for (output_layout, output) in [REPLICATE, shard(-1), shard(1)] {
            let plan = ParallelPlan::new().module("up", ColwiseParallel { input_layout, output_layout });
            let case = Case { plan, input, output };
            let what = format!("{input_layout:?} -> {output_layout:?}");
            check(&what, &case, &[12, 12, 24], |_| (), |vb| nn::linear(24, 36, vb.pp("up")));
        }
    }
}

#[test]
fn row_parallel_linear() {
    for (input_layout, input) in [REPLICATE, shard(1), shard(-1)] {
        for (output_layout, output) in [REPLICATE, shard(1), shard(0), shard(-1)] {
            let plan = ParallelPlan::new().module("down", RowwiseParallel { input_layout, output_layout });
            let case = Case { plan, input, output };
            let what = format!("{input_layout:?} -> {output_layout:?}");
            let outputs = if output == Placement::Shard(2) { 12 } else { 5 };
            check(&what, &case, &[12, 12, 24], drawn, |vb| nn::linear(24, outputs, vb.pp("down")));
        }
    }
}

/// Values without zeros: `lora_B` is zero at first, and so is the gradient of `lora_A`.
pub(super) fn drawn(vars: &ShardedVarMap) {
    vars.init_with(Draws(3, |_| Init::Uniform { lo: -0.5, up: 0.5 })).unwrap();
}

#[test]
fn adapters_of_parallel_layers_match() {
    let (sequence, _) = shard(1);
    let of_sequence = ColwiseParallel { input_layout: sequence, ..Default::default() };
    let to_sequence = RowwiseParallel { output_layout: sequence, ..Default::default() };
    let plan = |style: ParallelStyle| ParallelPlan::new().module("layer", style);
    for (what, plan, input, output) in [
        ("outputs", plan(ColwiseParallel::default().into()), Placement::Replicate, Placement::Shard(2)),
        ("outputs of a sequence", plan(of_sequence.into()), Placement::Shard(1), Placement::Shard(2)),
        ("inputs", plan(RowwiseParallel::default().into()), Placement::Shard(2), Placement::Replicate),
        ("inputs to a sequence", plan(to_sequence.into()), Placement::Shard(2), Placement::Shard(1)),
    ] {
        let prepare = |vars: &ShardedVarMap| {
            vars.adapt(LoraConfig { rank: 3, alpha: 6. }, |_| true).unwrap();
            drawn(vars);
        };
        check(what, &Case { plan, input, output }, &[2, 12, 24], prepare, |vb| nn::linear(24, 12, vb.pp("layer")));
    }
}

#[test]
fn refuses_adapters_around_parallel_layers() {
    ranks(2, |world| {
        let vars = parallel_vars(&world, &ParallelPlan::new().module("q", ColwiseParallel::default()));
        let config = LoraConfig { rank: 2, alpha: 4. };
        let built = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
            nn::lora(nn::linear_no_bias(8, 6, vb.pp("q"))?, 8, 6, config, vb.pp("q"))
        });
        refused(built, &["shards `q`", "ShardedVarMap::adapt"]);
    });
}

/// An embedding with a layer before it, because ids have no gradient.
struct Looks(Embedding, Tensor);

impl Module for Looks {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // A term of the output's shape that gives the input a gradient.
        let rows = self.0.forward(&self.1)?;
        rows + x
    }
}

#[test]
fn parallel_embeddings() {
    let cases = [(DType::U32, None), (DType::U32, Some(7)), (DType::I64, Some(23)), (DType::U8, Some(11))];
    for (dtype, padding_idx) in cases {
        let new = |vb: VarBuilder<'static>| {
            // One of the ids is out of range.
            let ids = ids(5, &[2, 12], 24).to_dtype(dtype)?;
            let gap = ids.eq(&ids.zeros_like()?)?;
            let none = match dtype {
                DType::U32 => Tensor::full(u32::MAX, (2, 12), ids.device())?,
                DType::U8 => Tensor::full(u8::MAX, (2, 12), ids.device())?,
                _ => Tensor::full(i64::MAX, (2, 12), ids.device())?,
            };
            let table = nn::embedding(24, 12, vb.pp("embed"))?.with_padding_idx(padding_idx)?;
            Ok(Looks(table, gap.where_cond(&none, &ids)?))
        };
        for (output_layout, output) in [REPLICATE, shard(1), shard(-1)] {
            let style = VocabParallel { output_layout, ..Default::default() };
            let case = Case { plan: ParallelPlan::new().module("embed", style), input: output, output };
            check(&format!("vocabulary {dtype:?} {output_layout:?}"), &case, &[2, 12, 12], drawn, new);
            let style = HiddenParallel { output_layout, ..Default::default() };
            let case = Case { plan: ParallelPlan::new().module("embed", style), input: output, output };
            check(&format!("width {dtype:?} {output_layout:?}"), &case, &[2, 12, 12], drawn, new);
        }
    }
}

#[test]
fn refuses_ids_out_of_range() {
    // On a device the kernel would abort the process.
    if on_cuda() {
        return;
    }
    let device = device();
    let bad = [
        Tensor::new(&[[3u8, 24]], &device),
        Tensor::new(&[[3u32, 24]], &device),
        Tensor::new(&[[u32::MAX - 1, 3]], &device),
        Tensor::new(&[[3i64, 24]], &device),
        Tensor::new(&[[-1i64, 3]], &device),
        Tensor::new(&[[-25i64, 3]], &device),
    ];
    let bad = bad.map(Result::unwrap);
    for size in 1..=4 {
        ranks(size, |world| {
            for style in [ParallelStyle::from(VocabParallel::default()), HiddenParallel::default().into()] {
                for dtype in DTYPES {
                    let vars = parallel_vars(&world, &ParallelPlan::new().module("embed", style));
                    let model = build(&vars, dtype, |vb| nn::embedding(24, 12, vb.pp("embed")));
                    for ids in &bad {
                        let what = format!("{style:?} {dtype:?} of {size}: {ids}");
                        let error = model.forward(ids).expect_err(&what).to_string();
                        assert!(error.contains("out of range") || error.contains("invalid index"), "{what}: {error}");
                    }
                    // The first and the last ids, and no ids.
                    let y = model.forward(&Tensor::new(&[0u32, 23, u32::MAX], &device).unwrap()).unwrap();
                    assert_eq!(y.dim(0).unwrap(), 3);
                }
            }
        });
    }
}

#[test]
fn refuses_linear_styles_of_embeddings() {
    ranks(2, |world| {
        for style in [ParallelStyle::from(ColwiseParallel::default()), RowwiseParallel::default().into()] {
            let vars = parallel_vars(&world, &ParallelPlan::new().module("embed", style));
            let new = |vb: VarBuilder<'static>| nn::embedding(8, 4, vb.pp("embed"));
            let built = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), new);
            refused(built, &["embed.weight", "VocabParallel"]);
        }
    });
}

#[test]
fn refuses_indivisible_sequences_before_communication() {
    counted(2, |world, counts| {
        let (output_layout, _) = shard(1);
        let plan = ParallelPlan::new()
            .module("down", RowwiseParallel { output_layout, ..Default::default() })
            .module("embed", VocabParallel { output_layout, ..Default::default() });
        let vars = parallel_vars(&world, &plan);
        let model =
            build(&vars, DType::F32, |vb| Ok((nn::linear(8, 8, vb.pp("down"))?, nn::embedding(8, 4, vb.pp("embed"))?)));
        counts.take();
        let outputs = [
            model.call(|(down, _)| down.forward(&values(1, &[2, 7, 4], DType::F32))),
            model.call(|(_, embed)| embed.forward(&ids(1, &[2, 7], 8))),
        ];
        for error in outputs {
            refused(error, &["dimension 1 of [2, 7, ", "2 does not divide"]);
        }
        // A wrong number of features, in a layout that would be gathered.
        refused(
            model.call(|(down, _)| down.forward(&values(1, &[2, 8, 8], DType::F32))),
            &["[2, 8, 8]", "the weight takes 4"],
        );
        assert_eq!(counts.take(), []);
    });
}

#[test]
fn refuses_different_ids_on_ranks() {
    let errors = ranks(2, |world| {
        let vars = parallel_vars(&world, &ParallelPlan::new().module("embed", VocabParallel::default()));
        let model = build(&vars, DType::F32, |vb| nn::embedding(8, 4, vb.pp("embed")));
        let same = model.forward(&ids(3, &[2, 3], 8)).unwrap();
        assert_eq!(same.dims(), [2, 3, 4]);
        model.forward(&ids(world.rank() as u32, &[2, 3], 8)).map_err(|error| error.to_string())
    });
    for error in errors {
        if on_cuda() {
            // Ids on a device are not compared, because the host would have to wait for them.
            assert!(error.is_ok());
            continue;
        }
        let error = error.unwrap_err();
        assert!(error.contains("`embed.weight`, with ids of hash") && error.contains("the same batch"), "{error}");
    }
}

/// A decoder block, on parts of the sequence or on all of it.
pub(super) struct Block {
    norms: [LayerNorm; 2],
    qkv: [Linear; 3],
    output: Linear,
    up: Linear,
    down: Linear,
}

pub(super) const WIDTH: usize = 24;
const HEAD: usize = 2;

impl Block {
    pub(super) fn new(vb: VarBuilder<'static>) -> Result<Self> {
        let square = |name: &str| nn::linear(WIDTH, WIDTH, vb.pp(name));
        Ok(Block {
            norms: [nn::layer_norm(WIDTH, 1e-5, vb.pp("norm_1"))?, nn::layer_norm(WIDTH, 1e-5, vb.pp("norm_2"))?],
            // The gradient of a bias of the keys is zero but for rounding.
            qkv: [square("q")?, nn::linear_no_bias(WIDTH, WIDTH, vb.pp("k"))?, square("v")?],
            output: square("o")?,
            up: nn::linear(WIDTH, 2 * WIDTH, vb.pp("up"))?,
            down: nn::linear(2 * WIDTH, WIDTH, vb.pp("down"))?,
        })
    }

    pub(super) fn plan(of_sequence: bool) -> ParallelPlan {
        let layout = if of_sequence { ActivationLayout::Shard(1) } else { ActivationLayout::Replicate };
        let colwise = ColwiseParallel { input_layout: layout, ..Default::default() };
        let rowwise = RowwiseParallel { output_layout: layout, ..Default::default() };
        let plan = ParallelPlan::new().module("[qkv]", colwise).module("up", colwise);
        let plan = plan.module("o", rowwise).module("down", rowwise);
        if of_sequence { plan.module("norm_*", SequenceParallel::default()) } else { plan }
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let normed = self.norms[0].forward(x)?;
        let [q, k, v] = &self.qkv;
        let (q, k, v) = (q.forward(&normed)?, k.forward(&normed)?, v.forward(&normed)?);
        let heads = q.dim(2)? / HEAD;
        let x = (x + self.output.forward(&nn::causal_attention(&q, &k, &v, heads, heads, 0.7)?)?)?;
        &x + self.down.forward(&nn::gelu(&self.up.forward(&self.norms[1].forward(&x)?)?)?)?
    }
}

/// A checkpointed block.
struct Again(Arc<Block>);

impl Module for Again {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let block = self.0.clone();
        checkpoint(move |x: Tensor| block.forward(&x), x.clone())
    }
}

#[test]
fn checkpointed_blocks_repeat_their_collectives() {
    // Norm 1, queries, keys and values, output, norm 2, up, down.
    let forward = ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"];
    // The same again, and then their opposites in reverse.
    let backward = [&forward[..], &["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]].concat();
    counted(2, |world, counts| {
        let vars = parallel_vars(&world, &Block::plan(true));
        let model = build(&vars, DType::F32, |vb| Ok(Again(Arc::new(Block::new(vb)?))));
        let x = Var::from_tensor(&values(1, &[2, 6, WIDTH], DType::F32)).unwrap();
        counts.take();
        let y = model.forward(&x).unwrap();
        assert_eq!(counts.names(), forward);
        model.backward(&y.sum_all().unwrap()).unwrap();
        let issued = counts.names();
        // Terms of replicated parameters' gradients are added after those.
        assert_eq!(issued[..backward.len()], backward);
        assert!(issued[backward.len()..].iter().all(|name| *name == "all_reduce"), "{issued:?}");
    });
}

#[test]
fn blocks_with_and_without_sequence_parallelism() {
    for (of_sequence, layout) in [(false, Placement::Replicate), (true, Placement::Shard(1))] {
        let case = Case { plan: Block::plan(of_sequence), input: layout, output: layout };
        check(&format!("block {layout}"), &case, &[2, 12, WIDTH], drawn, Block::new);
        let again = |vb| Ok(Again(Arc::new(Block::new(vb)?)));
        check(&format!("checkpointed block {layout}"), &case, &[2, 12, WIDTH], drawn, again);
    }
}
