//! Shared code of the example programs: models, data, learning-rate schedules, metrics and output.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod command_line;
pub mod console;
pub mod data;
pub mod flags;
pub mod generate;
pub mod hub;
pub mod input;
pub mod job;
mod json;
pub mod metrics;
pub mod models;
pub mod progress;
pub mod ranks;
pub mod schedule;
pub mod tasks;
pub mod tensorboard;
pub mod writable;
