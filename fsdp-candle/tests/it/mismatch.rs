//! Ranks that use different parameters: an error on every rank that names the parameters, or with
//! `set_reduce_scatter_unused_params` the correct gradients.

use std::sync::Arc;

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::VarBuilder;
use fsdp_candle::{
    FsdpModule, FullyShard, MixedPrecisionPolicy, Recurse, ReshardAfterForward, ShardedVarMap, clip_grad_norm,
    fully_shard, nn,
};

use crate::common::{
    WIDTH, all_refused, assert_close, assert_contains, batch, gradients, journal, mean_square, ranks, rounding,
    shard_of_gradient, vars_on,
};

const ADVICE: &str = "call `set_reduce_scatter_unused_params(true, Recurse::Yes)` of the root on every rank";

/// One unit: a body, and heads of the same shape from which each rank chooses.
type Heads = FsdpModule<(nn::Linear, Vec<nn::Linear>)>;

fn heads(opts: &FullyShard, vars: &ShardedVarMap, dtype: DType) -> Heads {
    fully_shard(opts, vars.builder(dtype), |vb| {
        let heads = ["a", "b", "c"].iter().map(|name| nn::linear_no_bias(WIDTH, WIDTH, vb.pp(name)));
        Ok((nn::linear_no_bias(WIDTH, WIDTH, vb.pp("body"))?, heads.collect::<Result<_>>()?))
    })
    .unwrap()
}

/// The loss of some heads; with `all` the other heads are in it with a factor of 0.
fn loss(model: &Heads, x: &Tensor, chosen: &[usize], all: bool) -> Tensor {
    let x = x.to_dtype(model.params()[0].dtype()).unwrap();
    let loss = model.call(|(body, heads)| {
        let hidden = body.forward(&x)?;
        let used = |head: &usize| chosen.contains(head);
        let losses = (0..heads.len()).filter(|head| all || used(head)).map(|head| {
            let loss = heads[head].forward(&hidden)?.to_dtype(DType::F32)?.sqr()?.mean_all()?;
            if used(&head) { Ok(loss) } else { &loss * loss.zeros_like()? }
        });
        losses.reduce(|a, b| a? + b?).unwrap()
    });
    loss.unwrap()
}

