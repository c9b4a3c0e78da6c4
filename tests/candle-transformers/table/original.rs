//! The cases with the original files.

use candle_transformers::models;

#[allow(clippy::duplicate_mod)]
#[path = "cases.rs"]
pub(super) mod cases;
