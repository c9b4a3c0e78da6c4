//! Faults of memory and of plans that users of PyTorch's FSDP2 reported, and that must not happen here.
//! `docs/reports.md` has the reports.
//!
//! Ranks are threads. Each test runs in its own process, because the allocator counts for the whole process.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::initializer::Pretrained;
use fsdp_candle::{
    Adam, AdamConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, CandleOptimizer, Ema, FsdpModule, FullyShard,
    GradAccumulator, GradScaler, MixedPrecisionPolicy, Muon, MuonConfig, SGD, SgdConfig, ShardedOptimizer,
    ShardedVarMap, StateDictOptions, StateOnDisk, World, clip_grad_norm, get_model_state_dict, load_model,
    model_tensors, nn, optimizer_tensors, shard,
};
use fsdp_ckpt::{AsyncSaver, LoadOptions, SaveState, WhenBusy, hf};
use fsdp_core::process_group::local;
use fsdp_test_support::{program, run};
use serde_json::Value;

use crate::memory_options::ALLOCATOR;

/// Runs a test of this file in its own process.
fn alone(test: &str, body: impl FnOnce()) {
    const ALONE: &str = "FSDP_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return body();
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("reported::{test}"), "--nocapture", "--test-threads=1"]).env(ALONE, "1");
    // `gemm` keeps memory for each thread that it has used.
    command.env("RAYON_NUM_THREADS", "1");
    let run = run(command, Duration::from_secs(120)).ok();
    assert!(run.stdout.contains("1 passed"), "{}", run.stdout);
}

/// Bytes in use by all ranks when all of them are at this point.
fn in_use(world: &World) -> usize {
    let barrier = || world.group().barrier().wait().unwrap();
    barrier();
    let bytes = ALLOCATOR.current_usage();
    barrier();
    bytes
}

/// Runs `f` on all ranks at once. Returns the bytes that all of them needed at most, in addition to those before.
fn most<T>(world: &World, f: impl FnOnce() -> T) -> (usize, T) {
    let before = in_use(world);
    if world.rank() == 0 {
        ALLOCATOR.reset_peak_usage();
    }
    world.group().barrier().wait().unwrap();
    let out = f();
    world.group().barrier().wait().unwrap();
    let peak = ALLOCATOR.peak_usage();
    world.group().barrier().wait().unwrap();
    (peak.saturating_sub(before), out)
}

/// An embedding and a head that shares its weight.
struct Tied {
    embed: nn::Embedding,
    body: nn::Linear,
    head: nn::Linear,
}

const VOCABULARY: usize = 4096;
const WIDTH: usize = 128;
/// The bytes of the model. A rank of four has 540,000 of them.
const MODEL: usize = 4 * (VOCABULARY + WIDTH) * WIDTH;
/// Allowance for bookkeeping of four ranks together.
const SLACK: usize = 200_000;

impl Tied {
    fn new(vb: VarBuilder) -> Result<Self> {
        let embed = nn::embedding(VOCABULARY, WIDTH, vb.pp("embed"))?;
        let head = nn::Linear::new(embed.embeddings().clone(), None);
        Ok(Tied { body: nn::linear_no_bias(WIDTH, WIDTH, vb.pp("body"))?, embed, head })
    }
}

impl Module for Tied {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.head.forward(&self.body.forward(&self.embed.forward(ids)?)?)
    }
}

fn map(world: &World, mesh: &[(&str, usize)]) -> ShardedVarMap {
    ShardedVarMap::new(&world.mesh(mesh).unwrap(), world.device())
}

fn tied(vars: &ShardedVarMap) -> FsdpModule<Tied> {
    shard(&FullyShard::new(vars), &["body"], vars.builder(DType::F32), Tied::new).unwrap()
}

