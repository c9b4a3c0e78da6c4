//! The model files of candle-transformers from Cargo's registry, each with the line `use fsdp_candle::nn as
//! candle_nn;`. The build script reads them there; this repository contains none of them.
//!
//! `models` has the changed files, `original` the unchanged ones, and `documented` those with the diffs of
//! `docs/from-candle.md`.
//!
//! With the feature `all`, `models` has every file of candle-transformers, and nothing else is here.

// The files are included by a macro, and some of them export macros.
#![cfg_attr(feature = "all", allow(macro_expanded_macro_exports_accessed_by_absolute_paths))]

/// Candle, by the name that the files use.
pub extern crate candle_core as candle;

pub mod diff;

/// A file before and after the change.
#[derive(Debug)]
pub struct File {
    /// The path in candle-transformers' `src`.
    pub name: &'static str,
    /// The original text.
    pub original: &'static str,
    /// The text that the tests compile.
    pub changed: &'static str,
}

/// The path where candle-transformers' source was expected, if it is missing.
///
/// `cargo build` does not download dependencies of tests only. Then this crate is empty.
#[macro_export]
macro_rules! source_is_there {
    () => {
        const _: () = if let Some(place) = $crate::MISSING {
            panic!("{}", place);
        };
    };
}

include!(concat!(env!("OUT_DIR"), "/files.rs"));
