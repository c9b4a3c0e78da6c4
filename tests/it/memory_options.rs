//! A rank's memory after each phase of a step follows the formula, for the kinds of sharding that `bench memory` does
//! not run.
//!
//! Ranks are threads: the allocator counts the sum over ranks, read while all of them wait. Each test runs in its own
//! process, because the count is process-wide.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Module, Result, Tensor, Var};
use fsdp_candle::activation_checkpoint::{ActivationOffload, CheckpointPolicy};
use fsdp_candle::nn::{self, LoraConfig, is_adapter};
use fsdp_candle::{
    ActivationLayout, AdamW, AdamWConfig, ColwiseParallel, DataParallelMeshDims, FsdpModule, FullyShard,
    MixedPrecisionPolicy, ParallelPlan, Recurse, ReshardAfterForward, RowwiseParallel, ShardedVarMap, StateOnDisk,
    ValuesOf, World, check_finite, fully_shard, optimizer_tensors, parallelize,
};
use fsdp_ckpt::SaveState;
use fsdp_core::process_group::local;

#[global_allocator]
pub(crate) static ALLOCATOR: peak_alloc::PeakAlloc = peak_alloc::PeakAlloc;

const WIDTH: usize = 256;
const LAYERS: usize = 4;
/// Parameters of all blocks, in bytes.
const MODEL: f64 = (LAYERS * 8 * WIDTH * WIDTH * 4) as f64;
/// Bytes of an activation of one row.
const ROW: f64 = (WIDTH * 4) as f64;
/// Allowance on a rank for bookkeeping, the root's norm and activations of one row.
const SLACK: f64 = 200e3;
const LORA_RANK: usize = 16;
/// Adapters of all blocks, in bytes.
const ADAPTERS: f64 = (LAYERS * LORA_RANK * 5 * WIDTH * 4) as f64;

/// The sharding and the options of a model.
#[derive(Clone)]
struct Way {
    mesh: &'static [(&'static str, usize)],
    reshard: ReshardAfterForward,
    dtype: Option<DType>,
    lora: bool,
    /// Whether parameters are frozen after the model is built.
    late: bool,
    dropout: f32,
    adds: bool,
    again: Again,
    sync: bool,
    /// Whether replicas shard the optimizer's state.
    divided: bool,
    rows: usize,
    /// Whether the ranks of the dimension `tp` also shard the rows, if there is one.
    sequence: bool,
}

/// The checkpointed blocks.
#[derive(Clone, Copy)]
enum Again {
    Nothing,
    /// Every block.
    All,
    /// The first two blocks.
    FirstTwo,
    /// Every block, keeping its first product.
    AllButProduct,
}

impl Again {
    fn policy(self) -> CheckpointPolicy {
        match self {
            Again::Nothing => CheckpointPolicy::none(),
            Again::All => CheckpointPolicy::all(),
            Again::FirstTwo => CheckpointPolicy::named(["blocks.[01]"]).unwrap(),
            Again::AllButProduct => CheckpointPolicy::all().keep(|call| call.number == 0),
        }
    }
}

const FSDP: &[(&str, usize)] = &[("dp_shard", 4)];
const FSDP_ALONE: &[(&str, usize)] = &[("dp_shard", 1)];
const HSDP: &[(&str, usize)] = &[("dp_replicate", 2), ("dp_shard", 2)];
const WAY: Way = Way {
    mesh: FSDP,
    reshard: ReshardAfterForward::Always,
    dtype: None,
    lora: false,
    late: false,
    dropout: 0.,
    adds: false,
    again: Again::Nothing,
    sync: true,
    divided: false,
    rows: 1,
    sequence: false,
};

impl Way {
    /// The number of tensor parallel ranks.
    fn tensor(&self) -> usize {
        self.mesh.iter().find(|(name, _)| *name == "tp").map_or(1, |(_, ranks)| *ranks)
    }

    fn vars(&self, world: &World) -> fsdp_candle::Result<ShardedVarMap> {
        let mesh = world.mesh(self.mesh)?;
        if self.tensor() == 1 {
            return Ok(ShardedVarMap::new(&mesh, world.device()));
        }
        let dims = DataParallelMeshDims { shard: &["dp_shard"], replicate: &[] };
        let vars = ShardedVarMap::with_dp_mesh_dims(&mesh, &dims, world.device())?;
        let between = if self.sequence { ActivationLayout::Shard(0) } else { ActivationLayout::Replicate };
        let plan = ParallelPlan::new()
            .module("blocks.*.up", ColwiseParallel { input_layout: between, ..Default::default() })
            .module("blocks.*.down", RowwiseParallel { output_layout: between, ..Default::default() });
        parallelize(&vars, &mesh.slice(&["tp"])?, &plan)?;
        Ok(vars)
    }

