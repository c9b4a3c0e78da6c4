//! The contract of `fully_shard` in its documentation, and a training script in the blocks that the skill asks for.

use candle_core::{Module, backprop::GradStore};

use super::*;
use fsdp_candle::Placement::Shard;
use fsdp_candle::{DTensor, StateDictOptions, clip_grad_norm, get_model_state_dict};

#[test]
fn what_the_documentation_promises() {
    on_worlds(&[1, 2], |world| {
        let args = ModelArgs::default();
        let vars = vars(world)?;
        let model = sharded(&FullyShard::new(&vars), &vars, &args)?;
        let x = randint(args.vocab_size, (2, 8), world.device())?;
        // tutorial: The user contract
        //> # fully_shard converts model.parameters() from plain torch.Tensor to DTensor in-place
        let is_sharded = |param: &fsdp_candle::FsdpParam| !param.is_unsharded() && param.placements() == [Shard(0)];
        assert!(vars.params().iter().all(|param| is_sharded(param)));
        //> # pre-forward hooks all-gather the parameters: plain tensors meanwhile
        let y = model.call(|inner| {
            assert!(model.params().iter().all(|param| param.is_unsharded()));
            inner.forward(&x)
        })?;
        //> # post-forward and post-backward hooks free the unsharded parameters
        let grads = model.backward(&y.sum_all()?)?;
        assert!(vars.params().iter().all(|param| is_sharded(param)));
        //> # the optimizer is initialized with the DTensor parameters and steps on them
        let mut optim = Adam::new(vars.trainable(), AdamConfig::default())?;
        optim.step(&grads)?;
        //> # model.forward(input) past the hooks does not work ...
        assert!(model.inner().forward(&x).is_err());
        //> # ... unless model.unshard() is called explicitly
        model.unshard()?;
        model.inner().layers.iter().try_for_each(|layer| layer.unshard())?;
        model.inner().forward(&x)?;
        model.reshard()?;
        model.inner().layers.iter().try_for_each(|layer| layer.reshard())?;
        //> # ... or register_fsdp_forward_method(model, "logits")
        let logits = |inner: &Transformer<_>| inner.forward(&x);
        model.call(logits)?;
        //> # FQNs of parameters remain unchanged
        let names: Vec<_> = get_model_state_dict(&vars, &StateDictOptions::default())?.tensors.into_keys().collect();
        // end
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

// The blocks of a script. tutorial: A training script
//> def init_distributed():
//>     dist.init_process_group(backend="nccl")
//>     torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
fn init_distributed() -> anyhow::Result<World> {
    Ok(fsdp_candle::init_on(fsdp_candle::DeviceChoice::Cpu)?)
}
//> def build_model_meta():
//>     with torch.device("meta"):
//>         model = Transformer(args)
fn build_model(world: &World, args: &ModelArgs) -> anyhow::Result<(ShardedVarMap, Sharded)> {
    //>     fully_shard(model)
    let vars = ShardedVarMap::of_world(world)?;
    let model = sharded(&FullyShard::new(&vars), &vars, args)?;
    //>     model.to_empty(device="cuda"); model.reset_parameters()
    //>     return model
    Ok((vars, model))
}
//> def build_optimizer(model):
//>     return torch.optim.Adam(model.parameters(), lr=1e-2)
fn build_optimizer(vars: &ShardedVarMap) -> anyhow::Result<Adam> {
    Ok(Adam::new(vars.trainable(), AdamConfig { lr: 1e-2, ..AdamConfig::default() })?)
}
//> def train_step(model, optim, x):
fn train_step(vars: &ShardedVarMap, model: &Sharded, optim: &mut Adam, x: &Tensor) -> anyhow::Result<GradStore> {
    //>     model(x).sum().backward()
    let mut grads = model.backward(&model.forward(x)?.sum_all()?)?;
    //>     torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    clip_grad_norm(vars, &mut grads, 1.0)?;
    //>     optim.step()
    optim.step(&grads)?;
    //>     optim.zero_grad()
    Ok(grads)
}
// end

#[test]
fn a_script_in_the_blocks_of_the_skill() {
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
    // Outside a launcher it is a world of one.
    let alone = init_distributed().unwrap();
    assert_eq!((alone.rank(), alone.size()), (0, 1));
}
