//! Figures of candle-fsdp on CUDA devices. Its layers are fused as on CPUs. Attention differs: cuDNN computes it in half
//! precision, if it is installed, or kernels for tensor cores do, if heads have 64 or 128 elements. Otherwise it writes
//! blocks of scores to memory between its matrix products.

use super::framework::{Checkpoint, Framework};
use super::hardware::Precision;
use super::model::{Layer, MlpKind, Norm};
use super::setup::Setup;

const F32: f64 = 4.;
/// Number of elements from which tensors are refused: Candle counts elements of a launch in 32 bits.
pub(super) const COUNTABLE: f64 = 2147483648.;
/// Logits that exist at a time (`fsdp-candle/src/nn/cuda/losses.rs`).
pub(super) const LOGITS: f64 = 67108864.;
/// Bytes of a block's scores, and the queries of a block (`fsdp-candle/src/nn/attention/cuda.rs`).
const BLOCK_BYTES: f64 = 268435456.;
const BLOCK_QUERIES: [f64; 2] = [16., 256.];

/// Queries of a block of the kernels for tensor cores (`fsdp-candle/src/kernels/cuda/flash_attention.cuh`).
const FLASH_QUERIES: f64 = 64.;
/// The time of an operation of these kernels in forward and in backward, relative to FlashAttention 2. Measured on an
/// H200 with heads of 128 and 8192 tokens: 201 TFLOP/s, and 144 of the seven products in backward.
const FLASH_TIME: [f64; 2] = [1.5, 2.1];
/// The same for cuDNN, which PyTorch ran on that H200: 566 to 644 TFLOP/s, and 470 to 541 of the five products in backward.
const CUDNN_TIME: [f64; 2] = [0.5, 0.6];
/// The fewest queries that cuDNN is used for (`fsdp-candle/src/kernels/cuda/cudnn/mod.rs`).
const CUDNN_QUERIES: usize = 512;

/// The implementation of attention that a device uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attention {
    /// Matrix products and a softmax, for a block of scores at a time.
    Blocks,
    /// This project's kernels for tensor cores.
    TensorCores,
    Cudnn,
}

impl Attention {
    pub(super) fn of(setup: &Setup, layer: &Layer) -> Self {
        let head = layer.queries / layer.heads;
        if setup.compute != Precision::Bf16 {
            return Attention::Blocks;
        }
        let is_covered = head <= 128. && head % 8. == 0. && setup.seq >= CUDNN_QUERIES && setup.mesh.context == 1;
        match [64., 128.].contains(&head) {
            _ if setup.cudnn && is_covered => Attention::Cudnn,
            true => Attention::TensorCores,
            false => Attention::Blocks,
        }
    }
}

/// Returns the number of scores of a block of queries, over all heads and keys.
fn block(layer: &Layer) -> f64 {
    let keys = layer.scores / layer.heads;
    let [fewest, most] = BLOCK_QUERIES;
    (BLOCK_BYTES / (F32 * layer.scores)).floor().clamp(fewest, most).min(keys) * layer.scores
}

/// Returns the bytes that attention's backward uses besides its operands and gradients. These are a number for each query
/// and head with tensor cores. cuDNN adds sums of the queries' gradients, and those of keys and values for each head of
/// the queries if heads share keys. Otherwise they are a block's products, its weights and their gradients, and in half
/// precision sums of the gradients of keys and values.
pub(super) fn attention_memory(setup: &Setup, layer: &Layer) -> f64 {
    let Setup { compute, .. } = *setup;
    match Attention::of(setup, layer) {
        Attention::TensorCores => F32 * layer.scores,
        Attention::Cudnn => {
            let of_keys = if layer.keys < layer.queries { 2. * compute.bytes() } else { 0. };
            F32 * layer.scores + (F32 + of_keys) * setup.tokens() * layer.queries
        }
        Attention::Blocks => {
            let keys = layer.scores / layer.heads;
            let sums = if compute == Precision::F32 { 0. } else { (2. * F32 + compute.bytes()) * layer.keys * keys };
            2. * (F32 + compute.bytes()) * block(layer) + sums
        }
    }
}