    /// The rows of a rank between layers.
    fn own_rows(&self) -> usize {
        if self.sequence { self.rows / self.tensor() } else { self.rows }
    }
}

/// A residual MLP.
struct Block {
    up: Box<dyn Module + Send + Sync>,
    down: nn::Linear,
    dropout: nn::Dropout,
    /// Whether `nn::add` adds, instead of Candle's `+`.
    adds: bool,
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.dropout.forward(&self.down.forward(&nn::gelu(&self.up.forward(x)?)?)?, true)?;
        if self.adds { nn::add(x, &y) } else { x + y }
    }
}

/// Bytes in use by a rank when all ranks are at this point.
fn in_use(world: &World) -> f64 {
    let barrier = || world.group().barrier().wait().unwrap();
    barrier();
    let bytes = ALLOCATOR.current_usage();
    barrier();
    bytes as f64 / world.size() as f64
}

/// Bytes of a rank after building the model, creating the optimizer, a step, the next forward, and its backward.
fn phases(way: &Way) -> [f64; 5] {
    local::run(4, |group| {
        let world = World::of(group);
        let before = in_use(&world);
        let vars = way.vars(&world).unwrap();
        if way.lora && !way.late {
            vars.freeze(|name| !is_adapter(name)).unwrap();
        }
        let policy = MixedPrecisionPolicy { param_dtype: way.dtype, ..Default::default() };
        let opts = FullyShard::new(&vars).reshard_after_forward(way.reshard).mp_policy(policy);
        let opts = opts.shard_optimizer_over_replicas(way.divided);
        let vb = vars.builder(DType::F32);
        let block = |i: usize| {
            fully_shard(&opts, vb.pp(format!("blocks.{i}")), |vb| {
                let up = nn::linear_no_bias(WIDTH, 4 * WIDTH, vb.pp("up"))?;
                let config = LoraConfig { rank: LORA_RANK, alpha: 16. };
                let up: Box<dyn Module + Send + Sync> = match way.lora {
                    true => Box::new(nn::lora(up, WIDTH, 4 * WIDTH, config, vb.pp("up"))?),
                    false => Box::new(up),
                };
                let down = nn::linear_no_bias(4 * WIDTH, WIDTH, vb.pp("down"))?;
                Ok(Arc::new(Block { up, down, dropout: nn::Dropout::new(way.dropout), adds: way.adds }))
            })
            .unwrap()
        };
        let blocks: Vec<FsdpModule<Arc<Block>>> = (0..LAYERS).map(block).collect();
        let model = fully_shard(&opts, vb.clone(), |vb| Ok((blocks, nn::rms_norm(WIDTH, 1e-5, vb.pp("norm"))?)));
        let model = model.unwrap();
        if way.late {
            vars.set_requires_grad(false, |name| !is_adapter(name)).unwrap();
        }
        let policy = way.again.policy();
        let built = in_use(&world) - before;
        let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
        let optimizer = in_use(&world) - before;
        let x = Tensor::ones((way.own_rows(), WIDTH), DType::F32, world.device()).unwrap();
        let forward = || {
            let y = model.call(|(blocks, norm)| {
                let y = blocks.iter().enumerate().try_fold(x.clone(), |x, (i, block)| {
                    block.call_with(x, |inner, x| {
                        let inner = inner.clone();
                        policy.run(i, &format!("blocks.{i}"), move |x: Tensor| inner.forward(&x), x)
                    })
                })?;
                norm.forward(&y)
            });
            y.unwrap().to_dtype(DType::F32).unwrap().sqr().unwrap().mean_all().unwrap()
        };
        let grads = model.backward(&forward()).unwrap();
        optim.step(&grads).unwrap();
        drop(grads);
        vars.release_buffers();
        let step = in_use(&world) - before;
        model.set_requires_gradient_sync(way.sync, Recurse::Yes);
        let loss = forward();
        vars.release_buffers();
        let after_forward = in_use(&world) - before;
        let grads = model.backward(&loss).unwrap();
        drop(loss);
        vars.release_buffers();
        let after_backward = in_use(&world) - before;
        drop(grads);
        [built, optimizer, step, after_forward, after_backward]
    })[0]
}

