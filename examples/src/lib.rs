//! What the example programs share: models, data, learning-rate schedules, metrics, TensorBoard, progress and consoles.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod console;
pub mod data;
pub mod device;
pub mod generate;
pub mod job;
pub mod metrics;
pub mod models;
pub mod progress;
pub mod ranks;
pub mod schedule;
pub mod tensorboard;
pub mod writable;
