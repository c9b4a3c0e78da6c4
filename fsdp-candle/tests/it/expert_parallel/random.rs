//! Random mixtures on random meshes of up to eight ranks. `FSDP_RANDOM_MIXTURES` sets their number, `FSDP_RANDOM_SEED` the
//! first seed.

use std::hash::{DefaultHasher, Hash, Hasher};

use fsdp_candle::{FullyShard, ReshardAfterForward, ShardedVarMap, nn};

use super::model::{Shape, Skew};
use super::training::{SETUP, Setup, compare_prepared, sgd};
use crate::common::one_of;
use crate::random_models::{Draw, number};

/// A mesh whose ranks all have experts.
fn mesh(draw: &mut Draw) -> (Vec<(&'static str, usize)>, usize) {
    loop {
        let sizes = [1 + draw.below(2), 1 + draw.below(3), 1 + draw.below(4), 1 + usize::from(draw.once_in(4))];
        if sizes.iter().product::<usize>() > 8 {
            continue;
        }
        let [replicate, shard, experts, tensor] = sizes;
        let mut mesh = vec![("dp_shard", shard), ("ep", experts)];
        if draw.once_in(3) {
            mesh.reverse();
        }
        if replicate > 1 {
            mesh.insert(0, ("dp_replicate", replicate));
        }
        if tensor > 1 {
            mesh.push(("tp", tensor));
        }
        return (mesh, experts);
    }
}

#[test]
fn random_mixtures_train_alike() {
    let first = number("FSDP_RANDOM_SEED").unwrap_or(1);
    for seed in first..first + number("FSDP_RANDOM_MIXTURES").unwrap_or(30 / one_of(10) as u64) {
        let mut draw = Draw(seed);
        let (mesh, ranks) = mesh(&mut draw);
        let has_replicas = mesh[0].0 == "dp_replicate";
        let is_split = mesh.iter().any(|(name, _)| *name == "tp");
        let experts = ranks + draw.below(6);
        let shape = Shape {
            experts,
            per_token: 1 + draw.below(experts.min(3)),
            skew: match draw.below(4) {
                0 => Skew::OneExpert(draw.below(experts)),
                1 => Skew::First(experts.min(3)),
                _ => Skew::Router,
            },
            bias: draw.once_in(3),
            recomputes: draw.once_in(3),
        };
        let options: fn(FullyShard) -> FullyShard = match draw.below(4) {
            0 => |options| options.reshard_after_forward(ReshardAfterForward::Never),
            1 => |options| options.reshard_after_forward(ReshardAfterForward::Always),
            2 if has_replicas => |options| options.shard_optimizer_over_replicas(true),
            _ => |options| options,
        };
        let setup = Setup { shape, options, optimizer: sgd, accumulates: draw.once_in(3), steps: 3, ..SETUP };
        let (freezes, adapts) = (draw.once_in(2), draw.once_in(4) && !is_split);
        println!("seed {seed}: {mesh:?}, {shape:?}, freezes {freezes}, adapts {adapts}");
        compare_prepared(&mesh, setup, &move |vars: &ShardedVarMap| {
            let is_frozen = move |name: &str| {
                let mut hasher = DefaultHasher::new();
                (seed, name).hash(&mut hasher);
                !name.starts_with("head") && !nn::is_adapter(name) && !hasher.finish().is_multiple_of(3)
            };
            if freezes {
                vars.freeze(is_frozen).unwrap();
            }
            if adapts {
                vars.adapt(nn::LoraConfig { rank: 2, alpha: 4. }, |layer| layer.contains("experts.")).unwrap();
            }
        });
    }
}