/// Runs a test of this file in its own process.
fn alone(test: &str, body: impl FnOnce()) {
    const ALONE: &str = "FSDP_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return body();
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("memory_options::{test}"), "--nocapture", "--test-threads=1"]).env(ALONE, "1");
    // `gemm` keeps memory for each thread that it has used. One thread needs as much in every step.
    command.env("RAYON_NUM_THREADS", "1");
    let run = fsdp_test_support::run(command, Duration::from_secs(120)).ok();
    assert!(run.stdout.contains("1 passed"), "{}", run.stdout);
}

fn check(what: &str, way: &Way, formula: [f64; 4]) {
    let [built, optimizer, forward, backward] = formula;
    let formula = [built, optimizer, optimizer, forward, backward];
    let names = ["build", "optimizer", "a step", "forward", "backward"];
    for ((phase, found), want) in names.iter().zip(phases(way)).zip(formula) {
        assert!((found - want).abs() <= SLACK, "{what}: {found:.0} bytes after {phase}, not {want:.0}");
    }
}

/// Parameters and moments sharded over `shards` ranks, `kept` bytes from forward to backward, then sharded gradients.
fn formula(shards: f64, kept: f64) -> [f64; 4] {
    let share = MODEL / shards;
    [share, 3. * share, 3. * share + kept, 4. * share]
}

#[test]
fn reshard_size_keeps_a_share_after_forward() {
    alone("reshard_size_keeps_a_share_after_forward", || {
        let way = Way { reshard: ReshardAfterForward::To(2), ..WAY };
        check("K = 2", &way, formula(4., MODEL / 2.));
    });
}

#[test]
fn replicas_hold_the_state_of_a_smaller_world() {
    alone("replicas_hold_the_state_of_a_smaller_world", || {
        for (reshard, kept) in [(ReshardAfterForward::Always, 0.), (ReshardAfterForward::Never, MODEL)] {
            check(&format!("HSDP, {reshard:?}"), &Way { mesh: HSDP, reshard, ..WAY }, formula(2., kept));
        }
    });
}

#[test]
fn replicas_that_divide_shards_gather_them_for_a_step() {
    alone("replicas_that_divide_shards_gather_them_for_a_step", || {
        let share = MODEL / 4.;
        for (dtype, reshard, kept) in [
            (None, ReshardAfterForward::Always, MODEL / 2.),
            (None, ReshardAfterForward::Never, MODEL / 2. + MODEL),
            (Some(DType::BF16), ReshardAfterForward::Always, MODEL / 4.),
        ] {
            let way = Way { mesh: HSDP, divided: true, reshard, dtype, ..WAY };
            check(
                &format!("HSDP divided, {dtype:?}, {reshard:?}"),
                &way,
                [share, 3. * share, 3. * share + kept, 4. * share],
            );
        }
    });
}

#[test]
fn half_precision_halves_gathered_parameters() {
    alone("half_precision_halves_gathered_parameters", || {
        let way = Way { reshard: ReshardAfterForward::Never, dtype: Some(DType::BF16), ..WAY };
        check("BF16", &way, formula(4., MODEL / 2.));
    });
}

#[test]
fn frozen_parameters_have_no_moments_or_gradients() {
    alone("frozen_parameters_have_no_moments_or_gradients", || {
        for (reshard, kept) in [(ReshardAfterForward::Always, 0.), (ReshardAfterForward::Never, MODEL + ADAPTERS)] {
            let (base, adapters) = (MODEL / 4., ADAPTERS / 4.);
            let formula = [base + adapters, base + 3. * adapters, base + 3. * adapters + kept, base + 4. * adapters];
            for late in [false, true] {
                let way = Way { lora: true, late, reshard, ..WAY };
                check(&format!("LoRA, {reshard:?}, frozen late: {late}"), &way, formula);
            }
        }
    });
}

#[test]
fn unreduced_gradients_are_whole() {
    alone("unreduced_gradients_are_whole", || {
        let share = MODEL / 4.;
        let way = Way { sync: false, ..WAY };
        check("without synchronisation", &way, [share, 3. * share, 3. * share, 3. * share + MODEL]);
    });
}