/// The table is one parameter for both of its uses. No rank reads all of it, and none writes all of it.
#[test]
fn tied_models_load_and_export_by_shards() {
    alone("tied_models_load_and_export_by_shards", || {
        let root = tempfile::tempdir().unwrap();
        let file = |name: &str| root.path().join(name);
        local::run(4, |group| {
            let world = World::of(group);
            let vars = map(&world, &[("dp_shard", 4)]);
            let model = tied(&vars);
            assert_eq!(vars.params().len(), 2);
            let export = |name: &str, vars: &ShardedVarMap| {
                let tensors = get_model_state_dict(vars, &StateDictOptions::default()).unwrap().shards("");
                hf::export(file(name), world.group(), &tensors, &[]).unwrap();
            };
            let (bytes, ()) = most(&world, || export("first", &vars));
            // State dicts share the shards' memory.
            assert!(bytes <= SLACK, "{bytes} bytes for an export of {MODEL}");
            drop((model, vars));
            let (bytes, (vars, model)) = most(&world, || {
                let vars = map(&world, &[("dp_shard", 4)]);
                vars.init_with(Pretrained::open(file("first")).unwrap()).unwrap();
                let model = tied(&vars);
                (vars, model)
            });
            assert!(bytes <= MODEL + SLACK, "{bytes} bytes to start from {MODEL}");
            let source = fsdp_ckpt::open(file("first")).unwrap();
            let (bytes, _) = most(&world, || load_model(&vars, &*source, &LoadOptions::default()).unwrap());
            assert!(bytes <= SLACK, "{bytes} bytes to load {MODEL} into the shards");
            drop(model);
            export("second", &vars);
        });
        let read = |name: &str| std::fs::read(file(name).join("model.safetensors")).unwrap();
        let first = read("first");
        assert!(first == read("second"));
        // The head has no weight of its own.
        let tensors = safetensors::SafeTensors::deserialize(&first).unwrap();
        let mut names = tensors.names();
        names.sort_unstable();
        assert_eq!(names, ["body.weight", "embed.weight"]);
    });
}

/// Replicas save their shards from where they are.
#[test]
fn saves_of_replicas_take_no_memory() {
    alone("saves_of_replicas_take_no_memory", || {
        let root = tempfile::tempdir().unwrap();
        local::run(4, |group| {
            let world = World::of(group);
            let vars = map(&world, &[("dp_replicate", 2), ("dp_shard", 2)]);
            let model = tied(&vars);
            let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
            optim.step(&backward(&model, world.rank())).unwrap();
            vars.release_buffers();
            let gathered = vars.buffer_memory();
            let save = |step: usize| {
                let mut tensors = model_tensors(&vars).unwrap();
                tensors.extend(optimizer_tensors(&optim).unwrap());
                let state = SaveState { mesh: vars.mesh().layout().clone(), tensors, values: Default::default() };
                fsdp_ckpt::save(root.path().join(format!("step-{step}")), world.group(), &state).unwrap();
            };
            for step in 0..3 {
                let (bytes, ()) = most(&world, || save(step));
                assert!(bytes <= SLACK, "{bytes} bytes for a save of {}", 3 * MODEL);
            }
            assert_eq!(vars.buffer_memory(), gathered);
        });
    });
}

fn backward(model: &FsdpModule<Tied>, rank: usize) -> candle_core::backprop::GradStore {
    let ids = Tensor::new(&[[rank as u32, 1, 2]], &candle_core::Device::Cpu).unwrap();
    model.backward(&model.forward(&ids).unwrap().sqr().unwrap().mean_all().unwrap()).unwrap()
}

