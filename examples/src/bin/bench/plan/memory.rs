//! Memory of a rank: between steps, and at the peak of a step.

use fsdp_candle::ReshardAfterForward;
use serde::Serialize;

use super::framework::{Checkpoint, Framework};
use super::hardware::Precision;
use super::model::Layer;
use super::on_device;
use super::setup::Setup;

/// Bytes of a rank.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Memory {
    /// Memory between steps.
    pub(super) state: State,
    /// Moment with the highest memory.
    pub(super) peak: Moment,
    /// Reserve of the allocator.
    pub(super) reserve: f64,
    /// Peak with the reserve.
    pub(super) total: f64,
    /// All computed moments.
    pub(super) moments: Vec<Moment>,
}

/// Memory between steps.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct State {
    pub(super) parameters: f64,
    pub(super) gradients: f64,
    /// Two moments per parameter.
    pub(super) optimizer: f64,
    /// NCCL's registered memory.
    pub(super) registered: f64,
}

impl State {
    fn of(setup: &Setup) -> Self {
        let shards = setup.mesh.shard as f64;
        let share = setup.shards.bytes() * setup.trained() * setup.model.parameters() / shards;
        let [of_block, of_root] = setup.stored();
        let blocks = setup.model.layers.iter().map(|layer| layer.parameters).sum::<f64>();
        let parameters = (of_block * blocks + of_root * setup.model.root.parameters) / shards;
        State {
            parameters: if setup.shards_on_disk { 0. } else { parameters },
            gradients: if setup.in_backward { 0. } else { share },
            optimizer: if setup.on_disk { 0. } else { 2. * share },
            registered: if setup.registered { largest_collective(setup) } else { 0. },
        }
    }

    /// Returns the bytes that a step does not free.
    fn lasting(&self) -> f64 {
        self.parameters + self.optimizer + self.registered
    }

    pub(super) fn total(&self) -> f64 {
        self.lasting() + self.gradients
    }
}

/// Memory at a moment of a step.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Moment {
    pub(super) when: &'static str,
    /// Sharded parameters and optimizer state.
    pub(super) state: f64,
    /// Sharded gradients that exist at this moment.
    pub(super) gradients: f64,
    /// Gathered parameters.
    pub(super) gathered: f64,
    /// Gradients that are not reduced yet.
    pub(super) unreduced: f64,
    /// Pooled buffers.
    pub(super) pooled: f64,
    /// Activations that forward keeps, without logits.
    pub(super) activations: f64,
    pub(super) logits: f64,
    /// Working memory of the current operation, and recomputed activations.
    pub(super) working: f64,
}

impl Moment {
    pub(super) fn total(&self) -> f64 {
        let Moment { state, gradients, gathered, unreduced, pooled, activations, logits, working, .. } = self;
        state + gradients + gathered + unreduced + pooled + activations + logits + working
    }
}

/// Inputs of blocks that are being copied away or back (`fsdp-candle/src/activation_checkpoint/offload`).
const UNDERWAY: usize = 3;

/// Returns the bytes of the buffers that shards are cast to for all-gathers on CPUs. The pool keeps those of the root, or
/// of the head, and of the largest block.
fn cast_shards(setup: &Setup) -> f64 {
    let Setup { framework, compute, shards, base, model, mesh, .. } = setup;
    if *framework != Framework::Candle || compute == shards || base.is_some() || mesh.shard == 1 {
        return 0.;
    }
    let block = model.layers.iter().map(|layer| layer.parameters).fold(0., f64::max);
    compute.bytes() * (model.root.parameters - setup.own_embedding() + block) / mesh.shard as f64
}

/// Returns the bytes of the largest all-gather or reduce-scatter.
fn largest_collective(setup: &Setup) -> f64 {
    let Setup { model, compute, .. } = *setup;
    let outside = [model.root.parameters - setup.own_embedding(), setup.own_embedding()];
    let blocks = model.layers.iter().map(Layer::gathered);
    let of_gradients = setup.gradient().map_or(0., |_| setup.reduce.bytes());
    compute.bytes().max(of_gradients) * outside.into_iter().chain(blocks).fold(0., f64::max)
}

/// Computes the memory of a rank.
pub(super) fn of(setup: &Setup) -> Memory {
    let mut moments = moments(setup);
    if setup.framework.keeps_buffers() {
        let in_use = |moment: &Moment| moment.gathered + moment.unreduced;
        let most = moments.iter().map(in_use).fold(0., f64::max);
        moments.iter_mut().for_each(|moment| moment.pooled = most - in_use(moment) + cast_shards(setup));
    }
    let peak = moments.iter().max_by(|a, b| a.total().total_cmp(&b.total())).cloned().unwrap_or_default();
    let reserve = setup.reserve * peak.total();
    Memory { state: State::of(setup), total: peak.total() + reserve, reserve, peak, moments }
}