#[test]
fn checkpointing_keeps_block_inputs() {
    alone("checkpointing_keeps_block_inputs", || {
        let rows = 256;
        let bytes = rows as f64 * ROW;
        let widths = |way: Way| {
            // Matrix products keep packing buffers after the first step.
            let [_, _, between, forward, backward] = phases(&Way { rows, ..way });
            let beside = (backward - between - MODEL / 4.) / bytes;
            assert!(beside.abs() <= 2., "{beside} widths outlive backward");
            (forward - between) / bytes
        };
        let after_forward = |again: Again| widths(Way { again, ..WAY });
        let (all, inputs) = (after_forward(Again::Nothing), after_forward(Again::All));
        // In widths of the residual stream: each block's input, output and sum and, unless checkpointed, the input of
        // the activation, four wide.
        let blocks = LAYERS as f64;
        // Outside the blocks: the model's input, norm and loss.
        let beside = 0. ..=4.;
        assert!(beside.contains(&(all - 7. * blocks)), "{all} widths");
        assert!(beside.contains(&(inputs - blocks)), "{inputs} widths");
        let two = after_forward(Again::FirstTwo);
        assert!(beside.contains(&(two - 2. - 7. * (blocks - 2.))), "{two} widths");
        // The output of the first product is kept.
        let kept = after_forward(Again::AllButProduct);
        assert!(beside.contains(&(kept - 5. * blocks)), "{kept} widths");
        // Dropout's output is kept instead of its input, and no mask.
        let dropped = widths(Way { dropout: 0.1, ..WAY });
        assert!(beside.contains(&(dropped - 7. * blocks)), "{dropped} widths");
        // `nn::add` keeps neither a term nor the sum.
        let added = widths(Way { adds: true, ..WAY });
        assert!(beside.contains(&(added - 5. * blocks)), "{added} widths");
    });
}

/// Returns the bytes in use between forward and backward, and the peak, less the bytes in use before the step: for the
/// first step, in which units are inspected, and for the second.
fn inputs_in_memory(layers: usize, offload: bool, dtype: Option<DType>) -> [[f64; 2]; 2] {
    const WIDTH: usize = 32;
    local::run(1, |group| {
        let world = World::of(group);
        let vars = ShardedVarMap::new(&world.mesh(FSDP_ALONE).unwrap(), world.device());
        let policy = MixedPrecisionPolicy { param_dtype: dtype, ..Default::default() };
        let (opts, vb) = (FullyShard::new(&vars).mp_policy(policy), vars.builder(DType::F32));
        let layer = |i: usize| {
            let unit = |vb: candle_nn::VarBuilder<'static>| Ok(Arc::new(nn::linear_no_bias(WIDTH, WIDTH, vb)?));
            fully_shard(&opts, vb.pp(i), unit).unwrap()
        };
        let layers: Vec<_> = (0..layers).map(layer).collect();
        let model = fully_shard(&opts, vb.clone(), |_| Ok(layers)).unwrap();
        let policy = match offload {
            true => CheckpointPolicy::all().offload(ActivationOffload::disk(&world, std::env::temp_dir()).unwrap()),
            false => CheckpointPolicy::all(),
        };
        [0, 1].map(|_| {
            let x = Tensor::ones((ROWS, WIDTH), DType::F32, world.device()).unwrap();
            let before = ALLOCATOR.current_usage() as f64;
            ALLOCATOR.reset_peak_usage();
            let y = model.call_with(x, |layers, x| {
                layers.iter().enumerate().try_fold(x, |x, (i, layer)| {
                    layer.call_with(x, |layer, x| {
                        let layer = layer.clone();
                        policy.run(i, "layer", move |x: Tensor| layer.forward(&x)?.tanh(), x)
                    })
                })
            });
            let loss = y.unwrap().to_dtype(DType::F32).unwrap().sum_all().unwrap();
            // Until all is written.
            std::thread::sleep(Duration::from_millis(500));
            let between = ALLOCATOR.current_usage() as f64 - before;
            model.backward(&loss).unwrap();
            [between, ALLOCATOR.peak_usage() as f64 - before]
        })
    })[0]
}

const ROWS: usize = 1 << 14;

#[test]
fn offloaded_inputs_take_no_memory() {
    alone("offloaded_inputs_take_no_memory", || {
        for (dtype, bytes) in [(None, 4), (Some(DType::BF16), 2)] {
            let input = (ROWS * 32 * bytes) as f64;
            let more = |offload: bool| {
                let [few, many] = [4, 12].map(|layers| inputs_in_memory(layers, offload, dtype));
                [0, 1].map(|step| [0, 1].map(|at| (many[step][at] - few[step][at]) / input))
            };
            for [between, peak] in more(false) {
                assert!((7.9..8.5).contains(&between) && peak > 7.5, "{between} and {peak} inputs");
            }
            for [between, peak] in more(true) {
                // The number of inputs that wait for the disk differs by up to two.
                assert!(between < 0.5 && peak < 2.5, "{between} and {peak} inputs, offloaded");
            }
        }
    });
}

