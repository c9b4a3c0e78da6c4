//! Corpora larger than memory, for training language models.
//!
//! [`files`] finds the files of a corpus, and [`format`](mod@format) tells what they hold. [`documents`] reads their
//! texts one after another. There are two ways to train on them:
//!
//! - [`prepare`] tokenises a corpus once into shards, which [`shards`] opens. [`tokens`] opens the token files of other
//!   programs: nanoGPT, llm.c and Megatron-LM. Both allow random access.
//! - [`stream`] reads and tokenises the corpus while training, in an order that does not depend on the number of ranks.
//!
//! [`mixture`] draws sequences from several sources by weight. Every source has a place, which a checkpoint stores.
//!
//! Memory grows with the number of files, row groups and checksums only. [`memory`] holds all tokens.

pub mod documents;
pub mod files;
pub mod format;
pub mod memory;
pub mod mixture;
pub mod permutation;
pub mod prepare;
pub mod sequence;
pub mod shards;
pub mod source;
pub mod stream;
pub mod tokenise;
pub mod tokens;

mod checked;
