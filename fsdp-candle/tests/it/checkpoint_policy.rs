//! Checkpointing by policy: which layers are recomputed, and what they keep.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Module, Result, Tensor, Var};
use fsdp_candle::activation_checkpoint::{
    ActivationOffload, CheckpointPolicy, Operation, checkpoint, selective_checkpoint,
};
use fsdp_candle::{FsdpModule, FullyShard, World, fully_shard, nn, random};

use crate::common::{Gradients, alone, device, elements, gradients, input, mean_square, ranks, refused, vars};

const WIDTH: usize = 8;

struct Block {
    norm: nn::RmsNorm,
    qkv: nn::Linear,
    output: nn::Linear,
    up: nn::Linear,
    down: nn::Gpt2Linear,
}

impl Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let options = nn::AttentionOptions { dropout: 0.2, ..nn::AttentionOptions::causal(0.5) };
        let a = nn::attention_qkv(&self.qkv.forward(&self.norm.forward(x)?)?, 2, 2, &options)?;
        let x = (x + nn::ops::dropout(&self.output.forward(&a)?, 0.1)?)?;
        &x + self.down.forward(&nn::gelu(&self.up.forward(&x)?)?)?
    }
}

fn on_disk(world: &World) -> ActivationOffload {
    ActivationOffload::disk(world, std::env::temp_dir()).unwrap()
}

fn full(value: f32) -> Var {
    Var::from_tensor(&Tensor::full(value, (4, 4), &device()).unwrap()).unwrap()
}

/// The output and the gradients of all parameters and of the input.
fn run(
    size: usize,
    dtype: DType,
    policy: impl Fn(&World) -> CheckpointPolicy + Sync,
) -> Vec<(Vec<f32>, Gradients, Vec<f32>)> {
    ranks(size, |world| {
        let policy = policy(&world);
        random::manual_seed(2);
        let vars = vars(&world);
        let policy_of_units = fsdp_candle::MixedPrecisionPolicy { param_dtype: Some(dtype), ..Default::default() };
        let opts = FullyShard::new(&vars).mp_policy(policy_of_units);
        let vb = vars.builder(DType::F32);
        let block = |i| {
            fully_shard(&opts, vb.pp(format!("blocks.{i}")), |vb| {
                Ok(Arc::new(Block {
                    norm: nn::rms_norm(WIDTH, 1e-5, vb.pp("norm"))?,
                    qkv: nn::linear(WIDTH, 3 * WIDTH, vb.pp("qkv"))?,
                    output: nn::linear_no_bias(WIDTH, WIDTH, vb.pp("output"))?,
                    up: nn::linear(WIDTH, 2 * WIDTH, vb.pp("up"))?,
                    down: nn::gpt2_linear(2 * WIDTH, WIDTH, vb.pp("down"))?,
                }))
            })
        };
        let blocks: Vec<FsdpModule<Arc<Block>>> = (0..3).map(block).collect::<fsdp_candle::Result<_>>().unwrap();
        let model = fully_shard(&opts, vb.clone(), |_| Ok(blocks)).unwrap();
        let x = Var::from_tensor(&input(world.rank(), &[2, 5, WIDTH])).unwrap();
        let y = model.call_with(x.to_dtype(dtype).unwrap(), |blocks, x| {
            blocks.iter().enumerate().try_fold(x, |x, (i, block)| {
                block.call_with(x, |block, x| {
                    let block = block.clone();
                    policy.run(i, &format!("blocks.{i}"), move |x: Tensor| block.forward(&x), x)
                })
            })
        });
        let y = y.unwrap();
        let grads = model.backward(&mean_square(&y)).unwrap();
        (elements(&y), gradients(&vars, &grads), elements(grads.get(&x).unwrap()))
    })
}

