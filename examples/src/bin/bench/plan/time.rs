//! Time of a step: compute of each unit, and a simulation of overlapping communication.

use fsdp_candle::ReshardAfterForward;
use serde::Serialize;

use super::framework::{Checkpoint, Framework};
use super::hardware::Ring;
use super::model::Layer;
use super::on_device;
use super::setup::Setup;

/// Time of a step in seconds, unless noted otherwise.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Time {
    pub(super) step: f64,
    /// Forward and backward.
    pub(super) compute: Compute,
    /// Clipping and the optimizer.
    pub(super) optimizer: f64,
    /// Time in which collectives run.
    pub(super) communication: f64,
    /// Time in which compute waits for collectives.
    pub(super) exposed: f64,
    /// Bytes that a rank sends.
    pub(super) sent: f64,
    /// Number of launches, on a device.
    pub(super) launches: f64,
    /// Time in which the host launches them. A step takes at least as long.
    pub(super) launching: f64,
    pub(super) tokens_per_s_per_rank: f64,
    /// Model FLOPs utilization: the model's operations without recomputation, as a share of the device's peak.
    pub(super) mfu: f64,
    /// The embedding, or the root with the head, then the blocks in forward order, and a head that is a unit.
    pub(super) units: Vec<Unit>,
}

/// Seconds by the resource that bounds them.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Compute {
    pub(super) products: f64,
    pub(super) attention: f64,
    /// Elementwise operations, which are bound by memory.
    pub(super) memory: f64,
}

impl Compute {
    fn total(&self) -> f64 {
        self.products + self.attention + self.memory
    }

    fn add(&mut self, times: f64, other: Compute) {
        self.products += times * other.products;
        self.attention += times * other.attention;
        self.memory += times * other.memory;
    }
}

/// Times of a unit in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Unit {
    pub(super) forward: f64,
    pub(super) backward: f64,
    pub(super) gather_forward: f64,
    /// 0 if parameters stay gathered.
    pub(super) gather_backward: f64,
    pub(super) reduce_scatter: f64,
    pub(super) all_reduce: f64,
    /// Exchanges of activations between ranks that share layers or sequences, for which compute waits. Part of forward and
    /// backward.
    pub(super) exchange: f64,
    /// Exchanges that run behind the compute of forward and backward.
    pub(super) hidden: f64,
    /// Time in which compute waits for the unit's other collectives.
    pub(super) exposed: f64,
    /// Bytes that a rank sends.
    pub(super) sent: f64,
}

impl Unit {
    fn communication(&self) -> f64 {
        self.gather_forward + self.gather_backward + self.reduce_scatter + self.all_reduce + self.hidden
    }
}

/// Computes the time of a step.
pub(super) fn of(setup: &Setup) -> Time {
    let (compute, mut units) = units(setup);
    let waited = simulate(&mut units);
    let share = setup.model.parameters() / setup.mesh.shard as f64;
    let norm = Ring::of_shards(&setup.mesh, &setup.links, setup.mesh.shard).all_reduce(8.);
    let moved = setup.trained() * setup.framework.optimizer_moves(setup.shards) * share;
    let optimizer = norm + setup.device.moves(moved);
    let launches = match setup.framework {
        Framework::OnDevice => {
            let layers = setup.model.layers.iter().map(|layer| on_device::launches(setup, layer));
            layers.sum::<f64>() + on_device::root_launches(setup)
        }
        Framework::Candle | Framework::Pytorch => 0.,
    };
    let launching = launches * on_device::LAUNCH;
    let step = (waited + optimizer).max(launching);
    // A rank's part of the tokens that tensor-parallel ranks share.
    let tokens = setup.tokens() / setup.mesh.tensor as f64;
    let exchanges = units.iter().map(|unit| unit.exchange).sum::<f64>();
    Time {
        step,
        compute,
        optimizer,
        communication: units.iter().map(Unit::communication).sum::<f64>() + exchanges,
        exposed: units.iter().map(|unit| unit.exposed).sum::<f64>() + exchanges,
        sent: units.iter().map(|unit| unit.sent).sum(),
        launches,
        launching,
        tokens_per_s_per_rank: tokens / step,
        mfu: tokens * setup.operations() / step / setup.device.flops,
        units,
    }
}

