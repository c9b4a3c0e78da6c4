//! Text that others wrote, and that may be long.

/// Cuts `text` to about `most` bytes.
pub(crate) fn shorten(text: &mut String, most: usize) {
    if text.len() > most {
        let end = (0..=most).rev().find(|&end| text.is_char_boundary(end));
        text.truncate(end.unwrap_or(0));
        text.push_str(" ...");
    }
}