#[test]
fn asynchronous_saves_keep_no_memory() {
    alone("asynchronous_saves_keep_no_memory", || {
        let root = tempfile::tempdir().unwrap();
        local::run(2, |group| {
            let world = World::of(group);
            let vars = map(&world, &[("dp_shard", 2)]);
            let _model = tied(&vars);
            let keep = std::num::NonZeroUsize::new(1).unwrap();
            let mut saver = AsyncSaver::new(world.group().clone(), WhenBusy::Wait).unwrap().keep_newest(keep);
            let mut seen = vec![];
            for step in 0..50 {
                let tensors = model_tensors(&vars).unwrap();
                let state = SaveState { mesh: vars.mesh().layout().clone(), tensors, values: Default::default() };
                saver.save(root.path().join(format!("step-{step:03}")), &state).unwrap();
                saver.wait().unwrap();
                seen.push(in_use(&world));
            }
            let after = |range: std::ops::Range<usize>| seen[range].iter().copied().max().unwrap();
            assert!(after(45..50) <= after(5..10) + 20_000, "{seen:?}");
        });
    });
}

/// Two layers over which each optimizer trains.
fn small(vars: &ShardedVarMap) -> FsdpModule<[nn::Linear; 2]> {
    let build = |vb: VarBuilder<'static>| {
        Ok::<_, candle_core::Error>([
            nn::linear_no_bias(8, 16, vb.pp("up"))?,
            nn::linear_no_bias(16, 4, vb.pp("down"))?,
        ])
    };
    shard(&FullyShard::new(vars), &["*"], vars.builder(DType::F32), build).unwrap()
}

type Optimizer = Box<dyn ShardedOptimizer>;
type Make = fn(&ShardedVarMap, &Path) -> Optimizer;

const OPTIMIZERS: [(&str, Make); 7] = [
    ("AdamW", |vars, _| Box::new(AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap())),
    ("Adam", |vars, _| Box::new(Adam::new(vars.trainable(), AdamConfig::default()).unwrap())),
    ("SGD", |vars, _| Box::new(SGD::new(vars.trainable(), SgdConfig { momentum: 0.9, ..Default::default() }).unwrap())),
    ("AdamW8bit", |vars, _| {
        let config = AdamW8bitConfig { min_8bit_size: 1, ..Default::default() };
        Box::new(AdamW8bit::new(vars.trainable(), config).unwrap())
    }),
    ("Muon", |vars, _| Box::new(Muon::new(vars.trainable(), MuonConfig::default()).unwrap())),
    ("AdamW on disk", |vars, dir| {
        let disk = StateOnDisk::new(dir).memory_bytes(1 << 17);
        Box::new(AdamW::on_disk(vec![(vars.trainable(), AdamWConfig::default())], &disk).unwrap())
    }),
    ("Candle's SGD", |vars, _| Box::new(CandleOptimizer::<candle_nn::SGD>::new(vars.trainable(), 0.01).unwrap())),
];

/// With every optimizer, clipping, a loss scale, sums of gradients and moving averages.
#[test]
fn memory_is_flat_over_a_thousand_steps() {
    alone("memory_is_flat_over_a_thousand_steps", || {
        let dir = tempfile::tempdir().unwrap();
        for (name, make) in OPTIMIZERS {
            local::run(2, |group| {
                let world = World::of(group);
                let vars = map(&world, &[("dp_shard", 2)]);
                let model = small(&vars);
                let mut optim = make(&vars, dir.path());
                let mut scaler = GradScaler::new(8.);
                let mut average = Ema::new(vars.params(), 0.9).unwrap();
                let x = Tensor::ones((2, 8), DType::F32, world.device()).unwrap();
                let mut step = || {
                    let mut sum = GradAccumulator::new(vars.trainable());
                    let y = model.call(|[up, down]| down.forward(&nn::gelu(&up.forward(&x)?)?)).unwrap();
                    let loss = y.sqr().unwrap().mean_all().unwrap();
                    sum.add(model.backward(&scaler.scale(&loss).unwrap()).unwrap()).unwrap();
                    let mut grads = sum.finish().unwrap().unwrap();
                    scaler.unscale(&vars, &mut grads).unwrap();
                    clip_grad_norm(&vars, &mut grads, 1.).unwrap();
                    optim.step(&grads).unwrap();
                    scaler.update().unwrap();
                    average.update().unwrap();
                };
                (0..20).for_each(|_| step());
                let before = in_use(&world);
                (20..1000).for_each(|_| step());
                let after = in_use(&world);
                // A number for each parameter and step would be 8 bytes x 2 parameters x 980 steps x 2 ranks.
                assert!(after <= before + 8_000, "{name}: {before} bytes after 20 steps, {after} after 1000");
            });
        }
    });
}

