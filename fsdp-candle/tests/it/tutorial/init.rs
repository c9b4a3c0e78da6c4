//! Model initialization and DTensor parameters.

use super::*;
use fsdp_candle::Placement::{Replicate, Shard};

#[test]
fn layers_then_the_root() {
    on_worlds(&[1, 2, 4], |world| {
        let args = ModelArgs::default();
        let vars = vars(world)?;
        use fsdp_candle::{FsdpModule, FullyShard, fully_shard};
        let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
        let mut layers = vec![];
        for i in 0..args.n_layers {
            layers.push(fully_shard(&opts, vb.pp(format!("layers.{i}")), |vb| TransformerBlock::new(&args, vb))?);
        }
        let model = fully_shard(&opts, vb, |vb| Transformer::new(&args, layers, vb))?;
        let _: &Transformer<_> = model.inner();
        let _: &FsdpModule<_> = &model;
        println!("{model}");
        let printed = model.to_string();
        for part in ["(root)", "layers.0", "layers.2", "tok_embeddings.weight [9, 8] F32 (S(0))"] {
            assert!(printed.contains(part), "no {part} in {printed}");
        }
        // The root has the parameters that no layer has.
        assert_eq!((model.params().len(), vars.params().len()), (5, 5 + 3 * 10));
        Ok(())
    });
}

#[test]
fn parameters_are_dtensors() {
    on_worlds(&[1, 2, 4], |world| {
        let vars = vars(world)?;
        let model = sharded(&FullyShard::new(&vars), &vars, &ModelArgs::default())?;
        use fsdp_candle::DTensor;
        for param in vars.params() {
            let param: DTensor = param.dtensor()?;
            assert_eq!(param.placements(), [Shard(0)]);
            println!("{:?} of {:?}", param.to_local().dims(), param.shape());
        }
        let optim = Adam::new(vars.trainable(), AdamConfig { lr: 1e-2, ..AdamConfig::default() })?;
        // As `torch.chunk` splits 9 rows.
        let rows = [vec![9], vec![5, 4], vec![], vec![3, 3, 3, 0]][world.size() - 1][world.rank()];
        assert_eq!(vars.get("output.weight").unwrap().dtensor()?.to_local().dims(), [rows, 8]);
        assert_eq!(optim.states().len(), vars.params().len());
        drop(model);
        Ok(())
    });
}

/// The mesh decides: 1-D shards, 2-D replicates and shards.
#[test]
fn two_dimensional_meshes_replicate() {
    on_worlds(&[2, 4], |world| {
        let args = ModelArgs::default();
        let n = world.size();
        let mesh_1d = world.mesh(&[("dp_shard", n)])?;
        let mesh_2d = world.mesh(&[("dp_replicate", 2), ("dp_shard", n / 2)])?;
        let fsdp = ShardedVarMap::new(&mesh_1d, world.device());
        let model = sharded(&FullyShard::new(&fsdp), &fsdp, &args)?;
        assert!(fsdp.params().iter().all(|p| p.placements() == [Shard(0)]));
        let hsdp = ShardedVarMap::new(&mesh_2d, world.device());
        let hsdp_model = sharded(&FullyShard::new(&hsdp), &hsdp, &args)?;
        assert!(hsdp.params().iter().all(|p| p.placements() == [Replicate, Shard(0)]));
        // Both train alike.
        let x = randint(args.vocab_size, (2, 8), world.device())?;
        for (vars, model) in [(&fsdp, &model), (&hsdp, &hsdp_model)] {
            let loss = candle_core::Module::forward(model, &x)?.sum_all()?;
            adam(vars)?.step(&model.backward(&loss)?)?;
        }
        assert_eq!(parameters(&fsdp)?, parameters(&hsdp)?);
        Ok(())
    });
}
