//! Bytes that a framework keeps for backward, and bytes that its elementwise operations move.
//!
//! The figures of candle-fsdp are counted from the layers in `fsdp_candle::nn`, and measured on CPUs. `on_device` has
//! what differs on GPUs (docs/planning.md). PyTorch's figures are those of eager mode with torchtitan's layers at the end of
//! 2024. They were compared with runs only for selective checkpointing.

use clap::ValueEnum;
use serde::Serialize;

use super::hardware::{DeviceName, Precision};
use super::model::{Layer, Linear, Logits, Mlp, MlpKind, Norm, Root};
use super::on_device;

/// Framework of the planned training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Framework {
    /// candle-fsdp, with the layers of its `nn`
    Candle,
    /// candle-fsdp on a CUDA device
    #[value(skip)]
    #[serde(rename = "candle")]
    OnDevice,
    /// PyTorch FSDP2 without torch.compile, for comparison
    Pytorch,
}

/// Activations that are recomputed in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Checkpoint {
    /// Nothing: all activations are kept
    None,
    /// Every block: only its input is kept
    Full,
    /// torchtitan's `op`: keeps attention outputs and every other matrix product (PyTorch only)
    Selective,
}

const F32: f64 = 4.;
/// Logits that exist at a time on CPUs (`fsdp-candle/src/nn/loss/linear_cross_entropy.rs`).
const ON_CPU: f64 = 16777216.;
/// Rows of an operand that a matrix product copies, and the most bytes of the copy. The processor's caches decide, so these
/// are estimates.
const PACKED_ROWS: f64 = 512.;
const MOST_PACKED: f64 = 8388608.;

impl Framework {
    /// Returns the framework's variant on a device.
    pub(super) fn on(self, device: DeviceName) -> Self {
        if self == Framework::Candle && device != DeviceName::Cpu { Framework::OnDevice } else { self }
    }

    /// Returns the bytes per token that a block's forward keeps, under this checkpointing.
    pub(super) fn kept(self, layer: &Layer, compute: Precision, checkpoint: Checkpoint) -> f64 {
        let e = compute.bytes();
        match (self, checkpoint) {
            // The input of a block is the output of the block before.
            (Framework::Candle | Framework::OnDevice, Checkpoint::Full) => e * layer.residual,
            (Framework::Candle | Framework::OnDevice, _) => e * layer.residual + self.inside(layer, compute),
            (Framework::Pytorch, Checkpoint::None) => self.inside(layer, compute),
            (Framework::Pytorch, Checkpoint::Full) => e * layer.width,
            (Framework::Pytorch, Checkpoint::Selective) => {
                let kept = every_other(layer, true).map(|linear| linear.outputs * linear.times).sum::<f64>();
                e * (layer.width + layer.queries + kept) + F32 * layer.heads
            }
        }
    }

    /// Returns the bytes per token of a block's intermediate results that backward needs.
    pub(super) fn inside(self, layer: &Layer, compute: Precision) -> f64 {
        let e = compute.bytes();
        let &Layer { width, residual, whole, queries, keys, norms, mlp, .. } = layer;
        let statistics = F32 * layer.heads;
        match self {
            // The values that backward reads: the inputs of norms, products, activations and attention, and attention's
            // output. Queries and keys before their rotation are parts of a joined product, of which the values are read.
            Framework::Candle | Framework::OnDevice => {
                let turned = if layer.rotary && layer.joined { queries + keys } else { 0. };
                let normed = if layer.head_norms { queries + keys } else { 0. };
                let attention = 2. * queries + 2. * keys + turned + normed;
                let within = self.within(&mlp);
                let chosen = match mlp.experts > 0. {
                    true if self.is_one_operation(&mlp) => 5. * mlp.experts,
                    // Inputs and outputs of each expert, concatenated, reordered and weighted.
                    true => 5. * mlp.times * width + 5. * mlp.experts,
                    false => 0.,
                };
                let stream = (1. + norms) * residual + whole;
                // The rows that this rank's experts get, and the outputs that come back, in two orders and weighted.
                let dispatched = 4. * layer.dispatched;
                e * (stream + attention + within + chosen + dispatched) + statistics
            }
            Framework::Pytorch => {
                let norm = match layer.norm {
                    // The input in f32, the normalised input, and the output.
                    Norm::Rms => F32 + 2. * e,
                    Norm::Layer => 2. * e,
                } * norms
                    * width;
                // Queries, keys and values, each as wide as the queries, and the output of attention.
                let attention = 4. * e * queries;
                let within = if mlp.kind == MlpKind::Plain { 2. } else { 4. } * e * mlp.inner * mlp.times;
                norm + attention + within + statistics
            }
        }
    }

