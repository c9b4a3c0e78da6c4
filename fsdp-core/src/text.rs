//! Text for messages.

/// The longest start of `text` that fits `room` bytes.
pub(crate) fn shortened(text: &str, room: usize) -> &str {
    if text.len() <= room {
        return text;
    }
    &text[..(0..=room).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0)]
}

/// What a panic said.
pub(crate) fn of_panic(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}
