//! What a model is trained on: a sequence of tokens, read from files, and the batches that are cut from it.
//!
//! | file | subject |
//! |---|---|
//! | `files` | which files `--data` means |
//! | `text` | text to tokens and back |
//! | `tokens` | [`Data`]: all tokens in one sequence, checked against the vocabulary |
//! | `batches` | [`Batches`]: which tokens each rank reads at each step |
//! | `masking` | [`Masking`]: which of them a masked language model has to tell |

mod batches;
mod files;
mod masking;
mod text;
mod tokens;

pub use batches::{BatchShape, Batches};
pub use masking::{Masking, mask_token};
pub use text::Text;
pub use tokens::Data;
