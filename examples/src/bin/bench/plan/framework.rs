//! What a framework keeps of forward for backward, and how many bytes its elementwise operations move.
//!
//! candle-fsdp's on CPUs are counted from its layers (`fsdp_candle::nn`) and measured; those on GPUs are in `unfused`:
//! docs/planning.md. PyTorch's are those of eager mode, with the layers that torchtitan had at the end of 2024; only
//! with selective checkpointing were they compared with runs.

use clap::ValueEnum;
use serde::Serialize;

use super::hardware::{DeviceName, Precision};
use super::model::{Layer, Linear, Logits, MlpKind, Norm, Root};
use super::unfused;

/// Whose training is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Framework {
    /// candle-fsdp, with the layers of its `nn`
    Candle,
    /// candle-fsdp on a CUDA device, where `nn` has few fused operations
    #[value(skip)]
    #[serde(rename = "candle")]
    Unfused,
    /// PyTorch FSDP2 without torch.compile, to compare with
    Pytorch,
}

/// What runs again in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Checkpoint {
    /// Nothing: all activations are kept
    None,
    /// Every block: its input alone is kept
    Full,
    /// torchtitan's `op`: attention's output and every other matrix product are kept (PyTorch only)
    Selective,
}

const F32: f64 = 4.;

impl Framework {
    /// The same on a device.
    pub(super) fn on(self, device: DeviceName) -> Self {
        if self == Framework::Candle && device != DeviceName::Cpu { Framework::Unfused } else { self }
    }

    /// Bytes that a block's forward keeps for each token, whatever runs again.
    pub(super) fn kept(self, layer: &Layer, compute: Precision, checkpoint: Checkpoint) -> f64 {
        let e = compute.bytes();
        match (self, checkpoint) {
            // The block's input is its predecessor's output. At its border a unit copies what it passes on.
            (Framework::Candle | Framework::Unfused, Checkpoint::Full) => 2. * e * layer.width,
            (Framework::Candle | Framework::Unfused, _) => e * layer.width + self.inside(layer, compute),
            (Framework::Pytorch, Checkpoint::None) => self.inside(layer, compute),
            (Framework::Pytorch, Checkpoint::Full) => e * layer.width,
            (Framework::Pytorch, Checkpoint::Selective) => {
                let kept = every_other(layer, true).map(|linear| linear.outputs * linear.times).sum::<f64>();
                e * (layer.width + layer.queries + kept) + F32 * layer.heads
            }
        }
    }

    /// Bytes of what a block computes on its way and backward wants, a token.
    pub(super) fn inside(self, layer: &Layer, compute: Precision) -> f64 {
        let e = compute.bytes();
        let &Layer { width, queries, keys, norms, mlp, .. } = layer;
        let statistics = F32 * layer.heads;
        match self {
            // All that an operation of Candle's takes or gives stays: outputs of norms, projections and residual sums.
            Framework::Candle => {
                let turned = if layer.rotary { queries + keys } else { 0. };
                let normed = if layer.head_norms { queries + keys } else { 0. };
                let attention = 2. * queries + 2. * keys + turned + normed;
                let within = match mlp.kind {
                    MlpKind::Plain => 2.,
                    MlpKind::SiluMul => 3.,
                    MlpKind::Gated => 4.,
                } * mlp.inner
                    * mlp.times;
                // Each expert's tokens and outputs by themselves, all together, in their order, and weighted.
                let chosen = if mlp.experts > 0. { 5. * mlp.times * width + 5. * mlp.experts } else { width };
                e * (3. * width + norms * width + attention + within + chosen) + statistics
            }
            Framework::Unfused => unfused::inside(layer, compute),
            Framework::Pytorch => {
                let norm = match layer.norm {
                    // The input in f32, what is normalized, and the output.
                    Norm::Rms => F32 + 2. * e,
                    Norm::Layer => 2. * e,
                } * norms
                    * width;
                // Queries, keys and values as attention takes them, each as wide as the queries, and its output.
                let attention = 4. * e * queries;
                let within = if mlp.kind == MlpKind::Plain { 2. } else { 4. } * e * mlp.inner * mlp.times;
                norm + attention + within + statistics
            }
        }
    }

    /// Matrix elements that a token is multiplied with once more in backward.
    pub(super) fn products_again(self, layer: &Layer, checkpoint: Checkpoint) -> f64 {
        match checkpoint {
            Checkpoint::None => 0.,
            Checkpoint::Full => layer.products(),
            Checkpoint::Selective => every_other(layer, false).map(Linear::products).sum(),
        }
    }