/// The ranks share what is inside a layer. Between layers each rank has all rows, or its part of them.
#[test]
fn tensor_parallelism_divides_activations() {
    alone("tensor_parallelism_divides_activations", || {
        const DP2_TP2: &[(&str, usize)] = &[("dp_shard", 2), ("tp", 2)];
        const TP4: &[(&str, usize)] = &[("dp_shard", 1), ("tp", 4)];
        let (rows, blocks) = (256, LAYERS as f64);
        let bytes = rows as f64 * ROW;
        for (mesh, sequence) in [(FSDP, false), (DP2_TP2, false), (TP4, false), (DP2_TP2, true), (TP4, true)] {
            let way = Way { mesh, sequence, rows, ..WAY };
            let ranks = way.tensor() as f64;
            let [built, optimizer, between, forward, backward] = phases(&way);
            // Parameters, gradients and moments are sharded over all four ranks in every mesh.
            let share = MODEL / 4.;
            for (found, want) in [(built, share), (optimizer, 3. * share)] {
                assert!((found - want).abs() <= SLACK, "{mesh:?}: {found:.0} bytes, not {want:.0}");
            }
            assert!((backward - between - share) / bytes <= 2., "{mesh:?}: {backward:.0} after {between:.0}");
            // In widths of the residual stream: four before the activation; a block's input, output and sum, and, if
            // these are sharded by rows, the gathered input.
            let between_layers = if sequence { 3. / ranks + 1. } else { 3. };
            let want = blocks * (4. / ranks + between_layers);
            let kept = (forward - between) / bytes;
            assert!((0. ..=4.).contains(&(kept - want)), "{mesh:?}, {sequence}: {kept} widths, not {want}");
        }
    });
}

/// Neither a step, a check nor a save holds more of the state on disk. One tensor of it is four times as large.
#[test]
fn state_on_disk_takes_the_memory_of_its_blocks() {
    alone("state_on_disk_takes_the_memory_of_its_blocks", || {
        const BLOCKS: usize = 2 << 20;
        let (dir, saved) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        local::run(1, |group| {
            let world = World::of(group);
            let vars = ShardedVarMap::new(&world.mesh(FSDP_ALONE).unwrap(), world.device());
            let layers = |vb: candle_nn::VarBuilder<'static>| {
                let layer = |i: usize| nn::linear_no_bias(1024, 2048, vb.pp(i));
                (0..8).map(layer).collect::<Result<Vec<_>>>()
            };
            let _model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), layers).unwrap();
            let x = Var::from_tensor(&Tensor::zeros(1, DType::F32, world.device()).unwrap()).unwrap();
            let mut grads = x.sum_all().unwrap().backward().unwrap();
            for param in vars.trainable() {
                grads.insert(param.var(), Tensor::ones(param.var().shape(), DType::F32, world.device()).unwrap());
            }
            let before = ALLOCATOR.current_usage();
            let most = |what: &str| {
                let bytes = ALLOCATOR.peak_usage() - before;
                assert!(bytes <= BLOCKS + SLACK as usize, "{bytes} bytes after {what}");
                ALLOCATOR.reset_peak_usage();
            };
            ALLOCATOR.reset_peak_usage();
            let disk = StateOnDisk::new(dir.path()).memory_bytes(BLOCKS);
            let mut optim = AdamW::on_disk(vec![(vars.trainable(), AdamWConfig::default())], &disk).unwrap();
            most("the optimizer was made");
            assert!(ALLOCATOR.current_usage() - before >= BLOCKS);
            (0..2).for_each(|_| optim.step(&grads).unwrap());
            most("steps");
            check_finite(&vars, &[ValuesOf::Moments(&optim)]).unwrap();
            most("a check");
            let tensors = optimizer_tensors(&optim).unwrap();
            let state = SaveState { mesh: vars.mesh().layout().clone(), tensors, values: Default::default() };
            fsdp_ckpt::save(saved.path().join("step"), world.group(), &state).unwrap();
            most("a save");
            optim.reset().unwrap();
            most("a reset");
        });
    });
}