fn moments(setup: &Setup) -> Vec<Moment> {
    let Setup { model, framework, compute, reduce, checkpoint, .. } = *setup;
    let (layers, root) = (&model.layers, &model.root);
    let (e, shards) = (compute.bytes(), setup.mesh.shard as f64);
    let tokens = setup.tokens();
    let trained = setup.trained();
    let share = |parameters: f64| trained * setup.shards.bytes() * parameters / shards;
    let state = State::of(setup);
    // An all-gather of stored weights has them beside the decoded ones.
    let encoded = setup.base.map_or(0., |base| if base.bytes() < e { base.bytes() } else { 0. });
    let rotary = if root.rotary > 0. { root.rotary * setup.seq as f64 * e } else { 0. };

    // Activations of the first blocks.
    let kept = |count: usize| {
        let most = if setup.offload { UNDERWAY } else { count };
        let of_layer = |layer: &Layer| tokens * framework.kept(layer, compute, checkpoint);
        rotary + layers[..count].iter().rev().take(most).map(of_layer).sum::<f64>()
    };
    let all_kept = kept(layers.len()) + tokens * e * root.kept;
    let logits = framework.logits(root, compute, setup.gradient(), tokens);
    let of_gradient = setup.gradient().map_or(0., Precision::bytes);

    // The parameters of a block or of an embedding that stay gathered.
    let stay = |parameters: f64| match setup.reshard {
        ReshardAfterForward::Never => e * parameters,
        ReshardAfterForward::To(ranks) => e * parameters / ranks as f64,
        ReshardAfterForward::Default | ReshardAfterForward::Always => 0.,
    };
    let stays = |layer: &Layer| stay(layer.gathered());
    let comes = |layer: &Layer| (e + encoded) * layer.gathered() - stays(layer);
    // The root, or the unit of the head.
    let last = root.parameters - setup.own_embedding();
    let all_stay = stay(setup.own_embedding()) + layers.iter().map(stays).sum::<f64>();
    let next = |from: Option<&Layer>| from.map_or(0., comes);

    let base = Moment { state: state.lasting(), activations: all_kept, ..Moment::default() };
    let mut moments = vec![
        Moment {
            when: "the loss",
            gathered: e * last + all_stay + next(layers.last()),
            logits: logits.kept + logits.loss,
            ..base.clone()
        },
        Moment {
            when: "the head's backward",
            gathered: e * last + all_stay + next(layers.last()),
            unreduced: of_gradient * root.head,
            logits: logits.kept + logits.slopes,
            ..base.clone()
        },
    ];
    // Backward reaches the last block first. A head that is a unit is then reduced.
    let (in_root, pending, of_head) = match setup.has_root() {
        true => (e * last, of_gradient * root.head, 0.),
        false => (0., 0., last),
    };
    let (mut reduced, mut staying) = (share(of_head), all_stay);
    for (i, layer) in layers.iter().enumerate().rev() {
        let before = i.checked_sub(1).map(|before| &layers[before]);
        let again = match checkpoint {
            Checkpoint::None => 0.,
            Checkpoint::Full => framework.inside(layer, compute),
            Checkpoint::Selective => {
                framework.inside(layer, compute) - (framework.kept(layer, compute, checkpoint) - e * layer.width)
            }
        };
        moments.push(Moment {
            when: match i {
                0 => "the first block's backward",
                _ if i + 1 == layers.len() => "the last block's backward",
                _ => "a block's backward",
            },
            gradients: reduced,
            gathered: in_root + staying + comes(layer) + next(before),
            unreduced: pending
                + waiting(setup, layer)
                + sent(setup, layers.get(i + 1).map_or(of_head, Layer::gathered)),
            activations: kept(i + 1),
            // The keys and values of all ranks, their gradients, and a copy in another order.
            working: tokens * again.max(0.) + backward(setup, layer) + 5. * setup.whole_keys(layer),
            ..base.clone()
        });
        staying -= stays(layer);
        reduced = share(layer.parameters) + if setup.in_backward { 0. } else { reduced };
    }
    moments.push(Moment {
        when: if setup.has_root() { "the root's reduction" } else { "the embedding's reduction" },
        gradients: reduced,
        gathered: in_root + staying,
        unreduced: setup.gradient().map_or(0., |it| it.bytes().max(reduce.bytes()))
            * if setup.has_root() { root.parameters } else { setup.own_embedding() }
            + sent(setup, layers.first().map_or(of_head, Layer::gathered)),
        activations: rotary,
        ..base
    });
    moments
}

/// Returns the most bytes that a block's backward uses besides what forward kept: in the middle of its MLP, or in its
/// attention, when the MLP's activations are free.
fn backward(setup: &Setup, layer: &Layer) -> f64 {
    let Setup { framework, compute, .. } = *setup;
    let (e, tokens) = (compute.bytes(), setup.tokens());
    let in_mlp = tokens * framework.flowing(layer, compute);
    if framework != Framework::OnDevice {
        return in_mlp;
    }
    let freed = e * (framework.within(&layer.mlp) + 2. * layer.residual);
    // The gradients of attention's output, queries, keys and values.
    let gradients = e * 2. * (layer.queries + layer.keys);
    in_mlp.max(on_device::attention_memory(setup, layer) + tokens * (gradients - freed))
}

/// Returns the bytes that the reduction of a unit's gradients reads, while the next unit computes.
fn sent(setup: &Setup, parameters: f64) -> f64 {
    if setup.mesh.shard == 1 { 0. } else { setup.trained() * setup.reduce.bytes() * parameters }
}

/// Returns the bytes of a block's gradients. They are packed for their reduction if the dtypes differ.
fn waiting(setup: &Setup, layer: &Layer) -> f64 {
    let Some(gradient) = setup.gradient() else { return 0. };
    let packed = if gradient == setup.reduce || setup.mesh.shard == 1 { 0. } else { setup.reduce.bytes() };
    (gradient.bytes() + packed) * layer.gathered()
}