    /// Bytes that a block's forward reads and writes besides matrix products and attention, a token.
    pub(super) fn moved(self, layer: &Layer, compute: Precision) -> f64 {
        let e = compute.bytes();
        let &Layer { width, queries, keys, norms, mlp, .. } = layer;
        let heads = queries + keys;
        let (rotary, head_norms) = (f64::from(layer.rotary), f64::from(layer.head_norms));
        let within = mlp.inner * mlp.times;
        let residual = 6. * e * width;
        match self {
            // Each operation reads its inputs and writes its output. The unit's border copies.
            Framework::Candle => {
                let activation = match mlp.kind {
                    MlpKind::Plain => 2.,
                    MlpKind::SiluMul => 3.,
                    MlpKind::Gated => 5.,
                };
                let experts = if mlp.experts > 0. { 8. * mlp.times * width } else { 0. };
                let own = 2. * norms * width + 2. * width + 2. * heads * (rotary + head_norms);
                residual + e * (own + activation * within + experts)
            }
            Framework::Unfused => unfused::moved(layer, compute),
            // Norms and rotary embeddings go through f32, an operation at a time.
            Framework::Pytorch => {
                let norm = match layer.norm {
                    Norm::Rms => 24. + 4. * e,
                    Norm::Layer => 2. * e,
                };
                let repeated = if keys < queries { 2. * e * heads } else { 0. };
                let activation = if mlp.kind == MlpKind::Plain { 2. } else { 5. };
                let turned = heads * (rotary * (16. + 2. * e) + head_norms * norm);
                residual + norm * norms * width + turned + repeated + activation * e * within
            }
        }
    }

    /// Whether activations go as backward has used them. Candle's graph holds them as long as the loss is there.
    pub(super) fn frees_in_backward(self) -> bool {
        self == Framework::Pytorch
    }

    /// Whether buffers of gathered parameters and whole gradients are kept for the next that wants one: candle-fsdp's
    /// pool holds what was most in use at once.
    pub(super) fn keeps_buffers(self) -> bool {
        self != Framework::Pytorch
    }

    /// Whether a parameter goes when its own gradient is whole, and not when its unit's are.
    pub(super) fn frees_parameters_one_by_one(self) -> bool {
        self != Framework::Pytorch
    }

    /// Bytes of gradients that a block's backward leaves until the whole backward is done, a token.
    pub(super) fn lingering(self, layer: &Layer, compute: Precision) -> f64 {
        if self == Framework::Unfused { unfused::lingering(layer, compute) } else { 0. }
    }

    /// Bytes that attention keeps between steps for sequences of this length.
    pub(super) fn mask(self, seq: usize) -> f64 {
        if self == Framework::Unfused { unfused::mask(seq) } else { 0. }
    }

    /// Gradients of activations on their way through a block, bytes a token: those in the middle of an MLP are the
    /// most. Candle adds each to a tensor of zeros.
    pub(super) fn flowing(self, layer: &Layer, compute: Precision) -> f64 {
        let inner = match (self, layer.mlp.kind) {
            (Framework::Pytorch, _) => 3.,
            (_, MlpKind::Plain) => 4.,
            (_, _) => 5.,
        };
        let mlp = compute.bytes() * (inner * layer.mlp.inner * layer.mlp.times.max(1.) + 2. * layer.width);
        if self == Framework::Unfused { mlp.max(unfused::flowing(layer)) } else { mlp }
    }

    /// Bytes of logits and of what the loss makes of them.
    pub(super) fn logits(self, root: &Root, compute: Precision) -> Logits {
        let e = compute.bytes();
        let all = root.vocabulary;
        match self {
            // Candle adds the gradient to zeros. In half precision the loss reads f32 copies.
            Framework::Candle => Logits {
                kept: root.logits * e * all,
                loss: if compute == Precision::F32 { 3. * F32 * all } else { (2. * F32 + e) * all },
                slopes: root.logits * e * all,
                lingering: 0.,
                moved: if compute == Precision::F32 { 3. * F32 * all } else { 30. * all },
            },
            Framework::Unfused => unfused::logits(root, compute),
            // Cast to f32, whose log-softmax stays; its gradient twice in f32, and in the logits' own dtype.
            Framework::Pytorch => Logits {
                kept: F32 * all,
                loss: 2. * F32 * all,
                slopes: F32 * all + e * all,
                lingering: 0.,
                moved: (28. + 2. * e) * all,
            },
        }
    }

    /// Bytes that the optimizer and clipping read and write for each parameter of a shard.
    pub(super) fn optimizer_moves(self, shards: Precision) -> f64 {
        let tensors = match self {
            // Parameter, gradient and two moments are read, three written; the norm reads, clipping reads and writes.
            Framework::Candle | Framework::Unfused => 10.,
            // AdamW as a sequence of operations on lists of tensors.
            Framework::Pytorch => 24.,
        };
        tensors * shards.bytes()
    }

    /// Of the memory that a step takes, what the allocator holds besides, as a share.
    pub(super) fn reserve(self) -> f64 {
        match self {
            Framework::Candle => 0.,
            // A guess: no GPU has run it.
            Framework::Unfused => 0.1,
            // The one constant that was fitted, to a twentieth, to the memory that torchtitan reports.
            Framework::Pytorch => 0.15,
        }
    }
}

/// The linears whose outputs selective checkpointing keeps, or those that run again.
fn every_other(layer: &Layer, kept: bool) -> impl Iterator<Item = &Linear> {
    layer.linears.iter().skip(usize::from(!kept)).step_by(2)
}