/// Returns the seconds of attention's forward and backward.
fn attention(setup: &Setup, layer: &Layer) -> [f64; 2] {
    let tokens = setup.tokens();
    if setup.framework == Framework::OnDevice {
        return on_device::attention(setup, layer);
    }
    // Attention's backward has two and a half times the operations of its forward, because it recomputes a product.
    let forward = setup.device.attention(tokens * layer.attention());
    [forward, 2.5 * forward]
}

/// Returns the seconds of a block's forward.
fn forward(setup: &Setup, layer: &Layer) -> Compute {
    let tokens = setup.tokens();
    Compute {
        products: setup.device.products(2. * tokens * layer.products()),
        attention: attention(setup, layer)[0],
        memory: setup.device.moves(tokens * setup.framework.moved(layer, setup.compute)),
    }
}

/// Returns the seconds of a block's backward, including recomputation.
fn backward(setup: &Setup, layer: &Layer) -> Compute {
    let once = forward(setup, layer);
    let mut all = Compute {
        products: setup.backward_products() * once.products,
        attention: attention(setup, layer)[1],
        memory: 2. * once.memory,
    };
    let again = setup.framework.products_again(layer, setup.checkpoint);
    let again = Compute { products: setup.device.products(2. * setup.tokens() * again), ..once };
    match setup.checkpoint {
        Checkpoint::None => {}
        Checkpoint::Full => all.add(1., again),
        // The output of attention is kept.
        Checkpoint::Selective => all.add(1., Compute { attention: 0., ..again }),
    }
    all
}

/// Returns the seconds that attention waits for a collective of keys and values. On a device, half of it runs behind half
/// of the attention.
fn exposed(framework: Framework, keys: f64, attention: f64) -> f64 {
    match framework {
        Framework::OnDevice => keys / 2. + (keys / 2. - attention / 2.).max(0.),
        _ => keys,
    }
}