/// Returns the scores per token that are computed: those of visible keys, and of hidden keys in blocks along the
/// diagonal.
fn computed(layer: &Layer, attention: Attention) -> f64 {
    let keys = layer.scores / layer.heads;
    let queries = match attention {
        Attention::Blocks => block(layer) / layer.scores,
        Attention::TensorCores | Attention::Cudnn => FLASH_QUERIES,
    };
    (layer.reach + queries / 2.).min(keys) * layer.heads
}

/// Returns the seconds of attention's forward and backward.
pub(super) fn attention(setup: &Setup, layer: &Layer) -> [f64; 2] {
    let Setup { compute, device, .. } = *setup;
    let attention = Attention::of(setup, layer);
    let computed = setup.tokens() * computed(layer, attention);
    let product = 2. * layer.queries / layer.heads * computed;
    let fused = |products: [f64; 2], times: [f64; 2]| {
        std::array::from_fn(|pass| device.attention(products[pass] * product * times[pass]))
    };
    match attention {
        // Both kernels of backward compute the scores and the gradients of the weights.
        Attention::TensorCores => fused([2., 7.], FLASH_TIME),
        Attention::Cudnn => fused([2., 5.], CUDNN_TIME),
        // Forward writes products, reads them twice, and writes and reads weights. Backward writes and reads two products,
        // and writes and reads weights and the products' gradients, which two matrix products read.
        Attention::Blocks => {
            let e = compute.bytes();
            let moved = [3. * F32 + 2. * e, 4. * F32 + 5. * e];
            std::array::from_fn(|pass| device.products([2., 5.][pass] * product) + device.moves(moved[pass] * computed))
        }
    }
}

/// Seconds that the host takes to launch a kernel: about what CUDA needs.
pub(super) const LAUNCH: f64 = 5e-6;

/// Launches of a mixture of experts in forward and in backward, but for the gradients of its experts' weights: the router's
/// softmax, the choice and the weights of experts, and the experts.
const MIXTURE: [f64; 2] = [20., 70.];

/// Further launches where experts are on several ranks: the exchanges, rows in the order of the experts and back, and the
/// weighted sums.
const DISPATCH: [f64; 2] = [26., 55.];
/// Further launches for each expert of this rank, and for each of another rank, whose parameters are empty.
const OF_OWN_EXPERT: [f64; 2] = [3., 3.];
const OF_OTHER_EXPERT: [f64; 2] = [7., 4.];

