//! What one step of an optimizer does to each element: its numbers, worked out in f64. Kernels compute in f32, or in
//! f64 for f64.

/// Adam and AdamW: `g = g + l2 p`, `mean = beta1 mean + (1 - beta1) g`, `square = beta2 square + (1 - beta2) g g`,
/// `p = decay p - step_size mean / (sqrt(square) / root_bias_correction2 + eps)`. Without `l2` the first is left out.
#[derive(Clone, Copy)]
pub(crate) struct AdamUpdate {
    pub(crate) l2: f64,
    pub(crate) decay: f64,
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) step_size: f64,
    pub(crate) root_bias_correction2: f64,
    pub(crate) eps: f64,
}

/// SGD: `g = g + l2 p`, `buffer = kept buffer + taken g`, `p = p - lr (buffer, or g + nesterov buffer)`. Without `l2`
/// the first is left out, and without a buffer the second: then `p = p - lr g`.
#[derive(Clone, Copy)]
pub(crate) struct SgdUpdate {
    pub(crate) l2: f64,
    pub(crate) kept: f64,
    pub(crate) taken: f64,
    pub(crate) nesterov: Option<f64>,
    pub(crate) lr: f64,
}
