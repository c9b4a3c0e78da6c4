//! What candle-fsdp takes on a CUDA device. Attention, the loss and most layers are chains of Candle's operations
//! there: each keeps what it takes and gives, and reads and writes it whole.
//!
//! Figures are bytes a token, counted from `fsdp_candle::nn`: a term for each tensor of a chain.

use super::hardware::Precision;
use super::model::{Layer, Logits, MlpKind, Root};

const F32: f64 = 4.;
/// Tensors of so many elements are refused: Candle counts a launch in 32 bits.
pub(super) const COUNTABLE: f64 = 2147483648.;
/// Matrices of scores that attention's forward keeps: the product, scaled, masked, shifted, powers, weights. Capped
/// scores are divided, go through `tanh`, and are multiplied.
const KEPT: f64 = 6.;
const CAPPED: f64 = 3.;
/// Matrices at work in the backward of the weights' quotient, which has the most: its gradient, the numerator's and its
/// sum, the denominator's, the tensor of zeros that it is added to, and the sum.
const WORKING: f64 = 6.;
/// Gradients of the mask and of the largest score, which nobody asks for: Candle keeps them to the end of backward.
const LINGERING: f64 = 2.;
/// Matrices that attention's elementwise operations read and write in forward, and in backward, where each gradient is
/// made and added to zeros.
const READ_AND_WRITTEN: [f64; 2] = [14., 57.];
/// What backward reads and writes for each byte of forward: a gradient is made, zeros are written, and both are added.
pub(super) const BACKWARD_MOVES: f64 = 3.5;

/// Bytes of one matrix of scores.
fn matrix(layer: &Layer) -> f64 {
    F32 * layer.scores
}

/// Bytes that a cast to f32 makes of an element.
fn cast(compute: Precision) -> f64 {
    if compute == Precision::F32 { 0. } else { F32 }
}

/// Queries, keys and values as the products take them, and what becomes of the output: besides what the projections
/// and the output itself are.
fn operands(layer: &Layer, compute: Precision) -> f64 {
    let &Layer { queries, keys, .. } = layer;
    // The thirds of one projection are not contiguous: they are copied where no cast copies them.
    let apart = layer.linears.first().is_some_and(|linear| linear.outputs > queries);
    let casts = if apart { F32 } else { cast(compute) };
    let spread = if keys < queries { 2. * queries } else { 0. };
    casts * (queries + 2. * keys) + F32 * (queries + 2. * keys + spread + 2. * queries) + cast(compute) * queries
}

/// Intermediate results of a block that backward needs.
pub(super) fn inside(layer: &Layer, compute: Precision) -> f64 {
    let e = compute.bytes();
    let &Layer { width, queries, keys, norms, mlp, .. } = layer;
    let heads = queries + keys;
    let (rotary, head_norms) = (f64::from(layer.rotary), f64::from(layer.head_norms));
    // Each half by cosine and by sine, their difference and sum, and both in one.
    let turned = 4. * rotary * heads;
    let within = if mlp.kind == MlpKind::Plain { 2. } else { 4. } * mlp.inner * mlp.times;
    let chosen = if mlp.experts > 0. { 5. * mlp.times * width + 5. * mlp.experts } else { width };
    let scores = (KEPT + if layer.capped { CAPPED } else { 0. }) * matrix(layer);
    e * (3. * width + norms * width + 2. * heads + turned + head_norms * heads + within + chosen)
        + operands(layer, compute)
        + scores
}

/// Gradients that a block's backward leaves until the whole backward is done.
pub(super) fn lingering(layer: &Layer, compute: Precision) -> f64 {
    // Cosines and sines have gradients, too: four of half a head.
    let turned = 2. * compute.bytes() * (layer.queries + layer.keys) * f64::from(layer.rotary);
    LINGERING * matrix(layer) + turned
}

/// Matrices that attention's backward holds at once.
pub(super) fn flowing(layer: &Layer) -> f64 {
    WORKING * matrix(layer)
}

/// Bytes that a block's forward reads and writes besides matrix products and the scores.
pub(super) fn moved(layer: &Layer, compute: Precision) -> f64 {
    let e = compute.bytes();
    let &Layer { width, queries, keys, norms, mlp, .. } = layer;
    let heads = queries + keys;
    let (rotary, head_norms) = (f64::from(layer.rotary), f64::from(layer.head_norms));
    // A cast, a square, its mean, a quotient, a product, a cast back.
    let norm = 9. * F32 + 2. * e;
    let activation = if mlp.kind == MlpKind::Plain { 2. } else { 5. } * mlp.inner * mlp.times;
    let experts = if mlp.experts > 0. { 8. * mlp.times * width } else { 0. };
    let residual_and_border = 8. * width;
    norm * (norms * width + head_norms * heads)
        + e * (residual_and_border + 9. * rotary * heads + activation + experts)
        + 2. * operands(layer, compute)
}

/// Bytes of scores that attention reads and writes in forward, and in backward.
pub(super) fn scores_moved(layer: &Layer) -> [f64; 2] {
    let capped = if layer.capped { CAPPED } else { 0. };
    READ_AND_WRITTEN.map(|matrices| matrices * (1. + capped / KEPT) * matrix(layer))
}

/// Operations of a token's attention in forward: no key is skipped that the mask hides.
pub(super) fn attention(layer: &Layer) -> f64 {
    4. * layer.queries / layer.heads * layer.scores
}

/// Logits are whole: in their dtype, and in f32 shifted and as powers, beside a copy in f32 of halves.
pub(super) fn logits(root: &Root, compute: Precision) -> Logits {
    let (e, all) = (compute.bytes(), root.vocabulary);
    Logits {
        kept: (root.logits * e + cast(compute) + 2. * F32) * all,
        // The powers' gradient, what it gives, zeros, and their sum.
        loss: 4. * F32 * all,
        slopes: root.logits * e * all,
        // That of the largest logit.
        lingering: F32 * all,
        moved: 134. * all,
    }
}

/// The mask of `seq` queries and keys, which the device keeps.
pub(super) fn mask(seq: usize) -> f64 {
    F32 * (seq as f64).powi(2)
}
