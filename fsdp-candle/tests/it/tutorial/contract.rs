//! The contract in the documentation of `fully_shard`, and a training script from the code blocks of the skill.

use candle_core::{Module, backprop::GradStore};

use super::*;
use fsdp_candle::Placement::Shard;
use fsdp_candle::{DTensor, StateDictOptions, clip_grad_norm, get_model_state_dict};

#[test]
fn the_documented_contract_holds() {
    on_worlds(&[1, 2], |world| {
        let args = ModelArgs::default();
        let vars = vars(world)?;
        let model = sharded(&FullyShard::new(&vars), &vars, &args)?;
        let x = randint(args.vocab_size, (2, 8), world.device())?;
        let is_sharded = |param: &fsdp_candle::FsdpParam| !param.is_unsharded() && param.placements() == [Shard(0)];
        assert!(vars.params().iter().all(|param| is_sharded(param)));
        let y = model.call(|inner| {
            assert!(model.params().iter().all(|param| param.is_unsharded()));
            inner.forward(&x)
        })?;
        let grads = model.backward(&y.sum_all()?)?;
        assert!(vars.params().iter().all(|param| is_sharded(param)));
        let mut optim = Adam::new(vars.trainable(), AdamConfig::default())?;
        optim.step(&grads)?;
        assert!(model.inner().forward(&x).is_err());
        model.unshard()?;
        model.inner().layers.iter().try_for_each(|layer| layer.unshard())?;
        model.inner().forward(&x)?;
        model.reshard()?;
        model.inner().layers.iter().try_for_each(|layer| layer.reshard())?;
        let logits = |inner: &Transformer<_>| inner.forward(&x);
        model.call(logits)?;
        let names: Vec<_> = get_model_state_dict(&vars, &StateDictOptions::default())?.tensors.into_keys().collect();
        let map = candle_nn::VarMap::new();
        let vb = candle_nn::VarBuilder::from_varmap(&map, DType::F32, world.device());
        let layers = (0..args.n_layers).map(|i| TransformerBlock::new(&args, vb.pp(format!("layers.{i}"))));
        Transformer::new(&args, layers.collect::<Result<Vec<_>, _>>()?, vb.clone())?;
        let mut plain: Vec<_> = map.data().lock().unwrap().keys().cloned().collect();
        plain.sort();
        assert_eq!(names, plain);
        Ok(())
    });
}

fn init_distributed() -> anyhow::Result<World> {
    Ok(fsdp_candle::init_on(fsdp_candle::DeviceChoice::Cpu)?)
}
fn build_model(world: &World, args: &ModelArgs) -> anyhow::Result<(ShardedVarMap, Sharded)> {
    let vars = ShardedVarMap::of_world(world)?;
    let model = sharded(&FullyShard::new(&vars), &vars, args)?;
    Ok((vars, model))
}
fn build_optimizer(vars: &ShardedVarMap) -> anyhow::Result<Adam> {
    Ok(Adam::new(vars.trainable(), AdamConfig { lr: 1e-2, ..AdamConfig::default() })?)
}
fn train_step(vars: &ShardedVarMap, model: &Sharded, optim: &mut Adam, x: &Tensor) -> anyhow::Result<GradStore> {
    let mut grads = model.backward(&model.forward(x)?.sum_all()?)?;
    clip_grad_norm(vars, &mut grads, 1.0)?;
    optim.step(&grads)?;
    Ok(grads)
}

#[test]
fn the_documented_script_trains() {
    let args = ModelArgs::default();
    let script = |world: &World| -> anyhow::Result<_> {
        let (vars, model) = build_model(world, &args)?;
        let mut optim = build_optimizer(&vars)?;
        let x = randint(args.vocab_size, (2, 8), world.device())?;
        for _ in 0..3 {
            let grads = train_step(&vars, &model, &mut optim, &x)?;
            let grad: DTensor = vars.params()[0].grad(&grads)?.unwrap();
            assert_eq!(grad.placements(), [Shard(0)]);
        }
        parameters(&vars)
    };
    let worlds = on_worlds(&[1, 2], script);
    for ((name, one), (_, two)) in worlds[0][0].iter().zip(&worlds[1][1]) {
        let near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-4;
        assert!(one.iter().zip(two).all(near), "{name}");
    }
    // Without a launcher it is a world of one rank.
    let alone = init_distributed().unwrap();
    assert_eq!((alone.rank(), alone.size()), (0, 1));
}
