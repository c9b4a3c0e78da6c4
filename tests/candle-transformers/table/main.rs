//! Trains the models of candle-transformers for the table in `docs/candle-transformers.md`.
//!
//! Prints one JSON object a line for each case. Arguments select cases by a part of a file's name.

// The files shared with the tests have more than this program uses.
#![allow(dead_code)]

mod changed;
#[path = "../../it/candle_transformers/data.rs"]
mod data;
#[path = "../../it/candle_transformers/gathered.rs"]
mod gathered;
mod measure;
mod original;
#[path = "../../it/candle_transformers/train.rs"]
mod train;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    for (ours, theirs) in changed::cases::all().iter().zip(original::cases::all()) {
        let name = ours.files[0];
        if words.is_empty() || words.iter().any(|word| name.contains(word.as_str())) {
            let started = std::time::Instant::now();
            println!("{}", measure::case(ours.files, ours.experts, ours.rows, ours.load, theirs.load));
            eprintln!("{name}: {:.1} s", started.elapsed().as_secs_f64());
        }
    }
}
