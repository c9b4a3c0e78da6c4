//! Tiny configurations of every file that has one here. Compiled twice: with the changed files (`super::models`) and
//! with the original ones.

#[path = "decoders.rs"]
mod decoders;
#[path = "encoders.rs"]
mod encoders;
#[path = "images.rs"]
mod images;
#[path = "others.rs"]
mod others;

use super::models;
pub(crate) use crate::data::{Batch, Forward, Load, MELS, MOST, PIXELS, VOCABULARY, floats};

/// A model of one or several files.
pub(crate) struct Case {
    /// The files of candle-transformers' `src/models` whose layers it uses.
    pub(crate) files: &'static [&'static str],
    /// Whether it has experts, of which ranks use different ones.
    pub(crate) experts: bool,
    /// Whether its forward takes one row at a time.
    pub(crate) rows: bool,
    pub(crate) load: Load,
}

/// Returns all cases, in no order.
pub(crate) fn all() -> Vec<Case> {
    [decoders::cases(), encoders::cases(), images::cases(), others::cases()].into_iter().flatten().collect()
}

/// A case: its files, a builder of a model, and its forward, whose output's last dimension is classes. An output of four
/// dimensions is compared with values.
macro_rules! case {
    ($($file:literal),+; experts $rest:tt $($more:tt)*) => {
        Case { experts: true, ..case!($($file),+; $rest $($more)*) }
    };
    ($($file:literal),+; rows $rest:tt $($more:tt)*) => {
        Case { rows: true, ..case!($($file),+; $rest $($more)*) }
    };
    ($($file:literal),+; |$vb:ident| $new:expr, |$model:ident, $batch:ident| $forward:expr) => {
        Case {
            files: &[$($file),+],
            experts: false,
            rows: false,
            load: |$vb| {
                #[allow(unused_mut)]
                let mut $model = $new;
                let forward: Forward = Box::new(move |$batch: &super::Batch| $forward);
                Ok(forward)
            },
        }
    };
}
pub(crate) use case;

/// Parses a configuration in the format of `config.json`.
macro_rules! config {
    ($($json:tt)+) => {
        serde_json::from_value(serde_json::json!($($json)+)).expect("a configuration of the file's own")
    };
}
pub(crate) use config;

/// The fields of most decoders' configurations.
macro_rules! decoder {
    ($($key:literal: $value:expr),* $(,)?) => {{
        let mut fields = serde_json::json!({
            "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": MOST, "rms_norm_eps": 1e-5,
            "rope_theta": 1e4, "hidden_act": "silu", "attention_bias": false, "tie_word_embeddings": false,
        });
        let more = serde_json::json!({ $($key: $value),* });
        fields.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        serde_json::from_value(fields).expect("a configuration of the file's own")
    }};
}
pub(crate) use decoder;
