//! What the operations on the CPU are made of: slices of f32, threads, vector instructions and matrix products.

pub(in crate::nn) mod matrix;
pub(in crate::nn) mod parallel;
pub(in crate::nn) mod simd;
pub(in crate::nn) mod values;
pub(in crate::nn) mod weighted_op;
