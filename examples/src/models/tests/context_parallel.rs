//! Random models and settings on meshes of ranks that share sequences, compared with one rank.
//!
//! `FSDP_RANDOM_CONTEXTS` sets the number of models, `FSDP_RANDOM_SEED` the first seed.

use std::env;
use std::panic::catch_unwind;
use std::sync::Arc;

use candle_core::{DType, Device};
use fsdp_candle::activation_checkpoint::CheckpointPolicy;
use fsdp_candle::initializer::Philox;
use fsdp_candle::nn::IGNORED;
use fsdp_candle::random::{RngState, set_rng_state};
use fsdp_candle::{
    AttentionExchange, DeviceChoice, FsdpParam, FullyShard, ReduceOp, SGD, SgdConfig, ShardedVarMap, World,
};
use fsdp_core::process_group::local;

use crate::data::MicroBatch;
use crate::models::{Batch, Dropout, ModelConfig, ModelOptions, TensorParallel, build, cross_entropy_sum};
use crate::ranks::Ranks;

/// Models that the tests draw by default.
const MODELS: u64 = 40;
const VOCABULARY: usize = 24;

/// A pseudo-random number generator (splitmix64).
struct Draw(u64);

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

#[derive(Debug)]
struct Plan {
    config: String,
    /// Sizes of the mesh: data-parallel, context-parallel and tensor-parallel ranks.
    mesh: [usize; 3],
    sequence: bool,
    exchange: AttentionExchange,
    /// Rows of each rank with different data.
    batch: usize,
    steps: usize,
    /// Documents of each row, if attention stays within them.
    documents: Option<Vec<Vec<usize>>>,
    /// Data tokens of each row.
    filled: Vec<usize>,
    dropout: f64,
    recomputes: bool,
    /// F64 has no fused operations, but shows small errors.
    dtype: DType,
}

impl Plan {
    fn draw(seed: u64) -> Self {
        let mut draw = Draw(seed);
        let family = draw.one_of(&["llama", "qwen3", "gemma2", "mixtral", "gpt2", "bert", "phi3"]);
        let mesh = draw.one_of(&[
            [1, 2, 1],
            [1, 3, 1],
            [1, 4, 1],
            [2, 2, 1],
            [2, 3, 1],
            [1, 2, 2],
            [1, 4, 2],
            [2, 2, 2],
            [1, 8, 1],
            [1, 5, 1],
            [4, 2, 1],
        ]);
        let splits = !["gpt2", "bert", "phi3"].contains(&family);
        let mesh = if splits { mesh } else { [mesh[0], mesh[1], 1] };
        let kv_heads = draw.one_of(&[1, 2, 4]) * mesh[2];
        let heads = kv_heads * draw.one_of(&[1, 2]);
        let head_dim = 2 * (1 + draw.below(3));
        let layers = 1 + draw.below(2);
        let more = match family {
            "gemma2" => format!(", \"sliding_window\": {}, \"query_pre_attn_scalar\": 6", 1 + draw.below(9)),
            "mixtral" => ", \"num_local_experts\": 3, \"num_experts_per_tok\": 2, \"output_router_logits\": true, \
                           \"router_aux_loss_coef\": 0.1"
                .into(),
            _ => String::new(),
        };
        let width = heads * head_dim;
        let config = match family {
            "gpt2" => format!(
                r#"{{"model_type": "gpt2", "n_embd": {width}, "n_head": {heads}, "n_layer": {layers}, "n_positions": 128,
                "vocab_size": {VOCABULARY}, "initializer_range": 0.4}}"#
            ),
            _ => format!(
                r#"{{"model_type": "{family}", "hidden_size": {width}, "intermediate_size": 8,
                "num_hidden_layers": {layers}, "num_attention_heads": {heads}, "num_key_value_heads": {kv_heads},
                "head_dim": {head_dim}, "vocab_size": {VOCABULARY}, "max_position_embeddings": 128,
                "pad_token_id": null, "initializer_range": 0.4{more}}}"#
            ),
        };
        let kv_heads = if ["gpt2", "bert"].contains(&family) { heads } else { kv_heads };
        let by_heads = (kv_heads / mesh[2]).is_multiple_of(mesh[1]) && draw.below(2) == 0;
        let sequence = mesh[2] > 1 && draw.below(2) == 0;
        let steps = 2 * mesh[1] * if sequence { mesh[2] } else { 1 } * (1 + draw.below(3));
        let batch = 1 + draw.below(2);
        let rows = mesh[0] * batch;
        let filled = (0..rows).map(|_| if draw.below(3) == 0 { draw.below(steps) + 1 } else { steps }).collect();
        let has_documents = draw.below(2) == 0;
        let documents = (0..rows).map(|_| {
            let mut lengths = vec![];
            while lengths.iter().sum::<usize>() < steps {
                let rest = steps - lengths.iter().sum::<usize>();
                lengths.push(1 + draw.below(rest));
            }
            lengths
        });
        let documents: Vec<Vec<usize>> = documents.collect();
        Plan {
            config,
            mesh,
            sequence,
            exchange: if by_heads { AttentionExchange::Heads } else { AttentionExchange::Gather },
            batch,
            steps,
            documents: has_documents.then_some(documents),
            filled,
            dropout: if draw.below(3) == 0 { 0.3 } else { 0. },
            recomputes: draw.below(2) == 0,
            dtype: draw.one_of(&[DType::F32, DType::F64]),
        }
    }

    /// Returns the rows `first..first + count`.
    fn rows(&self, first: usize, count: usize) -> MicroBatch {
        let id = |row: usize, at: usize| ((7 * at + 5 * row + at * at % 5) % VOCABULARY) as u32;
        let all = || (first..first + count).flat_map(|row| (0..self.steps).map(move |at| (row, at)));
        let target = |(row, at)| if at < self.filled[row] && (row + at) % 4 > 0 { id(row, at + 1) } else { IGNORED };
        let targets: Vec<u32> = all().map(target).collect();
        MicroBatch {
            inputs: all().map(|(row, at)| id(row, at)).collect(),
            counted: targets.iter().filter(|target| **target != IGNORED).count() as u64,
            targets,
            documents: self.documents.as_ref().map(|documents| documents[first..first + count].to_vec()),
            filled: self.filled[first..first + count].to_vec(),
            pairs: None,
        }
    }

    /// Takes a step whose change of the parameters is the gradient. Returns the loss and the parameters.
    fn train(&self, world: &World, ranks: Ranks) -> (f64, Vec<(String, Vec<f64>)>) {
        let config = ModelConfig::parse(&self.config).unwrap();
        let vars: ShardedVarMap = ranks.vars(world).unwrap();
        vars.init_with(Philox::new(3)).unwrap();
        let context = ranks.context(&vars, self.exchange).unwrap();
        let mesh = ranks.tensor_mesh(&vars).unwrap();
        let options = ModelOptions {
            dtype: self.dtype,
            positions: self.steps,
            checkpoints: CheckpointPolicy::every(usize::from(self.recomputes)),
            dropout: Dropout { embedding: self.dropout, hidden: self.dropout, attention: self.dropout },
            parallel: mesh.map(|mesh| TensorParallel::new(mesh, self.sequence).unwrap()),
        };
        let model = build(&config, &FullyShard::new(&vars), &vars, options).unwrap();
        let mut optim = SGD::new(vars.trainable(), SgdConfig { lr: 1., ..SgdConfig::default() }).unwrap();
        let all = self.mesh[0] * self.batch;
        let own = all / ranks.data();
        let first = ranks.data_rank(world.rank()) * own;
        let batch = Batch::new(self.rows(first, own), &Device::Cpu, context.as_ref()).unwrap();
        model.inner().set_training(true);
        set_rng_state(RngState { first_row: first as u64, ..RngState::new(7) });
        // The average over ranks is the mean over the data.
        let factor = (ranks.data() * ranks.context) as f64 / self.rows(0, all).counted.max(1) as f64;
        let loss = (cross_entropy_sum(&model, &batch).unwrap() * factor).unwrap();
        let grads = model.backward(&loss).unwrap();
        optim.step(&grads).unwrap();
        let whole = |param: &Arc<FsdpParam>| {
            let values = param.dtensor().unwrap().full_tensor().unwrap().to_dtype(DType::F64).unwrap();
            (param.name().to_owned(), values.flatten_all().unwrap().to_vec1().unwrap())
        };
        (
            world.all_reduce(&[loss.to_dtype(DType::F64).unwrap().to_scalar().unwrap()], ReduceOp::Avg).unwrap()[0],
            vars.params().iter().map(whole).collect(),
        )
    }
}

