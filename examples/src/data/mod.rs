//! What a model is trained on: a stream of tokens or examples, read from files, and the batches made of them.
//!
//! | file | subject |
//! |---|---|
//! | `files` | which files `--data` means |
//! | `text` | text to tokens and back |
//! | `tokens` | [`Data`]: all tokens in one sequence, checked against the vocabulary |
//! | `sft` | [`Examples`]: conversations and completions, and how they share sequences |
//! | `permutation` | orders that any rank computes |
//! | `stream` | which tokens a sequence of a stream has |
//! | `batches` | [`Batches`]: which tokens each rank reads at each step |
//! | `masking` | [`Masking`]: which of them a masked language model has to tell |

pub use batches::{BatchShape, Batches, MicroBatch, Source};
pub use masking::{Masking, mask_token};
pub use sft::Examples;
pub use sft::packing::PackingOptions;
pub use text::Text;
pub use tokens::Data;

mod batches;
mod files;
mod masking;
mod sft;
mod stream;
mod text;
mod tokens;
