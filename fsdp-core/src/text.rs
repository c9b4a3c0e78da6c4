//! Text for messages.

/// Returns the longest prefix of `text` that fits in `room` bytes.
pub(crate) fn shortened(text: &str, room: usize) -> &str {
    if text.len() <= room {
        return text;
    }
    &text[..(0..=room).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0)]
}

/// Returns the message of a panic.
pub(crate) fn of_panic(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}