#[test]
fn policies_keep_the_bits() {
    for (size, dtype) in [(1, DType::F32), (2, DType::F32), (3, DType::BF16), (4, DType::F32), (2, DType::F64)] {
        let want = run(size, dtype, |_| CheckpointPolicy::none());
        let named = |names: &[&str]| CheckpointPolicy::named(names).unwrap();
        let policies = [
            CheckpointPolicy::all(),
            CheckpointPolicy::every(2),
            named(&["blocks.[12]"]),
            CheckpointPolicy::all().keep(|_| true),
            CheckpointPolicy::all().keep(|call| call.operation == Operation::Attention),
            CheckpointPolicy::every(2).keep(|call| call.operation == Operation::Linear && call.number % 2 == 1),
            named(&["*.0", "*.2"]).keep(|call| call.shape.last() == Some(&(2 * WIDTH))),
        ];
        for policy in policies {
            assert!(run(size, dtype, |_| policy.clone()) == want, "{size} {dtype:?} {policy:?}");
            let on_disk = |world: &World| policy.clone().offload(on_disk(world));
            assert!(run(size, dtype, on_disk) == want, "{size} {dtype:?} {policy:?} on disk");
        }
        let on_host = |world: &World| CheckpointPolicy::all().offload(ActivationOffload::cpu(world));
        assert!(run(size, dtype, on_host) == want, "{size} {dtype:?} on the host");
    }
}

/// Several inputs: one without a gradient and an integer one stay in memory. Checkpoints inside of checkpoints, and an
/// input that the model also uses itself.
#[test]
fn offloads_inputs_with_gradients() {
    let world = alone();
    let weight = full(0.5);
    let [x, y] = [1, 2].map(|seed| Var::from_tensor(&input(seed, &[3, 4])).unwrap());
    let mask = input(3, &[3, 4]);
    let ids = Tensor::new(&[2u32, 0, 1], &device()).unwrap();
    let gradients = |policy: &CheckpointPolicy| {
        let layer = Arc::new(nn::Linear::new(weight.as_tensor().clone(), None));
        let layers = (0..4).try_fold((x.as_tensor() * 2.)?, |x, i| {
            let (layer, inner) = (layer.clone(), policy.clone());
            let forward = move |((x, y), (mask, ids)): ((Tensor, Tensor), (Tensor, Tensor))| {
                let own = layer.clone();
                let x = inner.run(i, "inner", move |x: Tensor| own.forward(&x.tanh()?), (&x * &mask)?)?;
                x.index_select(&ids, 0)? + layer.forward(&y)?
            };
            let inputs = ((x.clone(), y.as_tensor().clone()), (mask.clone(), ids.clone()));
            policy.run(i, "layer", forward, inputs)? + x
        });
        let loss = mean_square(&layers?);
        // Another graph is alive meanwhile.
        let other = mean_square(&policy.run(0, "layer", |x: Tensor| x.sqr(), x.as_tensor().clone())?);
        let grads = loss.backward()?;
        let of = |var: &Var| elements::<f32>(grads.get(var).unwrap());
        let found = [of(&weight), of(&x), of(&y), elements(other.backward()?.get(&x).unwrap())];
        Ok::<_, candle_core::Error>(found)
    };
    let want = gradients(&CheckpointPolicy::all()).unwrap();
    let offload = on_disk(&world);
    let policy = CheckpointPolicy::all().offload(offload.clone());
    (0..2).for_each(|_| assert!(gradients(&policy).unwrap() == want));
    // The mask has no gradient.
    let product = |(x, mask): (Tensor, Tensor)| x * mask;
    let inputs = (x.as_tensor().clone(), mask.clone());
    let before = offload.bytes();
    fsdp_candle::no_grad(|| policy.run(0, "layer", product, inputs.clone())).unwrap();
    assert!(offload.bytes() <= before);
    let y = policy.run(0, "layer", product, inputs).unwrap();
    while offload.bytes() != 3 * 4 * 4 {
        std::thread::yield_now(); // until the thread drops inputs of earlier graphs
    }
    assert!(y.backward().is_ok());
}

