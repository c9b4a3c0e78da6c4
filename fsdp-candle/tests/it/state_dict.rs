//! State dicts of a model and its optimizer: sharded, full, and from rank 0.

use candle_core::{DType, Tensor};
use fsdp_candle::{
    AdamW, AdamWConfig, FullyShard, IncompatibleKeys, SGD, SgdConfig, ShardedOptimizer, ShardedVarMap, StateDict,
    StateDictOptions, StateTensor, World, get_model_state_dict, get_optimizer_state_dict, get_state_dict,
    load_optimizer, optimizer_tensors, set_model_state_dict, set_optimizer_state_dict, set_state_dict,
};
use fsdp_ckpt::{LoadOptions, SaveState, save};

use crate::common::{batch, dict_elements, full, loss_of, ranks, refused, sharded, vars, vars_on, whole};

const WIDTH: usize = 5;

/// A model after one step, with a frozen parameter and an ignored one.
fn stepped(world: &World, vars: &ShardedVarMap) -> AdamW {
    vars.freeze(|name| name == "blocks.0.up.bias").unwrap();
    let opts = FullyShard::new(vars).ignored_params(|name| name == "blocks.1.norm.weight");
    let model = sharded(&opts, vars, WIDTH);
    let mut optim = AdamW::new(vars.trainable(), AdamWConfig { lr: 0.01, ..AdamWConfig::default() }).unwrap();
    let loss = loss_of(&model, &batch(world.rank(), WIDTH));
    optim.step(&model.backward(&loss).unwrap()).unwrap();
    optim
}

fn zeroed(dict: &StateDict) -> StateDict {
    let zero = |state: &StateTensor| StateTensor { tensor: state.tensor.zeros_like().unwrap(), ..state.clone() };
    let tensors = dict.tensors.iter().map(|(name, state)| (name.clone(), zero(state))).collect();
    StateDict { tensors, values: dict.values.clone() }
}

#[test]
fn full_state_dicts_are_the_same_at_every_world_size() {
    let of_one = ranks(1, |world| {
        let vars = vars(&world);
        sharded(&FullyShard::new(&vars), &vars, WIDTH);
        dict_elements(&get_model_state_dict(&vars, &full()).unwrap())
    });
    for size in [2, 3, 4] {
        for replicate in [1, 2].into_iter().filter(|replicate| size % replicate == 0) {
            let all = ranks(size, |world| {
                let vars = vars_on(&world, &[("dp_replicate", replicate), ("dp_shard", size / replicate)]);
                sharded(&FullyShard::new(&vars), &vars, WIDTH);
                dict_elements(&get_model_state_dict(&vars, &full()).unwrap())
            });
            assert!(all.iter().all(|dict| *dict == of_one[0]), "{size} ranks, {replicate} replicas");
        }
    }
}

#[test]
fn state_dicts_round_trip_in_every_form() {
    for size in [1, 2, 3] {
        ranks(size, |world| {
            let vars = vars(&world);
            let mut optim = stepped(&world, &vars);
            let now = |optim: &AdamW| {
                let (model, moments) = get_state_dict(&vars, optim, &full()).unwrap();
                [dict_elements(&model), dict_elements(&moments)].concat()
            };
            let wanted = now(&optim);
            let copies = StateDictOptions { cpu_offload: true, ..StateDictOptions::default() };
            let broadcast = StateDictOptions { broadcast_from_rank0: true, cpu_offload: true, ..full() };
            for options in [copies, full(), broadcast] {
                let (model, moments) = get_state_dict(&vars, &optim, &options).unwrap();
                let is_empty = options.broadcast_from_rank0 && world.rank() > 0;
                assert_eq!((model.tensors.is_empty(), moments.values.is_empty()), (is_empty, is_empty));

                let shards = get_state_dict(&vars, &optim, &StateDictOptions::default()).unwrap();
                let zeros = (zeroed(&shards.0), zeroed(&shards.1));
                set_state_dict(&vars, &mut optim, &zeros.0, &zeros.1, &StateDictOptions::default()).unwrap();
                assert!(now(&optim).iter().all(|(_, elements)| elements.iter().all(|&x| x == 0.)));

                let keys = set_state_dict(&vars, &mut optim, &model, &moments, &options).unwrap();
                assert_eq!(keys, IncompatibleKeys::default());
                assert!(now(&optim) == wanted, "{options:?}");
            }
        });
    }
}

#[test]
fn options_select_parameters() {
    ranks(2, |world| {
        let vars = vars(&world);
        stepped(&world, &vars);
        let names = |options: &StateDictOptions| -> Vec<String> {
            get_model_state_dict(&vars, options).unwrap().tensors.into_keys().collect()
        };
        let all = names(&StateDictOptions::default());
        assert_eq!(all.len(), vars.params().len() + 1);
        assert!(all.contains(&"blocks.1.norm.weight".to_string()), "an ignored parameter is state, too");

        let unfrozen = StateDictOptions { ignore_frozen_params: true, ..StateDictOptions::default() };
        assert_eq!(names(&unfrozen).len(), all.len() - 1);
        let keys = set_model_state_dict(&vars, &get_model_state_dict(&vars, &full()).unwrap(), &unfrozen).unwrap();
        assert_eq!(keys, IncompatibleKeys::default());

        let block = StateDictOptions { submodule: Some("blocks.2".into()), ..StateDictOptions::default() };
        let bare = StateDictOptions { keep_submodule_prefixes: false, ..block.clone() };
        assert!(names(&block).contains(&"blocks.2.down.weight".to_string()));
        assert!(names(&bare).contains(&"down.weight".to_string()));
        assert_eq!(names(&bare).len(), names(&block).len());
        let dict = zeroed(&get_model_state_dict(&vars, &bare).unwrap());
        set_model_state_dict(&vars, &dict, &bare).unwrap();
        let is_zero = |name: &str| {
            let param = vars.get(name).unwrap();
            whole(&vars, &param, param.var()).iter().all(|v| *v == 0.)
        };
        assert!(is_zero("blocks.2.down.weight") && !is_zero("blocks.1.down.weight"));
    });
}