fn worlds() -> [(usize, Vec<(&'static str, usize)>); 5] {
    [
        (2, vec![("shard", 2)]),
        (3, vec![("shard", 3)]),
        (4, vec![("shard", 4)]),
        (2, vec![("replicate", 2), ("shard", 1)]),
        (4, vec![("replicate", 2), ("shard", 2)]),
    ]
}

#[test]
fn different_parameters_are_errors_on_every_rank() {
    for (size, mesh) in worlds() {
        for (dtype, own) in [(DType::F32, false), (DType::BF16, false), (DType::F32, true)] {
            let errors = ranks(size, |world| {
                let vars = vars_on(&world, &mesh);
                let model = heads(&FullyShard::new(&vars), &vars, dtype);
                if own {
                    model.set_custom_reduce_scatter(Some(journal("reduce 0".into(), &Arc::default())));
                }
                let loss = loss(&model, &batch(world.rank(), WIDTH), &[world.rank() % 2], false);
                model.backward(&loss).unwrap_err().to_string()
            });
            // With pairs of shards, both replicas hold both heads.
            all_refused(
                errors,
                &[
                    "FSDP unit `(root)`: ",
                    " of 4 parameters failed",
                    "unit `(root)`: body.weight, a.weight; ",
                    "unit `(root)`: body.weight, b.weight; ",
                    "`a.weight` is on rank(s) [0",
                    "] only, `b.weight` on rank(s) [1",
                    ADVICE,
                ],
            );
        }
    }
}

#[test]
fn reduces_unused_parameters_and_names_them() {
    for (size, mesh) in worlds() {
        for dtype in [DType::F32, DType::BF16] {
            ranks(size, |world| {
                let make = || {
                    let vars = vars_on(&world, &mesh);
                    let model = heads(&FullyShard::new(&vars), &vars, dtype);
                    (vars, model)
                };
                let ((all_vars, all), (vars, some)) = (make(), make());
                some.set_reduce_scatter_unused_params(true, Recurse::Yes);
                let x = batch(world.rank(), WIDTH);
                let whole = |vars: &ShardedVarMap, model: &Heads, loss: &Tensor| {
                    let mut grads = model.backward(loss).unwrap();
                    for param in vars.trainable() {
                        // Candle has no kernel for an empty shard.
                        let grad = match param.region().is_empty() {
                            true => Tensor::zeros(&param.region().sizes[..], DType::F32, &Device::Cpu),
                            false => shard_of_gradient(&param, &grads).to_dtype(DType::F32),
                        };
                        grads.insert(param.var(), grad.unwrap());
                    }
                    gradients(vars, &grads)
                };
                for step in 0..2 {
                    let chosen = [(world.rank() + step) % 2];
                    let want = whole(&all_vars, &all, &loss(&all, &x, &chosen, true));
                    let got = whole(&vars, &some, &loss(&some, &x, &chosen, false));
                    assert_close(&got, &want, rounding(dtype).max(1e-6));
                    assert_eq!(some.parameters_without_gradient(), ["c.weight"]);
                }
            });
        }
    }
}

#[test]
fn parameters_used_in_an_earlier_backward_are_not_named() {
    ranks(4, |world| {
        let vars = vars_on(&world, &[("replicate", 2), ("shard", 2)]);
        let model = heads(&FullyShard::new(&vars), &vars, DType::F32);
        model.set_reduce_scatter_unused_params(true, Recurse::Yes);
        let x = batch(world.rank(), WIDTH);
        let run = |chosen: &[usize]| drop(model.backward(&loss(&model, &x, chosen, false)).unwrap());
        // Only rank 3 uses the head `b`: in a backward without a reduction, in one that reduces over shards only, and
        // in one that is not the last.
        let chosen: &[usize] = if world.rank() == 3 { &[0, 1] } else { &[0] };
        let switches: [fn(&Heads, bool); 3] = [
            |model, on| model.set_requires_gradient_sync(on, Recurse::Yes),
            |model, on| model.set_requires_all_reduce(on, Recurse::Yes),
            |model, on| model.set_is_last_backward(on),
        ];
        for switch in switches {
            switch(&model, false);
            run(chosen);
            switch(&model, true);
            run(&[0]);
            assert_eq!(model.parameters_without_gradient(), ["c.weight"]);
        }
        run(&[0]);
        assert_eq!(model.parameters_without_gradient(), ["b.weight", "c.weight"]);
    });
}

#[test]
fn errors_group_parameters_by_their_ranks() {
    // Experts of two weights. A rank runs those to which it routes its tokens.
    const EXPERTS: usize = 6;
    for (size, on) in [(2, "[0]"), (3, "[0]"), (4, "[0, 3]")] {
        let errors = ranks(size, |world| {
            let vars = vars_on(&world, &[("shard", size)]);
            let linear = |vb: VarBuilder<'static>| nn::linear_no_bias(WIDTH, WIDTH, vb);
            let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32).pp("moe"), |vb| {
                let experts = (0..EXPERTS).map(|i| {
                    let vb = vb.pp(format!("experts.{i}"));
                    Ok((linear(vb.pp("w1"))?, linear(vb.pp("w2"))?))
                });
                Ok((linear(vb.pp("gate"))?, experts.collect::<Result<Vec<_>>>()?))
            })
            .unwrap();
            let y = model.call(|(gate, experts)| {
                let x = gate.forward(&batch(world.rank(), WIDTH))?;
                let used = experts.iter().enumerate().filter(|(i, _)| (i + world.rank()).is_multiple_of(3));
                let outputs = used.map(|(_, (w1, w2))| w2.forward(&nn::gelu(&w1.forward(&x)?)?));
                outputs.reduce(|a, b| a? + b?).unwrap()
            });
            model.backward(&mean_square(&y.unwrap())).unwrap_err().to_string()
        });
        let first = [0, 3].map(|i| format!("`moe.experts.{i}.w1.weight`, `moe.experts.{i}.w2.weight`")).join(", ");
        let first = format!("{first} are on rank(s) {on} only, ");
        all_refused(errors, &["FSDP unit `moe`: reduce-scatter of 13 parameters failed", &first, ADVICE]);
    }
}

#[test]
fn replicas_with_different_parameters_are_errors() {
    for (size, shards) in [(2, 1), (4, 2)] {
        let errors = ranks(size, |world| {
            let vars = vars_on(&world, &[("replicate", 2), ("shard", shards)]);
            let model = heads(&FullyShard::new(&vars), &vars, DType::F32);
            // The ranks of each replica agree, but the replicas differ.
            let loss = loss(&model, &batch(world.rank(), WIDTH), &[world.rank() / shards], false);
            model.backward(&loss).unwrap_err().to_string()
        });
        all_refused(
            errors,
            &[
                "FSDP unit `(root)`: all-reduce of 4 parameters failed",
                "`a.weight` is on rank(s) [0] only, `b.weight` on rank(s) [1] only",
                ADVICE,
            ],
        );
    }
}

#[test]
fn backwards_reduced_on_some_ranks_are_errors() {
    type Dims = &'static [(&'static str, usize)];
    type Off = fn(&Heads);
    let cases: [(Dims, Off, &str); 4] = [
        (&[("shard", 2)], |model| model.set_requires_gradient_sync(false, Recurse::Yes), "reduce-scatter"),
        (&[("shard", 3)], |model| model.set_requires_gradient_sync(false, Recurse::Yes), "reduce-scatter"),
        (
            &[("replicate", 2), ("shard", 1)],
            |model| model.set_requires_gradient_sync(false, Recurse::Yes),
            "all-reduce",
        ),
        (&[("replicate", 2), ("shard", 2)], |model| model.set_requires_all_reduce(false, Recurse::Yes), "all-reduce"),
    ];
    for (mesh, off, what) in cases {
        let size = mesh.iter().map(|(_, size)| size).product();
        let errors = ranks(size, |world| {
            let vars = vars_on(&world, mesh);
            let model =
                heads(&FullyShard::new(&vars).reshard_after_forward(ReshardAfterForward::Never), &vars, DType::F32);
            // Nothing else is gathered or reduced, so nothing else can fail.
            model.set_reshard_after_backward(false, Recurse::Yes);
            model.unshard().unwrap();
            let quiet = world.rank() < size.div_ceil(2);
            for backward in 0..2 {
                if quiet && backward == 0 {
                    off(&model);
                } else {
                    model.set_requires_gradient_sync(true, Recurse::Yes);
                    model.set_requires_all_reduce(true, Recurse::Yes);
                }
                if let Err(error) = model.backward(&loss(&model, &batch(world.rank(), WIDTH), &[0], false)) {
                    return error.to_string();
                }
            }
            panic!("rank {} summed what others had summed already", world.rank())
        });
        all_refused(
            errors,
            &[
                &format!("FSDP unit `(root)`: {what} of 4 parameters failed"),
                "unit `(root)`, gradients of 2 backwards: body.weight, a.weight; ",
                "unit `(root)`: body.weight, a.weight; ",
                "of as many backwards",
            ],
        );
    }
}

