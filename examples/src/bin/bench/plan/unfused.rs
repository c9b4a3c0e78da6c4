//! Figures of candle-fsdp on CUDA devices, where attention, the loss and most layers are chains of Candle's operations.
//! Each operation keeps and moves its whole inputs and outputs.
//!
//! Figures are bytes per token, counted from `fsdp_candle::nn`, with one term for each tensor of a chain.

use super::hardware::Precision;
use super::model::{Layer, Logits, MlpKind, Root};

const F32: f64 = 4.;
/// Number of elements from which tensors are refused: Candle counts elements of a launch in 32 bits.
pub(super) const COUNTABLE: f64 = 2147483648.;
/// Score matrices that attention's forward keeps: product, scaled, masked, shifted, exponentials and weights. Capped
/// scores add a division, `tanh` and a product.
const KEPT: f64 = 6.;
const CAPPED: f64 = 3.;
/// Matrices alive in the backward of the softmax quotient, the peak: its gradient, the numerator's gradient and its
/// sum, the denominator's gradient, the tensor of zeros, and the sum with it.
const WORKING: f64 = 6.;
/// Gradients of the mask and of the largest score. They are unused, and Candle keeps them until backward ends.
const LINGERING: f64 = 2.;
/// Matrices that attention's elementwise operations move in forward, and in backward, where each gradient is added to
/// zeros.
const READ_AND_WRITTEN: [f64; 2] = [14., 57.];
/// Bytes that backward moves per byte of forward: a gradient is computed, zeros are written, and both are added.
pub(super) const BACKWARD_MOVES: f64 = 3.5;

/// Returns the bytes of one matrix of scores.
fn matrix(layer: &Layer) -> f64 {
    F32 * layer.scores
}

/// Returns the bytes per element of a cast to f32.
fn cast(compute: Precision) -> f64 {
    if compute == Precision::F32 { 0. } else { F32 }
}

/// Returns the bytes of the inputs that attention's products copy, and of its copied output.
fn operands(layer: &Layer, compute: Precision) -> f64 {
    let &Layer { queries, keys, .. } = layer;
    // The parts of a fused projection are not contiguous, so they are copied unless a cast copies them.
    let apart = layer.linears.first().is_some_and(|linear| linear.outputs > queries);
    let casts = if apart { F32 } else { cast(compute) };
    let spread = if keys < queries { 2. * queries } else { 0. };
    casts * (queries + 2. * keys) + F32 * (queries + 2. * keys + spread + 2. * queries) + cast(compute) * queries
}

/// Returns the bytes of a block's intermediate results that backward needs.
pub(super) fn inside(layer: &Layer, compute: Precision) -> f64 {
    let e = compute.bytes();
    let &Layer { width, queries, keys, norms, mlp, .. } = layer;
    let heads = queries + keys;
    let (rotary, head_norms) = (f64::from(layer.rotary), f64::from(layer.head_norms));
    // Each half times cosine and sine, their difference and sum, and the concatenation.
    let turned = 4. * rotary * heads;
    let within = if mlp.kind == MlpKind::Plain { 2. } else { 4. } * mlp.inner * mlp.times;
    let chosen = if mlp.experts > 0. { 5. * mlp.times * width + 5. * mlp.experts } else { width };
    let scores = (KEPT + if layer.capped { CAPPED } else { 0. }) * matrix(layer);
    e * (3. * width + norms * width + 2. * heads + turned + head_norms * heads + within + chosen)
        + operands(layer, compute)
        + scores
}

/// Returns the bytes of gradients that a block's backward leaves until backward ends.
pub(super) fn lingering(layer: &Layer, compute: Precision) -> f64 {
    // Cosines and sines also get gradients: four of half a head.
    let turned = 2. * compute.bytes() * (layer.queries + layer.keys) * f64::from(layer.rotary);
    LINGERING * matrix(layer) + turned
}

/// Returns the bytes of matrices that attention's backward holds at once.
pub(super) fn flowing(layer: &Layer) -> f64 {
    WORKING * matrix(layer)
}

/// Returns the bytes that a block's forward moves, except for matrix products and scores.
pub(super) fn moved(layer: &Layer, compute: Precision) -> f64 {
    let e = compute.bytes();
    let &Layer { width, queries, keys, norms, mlp, .. } = layer;
    let heads = queries + keys;
    let (rotary, head_norms) = (f64::from(layer.rotary), f64::from(layer.head_norms));
    // Cast, square, mean, quotient, product and cast back.
    let norm = 9. * F32 + 2. * e;
    let activation = if mlp.kind == MlpKind::Plain { 2. } else { 5. } * mlp.inner * mlp.times;
    let experts = if mlp.experts > 0. { 8. * mlp.times * width } else { 0. };
    let residual_and_border = 8. * width;
    norm * (norms * width + head_norms * heads)
        + e * (residual_and_border + 9. * rotary * heads + activation + experts)
        + 2. * operands(layer, compute)
}

/// Returns the bytes of scores that attention moves in forward and in backward.
pub(super) fn scores_moved(layer: &Layer) -> [f64; 2] {
    let capped = if layer.capped { CAPPED } else { 0. };
    READ_AND_WRITTEN.map(|matrices| matrices * (1. + capped / KEPT) * matrix(layer))
}

/// Returns the operations per token of attention's forward, including masked keys.
pub(super) fn attention(layer: &Layer) -> f64 {
    4. * layer.queries / layer.heads * layer.scores
}

/// Returns the bytes of whole logits: in their dtype, and shifted and exponentiated in f32, with an f32 copy of
/// half-precision logits.
pub(super) fn logits(root: &Root, compute: Precision) -> Logits {
    let (e, all) = (compute.bytes(), root.vocabulary);
    Logits {
        kept: (root.logits * e + cast(compute) + 2. * F32) * all,
        // The gradient of the exponentials, its product, zeros, and their sum.
        loss: 4. * F32 * all,
        slopes: root.logits * e * all,
        // The gradient of the largest logit.
        lingering: F32 * all,
        moved: 134. * all,
    }
}

/// Returns the bytes of the mask for `seq` queries and keys, which stays on the device.
pub(super) fn mask(seq: usize) -> f64 {
    F32 * (seq as f64).powi(2)
}
