//! Experts on different ranks, compared with experts on all ranks.

mod errors;
mod model;
mod random;
mod state;
mod training;