    /// Returns the matrix elements that a token is multiplied with again in backward.
    pub(super) fn products_again(self, layer: &Layer, checkpoint: Checkpoint) -> f64 {
        match checkpoint {
            Checkpoint::None => 0.,
            Checkpoint::Full => layer.products(),
            Checkpoint::Selective => every_other(layer, false).map(Linear::products).sum(),
        }
    }

    /// Returns the bytes per token that a block's forward moves, except for matrix products and attention.
    pub(super) fn moved(self, layer: &Layer, compute: Precision) -> f64 {
        let e = compute.bytes();
        let &Layer { width, residual, queries, keys, norms, mlp, .. } = layer;
        let heads = queries + keys;
        let (rotary, head_norms) = (f64::from(layer.rotary), f64::from(layer.head_norms));
        let within = mlp.inner * mlp.times;
        let sums = 6. * e * residual;
        match self {
            // Each operation reads its inputs and writes its output. The unit's boundary copies.
            Framework::Candle | Framework::OnDevice => {
                let activation = match mlp.kind {
                    MlpKind::Plain => 2.,
                    MlpKind::SiluMul | MlpKind::SwiGlu => 3.,
                    MlpKind::Gated => 5.,
                };
                let experts = match mlp.experts > 0. {
                    true if self.is_one_operation(&mlp) => 4. * mlp.times * width,
                    true => 8. * mlp.times * width,
                    false => 0.,
                };
                let own = 2. * norms * residual + 2. * residual + 2. * heads * (rotary + head_norms);
                sums + e * (own + activation * within + experts + 6. * layer.dispatched)
            }
            // Norms and rotary embeddings compute in f32, one operation at a time.
            Framework::Pytorch => {
                let norm = match layer.norm {
                    Norm::Rms => 24. + 4. * e,
                    Norm::Layer => 2. * e,
                };
                let repeated = if keys < queries { 2. * e * heads } else { 0. };
                let activation = if mlp.kind == MlpKind::Plain { 2. } else { 5. };
                let turned = heads * (rotary * (16. + 2. * e) + head_norms * norm);
                sums + norm * norms * width + turned + repeated + activation * e * within
            }
        }
    }

    /// Returns whether buffers of gathered parameters and whole gradients are pooled. candle-fsdp's pool keeps the peak
    /// number.
    pub(super) fn keeps_buffers(self) -> bool {
        self != Framework::Pytorch
    }

    /// Returns the elements per token that candle-fsdp keeps inside an MLP.
    pub(super) fn within(self, mlp: &Mlp) -> f64 {
        // On a CPU and in mixtures of experts, the output of a fused activation is computed again.
        let recomputed = if self == Framework::Candle || self.is_one_operation(mlp) { 1. } else { 0. };
        let widths = match mlp.kind {
            MlpKind::Plain => 2. - recomputed,
            MlpKind::SiluMul | MlpKind::SwiGlu => 3. - recomputed,
            MlpKind::Gated => 4.,
        };
        widths * mlp.inner * mlp.times
    }

    /// Returns the bytes per token of gradients in a block at their peak, in the middle of an MLP. Candle adds each
    /// gradient to a tensor of zeros.
    pub(super) fn flowing(self, layer: &Layer, compute: Precision) -> f64 {
        let mlp = &layer.mlp;
        if self == Framework::OnDevice && self.is_one_operation(mlp) {
            // Rows of all routes: four of the inner width and the output's gradient, or three, that gradient and the input.
            let rows = (4. * mlp.inner + layer.width).max(3. * mlp.inner + 2. * layer.width);
            return compute.bytes() * (rows * mlp.times + 2. * layer.width);
        }
        if self.is_one_operation(mlp) {
            // In f32, of one expert at a time.
            return F32 * 3. * mlp.inner * mlp.times / mlp.experts.max(1.) + compute.bytes() * 2. * layer.width;
        }
        let inner = match (self, mlp.kind) {
            (Framework::Pytorch, _) => 3.,
            (_, MlpKind::Plain) => 4.,
            (_, _) => 5.,
        };
        compute.bytes() * (inner * mlp.inner * mlp.times.max(1.) + 2. * layer.width)
    }