#[test]
fn broadcasts_hyper_parameters_of_rank_0() {
    ranks(3, |world| {
        let vars = vars(&world);
        let sgd = |momentum| SGD::new(vars.trainable(), SgdConfig { lr: 0.1, momentum, ..Default::default() }).unwrap();
        let kept = StateDictOptions { cpu_offload: true, ..full() };
        let broadcast = StateDictOptions { broadcast_from_rank0: true, ..kept.clone() };
        let mut adamw = stepped(&world, &vars);
        let dict = get_optimizer_state_dict(&vars, &adamw, &kept).unwrap();
        assert_eq!(dict.values.is_empty(), world.rank() > 0);
        adamw.set_learning_rate(0.5);
        set_optimizer_state_dict(&vars, &mut adamw, &dict, &broadcast).unwrap();
        assert_eq!(adamw.groups()[0].lr, 0.01);

        // They describe the optimizer's state too: without momentum it is empty.
        let momentum = get_optimizer_state_dict(&vars, &sgd(0.9), &kept).unwrap();
        let mut plain = sgd(0.);
        set_optimizer_state_dict(&vars, &mut plain, &momentum, &broadcast).unwrap();
        assert_eq!(plain.param_groups()[0].hyper["momentum"], 0.9);
        let kept = get_optimizer_state_dict(&vars, &plain, &StateDictOptions::default()).unwrap();
        assert!(kept.tensors.contains_key("state.head.weight.momentum_buffer"));

        // An error on one rank is an error on all of them, and no rank waits.
        let mut wrong = dict.clone();
        wrong.values.insert("param_groups".into(), serde_json::json!([{}, {}]));
        refused(
            set_optimizer_state_dict(&vars, &mut adamw, &wrong, &broadcast),
            &["are not the 1 groups of this optimizer"],
        );
        assert_eq!(adamw.groups()[0].lr, 0.01);
    });
}

#[test]
fn mismatched_state_dicts_are_refused_on_every_rank() {
    ranks(2, |world| {
        let vars = vars(&world);
        stepped(&world, &vars);
        let whole = get_model_state_dict(&vars, &full()).unwrap();
        let before = dict_elements(&whole);
        let broadcast = StateDictOptions { broadcast_from_rank0: true, ..full() };

        let mut lacking = zeroed(&whole);
        lacking.tensors.remove("head.weight");
        lacking.tensors.insert("tail".into(), StateTensor::whole(Tensor::ones(2, DType::F32, world.device()).unwrap()));
        let mut misshapen = zeroed(&whole);
        let ones = StateTensor::whole(Tensor::ones((1, 1), DType::F32, world.device()).unwrap());
        misshapen.tensors.insert("head.weight".into(), ones);
        for options in [full(), broadcast.clone()] {
            refused(set_model_state_dict(&vars, &lacking, &options), &["lacks \"head.weight\"", "unexpected \"tail\""]);
            let who = if options.broadcast_from_rank0 && world.rank() > 0 { "rank 0" } else { "`head.weight`" };
            refused(set_model_state_dict(&vars, &misshapen, &options), &[who]);
        }
        // Only rank 0's state dict counts: the other ranks may pass anything.
        let theirs = if world.rank() == 0 { &whole } else { &misshapen };
        set_model_state_dict(&vars, theirs, &broadcast).unwrap();
        assert_eq!(dict_elements(&get_model_state_dict(&vars, &full()).unwrap()), before);

        let shards = StateDictOptions { broadcast_from_rank0: true, ..StateDictOptions::default() };
        refused(set_model_state_dict(&vars, &whole, &shards), &["needs full_state_dict"]);

        let lenient = StateDictOptions { strict: false, ..full() };
        let keys = set_model_state_dict(&vars, &lacking, &lenient).unwrap();
        assert_eq!((keys.missing, keys.unexpected), (vec!["head.weight".to_string()], vec!["tail".to_string()]));
    });
}

#[test]
fn shards_of_another_mesh_are_refused() {
    let of_two = ranks(2, |world| {
        let vars = vars(&world);
        stepped(&world, &vars);
        get_model_state_dict(&vars, &StateDictOptions::default()).unwrap()
    });
    ranks(1, |world| {
        let vars = vars(&world);
        stepped(&world, &vars);
        refused(
            set_model_state_dict(&vars, &of_two[1], &StateDictOptions::default()),
            &["use the state dict of the same mesh, or a full one"],
        );
    });
}

#[test]
fn refuses_a_fractional_step() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("step-1");
    ranks(1, |world| {
        let vars = vars(&world);
        let mut optim = stepped(&world, &vars);
        let mut tensors = optimizer_tensors(&optim).unwrap();
        let step = tensors.iter_mut().find(|tensor| tensor.fqn == "optim.state.head.bias.step").unwrap();
        step.data = std::sync::Arc::new(fsdp_core::Buffer::F32(vec![1.5]));
        let state = SaveState { mesh: vars.mesh().layout().clone(), tensors, values: Default::default() };
        save(&dir, world.group(), &state).unwrap();
        let source = fsdp_ckpt::open(&dir).unwrap();
        refused(
            load_optimizer(&mut optim, &*source, &LoadOptions::default()),
            &["`head.bias`", "has a step count of 1.5"],
        );
    });
}
