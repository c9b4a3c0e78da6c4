//! What the example programs share: models, data, learning-rate schedules, metrics and progress.

pub mod data;
pub mod generate;
pub mod job;
pub mod metrics;
pub mod models;
pub mod progress;
pub mod schedule;
