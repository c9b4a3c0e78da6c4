//! Optimizers over shards, gradient clipping, loss scaling and checks for NaN and infinity.
//!
//! [`ShardedOptimizer`] is the trait that state dicts, checkpoints, [`GradScaler`] and [`check_finite()`] work with.
//! Adam, AdamW and SGD are elementwise: each rank updates its shards alone. Muon is not: a matrix has one owner, to
//! which its shards move. A state is sharded as its parameter is. [`crate::StateOnDisk`] keeps elementwise state in
//! files.

mod adam;
mod candle_loop;
mod candle_optimizer;
mod check_finite;
mod clip_grad;
mod disk;
mod elementwise;
mod ema;
mod grad_accumulator;
mod grad_scaler;
mod hyper_parameters;
mod moment_kind;
mod muon;
mod muon_exchange;
mod reach;
mod sgd;
mod shard_update;
mod sharded_optimizer;
mod state;

pub use crate::kernels::NormType;
pub use adam::{Adam, AdamConfig, AdamParams, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig};
pub use candle_optimizer::CandleOptimizer;
pub use check_finite::{ValuesOf, check_finite};
pub use clip_grad::{
    ClipOptions, GradNorm, clip_factor, clip_grad_norm, clip_grad_norm_of, clip_grad_norm_with, clip_grads_with_norm,
    grad_norm,
};
pub use elementwise::{ElementwiseOptimizer, ElementwiseRule};
pub use ema::Ema;
pub use grad_accumulator::GradAccumulator;
pub use grad_scaler::{GradScaler, GradScalerState};
pub use muon::{AdjustLr, Muon, MuonConfig};
pub use sgd::{SGD, SgdConfig};
pub use sharded_optimizer::{Optimizers, ParamGroup, ShardedOptimizer, group_by_name};
pub use state::ParamState;
