//! A bar on stderr while bytes are read, where that is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

const TEMPLATE: &str =
    "{msg} [{wide_bar:.cyan/blue}] {binary_bytes}/{binary_total_bytes}  {binary_bytes_per_sec}  ETA {eta}";

/// A bar over `bytes` bytes. Nothing is drawn where stderr is no terminal.
pub(crate) fn bar(what: &'static str, bytes: u64) -> ProgressBar {
    // The template is a constant that a test reads; a bar without it would still be a bar.
    let style = ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(bytes).with_style(style.progress_chars("=> ")).with_message(what);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_template_is_one() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
    }
}
