//! Training data: files of tokens, text or examples, and the batches made from them.
//!
//! `files` finds the text and 16-bit tokens that are read whole, and `text` turns text into tokens. `corpus` reads other
//! formats. A [`Source`] is one stream of tokens ([`Data`], cut by `stream`), a [`MixedCorpus`], [`Examples`] (`sft`) or
//! [`Pairs`]. [`Batches`] gives each rank its sequences of every
//! step, and [`Masking`] chooses the masked tokens of a BERT. [`records`] holds data of whole texts: with labels, or in
//! pairs.

pub(crate) use batches::with_padding;
pub use batches::{BatchShape, Batches, MicroBatch, Source};
pub use corpus::{Corpora, CorpusOptions, CorpusTokenizer, EvaluationCorpus, MixedCorpus};
pub use masking::{Masking, mask_token};
pub use sft::packing::PackingOptions;
pub use sft::pairs::{PairOptions, Pairs};
pub use sft::{Examples, chat_text};
pub use text::Text;
pub use tokens::Data;

mod batches;
mod corpus;
mod files;
mod masking;
pub mod records;
mod sft;
mod stream;
mod text;
mod tokens;

/// Largest record of labelled texts, conversations or pairs, in bytes.
const MOST_BYTES: usize = 1 << 30;
