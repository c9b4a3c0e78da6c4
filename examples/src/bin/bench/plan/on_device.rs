//! Figures of candle-fsdp on CUDA devices. Its layers are fused as on CPUs. Attention differs, because it writes blocks
//! of scores to memory between its matrix products, and so does Candle's backward, which adds each gradient to zeros.

use super::hardware::Precision;
use super::model::Layer;

const F32: f64 = 4.;
/// Number of elements from which tensors are refused: Candle counts elements of a launch in 32 bits.
pub(super) const COUNTABLE: f64 = 2147483648.;
/// Bytes that backward moves per byte of forward: a gradient is computed, zeros are written, and both are added.
pub(super) const BACKWARD_MOVES: f64 = 3.5;
/// Logits that exist at a time (`fsdp-candle/src/nn/cuda/losses.rs`).
pub(super) const LOGITS: f64 = 67108864.;
/// Bytes of a block's scores, and the queries of a block (`fsdp-candle/src/nn/attention/cuda.rs`).
const BLOCK_BYTES: f64 = 268435456.;
const BLOCK_QUERIES: [f64; 2] = [16., 256.];

/// Returns the number of scores of a block of queries, over all heads and keys.
fn block(layer: &Layer) -> f64 {
    let keys = layer.scores / layer.heads;
    let [fewest, most] = BLOCK_QUERIES;
    (BLOCK_BYTES / (F32 * layer.scores)).floor().clamp(fewest, most).min(keys) * layer.scores
}

/// Returns the bytes that attention's backward uses besides its operands and gradients: a block's products, its weights
/// and their gradients, and in half precision sums of the gradients of keys and values.
pub(super) fn attention_memory(layer: &Layer, compute: Precision) -> f64 {
    let keys = layer.scores / layer.heads;
    let sums = if compute == Precision::F32 { 0. } else { (2. * F32 + compute.bytes()) * layer.keys * keys };
    2. * (F32 + compute.bytes()) * block(layer) + sums
}

/// Returns the scores per token that are computed: those of visible keys, and of hidden keys in blocks along the
/// diagonal.
fn computed(layer: &Layer) -> f64 {
    let keys = layer.scores / layer.heads;
    let queries = block(layer) / layer.scores;
    (layer.reach + queries / 2.).min(keys) * layer.heads
}

/// Returns the operations per token of attention's matrix products in forward and in backward.
pub(super) fn attention(layer: &Layer) -> [f64; 2] {
    let product = 2. * layer.queries / layer.heads * computed(layer);
    [2. * product, 5. * product]
}

/// Returns the bytes per token of scores that attention moves in forward and in backward. Forward writes products, reads
/// them twice, and writes and reads weights. Backward writes and reads two products, and writes and reads weights and
/// the products' gradients, which two matrix products read.
pub(super) fn scores_moved(layer: &Layer, compute: Precision) -> [f64; 2] {
    let e = compute.bytes();
    [3. * F32 + 2. * e, 4. * F32 + 5. * e].map(|bytes| bytes * computed(layer))
}