fn units(setup: &Setup) -> (Compute, Vec<Unit>) {
    let Setup { model, mesh, links, .. } = setup;
    let (e, reduce) = (setup.compute.bytes(), setup.reduce.bytes());
    let over_shards = Ring::of_shards(mesh, links, mesh.shard);
    let over_layer = Ring::of_layer(mesh, links);
    let over_sequence = Ring::of_sequence(mesh, links);
    let over_replicas = Ring::of_replicas(mesh, links);
    let (over_experts, over_expert) = (Ring::of_experts(mesh, links), Ring::of_expert(mesh, links));
    let [of_block, of_root] = setup.stored().map(|stored| if setup.base.is_some() { stored.min(e) } else { e });
    let reduce = setup.trained() * reduce;
    // The communication of parameters that are sharded over a ring.
    let of_ring = |ring: &Ring, parameters: f64, e: f64, kept: bool| {
        let again = match setup.reshard {
            _ if kept => None,
            ReshardAfterForward::Never => None,
            ReshardAfterForward::To(ranks) => Some(Ring::of_shards(mesh, links, ranks)),
            ReshardAfterForward::Default | ReshardAfterForward::Always => Some(*ring),
        };
        let again = again.as_ref();
        let own = reduce * parameters / ring.ranks();
        Unit {
            gather_forward: ring.gather(e * parameters),
            gather_backward: again.map_or(0., |again| again.gather(e * parameters)),
            reduce_scatter: ring.gather(reduce * parameters),
            all_reduce: over_replicas.all_reduce(own),
            sent: ring.sent((e + reduce) * parameters)
                + again.map_or(0., |again| again.sent(e * parameters))
                + 2. * over_replicas.sent(own),
            ..Unit::default()
        }
    };
    let communication = |parameters: f64, e: f64, kept: bool| of_ring(&over_shards, parameters, e, kept);
    // Head, loss and last norm. The embedding copies rows.
    let (tokens, root) = (setup.tokens(), &model.root);
    let logits = setup.framework.logits(root, setup.compute, setup.gradient(), tokens);
    let head = Compute {
        products: setup.device.products(2. * tokens * root.products),
        attention: 0.,
        memory: setup.device.moves(logits.moved / 3. + 2. * e * tokens * root.kept),
    };
    let again = if logits.again { head.products } else { 0. };
    let mut compute = Compute::default();
    let back = Compute { products: setup.backward_products() * head.products, memory: 2. * head.memory, ..head };
    compute.add(1., head);
    compute.add(1., back);
    compute.products += again;
    // The embedding's output, and the gradient of the head's input.
    let ends = over_layer.all_reduce(e * tokens * root.width);
    let of_head = |communication: Unit| Unit {
        forward: head.total() + ends,
        backward: back.total() + again + ends,
        exchange: 2. * ends,
        ..communication
    };
    let of_ends = 4. * over_layer.sent(e * tokens * root.width);
    let of_head = |communication: Unit| Unit { sent: communication.sent + of_ends, ..of_head(communication) };
    let mut units = vec![match setup.has_root() {
        true => {
            let stays = matches!(setup.reshard, ReshardAfterForward::Default | ReshardAfterForward::Never);
            of_head(communication(root.parameters, of_root, stays))
        }
        // Backward does not gather an embedding.
        false => communication(setup.own_embedding(), of_root, true),
    }];
    for layer in &model.layers {
        let (forward, backward) = (forward(setup, layer), backward(setup, layer));
        compute.add(1., forward);
        compute.add(1., backward);
        // The outputs of attention and MLP, and the gradients of their inputs. Experts take turns.
        let calls = 1. + layer.mlp.experts.max(1.);
        let exchange = calls * over_layer.all_reduce(e * tokens * layer.exchanged / calls);
        let in_backward = if setup.checkpoint == Checkpoint::None { exchange } else { 2. * exchange };
        // Keys and values are gathered in forward and again in backward, and their gradients reduce-scattered.
        let keys = 2. * over_sequence.gather(setup.whole_keys(layer));
        let [in_forward, back] = attention(setup, layer).map(|attention| exposed(setup.framework, keys, attention));
        let forwards = if setup.checkpoint == Checkpoint::Full { 2. } else { 1. };
        let waits = forwards * in_forward + 2. * back;
        // Tokens and outputs, and the gradients of both.
        let dispatch = match layer.dispatched {
            0. => 0.,
            elements => 2. * over_experts.gather(e * tokens * elements),
        };
        let exchange = exchange + in_forward + dispatch;
        let in_backward = in_backward + waits - in_forward + forwards * dispatch;
        // Experts are gathered beside the rest, unless other ranks have some.
        let apart = if layer.other_experts > 0. { layer.own_experts } else { 0. };
        let dense = communication(layer.gathered() - apart, of_block, false);
        let experts = if apart > 0. { of_ring(&over_expert, apart, of_block, false) } else { Unit::default() };
        let sums = 1. + if setup.checkpoint == Checkpoint::None { 1. } else { 2. };
        units.push(Unit {
            forward: forward.total() + exchange,
            backward: backward.total() + in_backward,
            exchange: exchange + in_backward,
            hidden: (forwards + 2.) * keys - waits,
            gather_forward: dense.gather_forward + experts.gather_forward,
            gather_backward: dense.gather_backward + experts.gather_backward,
            reduce_scatter: dense.reduce_scatter + experts.reduce_scatter,
            all_reduce: dense.all_reduce + experts.all_reduce,
            sent: dense.sent
                + experts.sent
                + 2. * sums * over_layer.sent(e * tokens * layer.exchanged)
                + 2. * (forwards + 2.) * over_sequence.sent(setup.whole_keys(layer))
                + 2. * (forwards + 1.) * over_experts.sent(e * tokens * layer.dispatched),
            ..Unit::default()
        });
    }
    if !setup.has_root() {
        // Not resharded after forward.
        units.push(of_head(communication(root.parameters - setup.own_embedding(), of_root, true)));
    }
    (compute, units)
}

/// A stream that runs collectives one after another.
#[derive(Default)]
struct Stream {
    free: f64,
}

impl Stream {
    /// Starts a collective after the previous one, and not before `now`. Returns its end.
    fn issue(&mut self, now: f64, seconds: f64) -> f64 {
        self.free = self.free.max(now) + seconds;
        self.free
    }
}

