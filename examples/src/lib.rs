//! What the example programs share: models, data, learning-rate schedules, metrics, TensorBoard and progress.

pub mod data;
pub mod generate;
pub mod job;
pub mod metrics;
pub mod models;
pub mod progress;
pub mod schedule;
pub mod tensorboard;