#[test]
fn a_missing_reduction_shows_in_the_next_collective() {
    let errors = ranks(2, |world| {
        let vars = vars_on(&world, &[("shard", 2)]);
        let model = heads(&FullyShard::new(&vars), &vars, DType::F32);
        let x = batch(world.rank(), WIDTH);
        let y = loss(&model, &x, &[0], false);
        // The loss has a graph, which reaches no parameter.
        let other = || Var::from_tensor(&x).unwrap().sum_all().unwrap();
        let loss = if world.rank() == 0 { y } else { other() };
        let clipped = model.backward(&loss).map_err(Into::into);
        let clipped = clipped.and_then(|mut grads| clip_grad_norm(&vars, &mut grads, 1.));
        clipped.unwrap_err().to_string()
    });
    all_refused(
        errors,
        &[
            "rank(s) [0] issued reduce_scatter(unit `(root)`: body.weight, a.weight; ",
            "rank(s) [1] issued all_reduce(the gradients' norm (Two); sum, F64 [1])",
            ADVICE,
        ],
    );
}

#[test]
fn a_norm_does_not_match_other_numbers() {
    let errors = ranks(2, |world| {
        let vars = vars_on(&world, &[("shard", 2)]);
        let model = heads(&FullyShard::new(&vars), &vars, DType::F32);
        let mut grads = model.backward(&loss(&model, &batch(world.rank(), WIDTH), &[0], false)).unwrap();
        match world.rank() {
            0 => clip_grad_norm(&vars, &mut grads, 1.).map(drop).unwrap_err().to_string(),
            // A single number as well.
            _ => world.all_reduce(&[1.], fsdp_core::ReduceOp::Sum).map(drop).unwrap_err().to_string(),
        }
    });
    all_refused(
        errors,
        &[
            "rank(s) [0] issued all_reduce(the gradients' norm (Two); sum, F64 [1])",
            "rank(s) [1] issued all_reduce(sum, F64 [1])",
        ],
    );
}

#[test]
fn gathers_of_different_units_name_both() {
    // Units of one size move the same number of bytes, so their collectives could be confused.
    for (own, larger) in [(false, 0), (true, 0), (false, WIDTH)] {
        let errors = ranks(3, |world| {
            let vars = vars_on(&world, &[("shard", 3)]);
            let policy = MixedPrecisionPolicy { param_dtype: Some(DType::BF16), ..Default::default() };
            let opts = FullyShard::new(&vars).mp_policy(policy);
            let unit = |name: &str, outputs: usize| {
                let vb = vars.builder(DType::F32).pp(name);
                let unit = fully_shard(&opts, vb, |vb| nn::linear(WIDTH, outputs, vb)).unwrap();
                if own {
                    unit.set_custom_all_gather(Some(journal(format!("gather {name}"), &Arc::default())));
                }
                unit
            };
            let (a, b) = (unit("a", WIDTH), unit("b", WIDTH + larger));
            let chosen = if world.rank() == 1 { &b } else { &a };
            let error = chosen.forward(&batch(world.rank(), WIDTH)).unwrap_err().to_string();
            assert_contains(&error, &[&format!("FSDP unit `{}`: all-gather", chosen.name())]);
            error
        });
        all_refused(
            errors,
            &[
                "rank(s) [0, 2] issued all_gather(unit `a`: a.weight, a.bias; BF16 [12",
                "rank(s) [1] issued all_gather(unit `b`: b.weight, b.bias; BF16 [",
                "call the same units in the same order",
            ],
        );
    }
}

#[test]
fn gathers_of_whole_tensors_name_their_parameters() {
    let errors = ranks(2, |world| {
        let vars = vars_on(&world, &[("shard", 2)]);
        let model = heads(&FullyShard::new(&vars), &vars, DType::F32);
        let own = &model.params()[1 + world.rank()];
        own.dtensor().unwrap().full_tensor().unwrap_err().to_string()
    });
    for error in errors {
        assert_contains(&error, &["all_gather(`a.weight`, F32 [6, 6] as [S(0)] on (shard: 2), to ", "`b.weight`"]);
    }
}