/// Returns the launches of a block in a step: kernels, matrix products, copies, fills and collectives. The terms were
/// counted on the device double, which is within 3 % of them (`tests/device/plan.rs`).
pub(super) fn launches(setup: &Setup, layer: &Layer) -> f64 {
    let Layer { mlp, norms, tensors, .. } = layer;
    // A mixture of experts is one operation, with a product for each weight's gradient, and a node in the graph for each
    // three weights, which are joined to one.
    let is_mixture = Framework::OnDevice.is_one_operation(mlp);
    let copies = if is_mixture { 0. } else { mlp.experts.max(1.) };
    let of_experts = if is_mixture { mlp.experts * mlp.linears } else { 0. };
    let [mixture, mixture_back] = match (is_mixture, layer.dispatched > 0.) {
        (true, false) => MIXTURE,
        (true, true) => std::array::from_fn(|pass| {
            let of_experts = mlp.experts * OF_OWN_EXPERT[pass] + mlp.other_experts * OF_OTHER_EXPERT[pass];
            MIXTURE[pass] + DISPATCH[pass] + of_experts
        }),
        (false, _) => [0., 0.],
    };
    let joined = of_experts / 2.;
    let once = layer.linears.len() as f64 - mlp.linears;
    let linears = once + copies * mlp.linears;
    // All but the projection after attention, and a router.
    let projections = once - 1. - f64::from(mlp.experts > 0.);
    let head_norms = if layer.head_norms { 2. } else { 0. };
    let weights = if layer.norm == Norm::Rms { 1. } else { 2. };
    let norms = norms + head_norms;
    let biases = (tensors - linears - of_experts - weights * norms).max(0.);
    let rotary = if layer.rotary { 2. } else { 0. };
    // Operations, and their arguments.
    let [activations, activated] = match mlp.kind {
        MlpKind::Plain => [1., 1.],
        MlpKind::SiluMul | MlpKind::SwiGlu => [1., 2.],
        MlpKind::Gated => [2., 3.],
    };
    let attention = attention_launches(setup, layer);
    // Each operation has a value in the graph that stands for it, which backward reads once.
    let operations =
        linears + biases + norms + rotary + copies * activations + 1. + 2. + joined + f64::from(is_mixture);
    // Sums where several operations share an input: projections of queries, keys and values, gates, the residual stream.
    let sums = (projections - 1.).max(0.) + copies * (activated - 1.) + 2.;
    // The sums of the residual stream, and the copy of the input.
    let forward = linears + biases + norms + rotary + copies * activations + attention[0] + 2. + 1. + mixture + joined;
    let gradients = 2. * linears
        + of_experts
        + joined
        + biases
        + norms * (1. + weights)
        + rotary
        + copies * activated
        + projections
        + 2. * 2.
        + 1.
        + f64::from(is_mixture)
        - sums;
    // Candle writes a zero for each gradient but the further ones of a sum, and adds to it. A parameter's node in the graph
    // has a small value.
    let fills = gradients + tensors + biases + 1.;
    let backward = 2. * linears
        + of_experts
        + mixture_back
        + biases
        + norms * (2. + weights)
        + rotary
        + copies * activations
        + attention[1]
        + gradients
        + fills
        + operations
        + sums;
    // The parameters' nodes in the graph of the second forward. Counts are five higher where queries and keys are rotated.
    let of_rotated = if layer.rotary && !is_mixture { 5. } else { 0. };
    let again = if setup.checkpoint == Checkpoint::None { 0. } else { forward + 6.5 * (tensors + 1.) + of_rotated };
    // Without tensor cores, the gradients of keys and values are added up in f32, and rounded.
    let rounded = if Attention::of(setup, layer) == Attention::Blocks { 8. } else { 0. };
    let casts = if setup.compute == Precision::F32 { 0. } else { (2. + of_gradients(setup)) * tensors + rounded };
    // The norm of the gradients has two kernels for each parameter, and the optimizer one.
    forward + backward + again + casts + 3. * tensors + 5.
}

/// Returns the launches that cast a gradient for its reduction.
fn of_gradients(setup: &Setup) -> f64 {
    if setup.gradient() == Some(setup.reduce) { 0. } else { 1. }
}

/// Returns the launches of attention in forward and backward: one and two kernels with tensor cores, and a call of cuDNN
/// each. Otherwise two and five products for each member of a group of query heads, and one kernel, for each block.
fn attention_launches(setup: &Setup, layer: &Layer) -> [f64; 2] {
    match Attention::of(setup, layer) {
        Attention::TensorCores => return [1., 2.],
        Attention::Cudnn => return [1., 1.],
        Attention::Blocks => {}
    }
    let keys = layer.scores / layer.heads;
    let blocks = (keys * layer.scores / block(layer)).ceil() * setup.batch as f64;
    let group = layer.queries / layer.keys;
    [blocks * (2. * group + 1.), blocks * (5. * group + 1.)]
}

/// Returns the launches of the root in a step: embeddings, last norm, head, loss, and what the optimizer does once.
pub(super) fn root_launches(setup: &Setup) -> f64 {
    let root = &setup.model.root;
    let stretches = (setup.tokens() * root.vocabulary / LOGITS).ceil();
    let casts = if setup.compute == Precision::F32 { 0. } else { (6. + of_gradients(setup)) * root.tensors };
    10. + 18.5 * root.tensors + 7. * stretches + casts
}
