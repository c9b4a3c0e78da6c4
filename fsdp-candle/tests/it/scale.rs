//! Cost of building a model and of its first steps as the number of ranks grows, counted on one rank whose peers are
//! simulated.
//!
//! Run it with `--nocapture` for the table in docs/planning.md.

use candle_core::{DType, Module};
use candle_nn::VarBuilder;
use fsdp_candle::{AdamW, AdamWConfig, FsdpModule, FullyShard, ShardedVarMap, World, fully_shard, nn};
use fsdp_test_support::heap;
use fsdp_test_support::simulated::{self, Traffic};

use crate::common::input;

#[global_allocator]
static ALLOCATOR: heap::Counting = heap::Counting;

const LAYERS: usize = 25;
const WIDTH: usize = 64;

/// Layers that are units.
struct Layers(Vec<FsdpModule<nn::Linear>>);

impl Module for Layers {
    fn forward(&self, x: &candle_core::Tensor) -> candle_core::Result<candle_core::Tensor> {
        self.0.iter().try_fold(x.clone(), |x, layer| layer.forward(&x))
    }
}

fn layers(vars: &ShardedVarMap) -> FsdpModule<Layers> {
    let options = FullyShard::new(vars);
    let vb = vars.builder(DType::F32);
    let layer = |number: usize, vb: &VarBuilder<'static>| {
        fully_shard(&options, vb.pp(format!("layers.{number}")), |vb| nn::linear(WIDTH, WIDTH, vb))
    };
    fully_shard(&options, vb, |vb| {
        let layers = (0..LAYERS).map(|number| layer(number, &vb)).collect::<fsdp_candle::Result<_>>()?;
        Ok(Layers(layers))
    })
    .unwrap()
}

/// The traffic and the heap memory of building, of the first step and of the third.
fn costs(rank: usize, ranks: usize) -> [(Traffic, usize); 3] {
    let (group, counter) = simulated::mirrored(rank, ranks);
    let world = World::of(group);
    let (built, heap) = heap::peak(|| {
        let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", ranks)]).unwrap(), world.device());
        let model = layers(&vars);
        let optim = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
        (model, optim)
    });
    let (model, mut optim) = built;
    let building = (counter.take(), heap);
    let x = input(rank, &[2, WIDTH]);
    let mut step = || {
        let ((), heap) = heap::peak(|| {
            let loss = model.forward(&x).unwrap().sqr().unwrap().mean_all().unwrap();
            optim.step(&model.backward(&loss).unwrap()).unwrap();
        });
        (counter.take(), heap)
    };
    let first = step();
    step();
    [building, first, step()]
}

#[test]
fn collectives_of_a_step_do_not_depend_on_the_ranks() {
    println!("ranks  what   rank  collectives  messages      bytes  heap bytes");
    let moved = (LAYERS * (WIDTH + 1) * WIDTH * 4) as f64;
    for ranks in [8, 64, 512, 4096] {
        for rank in [0, ranks - 1] {
            let costs = costs(rank, ranks);
            for (what, (traffic, heap)) in ["build", "first", "third"].iter().zip(costs) {
                let Traffic { collectives, messages, bytes } = traffic;
                println!("{ranks:>5}  {what}  {rank:>4} {collectives:>12} {messages:>9} {bytes:>10} {heap:>11}");
            }
            let [(building, of_building), (first, of_first), (third, _)] = costs;
            let hops = ranks.ilog2() as usize;
            // Beside the all-gathers in forward and backward, and the reduce-scatter.
            let beside = |traffic: Traffic| traffic.bytes as f64 - 3. * moved;
            assert!(building.messages <= 4 * hops && building.bytes <= 64, "{ranks} ranks: {building:?}");
            assert!(first.messages <= 120 * hops && beside(first) < 1024., "{ranks} ranks: {first:?}");
            assert!(third.messages <= 80 * hops && beside(third) < 1024., "{ranks} ranks: {third:?}");
            assert!(of_building < (2 << 20) + 256 * ranks && of_first < (4 << 20) + 1024 * ranks, "{costs:?}");
        }
    }
}
