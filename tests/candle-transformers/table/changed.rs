//! The cases with the changed files.

use fsdp_tests_candle_transformers::models;

#[path = "cases.rs"]
pub(super) mod cases;
