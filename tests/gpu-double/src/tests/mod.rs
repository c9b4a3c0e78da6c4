//! Small programs, right and wrong, on machines of their own.

mod bench;
mod library;
mod memory;
mod order;
mod races;
