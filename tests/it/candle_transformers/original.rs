//! The models of the original files.

use fsdp_tests_candle_transformers::original::models;

#[allow(clippy::duplicate_mod, dead_code)]
#[path = "cases.rs"]
pub(super) mod cases;
