//! Examples to learn from: `--sft FILE.jsonl`.
//!
//! | file | subject |
//! |---|---|
//! | `specials` | the special tokens that a model directory names |
//! | `json` | JSON as templates expect it |
//! | `template` | chat templates |
//! | `turns` | what of a conversation the assistant says |
//! | `line` | a line of a file |
//! | `examples` | [`Examples`]: all of a file, as tokens |
//! | `packing` | which examples share a sequence |

mod examples;
mod json;
mod line;
pub(in crate::data) mod packing;
mod specials;
mod template;
#[cfg(test)]
mod tests;
mod turns;

pub use examples::Examples;
