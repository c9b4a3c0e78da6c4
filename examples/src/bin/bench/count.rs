//! Sizes on the command line.

use clap::builder::RangedU64ValueParser;

/// Reads a number from 1 to `most`. Below that, products of such numbers are numbers still, and memory that is not
/// there is an error of the library's.
pub(crate) fn count(most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most)
}
