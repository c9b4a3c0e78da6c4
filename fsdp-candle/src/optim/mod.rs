//! What becomes of gradients: optimizers over shards, clipping, loss scaling, and a look for values that are no
//! numbers.

mod adamw;
mod clip;
mod finite;
mod grad_scaler;

pub use crate::kernels::NormType;
pub use adamw::{AdamW, AdamWConfig, AdamWState};
pub use clip::{ClipOptions, clip_grad_norm, clip_grad_norm_with, grad_norm};
pub use finite::{ValuesOf, check_finite};
pub use grad_scaler::{GradScaler, GradScalerState};
