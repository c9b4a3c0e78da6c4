//! What one step of AdamW does to each element.

/// The numbers of a step: `mean = beta1 mean + (1 - beta1) g`, `square = beta2 square + (1 - beta2) g g`,
/// `p = decay p - step_size mean / (sqrt(square) / root_bias_correction2 + eps)`, in f32, or in f64 for f64.
#[derive(Clone, Copy)]
pub(crate) struct AdamWUpdate {
    pub(crate) decay: f64,
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) step_size: f64,
    pub(crate) root_bias_correction2: f64,
    pub(crate) eps: f64,
}