fn world(group: fsdp_core::ProcessGroup) -> World {
    World::on(group, DeviceChoice::Cpu).unwrap()
}

fn check(seed: u64) {
    let plan = &Plan::draw(seed);
    let outcome = catch_unwind(|| {
        let one = Ranks::new(1, 1, 1, 1).unwrap();
        let (want, params) = plan.train(&World::single().unwrap(), one);
        let [data, context, tensor] = plan.mesh;
        let ranks = Ranks::new(data * context * tensor, 1, context, tensor).unwrap();
        local::run(data * context * tensor, |group| {
            let (loss, found) = plan.train(&world(group), ranks);
            // Routers and Gemma's norms compute in F32. Gradients of words sum up terms that cancel.
            let is_exact =
                plan.dtype == DType::F64 && !["mixtral", "gemma2"].iter().any(|name| plan.config.contains(name));
            let limit = if is_exact { 1e-9 } else { 5e-5 };
            assert!((loss - want).abs() < limit * want.abs().max(1.), "the loss is {loss}, not {want}");
            for ((name, found), (_, want)) in found.iter().zip(&params) {
                let largest = want.iter().fold(1f64, |largest, want| largest.max(want.abs()));
                for (found, want) in found.iter().zip(want) {
                    assert!((found - want).abs() < limit * largest, "{name}: {found}, not {want}");
                }
            }
        });
    });
    assert!(outcome.is_ok(), "FSDP_RANDOM_SEED={seed} FSDP_RANDOM_CONTEXTS=1: {plan:#?}");
}

#[test]
fn random_models_learn_as_on_one_rank() {
    let number = |name: &str, default: u64| env::var(name).map_or(default, |text| text.parse().unwrap());
    let first = number("FSDP_RANDOM_SEED", 1);
    (first..first + number("FSDP_RANDOM_CONTEXTS", MODELS)).for_each(check);
}