/// Simulates the schedule of a step, fills in the waits of compute, and returns the end of backward. One unit is
/// gathered ahead. A unit's reduction starts after the previous one has ended, and is followed by its all-reduce over
/// replicas. Gathers and reductions share a stream, and all-reduces have their own.
fn simulate(units: &mut [Unit]) -> f64 {
    let (mut shards, mut copies) = (Stream::default(), Stream::default());
    let blocks = 1..units.len();
    let mut now = 0.;
    let wait = |now: &mut f64, until: f64, unit: &mut Unit| {
        unit.exposed += (until - *now).max(0.);
        *now = now.max(until);
    };

    let root_there = shards.issue(now, units[0].gather_forward);
    wait(&mut now, root_there, &mut units[0]);
    let mut there = units.get(1).map_or(now, |first| shards.issue(now, first.gather_forward));
    for i in blocks.clone() {
        wait(&mut now, there, &mut units[i]);
        if let Some(next) = units.get(i + 1) {
            there = shards.issue(now, next.gather_forward);
        }
        now += units[i].forward;
    }
    now += units[0].forward;

    if units[0].gather_backward > 0. {
        let root_there = shards.issue(now, units[0].gather_backward);
        wait(&mut now, root_there, &mut units[0]);
    }
    let gather = |shards: &mut Stream, now: f64, unit: &Unit| match unit.gather_backward {
        0. => now,
        seconds => shards.issue(now, seconds),
    };
    if let Some(last) = units.last().filter(|_| units.len() > 1) {
        there = gather(&mut shards, now, last);
    }
    now += units[0].backward;
    // The unit whose gradients are being reduced with the end of the reduction, and the same for the all-reduce.
    let mut reducing: Option<(usize, f64)> = None;
    let mut copying: Option<(usize, f64)> = None;
    for i in blocks.rev().chain([0]) {
        if i > 0 {
            wait(&mut now, there, &mut units[i]);
            if i > 1 {
                there = gather(&mut shards, now, &units[i - 1]);
            }
            now += units[i].backward;
        }
        if let Some((unit, end)) = reducing {
            wait(&mut now, end, &mut units[unit]);
            if let Some((unit, end)) = copying {
                wait(&mut now, end, &mut units[unit]);
            }
            copying = Some((unit, copies.issue(now, units[unit].all_reduce)));
        }
        reducing = Some((i, shards.issue(now, units[i].reduce_scatter)));
    }
    if let Some((unit, end)) = reducing {
        wait(&mut now, end, &mut units[unit]);
        if let Some((unit, end)) = copying {
            wait(&mut now, end, &mut units[unit]);
        }
        let end = copies.issue(now, units[unit].all_reduce);
        wait(&mut now, end, &mut units[unit]);
    }
    now
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(forward: f64, gather: f64, reduce: f64) -> Unit {
        Unit {
            forward,
            backward: 2. * forward,
            gather_forward: gather,
            gather_backward: gather,
            reduce_scatter: reduce,
            ..Unit::default()
        }
    }

    fn step(root: Unit, blocks: &[Unit]) -> (f64, Vec<f64>) {
        let mut units = [&[root], blocks].concat();
        let end = simulate(&mut units);
        (end, units.iter().map(|unit| unit.exposed).collect())
    }

    #[test]
    fn step_without_communication_is_compute() {
        assert_eq!(step(unit(1., 0., 0.), &[unit(2., 0., 0.); 3]), (3. * 7., vec![0.; 4]));
    }

    #[test]
    fn fast_links_are_exposed_only_at_the_ends() {
        let root = Unit { gather_backward: 0., ..unit(10., 1., 1.) };
        let (end, exposed) = step(root, &[unit(10., 1., 1.); 4]);
        // The root's gather, the first block's gather after it, and the root's reduction after the first block's.
        assert_eq!(exposed, [2., 2., 0., 0., 0.]);
        assert_eq!(end, 150. + 4.);
    }

    #[test]
    fn slow_links_bound_the_step() {
        let (end, exposed) = step(Unit::default(), &[unit(1., 10., 10.); 4]);
        // Eight gathers and four reductions, and the exposed compute: the last forward and the first backward.
        assert!((120. ..=120. + 1. + 2. + 2. * 4.).contains(&end), "{end}");
        assert!((end - 12. - exposed.iter().sum::<f64>()).abs() < 1e-9);
    }

    #[test]
    fn replica_sums_overlap_with_shard_sums() {
        let block = Unit { all_reduce: 5., ..unit(10., 1., 1.) };
        let (with, _) = step(Unit::default(), &[block; 4]);
        let (without, _) = step(Unit::default(), &[unit(10., 1., 1.); 4]);
        // Compute waits for the last two, and one second overlaps with a reduction.
        assert_eq!(with - without, 9.);
    }

    #[test]
    fn kept_parameters_are_gathered_once() {
        let stays = Unit { gather_backward: 0., ..unit(1., 10., 0.) };
        assert_eq!(step(Unit::default(), &[stays; 4]).0, 40. + 1. + 8.);
    }
}
