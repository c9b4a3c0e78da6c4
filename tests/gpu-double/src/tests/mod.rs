//! Small programs with and without errors, each on a separate machine.

mod bench;
mod library;
mod memory;
mod order;
mod races;