    /// Returns whether an MLP, or all experts of a layer, are one operation.
    pub(super) fn is_one_operation(self, mlp: &Mlp) -> bool {
        match self {
            Framework::Candle => mlp.kind == MlpKind::SwiGlu,
            Framework::OnDevice => mlp.kind == MlpKind::SwiGlu && mlp.experts > 0.,
            Framework::Pytorch => false,
        }
    }

    /// Returns the memory of the head and the loss of this many tokens. `gradient` is the dtype of the head's gradient;
    /// `None` for a frozen head.
    pub(super) fn logits(self, root: &Root, compute: Precision, gradient: Option<Precision>, tokens: f64) -> Logits {
        let e = compute.bytes();
        let all = tokens * root.vocabulary;
        let (head, hidden) = (root.vocabulary * root.width, tokens * root.width);
        match self {
            // The logits of some rows in f32, and their gradient. Then Candle adds the hidden states' gradient to zeros.
            Framework::OnDevice => Logits {
                kept: F32 * tokens,
                loss: F32 * all.min(on_device::LOGITS),
                slopes: ((F32 + e) * all.min(on_device::LOGITS) + e * hidden).max(3. * e * hidden),
                moved: (2. * F32 + e) * all,
                again: true,
            },
            // The gradient of all logits, or those of the head and the hidden states. The head's gradient is computed in
            // f32, and rounded for a reduction in half precision. Ranks that share a vocabulary keep one number per
            // token, and compute the logits of some rows again.
            Framework::Candle => {
                let trained = if gradient.is_some() { 1. } else { 0. };
                let copy = if gradient.is_none_or(|it| it == Precision::F32) { 0. } else { F32 * head };
                let stretch = F32 * all.min(ON_CPU);
                // Processors without fast instructions for bf16 compute its products in f32.
                let packed = trained * (F32 * tokens.min(PACKED_ROWS) * root.vocabulary).min(MOST_PACKED);
                let (kept, loss, again) = match (root.shared, tokens < root.width) {
                    (true, _) => (F32 * tokens, stretch, stretch),
                    (false, true) => (F32 * all, 0., 0.),
                    (false, false) => (F32 * (trained * head + hidden), stretch, 0.),
                };
                Logits {
                    kept,
                    loss: loss + packed,
                    slopes: again + packed + 2. * F32 * hidden + copy,
                    moved: 3. * F32 * all,
                    again: root.shared,
                }
            }
            // Logits are cast to f32, and log-softmax is kept. Its gradient exists twice in f32, and once in the
            // logits' dtype.
            Framework::Pytorch => Logits {
                kept: F32 * all,
                loss: 2. * F32 * all,
                slopes: (F32 + e) * all,
                moved: (28. + 2. * e) * all,
                again: false,
            },
        }
    }

    /// Returns the bytes per parameter of a shard that the optimizer and clipping move.
    pub(super) fn optimizer_moves(self, shards: Precision) -> f64 {
        let tensors = match self {
            // Reads parameter, gradient and two moments, and writes three. The norm reads; clipping reads and writes.
            Framework::Candle | Framework::OnDevice => 10.,
            // AdamW as a sequence of operations on lists of tensors.
            Framework::Pytorch => 24.,
        };
        tensors * shards.bytes()
    }

    /// Returns the default reserve of the allocator, as a share of the memory of a step.
    pub(super) fn reserve(self) -> f64 {
        match self {
            Framework::Candle => 0.,
            // An estimate without measurements.
            Framework::OnDevice => 0.1,
            // The only fitted constant, to within a twentieth, from the memory that torchtitan reports.
            Framework::Pytorch => 0.15,
        }
    }
}

/// Returns the linear layers whose outputs selective checkpointing keeps, or those that it recomputes.
fn every_other(layer: &Layer, kept: bool) -> impl Iterator<Item = &Linear> {
    layer.linears.iter().skip(usize::from(!kept)).step_by(2)
}
