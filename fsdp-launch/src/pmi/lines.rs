//! Bytes of a rank as lines of text.

/// Bytes of the longest line.
pub(super) const MOST_LINE: usize = 16 << 10;

/// What came and is not a whole line yet.
#[derive(Default)]
pub(super) struct Lines(Vec<u8>);

impl Lines {
    /// Takes in what came; the lines that end in it, without their ends.
    ///
    /// # Errors
    /// What is wrong with it, when it is no text or too long.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<Vec<String>, String> {
        self.0.extend(bytes);
        let mut lines = Vec::new();
        while let Some(end) = self.0.iter().position(|&byte| byte == b'\n') {
            let rest = self.0.split_off(end + 1);
            let mut line = std::mem::replace(&mut self.0, rest);
            line.truncate(end);
            lines.push(text(line)?);
        }
        if self.0.len() > MOST_LINE {
            return Err(format!("a line of more than {MOST_LINE} bytes"));
        }
        Ok(lines)
    }
}

/// Printable ASCII is all that the protocol has.
fn text(line: Vec<u8>) -> Result<String, String> {
    if line.len() > MOST_LINE {
        return Err(format!("a line of more than {MOST_LINE} bytes"));
    }
    if let Some(byte) = line.iter().find(|byte| !(b' '..=b'~').contains(byte)) {
        return Err(format!("a line with the byte {byte:#04x}"));
    }
    String::from_utf8(line).map_err(|_| "a line that is no text".into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lines_come_whole_however_they_are_cut() {
        let mut lines = Lines::default();
        assert_eq!(lines.push(b"cmd=in").unwrap(), Vec::<String>::new());
        assert_eq!(lines.push(b"it\ncmd=a\n\ncmd").unwrap(), ["cmd=init", "cmd=a", ""]);
        assert_eq!(lines.push(b"=b\n").unwrap(), ["cmd=b"]);
        let whole = [vec![b'x'; MOST_LINE], vec![b'\n']].concat();
        assert_eq!(lines.push(&whole).unwrap()[0].len(), MOST_LINE);
        assert!(lines.push(&vec![b'x'; MOST_LINE + 1]).unwrap_err().contains("more than 16384 bytes"));
        assert!(Lines::default().push(b"a\x00b\n").unwrap_err().contains("0x00"));
        assert!(Lines::default().push(&[0xff, b'\n']).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_lines_or_an_error(parts in proptest::collection::vec(
            proptest::collection::vec(any::<u8>(), 0..100), 0..20,
        )) {
            let mut lines = Lines::default();
            for part in parts {
                match lines.push(&part) {
                    Ok(lines) => prop_assert!(lines.iter().all(|line| line.bytes().all(|byte| byte >= b' '))),
                    Err(_) => break,
                }
            }
        }
    }
}
