//! Escaping text from files before it is shown: a name could contain control sequences of a terminal.

use std::fmt::{Display, Formatter, Result, Write};

/// Escapes text for terminals and logs: control characters, line ends, bidirectional controls, and invisible characters
/// become `\n` or `\u{1b}`.
///
/// ```
/// use fsdp_ckpt::escape;
/// assert_eq!(escape("layers.0\n\u{1b}[31m\u{202e}é").to_string(), r"layers.0\n\u{1b}[31m\u{202e}é");
/// ```
pub fn escape<T: Display>(text: T) -> Escaped<T> {
    Escaped(text)
}

/// Result of [`escape()`].
#[derive(Clone, Copy, Debug)]
pub struct Escaped<T>(T);

impl<T: Display> Display for Escaped<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        write!(EscapingWriter(f), "{}", self.0)
    }
}

/// A writer that escapes.
struct EscapingWriter<'a, 'f>(&'a mut Formatter<'f>);

impl Write for EscapingWriter<'_, '_> {
    fn write_str(&mut self, text: &str) -> Result {
        let mut rest = text;
        while let Some((at, c)) = rest.char_indices().find(|(_, c)| is_invisible(*c)) {
            self.0.write_str(&rest[..at])?;
            match c {
                '\n' | '\r' | '\t' => write!(self.0, "{}", c.escape_default())?,
                _ => write!(self.0, "{}", c.escape_unicode())?,
            }
            rest = &rest[at + c.len_utf8()..];
        }
        self.0.write_str(rest)
    }
}

/// Returns whether a character is invisible or controls the terminal.
pub(crate) fn is_invisible(c: char) -> bool {
    match c {
        ' '..='~' => false,
        // Blank characters that Unicode classifies as letters, marks or symbols.
        '\u{34f}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{2800}' | '\u{3164}' | '\u{ffa0}' => true,
        '\u{180b}'..='\u{180f}' | '\u{fe00}'..='\u{fe0f}' | '\u{e0100}'..='\u{e01ef}' => true,
        // `escape_debug` knows the printable characters. After another character it keeps combining marks, which names
        // in many scripts need.
        _ => {
            let mut pair = [b'x', 0, 0, 0, 0];
            let length = c.encode_utf8(&mut pair[1..]).len();
            std::str::from_utf8(&pair[..=length]).is_ok_and(|pair| pair.escape_debug().nth(1) == Some('\\'))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_controls_and_invisible_characters() {
        for (text, want) in [
            ("model.layers.0.weight", "model.layers.0.weight"),
            ("Größe \"a\\b\" 層 نموذج हिन्दी", "Größe \"a\\b\" 層 نموذج हिन्दी"),
            ("a\u{1b}]0;x\u{7}b", "a\\u{1b}]0;x\\u{7}b"),
            ("\u{9b}2J\u{7f}\r\n\t", "\\u{9b}2J\\u{7f}\\r\\n\\t"),
            ("a\u{202e}b\u{2066}c\u{200b}d\u{feff}", "a\\u{202e}b\\u{2066}c\\u{200b}d\\u{feff}"),
            ("\u{3164}\u{ffff}\u{2028}\u{a0}\u{e000}", "\\u{3164}\\u{ffff}\\u{2028}\\u{a0}\\u{e000}"),
        ] {
            assert_eq!(escape(text).to_string(), want);
            assert_eq!(escape(escape(text)).to_string(), want, "twice is once");
        }
    }
}
