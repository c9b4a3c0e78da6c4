//! JSON for programs.

use std::io::Write;

use fsdp_ckpt::shown;

/// A value as pretty JSON, on stdout. Characters that steer a terminal stand in strings only, and JSON has escapes for
/// all of them.
pub(crate) fn print_json(value: &serde_json::Value) -> anyhow::Result<()> {
    let mut text = String::new();
    for c in format!("{value:#}\n").chars() {
        if c == '\n' || shown(c).to_string().chars().eq([c]) {
            text.push(c);
        } else {
            text.extend(c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}
