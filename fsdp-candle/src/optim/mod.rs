//! What becomes of gradients: optimizers over shards, clipping, loss scaling, and a look for values that are no
//! numbers.

mod accumulate;
mod adam;
mod adamw_8bit;
mod candle;
mod clip;
mod ema;
mod finite;
mod grad_scaler;
mod group;
mod hyper;
mod moment;
mod muon;
mod packed;
mod per_shard;
mod several;
mod sgd;
mod sharded;
mod state;

pub use crate::kernels::NormType;
pub use accumulate::GradAccumulator;
pub use adam::{Adam, AdamConfig, AdamW, AdamWConfig};
pub use adamw_8bit::{AdamW8bit, AdamW8bitConfig};
pub use candle::CandleOptimizer;
pub use clip::{ClipOptions, clip_grad_norm, clip_grad_norm_of, clip_grad_norm_with, grad_norm};
pub use ema::Ema;
pub use finite::{ValuesOf, check_finite};
pub use grad_scaler::{GradScaler, GradScalerState};
pub use group::{ParamGroup, group_by_name};
pub use muon::{AdjustLr, Muon, MuonConfig};
pub use per_shard::{ShardOptimizer, ShardRule};
pub use several::Optimizers;
pub use sgd::{SGD, SgdConfig};
pub use sharded::ShardedOptimizer;
pub use state::ParamState;
