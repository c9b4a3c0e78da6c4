//! What travels in an all-gather instead of the parameter itself: PyTorch's `fsdp_pre_all_gather` and
//! `fsdp_post_all_gather`.

mod all_gather;
mod eight_bits;
mod float8;
mod int8;

pub use all_gather::AllGatherExtension;
pub use float8::Float8;
pub use int8::Int8Blocks;
