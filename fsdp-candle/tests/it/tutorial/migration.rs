//! From FSDP1 to FSDP2.

use candle_core::Module;

use super::*;
use fsdp_candle::ReshardAfterForward::{Always, Never};
use fsdp_candle::{DTensor, MixedPrecisionPolicy, OffloadPolicy, Recurse, shard};

fn step(vars: &ShardedVarMap, model: &impl Module, unit: impl Fn(&Tensor) -> candle_core::Result<Grads>) -> Step {
    let x = randint(ModelArgs::default().vocab_size, (2, 8), vars.builder(DType::F32).device())?;
    let grads = unit(&model.forward(&x)?.sum_all()?)?;
    adam(vars)?.step(&grads)?;
    parameters(vars)
}

type Grads = candle_core::backprop::GradStore;
type Step = anyhow::Result<Parameters>;

#[test]
fn wrap_policies_become_calls_or_patterns() {
    on_worlds(&[1, 2], |world| {
        let args = ModelArgs::default();
        let by_call = vars(world)?;
        let vb = by_call.builder(DType::F32);
        let opts = FullyShard::new(&by_call);
        let mut layers = vec![];
        for i in 0..args.n_layers {
            let block = |vb| TransformerBlock::new(&args, vb);
            layers.push(fully_shard(&opts, vb.pp(format!("layers.{i}")), block)?);
        }
        let model = fully_shard(&opts, vb, |vb| Transformer::new(&args, layers, vb))?;
        for param in by_call.params() {
            assert!(!param.is_unsharded()); // there is no memory but the shards'
        }
        for (seed, param) in by_call.params().iter().enumerate() {
            let meta = param.dtensor()?;
            let (mesh, placements, device) = (meta.device_mesh(), meta.placements(), meta.device());
            let drawn = DTensor::randn(seed as u64, param.shape(), param.dtype(), device, mesh, placements)?;
            param.set_local(drawn.mul(0.1)?.to_local())?;
        }
        let by_pattern = vars(world)?;
        let vb = by_pattern.builder(DType::F32);
        let policy = ["layers.*"];
        let fsdp1 = shard(&FullyShard::new(&by_pattern), &policy, vb, |vb| {
            let block = |i| TransformerBlock::new(&args, vb.pp(format!("layers.{i}")));
            Transformer::new(&args, (0..args.n_layers).map(block).collect::<Result<_, _>>()?, vb.clone())
        })?;
        assert_eq!((model.units().len(), fsdp1.units().len()), (args.n_layers + 1, args.n_layers + 1));
        for param in by_pattern.params() {
            // The values are the same on every mesh.
            param.set_full(&by_call.get(param.name()).unwrap().dtensor()?.full_tensor()?)?;
        }
        let new = step(&by_call, &model, |loss| model.backward(loss))?;
        assert_eq!(step(&by_pattern, &fsdp1, |loss| fsdp1.backward(loss))?, new);
        Ok(new)
    })
    .windows(2)
    .for_each(|worlds| assert_eq!(worlds[0][0], worlds[1][0]));
}

/// Each keyword of FSDP1, with the guide's entry for it.
#[test]
fn keywords_become_options_and_methods() {
    on_worlds(&[2, 4], |world| {
        let args = ModelArgs::default();
        let n = world.size();
        let mut outcomes = vec![];
        let mut train = |vars: &ShardedVarMap, opts: &FullyShard| -> anyhow::Result<Sharded> {
            let model = sharded(opts, vars, &args)?;
            outcomes.push(step(vars, &model, |loss| model.backward(loss))?);
            Ok(model)
        };
        let vars_1d = ShardedVarMap::of_world(world)?;
        let vars_2d = ShardedVarMap::new(&world.mesh(&[("replicate", 2), ("shard", n / 2)])?, world.device());
        let full_shard = FullyShard::new(&vars_1d).reshard_after_forward(Always);
        let hybrid_shard = FullyShard::new(&vars_2d).reshard_after_forward(Always);
        let model = train(&vars_1d, &full_shard)?;
        train(&vars_2d, &hybrid_shard)?;
        let vars_1d = ShardedVarMap::new(vars_1d.mesh(), world.device());
        let vars_2d = ShardedVarMap::new(vars_2d.mesh(), world.device());
        let shard_grad_op = FullyShard::new(&vars_1d).reshard_after_forward(Never);
        let hybrid_shard_zero2 = FullyShard::new(&vars_2d).reshard_after_forward(Never);
        train(&vars_1d, &shard_grad_op)?;
        train(&vars_2d, &hybrid_shard_zero2)?;
        let vars_1d = ShardedVarMap::new(vars_1d.mesh(), world.device());
        let on_device = FullyShard::new(&vars_1d).offload_policy(OffloadPolicy::None);
        let offloaded = on_device.clone().offload_policy(OffloadPolicy::Cpu { pin_memory: true });
        let policy = MixedPrecisionPolicy {
            cast_forward_inputs: true,
            output_dtype: Some(DType::F32),
            ..MixedPrecisionPolicy::default()
        };
        let offloaded = offloaded.mp_policy(policy);
        train(&vars_1d, &offloaded)?;
        assert!(outcomes.windows(2).all(|two| two[0] == two[1]), "an option changed what is computed");

        // Accumulation: two backwards, and only the second communicates.
        let x = randint(args.vocab_size, (2, 8), world.device())?;
        let at_once = model.backward(&model.forward(&x)?.sum_all()?)?;
        model.set_requires_gradient_sync(false, Recurse::Yes);
        let none = model.backward(&model.forward(&x)?.sum_all()?)?;
        model.set_requires_gradient_sync(true, Recurse::Yes);
        let grads = model.backward(&model.forward(&x)?.sum_all()?)?;
        for param in model.params() {
            assert!(param.grad(&none)?.is_none());
            let twice = param.grad(&at_once)?.unwrap().mul(2.)?.sub(&param.grad(&grads)?.unwrap())?;
            let difference = twice.abs()?.max_all()?.full_tensor()?.to_scalar::<f32>()?;
            assert!(difference < 1e-4, "{}: {difference}", param.name());
        }
        Ok(())
    });
}
