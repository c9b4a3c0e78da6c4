//! The driver's functions, by their C names. What they do stands elsewhere; here pointers become numbers.

mod answer;
mod context;
mod copy;
mod device;
mod error;
mod event;
mod memory;
mod pool;
mod report;
mod stream;
