//! Initial values of parameters: drawn, or read from files, for one rank's shard alone.

mod fallback;
mod philox;
mod pretrained;
mod request;

pub use fallback::Fallback;
pub use philox::Philox;
pub use pretrained::Pretrained;
pub use request::{Initializer, ShardRequest};