/// Both tables of a vocabulary are in the root. Their gradients are reduced from where backward writes them.
#[test]
fn reductions_of_both_tables_hold_one_copy() {
    local::run(2, |group| {
        let world = World::of(group);
        let vars = map(&world, &[("dp_shard", 2)]);
        let policy = MixedPrecisionPolicy {
            param_dtype: Some(DType::BF16),
            reduce_dtype: Some(DType::F32),
            ..Default::default()
        };
        let opts = FullyShard::new(&vars).mp_policy(policy);
        let build = |vb: VarBuilder<'static>| {
            let embed = nn::embedding(VOCABULARY, WIDTH, vb.pp("embed"))?;
            let body = nn::linear_no_bias(WIDTH, WIDTH, vb.pp("body"))?;
            Ok::<_, candle_core::Error>((embed, body, nn::linear_no_bias(WIDTH, VOCABULARY, vb.pp("head"))?))
        };
        let model = shard(&opts, &["body"], vars.builder(DType::F32), build).unwrap();
        let ids = Tensor::new(&[[world.rank() as u32, 1, 2]], world.device()).unwrap();
        for _ in 0..2 {
            let y = model.call(|(embed, body, head)| head.forward(&body.forward(&embed.forward(&ids)?)?)).unwrap();
            model.backward(&y.to_dtype(DType::F32).unwrap().sqr().unwrap().mean_all().unwrap()).unwrap();
        }
        // Gathered in BF16, the gradients in F32, and the reduced shard of one of two ranks.
        let elements = 2 * VOCABULARY * WIDTH;
        let (most, bound) = (vars.buffer_memory().most, (2 + 4 + 2) * elements + 16 * WIDTH * WIDTH);
        assert!(most > 4 * elements && most <= bound, "{most} bytes, not {bound}");
    });
}

/// The embedding's reduction takes a hundred times as long as a block's. Memory has one copy of its gradients.
#[test]
fn plans_show_the_reduction_of_a_large_table() {
    let dir = tempfile::tempdir().unwrap();
    let config = r#"{"model_type": "llama", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 262144, "max_position_embeddings": 64, "tie_word_embeddings": false}"#;
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let mut command = Command::new(program("bench"));
    command.args(["plan", "--model", ".", "--batch", "1", "--seq", "16", "--device", "cpu", "--flops", "0.05"]);
    command.args(["--ranks-per-host", "4", "--param-dtype", "bf16", "--json"]).current_dir(dir.path());
    let stdout = run(command, Duration::from_secs(60)).ok().stdout;
    let report: Value = serde_json::from_str(stdout.lines().find(|line| line.starts_with('{')).unwrap()).unwrap();
    let number = |pointer: &str| report.pointer(pointer).and_then(Value::as_f64).unwrap();
    let moments = report["memory"]["moments"].as_array().unwrap();
    let reduction = moments.iter().find(|moment| moment["when"] == "the embedding's reduction").unwrap();
    let (unreduced, table) = (reduction["unreduced"].as_f64().unwrap(), 262144. * 256. * 4.);
    assert!((table..1.02 * table).contains(&unreduced), "{unreduced} bytes, the table is {table}");
    assert!(number("/memory/total") >= reduction["state"].as_f64().unwrap() + table);
    let [embedding, block] = [0, 1].map(|at| number(&format!("/time/units/{at}/reduce_scatter")));
    assert!(embedding > 100. * block && block > 0., "{embedding} and {block} s");
}
