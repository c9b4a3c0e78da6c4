//! Rotary position embeddings.

pub mod rotary_emb;
pub(in crate::nn) mod table;
