//! candle-transformers' own model files, as Cargo has put them into its registry, each with the one line
//! `use fsdp_candle::nn as candle_nn;`. The build script takes them from there; nothing of them is in this repository.
//!
//! `models` are the changed files, `original` the same ones as they are, and `documented` those with the diffs of
//! `docs/from-candle.md`.

extern crate candle_core as candle;

pub mod diff;

/// A file, and what was made of it.
#[derive(Debug)]
pub struct File {
    /// Its path in candle-transformers' `src`.
    pub name: &'static str,
    /// As it is there.
    pub original: &'static str,
    /// As the tests have it.
    pub changed: &'static str,
}

/// Where candle-transformers' source was looked for, when it is not there.
///
/// `cargo build` does not download what tests alone need: then there are no models here, and nobody who asks for them.
#[macro_export]
macro_rules! source_is_there {
    () => {
        const _: () = if let Some(place) = $crate::MISSING {
            panic!("{}", place);
        };
    };
}

include!(concat!(env!("OUT_DIR"), "/files.rs"));