#[test]
fn policies_choose_layers() {
    let chosen = |policy: CheckpointPolicy| -> Vec<usize> {
        (0..6).filter(|&i| policy.runs_again(i, &format!("model.layers.{i}"))).collect()
    };
    assert_eq!(chosen(CheckpointPolicy::default()), [0; 0]);
    assert_eq!(chosen(CheckpointPolicy::every(0)), [0; 0]);
    assert_eq!(chosen(CheckpointPolicy::all()), [0, 1, 2, 3, 4, 5]);
    assert_eq!(chosen(CheckpointPolicy::every(4)), [0, 4]);
    assert_eq!(chosen(CheckpointPolicy::named(["layers.[0-2]", "model.*.5"]).unwrap()), [0, 1, 2, 5]);
    refused(CheckpointPolicy::named(["["]), &["is not a valid pattern of names"]);
}

/// Two layers. The first one's weight is gone when backward runs, so its output must have been kept.
#[test]
fn kept_outputs_are_not_recomputed() {
    let kept = |numbers: &'static [usize], operation: Operation| {
        let weights = [1, 2].map(|i| full(i as f32));
        let [first, second] = weights.each_ref().map(|w| nn::Linear::new(w.as_tensor().clone(), None));
        let x = Tensor::ones((2, 4), DType::F32, &device()).unwrap();
        let seen = Arc::new(Mutex::new(vec![]));
        let calls = seen.clone();
        let y = selective_checkpoint(
            move |call| {
                calls.lock().unwrap().push((call.operation, call.number, call.shape.to_vec()));
                call.operation == operation && numbers.contains(&call.number)
            },
            move |x: Tensor| second.forward(&nn::silu(&first.forward(&x)?)?),
            x,
        );
        let loss = y.unwrap().sum_all().unwrap();
        weights[0].set(&weights[0].zeros_like().unwrap()).unwrap();
        let grads = loss.backward().unwrap();
        let product = |number| (Operation::Linear, number, vec![2, 4]);
        assert_eq!(*seen.lock().unwrap(), [product(0), product(1)]); // once, in forward
        elements::<f32>(grads.get(&weights[1]).unwrap())[0]
    };
    let silu = 4. / (1. + (-4f32).exp());
    assert!((kept(&[0, 1], Operation::Linear) - 2. * silu).abs() < 1e-5);
    assert!((kept(&[0], Operation::Linear) - 2. * silu).abs() < 1e-5);
    assert_eq!(kept(&[1], Operation::Linear), 0.);
    assert_eq!(kept(&[0, 1], Operation::Attention), 0.);
}

#[test]
fn nested_checkpoints_keep_their_own_outputs() {
    let weight = full(0.5);
    let layer = Arc::new(nn::Linear::new(weight.as_tensor().clone(), None));
    let gradient = |outer: bool, inner: Option<bool>| {
        let layer = layer.clone();
        let f = move |x: Tensor| {
            let (own, x) = (layer.clone(), layer.forward(&x)?);
            let forward = move |x: Tensor| own.forward(&nn::silu(&own.forward(&x)?)?);
            let x = match inner {
                None => forward(x)?,
                Some(false) => checkpoint(forward, x)?,
                Some(true) => selective_checkpoint(|call| call.number == 1, forward, x)?,
            };
            layer.forward(&x)
        };
        let x = Tensor::ones((2, 4), DType::F32, &device()).unwrap();
        let y = if outer { selective_checkpoint(|_| true, f, x) } else { f(x) };
        elements::<f32>(y.unwrap().sqr().unwrap().sum_all().unwrap().backward().unwrap().get(&weight).unwrap())
    };
    let want = gradient(false, None);
    for inner in [None, Some(false), Some(true)] {
        assert_eq!(gradient(true, inner), want, "{inner:?}");
    }

    let runs = Mutex::new(0);
    let f = move |x: Tensor| {
        let mut runs = runs.lock().unwrap();
        *runs += 1;
        layer.forward(&x.narrow(0, 0, *runs)?)?.sum_all()
    };
    let x = Tensor::ones((2, 4), DType::F32, &device()).unwrap();
    refused(
        selective_checkpoint(|_| true, f, x).unwrap().backward(),
        &["it kept an output of [1, 4], but backward has [2, 4]"],
    );
}
